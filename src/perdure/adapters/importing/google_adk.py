"""The SQLite files of Google ADK: those of `DatabaseSessionService`, older and newer, and of `SqliteSessionService`.

The older schema has a pickle for each event's actions. It is not read: a pickle can run code. What those actions have
done to the state is in the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from perdure.adapters.forms.adk import FORM
from perdure.adapters.google_adk_state import with_state
from perdure.adapters.importing.arriving import Arrival, Pieces
from perdure.adapters.importing.sources import ROW, Database, read_object, read_text, read_time
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.value import JSON

_FRAMEWORK = "google-adk"
_JSON = ("content", "grounding_metadata", "custom_metadata", "usage_metadata", "citation_metadata")
_MORE_JSON = ("input_transcription", "output_transcription")
_FLAGS = ("partial", "turn_complete", "interrupted")
_TEXTS = ("author", "branch", "error_code", "error_message")
_LONGEST_TAG = 200


def pieces(source: Path) -> Pieces:
    """Return the states of the apps and users of a file, then its sessions."""
    file = _File(Database(source))
    return [file.states, *(partial(file.session, *names) for names in file.sessions())]


class _File:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._sessions = database.require("Google ADK", "app_name", "user_id", "id", "state", "create_time")
        self._events = database.require("Google ADK", "session_id", "invocation_id", "timestamp", "user_id")
        self._is_old = "event_data" not in database.columns(self._events)

    def sessions(self) -> list[tuple[str, str, str]]:
        named = ("app_name", "user_id", "id")
        return [
            tuple(read_text(row[name], f"{self._sessions}[{row[ROW]}].{name}") for name in named)  # type: ignore[misc]  # three
            for row in self._db.rows(self._sessions)
        ]

    def states(self) -> Iterator[Arrival]:
        """Yield the states that the sessions of an app share, and those that the sessions of a user share."""
        for table in ("app_states", "user_states"):
            if {"app_name", "state"} <= self._db.columns(table):
                for row in self._db.rows(table):
                    yield self._state(table, row)

    def _state(self, table: str, row: dict[str, Any]) -> Arrival:
        where = f"{table}[{row[ROW]}]"
        app = read_text(row["app_name"], f"{where}.app_name")
        user = read_text(row["user_id"], f"{where}.user_id") if "user_id" in row else None
        kind = ("app", app) if user is None else ("user", app, user)
        return Arrival(
            names=(_FRAMEWORK, "state", *kind),
            items=(),
            read=_message,
            name=f"state of the app {app}" if user is None else f"state of {user} in the app {app}",
            metadata=with_state({}, read_object(row["state"], f"{where}.state")),
            owner=user or None,
        )

    def session(self, app: str, user: str, session_id: str) -> Iterator[Arrival]:
        (row,) = self._db.rows(self._sessions, app_name=app, user_id=user, id=session_id)
        where = f"{self._sessions}[{row[ROW]}]"
        events = self._db.rows(self._events, "timestamp, rowid", app_name=app, user_id=user, session_id=session_id)
        updated = read_time(row["update_time"])
        names = {"app": app, "user": user, "id": session_id, "updated": updated.timestamp() if updated else 0.0}
        yield Arrival(
            names=(app, session_id) if user else (app, user, session_id),
            names_of_all=(app, user, session_id),
            items=[self._event(each) for each in events],
            read=_message,
            metadata=with_state({"adk": names}, read_object(row["state"], f"{where}.state")),
            tags=(_tag_of(app),),
            owner=user or None,
            created_at=read_time(row["create_time"]),
        )

    def _event(self, row: dict[str, Any]) -> JSON:
        where = f"{self._events}[{row[ROW]}]"
        at = read_time(row["timestamp"])
        known = {"id": row["id"], "invocation_id": row["invocation_id"], "timestamp": at.timestamp() if at else 0.0}
        if not self._is_old:
            return {**known, **read_object(row["event_data"], f"{where}.event_data")}
        told = {key: read_object(row[key], f"{where}.{key}") for key in (*_JSON, *_MORE_JSON) if row.get(key)}
        flags = {key: bool(row[key]) for key in _FLAGS if row.get(key) is not None}
        texts = {key: row[key] for key in _TEXTS if row.get(key) is not None}
        return {**told, **flags, **texts, **known}


def _message(event: JSON) -> Message:
    return FORM.message(event)


def _tag_of(app: str) -> str:
    return app if app.isprintable() and 0 < len(app) <= _LONGEST_TAG else str(SessionId.of(_FRAMEWORK, app))
