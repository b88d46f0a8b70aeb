"""Recovery: killed runs are continued from the record, without repeating a model call or a completed tool call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from perdure.actions.callers import Caller
from perdure.actions.children import depth_of
from perdure.actions.claimed_work import ClaimedWork
from perdure.actions.given import require_loops
from perdure.actions.needed_model import known_model, require_model
from perdure.actions.needed_tools import require_tools
from perdure.actions.parallel import resume_group
from perdure.actions.run import Past, RunOptions, require_journal, run_agent
from perdure.actions.send import waiting_messages
from perdure.actions.subagents import Spawner
from perdure.actions.undo_run import without_run
from perdure.actions.waiting import is_waiting
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    PerdureError,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.loop.cut_off import LostAnswer
from perdure.loop.factory import LoopFactory
from perdure.loop.replay import Replay
from perdure.loop.run_events import ResumePoint
from perdure.loop.tool_use import Decisions
from perdure.model.checks import expect_method
from perdure.model.definition import ModelConfig
from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, AnyLoopEvent, MessageEnd, ParallelLoopEnd, ParallelLoopStart
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.tool_refs import SaidByRun
from perdure.model.transcript import LogRef, every_span
from perdure.model.value import ErrorRecord
from perdure.protocols import (
    ActionContext,
    ActionResult,
    Answer,
    Journal,
    JournalEntry,
    Key,
    SessionManager,
    StoredAt,
    is_sketchbook,
    said_in,
)
from perdure.redaction.traces import MARK as REDACTED
from perdure.run_journal import JournalRecord, event_of, tells_of_run
from perdure.runtime.record_reader import last_of_run

_log = logging.getLogger("perdure.recovery")


class ResumeExecution:
    """An action that continues the run that was under way when its process was killed. Without one, nothing changes.

    With `give_up` the run is ended where it is instead. What was said until then is kept, and the run counts as
    cancelled, or as failed if a `failure` is given. What waits in the inbox is sent next, unless the run is continued
    `alone`. `loops` runs the agent. `context` is what tools find in `ToolContext.context`.
    """

    ends_interruption = True

    def __init__(
        self,
        loops: LoopFactory,
        *,
        give_up: bool = False,
        failure: ErrorRecord | None = None,
        alone: bool = False,
        context: object = None,
    ) -> None:
        self._loops = require_loops(loops)
        self._context = context
        self._give_up = give_up
        self._failure = failure
        self._alone = alone
        self.has_found_one = False
        """True if there was a run to continue."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        journal = require_journal(context, "ResumeExecution")
        assert context is not None
        if not await journal.is_interrupted(session.id):
            if await journal.is_claimed(session.id):
                raise SessionBusy(session.id)
            return Answer(session)
        then = None if self._alone else waiting_messages(context, session.id, self._loops)
        work = ClaimedWork(session, context, takes_over=True, then=then)
        assert work.record is not None
        # The claim comes first. Before it, another process may continue the run and be killed too. A record read
        # before that would be outdated, and calls that are on record by now would be made again.
        await work.record.barrier()
        session = await _as_redacted(session, context, journal)
        return await self._resumed(session, context, journal, work, work.record)

    async def _resumed(
        self,
        session: AgentSession,
        context: ActionContext,
        journal: Journal,
        work: ClaimedWork,
        record: JournalRecord,
    ) -> ActionResult:
        story, is_whole = await _unsaved_story(journal, session)
        if not story:
            # The record names no run to recover, so the claim is released without a trace.
            record.is_unfinished = False
            return Answer(session)
        self.has_found_one = True
        written = await _unsaved_messages(journal, session, story)
        record.written.update({message.id: at for message, at in written.values()})
        events = list(_events(session, story, written))
        if isinstance(events[0], ParallelLoopStart):
            return await self._resumed_group(session, context, work, record, events[0], events[1:], written)
        record.ends_anyway = self._give_up and _may_end_alone(session)
        began = await _began_as(session, events[0], context)
        replay = Replay(began.state).apply_all(events)
        depth = await depth_of(session, context)
        if not self._give_up:
            await self._require_tools(session, context, replay, depth)
        options = RunOptions(
            work=work,
            past=Past(ResumePoint.of(events)) if is_whole else None,
            model=await self._model(session, events),
            give_up=self._give_up,
            failure=self._failure,
            decisions=_unspent(replay.decisions),
            depth=depth,
            inputs=_unjudged(events),
            key=_fact_of(events, "key"),
            posted=_fact_of(events, "posted"),
            caller=Caller(self._context, _fact_of(events, "context_data")),
            lost=await _lost_answer(journal, session, events[0].loop_id),
        )
        spawn = Spawner(session, context, self._loops, replay.decisions)
        # A decision that was left to a worker has saved nothing: the session is suspended with its calls until now.
        active = session.activated() if is_waiting(session) else session
        return await run_agent(active, replay.state, self._loops, context, options, spawn)

    async def _resumed_group(
        self,
        session: AgentSession,
        context: ActionContext,
        work: ClaimedWork,
        record: JournalRecord,
        start: ParallelLoopStart,
        events: Sequence[AnyLoopEvent],
        written: Mapping[str, tuple[Message, StoredAt]],
    ) -> ActionResult:
        if not self._give_up:
            stories = {loop: [event for event in events if event.loop_id == loop] for loop in start.loop_ids}
            return await resume_group(session, context, self._loops, start, stories, written, work)
        record.put(_end_without_selection(start))
        record.ends_anyway = True
        return Answer(session)

    async def _model(self, session: AgentSession, events: Sequence[AnyLoopEvent]) -> ModelConfig:
        recorded = next((event.config for event in events if isinstance(event, AgentStart)), None)
        if self._give_up:
            return known_model(self._loops, session, recorded)
        return await require_model(
            self._loops,
            session,
            recorded,
            why="The run that was killed was asking the model",
            what_to_do="Recover it where the model can be asked, or end it with cancel.",
        )

    async def _require_tools(self, session: AgentSession, context: ActionContext, replay: Replay, depth: int) -> None:
        """Raise ConfigurationError if the tool of a call that was begun is not here: it may have taken effect."""
        step = replay.state.execution.current_step if replay.state.execution else None
        begun = [call for call in step.tool_calls if call.id in replay.decisions.unknown] if step else []
        await require_tools(
            self._loops,
            session,
            context,
            depth,
            begun,
            why="The run that was killed was calling {name!r}",
            what_to_do="Recover it where its tools are (tools=[…], or --tools FILE.py), or end it with cancel.",
        )


