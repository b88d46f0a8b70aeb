"""Going on with runs that were killed: from the record, without calling a model or a completed tool again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from perdure.actions.given import require_loops
from perdure.actions.needed_tools import require_tools
from perdure.actions.parallel import resume_group
from perdure.actions.running import RunOptions, owner_here, require_journal, run_agent
from perdure.actions.send import send_leftovers_after
from perdure.actions.spawning import Spawner
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    PerdureError,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.loop.replay import Replay
from perdure.loop.tool_use import Decisions
from perdure.model.checks import expect
from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, AnyLoopEvent, ParallelLoopEnd, ParallelLoopStart
from perdure.model.message import Message
from perdure.model.said import SaidByRun
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, every_span
from perdure.protocols import ActionContext, Entry, Journal, JournalEntry, Key, StoredAt
from perdure.recording import entry_of, event_of, see_through
from perdure.runtime.runtime import SessionRuntime

REDACTED = "redacted"


class ResumeExecution:
    """Continue the run that was under way when its process was killed; a session without one is left as it is.

    With `give_up` it is ended where it stands instead: what was said until then is kept, and it counts as cancelled.
    """

    runs_model = True
    ends_interruption = True

    def __init__(self, loops: LoopFactory, *, depth: int = 0, give_up: bool = False) -> None:
        self._loops = require_loops(loops)
        self._depth = depth
        self._give_up = give_up
        self.has_found_one = False
        """Whether there was a run to be continued."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        journal = require_journal(context, "ResumeExecution")
        assert context is not None
        if await journal.is_claimed(session.id):
            raise SessionBusy(session.id)
        story = await _unsaved_story(journal, session)
        if not story:
            await _clear_claim(journal, session)
            context.answer = session
            return session
        self.has_found_one = True
        written = await _unsaved_messages(journal, session, story)
        events = list(_events(session, story, written))
        if isinstance(events[0], ParallelLoopStart):
            if self._give_up:
                return await _give_up_group(session, context, journal, events[0])
            stories = {loop: [event for event in events if event.loop_id == loop] for loop in events[0].loop_ids}
            stories[events[0].loop_id] = stories[events[0].loop_id][1:]
            return await resume_group(session, context, self._loops, events[0], stories, written)
        replay = Replay(session.state).apply_all(events)
        if not self._give_up:
            self._require_tools(session, replay)
        options = RunOptions(
            resumes=True,
            give_up=self._give_up,
            decisions=_unspent(replay.decisions),
            depth=self._depth,
            written={message.id: at for message, at in written.values()},
            key=_key_of(events),
        )
        spawn = Spawner(session, context, replay.decisions)
        active = session.activated() if session.state.execution and session.state.execution.pending_calls else session
        after = await run_agent(active, replay.state, self._loops, context, options, spawn)
        send_leftovers_after(context, self._loops, self._depth)
        return after

    def _require_tools(self, session: AgentSession, replay: Replay) -> None:
        """Raise ConfigurationError if a call that was begun is of a tool that is not here: it may have taken effect."""
        step = replay.state.execution.current_step if replay.state.execution else None
        begun = [call for call in step.tool_calls if call.id in replay.decisions.unknown] if step else []
        require_tools(
            self._loops,
            session,
            self._depth,
            begun,
            why="The run that was killed was calling {name!r}",
            what_to_do="Recover it where its tools are (tools=[…], or --tools FILE.py), or end it with cancel.",
        )


async def _give_up_group(
    session: AgentSession, context: ActionContext, journal: Journal, start: ParallelLoopStart
) -> AgentSession:
    """End a group of which no branch is to be selected; the session stays as it is."""
    end = ParallelLoopEnd(
        loop_id=start.loop_id,
        session_id=session.id,
        agent_id=start.agent_id,
        seq=start.seq + 1,
        loop_ids=start.loop_ids,
    )
    await _take_over(journal, session, entry_of(end))
    context.answer = session
    return session


async def _clear_claim(journal: Journal, session: AgentSession) -> None:
    """Take off the claim of one who was killed with nothing on record, as in the middle of a compaction."""
    if await journal.is_interrupted(session.id):
        await _take_over(journal, session)


async def _take_over(journal: Journal, session: AgentSession, *entries: Entry) -> None:
    """Take a lapsed claim off a session, with something put on record."""

    async def taken() -> None:
        claim, _ = await journal.claim(
            session.id, version=session.version, owner=owner_here(), entries=entries, take_over=True
        )
        await journal.release(claim)

    await see_through(taken())


def _key_of(events: Sequence[AnyLoopEvent]) -> Key | None:
    """The idempotency key of the request that a run answers."""
    keys = (event.key for event in events if isinstance(event, AgentStart) and event.key is not None)
    found = next(keys, None)
    return None if found is None else Key(*found)


def _unspent(decisions: Decisions) -> Decisions:
    """Decisions without the approvals of calls that were started: to make these again was not approved."""
    approved = {call: digest for call, digest in decisions.approved.items() if call not in decisions.unknown}
    return msgspec.structs.replace(decisions, approved=approved)


