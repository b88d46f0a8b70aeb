"""Runs, the origins of sessions, and the differences between two."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from perdure.errors import InvalidData
from perdure.run_journal import is_loop
from perdure.server.api.answers import checked_wait, reply_of_run
from perdure.server.api.sessions import page_limit
from perdure.server.call import Answer, Call
from perdure.server.problems import Problem
from perdure.sessions.family_tree import tree_of
from perdure.sessions.json_forms import BacklogForm, RunningForm, UsageForm, of_backlog
from perdure.sessions.lineage import Diff, diff_of


class RunsQuery(msgspec.Struct, kw_only=True):
    limit: int = 50
    before: int | None = None


class RunsForm(TypedDict):
    runs: list[dict[str, Any]]
    next: int | None


class DiffQuery(msgspec.Struct, kw_only=True):
    with_: str | None = msgspec.field(name="with", default=None)
    """The id of the other session. Without it, another version of the same session is meant."""
    version: int | None = None
    with_version: int | None = None
    """The version of the other."""


class TreeQuery(msgspec.Struct, kw_only=True):
    limit: int = 50
    """The number of newest runs of each session."""


class TreeForm(TypedDict):
    kind: str
    id: str
    title: str
    status: str
    model: str | None
    usage: UsageForm
    seconds: float | None
    tools: list[str]
    selected: bool
    stop_reason: str | None
    children: list[TreeForm]


class CancelledForm(TypedDict):
    cancelled: bool


class WorkerForm(TypedDict):
    holder: str
    running: list[RunningForm]


class WorkersForm(TypedDict):
    workers: list[WorkerForm]


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
    """Return the place of a run's first entry on record, which is the `before` of the page before it."""
    journal = call.sessions.runtime.journal
    runs = () if journal is None else await journal.runs((await call.sessions.info(call.session_id)).id, run=loop_id)
    return runs[0].first.seq if runs and runs[0].first.seq > 1 else None


async def get_run(call: Call) -> Answer:
    """Return one run whole: its messages, turns and events."""
    return Answer((await call.sessions.loop(call.session_id, call.path("run"))).to_dict())


async def get_reply(call: Call) -> Answer:
    """Return the answer of a run, or 202 while it is under way."""
    wait, run = checked_wait(call, call.query.wait), call.path("run")
    info = await call.sessions.info(call.session_id)
    if not await _on_record(call, info.id, run):
        raise Problem(404, "RunNotFound", "The session has no such run. Its /runs lists them.")
    return await reply_of_run(call, info.id, run, wait)


async def _on_record(call: Call, session_id: str, run: str) -> bool:
    journal = call.sessions.runtime.journal
    return journal is not None and any(map(is_loop, await journal.runs(session_id, run=run)))


async def cancel(call: Call) -> CancelledForm:
    """Ask the run that is under way, in whichever process, to stop."""
    return {"cancelled": await call.sessions.cancel(call.session_id)}


async def cancel_run(call: Call) -> CancelledForm:
    """Ask one run to stop, and no other. When the request arrives, it may have ended and another may have begun."""
    return {"cancelled": await call.sessions.cancel(call.session_id, run=call.path("run"))}


async def get_tree(call: Call) -> Answer:
    """Return a session's runs, branches, sub-agents and forks."""
    limit = page_limit(call, call.query.limit)
    return Answer((await tree_of(call.sessions, call.session_id, limit=limit)).to_json())


async def get_ancestry(call: Call) -> AncestryForm:
    """Return what a session was forked from, and its forks."""
    found = await call.sessions.ancestry(call.session_id)
    children, line = [str(each) for each in found.children], [str(each) for each in found.line]
    return {"parent": found.parent, "children": children, "root": found.root, "line": line}


async def get_diff(call: Call) -> DiffForm:
    """Return how many messages two sessions, or two versions of one, have in common, and how each continues."""
    asked: DiffQuery = call.query
    if asked.with_ is None and asked.with_version is None:
        raise InvalidData("$.with", "name the other session, or another version as `with_version`")
    left = await call.sessions.session(call.session_id, asked.version)
    right = await call.sessions.session(asked.with_ or call.session_id, asked.with_version)
    return _of_diff(diff_of(left, right))


def _of_diff(found: Diff) -> DiffForm:
    left, right = [each.to_dict() for each in found.left], [each.to_dict() for each in found.right]
    return {"common": len(found.common), "left": left, "right": right}


async def export(call: Call) -> Response:
    """Return a session as a file: in full, or as a conversation."""
    asked: ExportQuery = call.query
    info = await call.sessions.info(call.session_id)
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="perdure-")
    ending = {"perdure": "jsonl", "openai": "json", "markdown": "md"}[asked.format]
    # In a folder of its own, since the file has the name that the client sees.
    target = Path(folder) / f"{info.id}.{ending}"
    try:
        await call.sessions.export(target, [info.id], format=asked.format, history=asked.history)
    except BaseException:
        # A cancelled request leaves no file behind either.
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


async def get_workers(call: Call) -> WorkersForm:
    """Return the processes that hold sessions, and what each runs. A process that runs nothing is not known."""
    held: dict[str, list[RunningForm]] = {}
    # The limit is for sessions that wait. Those that are run are always all there.
    for each in of_backlog(await call.sessions.queue(limit=1))["running"]:
        held.setdefault(each["holder"], []).append(each)
    return {"workers": [{"holder": holder, "running": running} for holder, running in sorted(held.items())]}


async def retry_parked(call: Call) -> Answer:
    """Open a session that was parked. A worker sends what waits there."""
    await call.sessions.unpark(call.session_id)
    return Answer(None, 204)


class DroppedForm(TypedDict):
    dropped: list[dict[str, str | None]]


async def drop_waiting(call: Call) -> DroppedForm:
    """Take back every message that waits in a session."""
    dropped = await call.sessions.drop_waiting(call.session_id)
    return {"dropped": [{"key": each.key, "text": each.text} for each in dropped]}