async def _as_redacted(session: AgentSession, context: ActionContext, journal: Journal) -> AgentSession:
    """Return the session as it is in the store now, if something was redacted since its run was killed.

    A redaction does not move the version of such a session. So the claim cannot tell whether it was loaded before.
    """
    newest = await last_of_run(journal, session.id)
    since = () if newest is None else await journal.read(session.id, after=newest.seq)
    if not any(entry.kind == REDACTED for entry in since):
        return session
    return await context.store.load(session.id) or session


def _may_end_alone(session: AgentSession) -> bool:
    """Tell whether a run may end on record even if its session cannot be saved.

    A version that shows pending calls must not outlive their run. A sub-agent whose result was not saved would be begun
    again by its caller, and repeat all that it has done.
    """
    return not is_waiting(session) and session.info.spawn_ref is None


async def _began_as(session: AgentSession, start: AnyLoopEvent, context: ActionContext) -> AgentSession:
    """Return the session as a run found it: without the run that it replaces, if it replaces one."""
    if not isinstance(start, AgentStart) or start.takes_back is None:
        return session
    return await without_run(session, start.takes_back, context)


async def _lost_answer(journal: Journal, session: AgentSession, run: str) -> LostAnswer | None:
    """Return what was kept of the answer that was being written when a run was killed, or None."""
    if not is_sketchbook(journal):
        return None
    found = (await journal.progress(session.id)).sketches
    text = said_in(found)
    return LostAnswer(found[0].message_id, text) if text.strip() and found[0].run == run else None


