"""Imports of sessions from another store. The other direction is `export`."""

from __future__ import annotations

from io import BytesIO
from typing import Literal, TypedDict

import msgspec

from perdure.errors import InvalidData
from perdure.server.api.sessions import agent_named
from perdure.server.call import Answer, Call
from perdure.sessions.conversations import ImportReport


class Import(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file to import, as a text. Its lines are checked, so no byte of them may change on the way."""

    file: str
    format: Literal["perdure", "openai"] = "perdure"
    """`perdure` is what `export` and `perdure export` write. `openai` is messages: a list, or lines of them."""
    agent: str | None = None
    """The name of the served agent that gets the sessions of the format `openai`."""


class ImportedForm(TypedDict):
    sessions: int
    skipped: int
    messages: int
    created: list[str]


async def import_file(call: Call) -> Answer:
    """Import the sessions of a file. Those that are there already, and the same, are skipped."""
    asked: Import = call.body
    source = BytesIO(asked.file.encode())
    if asked.format == "perdure" and asked.agent is not None:
        raise InvalidData("$.agent", "sessions that perdure has exported have agents of their own; leave it out")
    agent = agent_named(call, asked.agent) if asked.format == "openai" else None
    report = await call.sessions.import_(source, format=asked.format, agent=agent)
    created = report.created if isinstance(report, ImportReport) else ()
    body: ImportedForm = {
        "sessions": report.sessions,
        "skipped": report.skipped,
        "messages": report.messages,
        "created": [str(each) for each in created],
    }
    return Answer(body, 201 if report.sessions else 200)
