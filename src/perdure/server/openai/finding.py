"""Responses on record: where one is, how far it has come, and what it was asked with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from perdure.actions.inbox import under_way
from perdure.errors import ConfigurationError, InvalidSessionId, SessionNotFound
from perdure.model.ids import now
from perdure.model.loop_events import AnyLoopEvent
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.model.usage import Usage
from perdure.protocols import Journal, JournalEntry
from perdure.run_journal import loops_on_record
from perdure.runtime.record_reader import Story
from perdure.server.openai.errors import not_found
from perdure.server.openai.ids import ResponseId
from perdure.sessions.following import listening
from perdure.sessions.operating import TAKEN_BACK
from perdure.sessions.sessions import Sessions

KEPT = "openai"
"""The key in a run's metadata of the parts of the request that are kept."""
State = Literal["queued", "running", "over"]
_RUNS_LOOKED_AT = 50
_LOOK_FOR_REFUSAL = 1.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A response on record."""

    id: ResponseId
    info: AgentSessionInfo
    state: State
    asked: Mapping[str, Any]
    """The start of its run, or the message that waits for one: both have what was asked."""
    run: str | None = None
    entries: Sequence[JournalEntry] = ()
    """Its entries on the record."""
    base: int = 0
    """The version that it began from. Its end has made the next one."""
    previous: ResponseId | None = None
    """The response that waited for the decision which began this one."""
    refusal: str | None = None
    """The reason why it was never begun."""

    @property
    def begin(self) -> int:
        """Its first place on the session's record, or 0 if it has not begun."""
        return self.entries[0].seq if self.entries else 0

    @property
    def version(self) -> int:
        return self.base + 1

    @property
    def kept(self) -> Mapping[str, Any]:
        """Return the parts of the request that are kept."""
        found = (self.asked.get("metadata") or {}).get(KEPT)
        return found if isinstance(found, Mapping) else {}

    @property
    def created_at(self) -> float:
        """The time when it was asked for, or when the decision was taken that began it."""
        at = self.kept.get("at") if self.previous is None else None
        if at is None and self.entries:
            at = datetime.fromisoformat(self.entries[0].body["at"]).timestamp()
        return float(at if at is not None else now().timestamp())

    @property
    def was_taken_back(self) -> bool:
        return self.refusal == TAKEN_BACK


class Outcome(msgspec.Struct, frozen=True):
    """The session as a response has left it."""

    session: AgentSession
    used_before: Usage

    @property
    def usage(self) -> Usage:
        return self.session.state.usage - self.used_before


async def find(sessions: Sessions, given: str) -> Found:
    """Return the response of an id. Raise a Problem if there is none within reach: the same one for all reasons."""
    response = ResponseId.of(given)
    found = None if response is None else await look_for(sessions, response)
    if found is None:
        raise not_found("Response", given)
    return found


async def reached(sessions: Sessions, session_id: str) -> AgentSessionInfo | None:
    """Return the header of a session within reach that was not deleted, or None if there is none."""
    try:
        info = await sessions.info(session_id)
    except (SessionNotFound, InvalidSessionId):
        return None
    # An owner's own id is whole; a shorter one would name the same session twice.
    return info if info.id == session_id and info.status is not SessionStatus.DELETED else None


async def look_for(sessions: Sessions, response: ResponseId) -> Found | None:
    """Return a response, or None if there is none within reach."""
    info = await reached(sessions, response.session)
    if info is None:
        return None
    journal = journal_of(sessions)
    for _ in range(2):  # a run may end between two looks
        kept = await journal.find_key(info.id, response.key)
        if kept is not None:
            execution = (await sessions.session(info.id, kept[1])).state.execution
            run = None if execution is None else execution.execution_id
            return None if run is None else await _part(journal, info, response, run, kept[1])
        waiting = await under_way(journal, info.id, response.key)
        if waiting is not None and waiting.kind == "agent_start":
            return await _part(journal, info, response, str(waiting.run), 0)
        if waiting is not None:
            return None if response.after else Found(id=response, info=info, state="queued", asked=waiting.body)
    return await _refused(journal, info, response)


async def _part(journal: Journal, info: AgentSessionInfo, response: ResponseId, run: str, saved: int) -> Found | None:
    """Return the part of a run that a response stands for. Each part begins from a version of its own."""
    entries = await journal.read(info.id, run=run)
    starts = [entry for entry in entries if entry.kind == "agent_start"]
    # A run that is continued after a crash has several starts from the same version.
    bases = list(dict.fromkeys(entry.body.get("base_version") or 0 for entry in starts))
    base = response.after or bases[0]
    if base not in bases:
        return None
    first = next(entry.seq for entry in starts if entry.body.get("base_version") == base)
    later = [entry.seq for entry in starts if (entry.body.get("base_version") or 0) > base]
    own = [entry for entry in entries if first <= entry.seq < min(later, default=entry.seq + 1)]
    place = bases.index(base)
    previous = None if not place else ResponseId(info.id, response.key, bases[place - 1] if place > 1 else 0)
    return Found(
        id=response,
        info=info,
        state="over" if saved > base else "running",
        asked=starts[0].body,
        run=run,
        entries=own,
        base=base,
        previous=previous,
    )


async def _refused(journal: Journal, info: AgentSessionInfo, response: ResponseId) -> Found | None:
    """Return a response whose message could never be sent. Its message has the key as its id."""
    for run in reversed(await loops_on_record(journal, info.id, limit=_RUNS_LOOKED_AT)):
        if run.first.body.get("base_version") is not None or run.last.kind != "agent_end":
            continue
        entries = await journal.read(info.id, run=run.loop_id)
        said = [entry.body["message"]["id"] for entry in entries if entry.kind == "message_end"]
        if said and said[0] == response.key and not response.after:
            reason = str(run.last.body.get("rejection"))
            return Found(
                id=response, info=info, state="over", asked={}, run=run.loop_id, entries=entries, refusal=reason
            )
    return None


async def outcome_of(sessions: Sessions, found: Found) -> Outcome | None:
    """Return the outcome of a response, or None if it never began or is not over."""
    if found.state != "over" or found.refusal is not None:
        return None
    session = await sessions.session(found.info.id, found.version)
    if found.previous is None:
        return Outcome(session, Usage())
    return Outcome(session, (await sessions.session(found.info.id, found.base)).state.usage)


async def events_of(sessions: Sessions, found: Found) -> Sequence[AnyLoopEvent]:
    """Return the events of a response that are on record."""
    return await Story(journal_of(sessions), found.info.id).events(found.entries)


async def settled(sessions: Sessions, response: ResponseId) -> None:
    """Wait until a response is over: its run has ended, or waits, or was never begun."""
    journal, time = journal_of(sessions), asyncio.get_running_loop().time
    look = time() + _LOOK_FOR_REFUSAL
    async with listening(journal, response.session) as news:
        while True:
            kept = await journal.find_key(response.session, response.key)
            if kept is not None and kept[1] > response.after:
                return
            # A message that was refused leaves no key, and to find it takes more: so not at every news.
            if kept is None and time() >= look:
                look = time() + _LOOK_FOR_REFUSAL
                found = await look_for(sessions, response)
                if found is None or found.state == "over":
                    return
            await news()


def journal_of(sessions: Sessions) -> Journal:
    journal = sessions.runtime.journal
    if journal is None:
        raise ConfigurationError("This store has no journal, so there are no responses to be found.")
    return journal