def _end_without_selection(start: ParallelLoopStart) -> ParallelLoopEnd:
    """Return the end of a group of which no branch is selected. The session stays as it is."""
    return ParallelLoopEnd(
        loop_id=start.loop_id,
        session_id=start.session_id,
        agent_id=start.agent_id,
        seq=start.seq + 1,
        loop_ids=start.loop_ids,
    )


def _unjudged(events: Sequence[AnyLoopEvent]) -> list[Message]:
    """Return the messages that a run answers, if nothing on record shows that input filters have let them pass.

    Later starts are those of recoveries that were killed before the filters had answered.
    """
    first, *rest = events
    if not isinstance(first, AgentStart) or first.resumed:
        return []
    rest = [event for event in rest if not isinstance(event, AgentStart) and not _is_lost_answer(event)]
    said = [event.message for event in rest if isinstance(event, MessageEnd)]
    was_warned = any(each.role == "system" and each.metadata.get("is_trace") for each in said)
    return said if len(said) == len(rest) and not was_warned else []


def _is_lost_answer(event: AnyLoopEvent) -> bool:
    if not isinstance(event, MessageEnd) or not event.message.is_superseded:
        return False
    return event.message.metadata.get("execution_id") == event.loop_id  # otherwise it was copied from another run


def _fact_of(events: Sequence[AnyLoopEvent], name: str) -> Any:
    """Return a fact about the request that a run answers, such as its key, from the first start that has it."""
    facts = (getattr(event, name) for event in events if isinstance(event, AgentStart))
    found = next((fact for fact in facts if fact is not None), None)
    return Key(*found) if isinstance(found, tuple) else found


def _unspent(decisions: Decisions) -> Decisions:
    """Return decisions without the approvals of calls that were started: their tools decide what happens to them."""
    spent = decisions.approved.keys() & decisions.unknown.keys()
    approved = {call: digest for call, digest in decisions.approved.items() if call not in spent}
    return msgspec.structs.replace(
        decisions, approved=approved, agreed={call: decisions.approved[call] for call in spent}
    )


async def _unsaved_story(journal: Journal, session: AgentSession) -> tuple[Sequence[JournalEntry], bool]:
    """Return the entries of the last run, or group of runs, since this version, if it was not saved.

    The second value tells whether these are all of its entries: a run that waited for a person began before this
    version.
    """
    newest = await last_of_run(journal, session.id)
    if newest is None or newest.kind == "parallel_loop_end":
        return (), True
    if newest.kind == "parallel_loop_start":
        return (newest,) if newest.body.get("base_version") == session.version else (), True
    entries = [entry for entry in await journal.read(session.id, run=newest.run) if tells_of_run(entry)]
    starts = [entry for entry in entries if entry.kind == "agent_start"]
    if starts and starts[0].body.get("group"):
        return await _group_story(journal, session, starts[0].body["group"]), True
    if newest.kind == "agent_end":
        return (), True
    first = next((entry for entry in starts if entry.body.get("base_version") == session.version), None)
    if first is None:
        return (), True
    return [entry for entry in entries if entry.seq >= first.seq], first is entries[0]


async def _group_story(journal: Journal, session: AgentSession, group: Sequence[str]) -> Sequence[JournalEntry]:
    """Return the entries of a parallel group, from its announcement on, if the group was not saved.

    The announcement comes right before the first of its branches begins.
    """
    firsts = [run.first.seq for loop in group for run in await journal.runs(session.id, run=loop)]
    place = min(firsts) - 1
    entries = await journal.read(session.id, after=place - 1)
    # Between the two, a redaction or an adapter may have put an entry of its own on record.
    while not tells_of_run(entries[0]):
        place -= 1
        entries = await journal.read(session.id, after=place - 1)
    is_unsaved = entries[0].kind == "parallel_loop_start" and entries[0].body.get("base_version") == session.version
    return [entry for entry in entries if tells_of_run(entry)] if is_unsaved else ()


