"""The page of one session: what was said, what ran, what waits, and what happens now."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from perdure.errors import InvalidData, NotLoaded, SessionNotFound
from perdure.loop.tokens import TokenEstimator
from perdure.model.ids import SessionId, new_id
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.transcript import Block
from perdure.protocols import said_in
from perdure.server.call import Call
from perdure.server.pages.conversation import (
    Conversation,
    SaidBox,
    boxes_of,
    view_entries,
)
from perdure.server.pages.conversation_window import said_window, shown_window
from perdure.server.pages.event_rows import last_events
from perdure.server.pages.family import family_of
from perdure.server.pages.notices import notice_of
from perdure.server.pages.render import is_fragment, page
from perdure.server.pages.run_list import run_list, standing_of
from perdure.server.pages.titles import title_of
from perdure.server.pages.token_bar import token_bar
from perdure.server.pages.version_line import version_line
from perdure.server.pages.windows import END, WINDOW, length_of
from perdure.sessions.following import progress_of
from perdure.sessions.graphs import Plan, is_noted, is_thread, plan_of
from perdure.sessions.pages import SpanReader, end_of_session
from perdure.sessions.sessions import Sessions
from perdure.sessions.viewing import View, view_of, view_without_journal

_ESTIMATOR = TokenEstimator()


class SessionQuery(msgspec.Struct, kw_only=True):
    """The part of a session that is looked at."""

    version: int | None = None
    view: Literal["shown", "said"] = "shown"
    end: int | None = None
    """The place where the window of messages ends."""
    run: str | None = None
    """The run whose facts are shown."""
    runs_before: int | None = None
    message: str | None = None
    """A message to be shown, as a search has found it."""
    place: int | None = None
    """The place of that message in the session's log."""
    notice: str | None = None
    """The verb that was done last from this page."""


class BlockQuery(msgspec.Struct, kw_only=True):
    """The part of a compaction that is looked at."""

    version: int | None = None
    start: int = 0


@dataclass(frozen=True)
class Standing:
    """A session as it is now, and the version of it that is looked at."""

    info: AgentSessionInfo
    """The newest header."""
    session: AgentSession
    """The version that is looked at."""
    now: View

    @property
    def is_past(self) -> bool:
        return self.session.version < self.info.version


async def get_session(call: Call) -> Response:
    """Return the page of a session."""
    asked: SessionQuery = call.query
    sessions = call.sessions
    # Read first: the stream begins after these, and tells what happens while the page is made.
    events = await last_events(sessions, (await sessions.info(call.session_id)).id)
    standing = await _standing(sessions, call.session_id, asked.version)
    said = await _conversation(sessions, standing, asked)
    runs = await run_list(sessions, standing.info.id, asked.runs_before, standing.now.activity)
    run = runs.records.get(asked.run or "", next(reversed(runs.records.values()), None))
    values: dict[str, Any] = {
        "info": standing.info,
        "session": standing.session,
        "title": await title_of(sessions, standing.info.id, standing.info.name or "Untitled"),
        "now": standing.now,
        "is_past": standing.is_past,
        "asked": asked,
        "said": said,
        "coming": _coming(standing, asked, said),
        "writing": await _writing(sessions, standing, said),
        "bar": token_bar(sessions, standing.session, said.messages, _ESTIMATOR) if asked.view == "shown" else None,
        "line": await version_line(sessions, standing.info, standing.session),
        "runs": runs,
        "run": run,
        "run_standing": None if run is None else standing_of(run),
        "family": await family_of(sessions, standing.info),
        "events": events,
        "is_thread": is_thread(standing.info) and is_noted(standing.session),
        "plan": Plan() if standing.is_past else await plan_of(sessions.runtime.journal, standing.session),
        "notice": notice_of(asked.notice),
        "query": _query_of(asked),
        # The form's key, by which a post that is sent twice is known.
        "key": new_id(),
        "runs_here": call.service.runs_here,
    }
    return page(call, "session.html", **values)


def _query_of(asked: SessionQuery) -> str:
    """Return the query for drawing the page again, without the notice of what was done."""
    given = {**msgspec.structs.asdict(asked), "notice": None}
    return urlencode({name: value for name, value in given.items() if value is not None})


async def _standing(sessions: Sessions, session_id: str, version: int | None) -> Standing:
    info = await sessions.info(session_id)
    now = await standing_now(sessions, info.id)
    newest = now.session
    if version is None or version == newest.version:
        return Standing(newest.info, newest, now)
    if not 0 < version <= newest.version:
        raise SessionNotFound(info.id, version)
    return Standing(newest.info, await end_of_session(sessions, info.id, version, last=END), now)


async def standing_now(sessions: Sessions, session_id: SessionId) -> View:
    """Return a conversation as it is now, reading no more than its end."""
    journal = sessions.runtime.journal
    if journal is None:
        is_running = sessions.live.is_running(session_id)
        return view_without_journal(await end_of_session(sessions, session_id, last=END), is_running=is_running)

    async def version() -> int:
        return (await sessions.runtime.get_session_info(session_id)).version

    try:
        return await view_of(journal, partial(end_of_session, sessions, session_id, last=END), version)
    except NotLoaded:  # the run under way has said more than the end that was read
        return await view_of(journal, partial(sessions.runtime.get_session, session_id), version)


async def _conversation(sessions: Sessions, standing: Standing, asked: SessionQuery) -> Conversation:
    if asked.end is not None and asked.end < 0:
        raise InvalidData("$.end", "expected 0 or more")
    if asked.view == "shown":
        return await shown_window(sessions, standing.session, asked.end, standing.now.pending_calls)
    now = standing.now
    return await said_window(sessions, now.session, asked.end, asked.message, asked.place, now.pending_calls)


def _coming(standing: Standing, asked: SessionQuery, said: Conversation) -> list[SaidBox]:
    """Return what the run under way was asked and has said, which is in no version yet."""
    now = standing.now
    if standing.is_past or said.stop < said.total or now.activity not in ("running", "killed", "left"):
        return []
    shown = {entry.id for entry in said.entries if isinstance(entry, SaidBox)}
    boxes = boxes_of([*now.asked, *now.said], now.pending_calls)
    return [box for box in boxes if box.id not in shown]


async def _writing(sessions: Sessions, standing: Standing, said: Conversation) -> str:
    """Return the text of the answer that is being written, as far as it is known."""
    journal = sessions.runtime.journal
    if journal is None or standing.is_past or said.stop < said.total or standing.now.activity != "running":
        return ""
    return said_in((await progress_of(journal, standing.info.id)).sketches)


async def get_block(call: Call) -> Response:
    """Return what a compaction covers: a part of a page for a script, or else a page of its own."""
    asked: BlockQuery = call.query
    info = await call.sessions.info(call.session_id)
    session = await end_of_session(call.sessions, info.id, asked.version, last=0)
    block = _block_of(session, call.path("block"))
    total, start = length_of(block.covered), max(0, asked.start)
    stop = min(total, start + WINDOW)
    reader = SpanReader(call.sessions.runtime.journal)
    entries, _ = await view_entries(reader, block.covered, start, stop, top=False)
    values: dict[str, Any] = {
        "info": info,
        "version": session.version,
        "block": block,
        "said": Conversation(entries, start, stop, total),
        "next": stop if stop < total else None,
    }
    return page(call, "block_part.html" if is_fragment(call.request) else "block.html", **values)


def _block_of(session: AgentSession, block_id: str) -> Block:
    for block in session.state.transcript.blocks():
        if block.id == block_id:
            return block
    raise InvalidData("$.block", "this version of the session has no such compaction")
