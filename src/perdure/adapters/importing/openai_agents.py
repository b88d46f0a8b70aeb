"""The files of the OpenAI Agents SDK: `SQLiteSession`, and `AdvancedSQLiteSession` with its branches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from perdure.adapters.forms.openai import FORM
from perdure.adapters.importing.arriving import Arrival, Pieces
from perdure.adapters.importing.sources import ROW, Database, read_json, read_text, read_time
from perdure.model.value import JSON

_MAIN = "main"


def pieces(source: Path) -> Pieces:
    """Return the sessions of a file."""
    file = _File(Database(source))
    return [partial(file.arrivals, session_id) for session_id in file.session_ids()]


class _File:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._messages = database.require("the OpenAI Agents SDK", "session_id", "message_data")
        self._sessions = database.table("session_id", "created_at", "updated_at")
        self._structure = database.table("session_id", "message_id", "branch_id", "sequence_number")

    def session_ids(self) -> list[str]:
        known: dict[str, None] = {}
        for table in filter(None, (self._sessions, self._messages)):
            for row in self._db.rows(table):
                known[read_text(row["session_id"], f"{table}[{row[ROW]}].session_id")] = None
        return [*known]

    def arrivals(self, session_id: str) -> Iterator[Arrival]:
        branches = self._branches(session_id)
        items = {row[ROW]: self._item(row) for row in self._db.rows(self._messages, "id", session_id=session_id)}
        times = list(self._db.rows(self._sessions, session_id=session_id)) if self._sessions else []
        created_at = read_time(times[0]["created_at"]) if times else None
        for branch, places in branches.items() or [(_MAIN, [*items])]:
            names = (session_id,) if branch == _MAIN else (session_id, "branch", branch)
            said = [items[place] for place in places if place in items]
            yield Arrival(names=names, items=said, read=_message, name=" ".join(names), created_at=created_at)

    def _item(self, row: dict[str, Any]) -> JSON:
        found: JSON = read_json(row["message_data"], f"{self._messages}[{row[ROW]}].message_data")
        return found

    def _branches(self, session_id: str) -> dict[str, list[int]]:
        """Return the row numbers of each branch, in order. The result is empty for a session without branches."""
        found: dict[str, list[int]] = {}
        rows = self._db.rows(self._structure, "sequence_number", session_id=session_id) if self._structure else ()
        for row in rows:
            found.setdefault(read_text(row["branch_id"], f"{self._structure}[{row[ROW]}]"), []).append(
                row["message_id"]
            )
        return found


def _message(item: JSON) -> Any:
    return FORM.message(item)