async def _unsaved_messages(
    journal: Journal, session: AgentSession, story: Sequence[JournalEntry]
) -> dict[str, tuple[Message, StoredAt]]:
    """Return the messages in the session's log behind all that its version names, and those in its branches' logs."""
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
    """Return the messages of a stretch of a log, by their ids. Forgotten ones are older than the run, and left out."""
    messages: Sequence[Message] = ()
    # A read that meets a forgotten message raises. The first one that is left is found by halving the stretch.
    first, looked_at = end, start
    while start < first:
        try:
            messages = await journal.messages(log, looked_at, end)
        except SessionNotFound:
            start = looked_at + 1
        else:
            first = looked_at
        looked_at = (start + first) // 2
    return {message.id: (message, StoredAt(log, place)) for place, message in enumerate(messages, first)}


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
    """The outcome of a recovery of killed runs."""

    resumed: tuple[SessionId, ...] = ()
    """The sessions whose runs were continued to their ends."""
    suspended: tuple[SessionId, ...] = ()
    """Resumed, and now waiting for a person."""
    busy: tuple[SessionId, ...] = ()
    """Conflicts: somebody else runs these sessions by now, or has changed them meanwhile."""
    failed: tuple[tuple[SessionId, str], ...] = ()
    """The sessions whose runs could not be continued, each with the reason."""
    errors: tuple[PerdureError, ...] = ()
    """The errors of those that failed, in the same order."""

    @classmethod
    def joined(cls, reports: Iterable[RecoveryReport]) -> RecoveryReport:
        """Return several `reports` as one."""
        columns = zip(*map(msgspec.structs.astuple, reports), strict=True)
        return cls(*(sum(column, start=()) for column in columns))


async def recover(runtime: SessionManager, loops: LoopFactory, *, session_id: str | None = None) -> RecoveryReport:
    """Resume every run whose claim has lapsed, or only that of one session. One that fails does not stop the others.

    `runtime` has the sessions, and `loops` runs their agents. With a `session_id` only that session is recovered.
    """
    journal = expect_method(runtime, "execute", "$.runtime").journal
    require_loops(loops)
    if journal is None:
        raise ConfigurationError("This store has no journal, so its runs are unrecorded and cannot be recovered.")
    wanted = await journal.lapsed() if session_id is None else [SessionId(session_id)]
    outcomes: dict[str, list[SessionId]] = {"resumed": [], "suspended": [], "busy": []}
    failed: list[tuple[SessionId, PerdureError]] = []
    for each in _children_first(wanted):
        action = ResumeExecution(loops)
        try:
            session = await runtime.execute(each, action)
        except (SessionBusy, SessionConflict):
            outcomes["busy"].append(each)
        except Exception as error:  # a hook may raise any error, and the other runs still have to be continued
            failed.append((each, _told_by_recovery(error)))
        else:
            waits = session.state.execution is not None and session.state.execution.pending_calls
            if action.has_found_one:
                outcomes["suspended" if waits else "resumed"].append(each)
                end = "waits for a person" if waits else "has ended"
                _log.info("the run of session %s was continued, and %s", each, end, extra={"facts": {"session": each}})
    return RecoveryReport(
        failed=tuple((each, str(error)) for each, error in failed),
        errors=tuple(error for _, error in failed),
        **{name: tuple(found) for name, found in outcomes.items()},
    )


def _told_by_recovery(error: Exception) -> PerdureError:
    """Return an error of a user's function, such as a hook, with a sentence and advice. Others are themselves."""
    if isinstance(error, PerdureError):
        return error
    told = PerdureError(f"A hook raised {type(error).__name__}: {error}.", "Fix it, then recover the run again.")
    told.__cause__ = error
    return told


def _children_first(wanted: Sequence[SessionId]) -> Sequence[SessionId]:
    """Return the sessions newest first: a child is younger than its parent, which then finds the child's run ended."""
    return tuple(reversed(wanted))