async def _unsaved_story(journal: Journal, session: AgentSession) -> Sequence[JournalEntry]:
    """The entries of the last run, or of the last group of runs, if it set out from this version and was not saved."""
    newest = await _newest(journal, session)
    if newest is None or newest.kind == "parallel_loop_end":
        return ()
    if newest.kind == "parallel_loop_start":
        return (newest,) if newest.body.get("base_version") == session.version else ()
    (run,) = await journal.runs(session.id, run=newest.run)
    if run.first.body.get("group"):
        return await _group_story(journal, session, run.first.body["group"])
    if newest.kind == "agent_end":
        return ()
    entries = await journal.read(session.id, run=newest.run)
    starts = (e for e in entries if e.kind == "agent_start" and e.body.get("base_version") == session.version)
    first = next(starts, None)
    return () if first is None else [entry for entry in entries if entry.seq >= first.seq]


async def _newest(journal: Journal, session: AgentSession) -> JournalEntry | None:
    """The last entry that tells of a run. One that tells of a redaction may stand behind it."""
    looked_at, asked = -1, 1
    entries: Sequence[JournalEntry] = ()
    while looked_at < len(entries):
        looked_at, entries = len(entries), await journal.read(session.id, last=asked)
        found = next((entry for entry in reversed(entries) if entry.kind != REDACTED), None)
        if found is not None:
            return found
        asked *= 8
    return None


async def _group_story(journal: Journal, session: AgentSession, group: Sequence[str]) -> Sequence[JournalEntry]:
    """What was told of a parallel group, from its announcement on: right before the first of its branches began."""
    firsts = [run.first.seq for loop in group for run in await journal.runs(session.id, run=loop)]
    place = min(firsts) - 1
    entries = await journal.read(session.id, after=place - 1)
    while entries[0].kind == REDACTED:
        place -= 1
        entries = await journal.read(session.id, after=place - 1)
    is_unsaved = entries[0].kind == "parallel_loop_start" and entries[0].body.get("base_version") == session.version
    return [entry for entry in entries if entry.kind != REDACTED] if is_unsaved else ()


async def _unsaved_messages(
    journal: Journal, session: AgentSession, story: Sequence[JournalEntry]
) -> dict[str, tuple[Message, StoredAt]]:
    """The messages that stand in the session's log behind all that its version names, and in its branches' logs."""
    log, end = await journal.log_of(session.id)
    spans = every_span(session.state.transcript.pieces)
    start = max((span.stop for span in spans if span.tape.ref == log), default=0)
    found = await _messages_at(journal, log, start, end)
    if story[0].kind == "parallel_loop_start":
        for loop in {entry.run for entry in story if entry.run is not None and entry.kind == "message_end"}:
            with suppress(SessionNotFound):  # a branch that has said nothing of its own yet
                log, end = await journal.log_of(session.id, loop)
                found |= await _messages_at(journal, log, 0, end)
    return found


async def _messages_at(journal: Journal, log: LogRef, start: int, end: int) -> dict[str, tuple[Message, StoredAt]]:
    messages = await journal.messages(log, start, end) if start < end else ()
    return {message.id: (message, StoredAt(log, place)) for place, message in enumerate(messages, start)}


def _events(
    session: AgentSession, entries: Iterable[JournalEntry], written: dict[str, tuple[Message, StoredAt]]
) -> Iterable[AnyLoopEvent]:
    said = SaidByRun(message for message, _ in written.values())

    def message_of(message_id: str) -> Message:
        if message_id not in written:
            raise CorruptRecord(session.id, f"message {message_id}", "its run's record names it, and the log lacks it")
        return written[message_id][0]

    for entry in entries:
        yield event_of(entry, session.id, session.state.agent_id, message_of, said.of(entry.run))


class RecoveryReport(msgspec.Struct, frozen=True):
    """What became of the runs that had been killed."""

    resumed: tuple[SessionId, ...] = ()
    suspended: tuple[SessionId, ...] = ()
    """Resumed, and now waiting for a person."""
    busy: tuple[SessionId, ...] = ()
    """Somebody else was quicker."""
    failed: tuple[tuple[SessionId, str], ...] = ()

    @classmethod
    def joined(cls, reports: Iterable[RecoveryReport]) -> RecoveryReport:
        """Several reports as one."""
        columns = zip(*map(msgspec.structs.astuple, reports), strict=True)
        return cls(*(sum(column, start=()) for column in columns))


async def recover(runtime: SessionRuntime, loops: LoopFactory, *, session_id: str | None = None) -> RecoveryReport:
    """Resume every run whose claim has lapsed, or that of one session. One that fails does not stop the others."""
    journal = expect(runtime, SessionRuntime, "$.runtime").journal
    require_loops(loops)
    if journal is None:
        raise ConfigurationError("This store has no journal, so its runs are unrecorded and cannot be recovered.")
    wanted = await journal.lapsed() if session_id is None else [SessionId(session_id)]
    outcomes: dict[str, list[SessionId]] = {"resumed": [], "suspended": [], "busy": []}
    failed: list[tuple[SessionId, str]] = []
    for each in _children_first(wanted):
        action = ResumeExecution(loops)
        try:
            session = await runtime.execute(each, action)
        except (SessionBusy, SessionConflict):
            outcomes["busy"].append(each)
        except PerdureError as error:
            failed.append((each, str(error)))
        else:
            waits = session.state.execution is not None and session.state.execution.pending_calls
            if action.has_found_one:
                outcomes["suspended" if waits else "resumed"].append(each)
    return RecoveryReport(failed=tuple(failed), **{name: tuple(found) for name, found in outcomes.items()})


def _children_first(wanted: Sequence[SessionId]) -> Sequence[SessionId]:
    """Newest first: a child is younger than its parent, which then finds it at its end."""
    return tuple(reversed(wanted))
