"""The SQLite files of Agno's `SqliteDb`: the messages of each run, one run after the other.

Agno has no adapter: perdure itself reads and continues what arrives. Older releases keep the runs in the session's row,
newer ones in a table of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from perdure.adapters.foreign import as_metadata
from perdure.adapters.forms.agno import FORM
from perdure.adapters.importing.arriving import Arrival, Pieces
from perdure.adapters.importing.sources import ROW, Database, read_json, read_object, read_text, read_time
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.value import JSON

_KEPT = ("agent_id", "team_id", "workflow_id", "user_id", "session_data", "agent_data", "metadata", "summary")


def pieces(source: Path) -> Pieces:
    """Return the sessions of a file."""
    file = _File(Database(source))
    return [partial(file.session, row) for row in file.rows()]


class _File:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._sessions = database.require("Agno", "session_id", "session_type", "session_data", "created_at")
        self._runs = database.table("run_id", "session_id", "run_data")

    def rows(self) -> list[int]:
        return [row[ROW] for row in self._db.rows(self._sessions)]

    def session(self, number: int) -> Iterator[Arrival]:
        (row,) = self._db.rows(self._sessions, rowid=number)
        where = f"{self._sessions}[{number}]"
        session_id = read_text(row["session_id"], f"{where}.session_id")
        kept = {key: _told(row[key], f"{where}.{key}") for key in _KEPT if row.get(key) is not None}
        data = kept.get("session_data")
        named = data.get("session_name") if isinstance(data, dict) else None
        user = row.get("user_id")
        yield Arrival(
            names=(session_id,),
            items=_said([*self._runs_of(session_id, row, where)]),
            read=_message,
            name=named if isinstance(named, str) and named else session_id,
            metadata={"agno": as_metadata(kept)},
            owner=user if isinstance(user, str) and user else None,
            created_at=read_time(row["created_at"]),
        )

    def _runs_of(self, session_id: str, row: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], str]]:
        within = _told(row["runs"], f"{where}.runs") if row.get("runs") else []
        if isinstance(within, list):
            yield from (
                (read_object(run, f"{where}.runs[{at}]"), f"{where}.runs[{at}]") for at, run in enumerate(within)
            )
        if self._runs is not None:
            for each in self._db.rows(self._runs, "run_index, created_at, rowid", session_id=session_id):
                place = f"{self._runs}[{each[ROW]}].run_data"
                yield read_object(_told(each["run_data"], place), place), place


def _told(value: Any, where: str) -> Any:
    """Return the JSON of a column. Some columns have it as a text within JSON."""
    if not isinstance(value, str) or value[:1] not in '{["':
        return value
    found = read_json(value, where)
    return read_json(found, where) if isinstance(found, str) and found[:1] in ("{", "[") else found


def _said(runs: list[tuple[dict[str, Any], str]]) -> list[JSON]:
    """Return the messages of runs. Each run repeats its history and its instructions, which are taken once."""
    found: list[JSON] = []
    instructed: set[str] = set()
    for run, where in _once(runs):
        for place, message in enumerate(run.get("messages") or []):
            if not isinstance(message, dict):
                raise InvalidData(f"{where}.messages[{place}]", "this is not a message. Mend or remove it")
            is_instruction, content = message.get("role") == "system", str(message.get("content"))
            if message.get("from_history") or (is_instruction and content in instructed):
                continue
            if is_instruction:
                instructed.add(content)
            found.append(message)
    return found


def _once(runs: list[tuple[dict[str, Any], str]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the runs of the session itself, each once. A file that was migrated may have them in both places."""
    known: set[str] = set()
    for run, where in runs:
        run_id = run.get("run_id")
        # The run of a team's member answers the run that called it, and that one has the answer.
        if run.get("parent_run_id") or (isinstance(run_id, str) and run_id in known):
            continue
        known.add(str(run_id))
        yield run, where


def _message(item: JSON) -> Message:
    return FORM.message(item)
