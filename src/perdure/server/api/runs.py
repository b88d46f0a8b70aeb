"""What ran, where sessions come from, and where two part."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from perdure.server.api.sessions import page_limit
from perdure.server.call import Answer, Call
from perdure.sessions.json_forms import BacklogForm, of_backlog


class RunsQuery(msgspec.Struct, kw_only=True):
    limit: int = 50
    before: int | None = None


class RunsForm(TypedDict):
    runs: list[dict[str, Any]]
    next: int | None


class DiffQuery(msgspec.Struct, kw_only=True):
    with_: str = msgspec.field(name="with")
    """The id of the other session."""


class DiffForm(TypedDict):
    common: int
    left: list[dict[str, Any]]
    right: list[dict[str, Any]]


class AncestryForm(TypedDict):
    parent: str | None
    children: list[str]
    root: str
    line: list[str]


class ExportQuery(msgspec.Struct, kw_only=True):
    format: Literal["perdure", "openai", "markdown"] = "perdure"
    history: bool = False


class QueueQuery(msgspec.Struct, kw_only=True):
    limit: int = 100


async def list_runs(call: Call) -> RunsForm:
    """Return the headers of a session's runs, the oldest of the page first."""
    limit = page_limit(call, call.query.limit)
    record = await call.sessions.record(call.session_id, limit=limit, before=call.query.before)
    oldest = next((each.loop_id for each in record.loops if each.started_at is not None), None)
    following = await _begin_of(call, oldest) if oldest is not None and len(record.loops) >= limit else None
    return {"runs": [each.to_dict() for each in record.loops], "next": following}


async def _begin_of(call: Call, loop_id: str) -> int | None:
    """Return the place of a run's first entry on record: what the page before it is asked for with."""
    journal = call.sessions.runtime.journal
    runs = () if journal is None else await journal.runs((await call.sessions.info(call.session_id)).id, run=loop_id)
    return runs[0].first.seq if runs and runs[0].first.seq > 1 else None


async def get_run(call: Call) -> Answer:
    """Return one run whole: its messages, turns and events."""
    return Answer((await call.sessions.loop(call.session_id, call.path("run"))).to_dict())


async def get_ancestry(call: Call) -> AncestryForm:
    """Return what a session was forked from, and its forks."""
    found = await call.sessions.ancestry(call.session_id)
    children, line = [str(each) for each in found.children], [str(each) for each in found.line]
    return {"parent": found.parent, "children": children, "root": found.root, "line": line}


async def get_diff(call: Call) -> DiffForm:
    """Return how many messages two sessions have in common, and how each goes on."""
    found = await call.sessions.diff(call.session_id, call.query.with_)
    left, right = [each.to_dict() for each in found.left], [each.to_dict() for each in found.right]
    return {"common": len(found.common), "left": left, "right": right}


async def export(call: Call) -> Response:
    """Return a session as a file: whole, or as a conversation."""
    asked: ExportQuery = call.query
    info = await call.sessions.info(call.session_id)
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="perdure-")
    ending = {"perdure": "jsonl", "openai": "json", "markdown": "md"}[asked.format]
    target = Path(folder) / f"{info.id}.{ending}"
    try:
        await call.sessions.export(target, [info.id], format=asked.format, history=asked.history)
    except BaseException:
        await asyncio.to_thread(_remove, target)
        raise
    kind = "text/markdown" if asked.format == "markdown" else "application/json"
    return FileResponse(target, media_type=kind, filename=target.name, background=BackgroundTask(_remove, target))


def _remove(target: Path) -> None:
    target.unlink(missing_ok=True)
    target.parent.rmdir()


async def get_queue(call: Call) -> BacklogForm:
    """Return what waits, what is being run, what is delayed and what is parked."""
    return of_backlog(await call.sessions.queue(limit=page_limit(call, call.query.limit)))


async def retry_parked(call: Call) -> Answer:
    """Open a session that was parked; a worker sends what waits there."""
    await call.sessions.unpark(call.session_id)
    return Answer(None, 204)


class DroppedForm(TypedDict):
    dropped: list[dict[str, str | None]]


async def drop_waiting(call: Call) -> DroppedForm:
    """Take back every message that waits in a session."""
    dropped = await call.sessions.drop_waiting(call.session_id)
    return {"dropped": [{"key": each.key, "text": each.text} for each in dropped]}
