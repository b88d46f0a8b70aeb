"""Between a session and a loop: claims the session, runs the agent on it, and hands the result over to be saved."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.continuing import continuation_of
from perdure.actions.inbox import RunInbox
from perdure.errors import ConfigurationError, InvalidData, RunInterrupted
from perdure.loop.agent_loop import Run
from perdure.loop.factory import LoopFactory
from perdure.loop.filters import rejection_in
from perdure.loop.narrator import Told
from perdure.loop.tool_use import Decisions
from perdure.model.definition import AgentDefinition, ModelConfig, refuse_secrets
from perdure.model.execution import ExecutionStatus
from perdure.model.lineage import ChildLoopRef
from perdure.model.loop_events import KINDS
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import EMPTY
from perdure.protocols import ActionContext, Journal, Key
from perdure.recording import JournalRecord

LEASE = 30.0

Spawn = Callable[..., Coroutine[Any, Any, Any]]


class RunOptions(msgspec.Struct, frozen=True):
    """What a run is started with, beside the session's state."""

    inputs: Sequence[Message] = ()
    decisions: Decisions = Decisions()
    key: Key | None = None
    posted: str | None = None
    """The delivery id of the inbox item that the run answers."""
    depth: int = 0
    lease: float = LEASE
    taken: int = 0
    record: JournalRecord | None = None
    """The record of a run that was killed, under a claim that is already held."""
    give_up: bool = False
    """Whether the run is to be ended where it stands."""
    metadata: Mapping[str, Any] = EMPTY
    """What the caller says of the run, for its record."""
    model: ModelConfig | None = None
    """The model of a run that is continued; a new one asks the session's."""


class Past(msgspec.Struct, frozen=True):
    """What the record holds of a run that is to be continued."""

    told: Told = Told()
    key: Key | None = None


async def run_agent(
    session: AgentSession,
    state: AgentState,
    loops: LoopFactory,
    context: ActionContext | None,
    options: RunOptions,
    spawn: Spawn | None = None,
) -> AgentSession:
    """Run a state of a session to the end of its execution; the session comes back with what the run has made of it."""
    loop = loops.build(_definition_for(session, options), state, depth=options.depth, model=options.model)
    record = options.record or claim_for(session, context, lease=options.lease, taken=options.taken)
    past = await past_of(session, state, context)
    key = options.key or past.key
    run = loop.start(
        state,
        record=record,
        session_id=session.id,
        decisions=options.decisions,
        inputs=options.inputs,
        facts={
            "base_version": session.version,
            "spawn_ref": session.info.spawn_ref,
            "key": (key.name, key.digest) if key else None,
            "posted": options.posted,
            "metadata": options.metadata,
            **await continuation_of(session, () if options.record else options.inputs, context),
        },
        spawn=spawn,
        told=past.told,
    )
    try:
        await _carry_through(run, record, context, options)
    except asyncio.CancelledError:
        if context is not None and run.is_settled and (record is None or record.claim is not None):
            hand_over(context, record, key)
            context.interrupted = _after(session, run)
        else:
            await leave(record)
        raise
    except BaseException:
        await leave(record)
        raise
    if context is not None:
        hand_over(context, record, key)
    return _after(session, run)


def claim_for(
    session: AgentSession,
    context: ActionContext | None,
    *,
    lease: float = LEASE,
    taken: int = 0,
    takes_over: bool = False,
) -> JournalRecord | None:
    """Return a record whose first write claims the session; None where runs are unrecorded."""
    if context is None or context.journal is None:
        return None
    record = JournalRecord(context.journal, session, owner=owner_here(), lease=lease, takes_over=takes_over)
    record.taken = taken
    context.record = record
    return record


def hand_over(context: ActionContext, record: JournalRecord | None, key: Key | None = None) -> None:
    """Let the runtime save what was done under a claim. If it cannot, it has the record leave the session."""
    context.saving = record.saving(key) if record is not None else None


async def leave(record: JournalRecord | None) -> None:
    if record is not None:
        await record.leave()


def _definition_for(session: AgentSession, options: RunOptions) -> AgentDefinition:
    """What the run is made of; one that is only to be ended needs no tools."""
    if not options.give_up:
        return session.definition
    return replace(session.definition, tools=(), tools_deny=(), capabilities=())


async def past_of(session: AgentSession, state: AgentState, context: ActionContext | None) -> Past:
    """Read how far the record has come of a run that is to be continued, and the key of the request it answers."""
    if context is None or context.journal is None or state.execution is None:
        return Past()
    if state.status is not ExecutionStatus.IN_PROGRESS:
        return Past()
    loop_id = state.execution.execution_id
    entries = [entry for entry in await context.journal.read(session.id, run=loop_id) if entry.kind in KINDS]
    if not entries:
        return Past()
    (run,) = await context.journal.runs(session.id, run=loop_id)
    stored = {message.id: message for message in await context.journal.messages(run.log, run.start, run.stop)}
    said = (entry.body["message"]["id"] for entry in entries if entry.kind == "message_end")
    spawned = (entry.body.get("child") for entry in entries if entry.kind == "tool_execution_end")
    told = Told(
        int(entries[-1].body["seq"]),
        tuple(stored[each] for each in said if each in stored),
        tuple(codec.convert(ChildLoopRef, each) for each in spawned if each),
        sum(entry.kind == "compaction" for entry in entries),
        codec.convert(datetime, entries[-1].body["at"]),
    )
    key = run.first.body.get("key")
    return Past(told, Key(*key) if key else None)


def _after(session: AgentSession, run: Run) -> AgentSession:
    after = session.with_state(_shown(session.state, run))
    return after.suspended() if run.is_waiting else after


def _shown(before: AgentState, run: Run) -> AgentState:
    """The state after a run. Input that filters did not accept is not shown: the view is the one it began with."""
    signals = run.state.execution.continuation.stop_signals if run.state.execution else ()
    if run.is_input_accepted and rejection_in(signals) is None:
        return run.state
    return run.state.with_transcript(before.transcript, rewound_to=before.rewound_to)


async def _carry_through(
    run: Run, record: JournalRecord | None, context: ActionContext | None, options: RunOptions
) -> None:
    """Take every step, with an eye on the inbox and the claim; cancelling this cancels the run, and waits for it."""
    if context is not None:
        run.is_interrupted = lambda: context.is_closing
    if options.give_up:
        await run.give_up()
        return
    inbox = None
    if record is not None and context is not None and context.journal is not None:
        inbox = RunInbox(run, record, context.journal, answers=options.posted)
        await inbox.open()
        run.between_steps = inbox.deliver
    await watched(_all_steps(run), inbox, context)
    if not run.is_settled:
        raise interrupted_by_closing(run.session_id or "")


def interrupted_by_closing(session_id: str) -> RunInterrupted:
    """Explain to the sender of a run why there is no answer: the runtime was closed before it came."""
    return RunInterrupted(
        session_id,
        f"The run of session {session_id!r} was interrupted: its connection was closed before it had ended. What "
        "it has done is on record. recover() or the next send() continues it, and cancel() ends it where it stands.",
    )


async def watched(
    steps: Coroutine[Any, Any, None], inbox: RunInbox | None, context: ActionContext | None = None
) -> None:
    """Do work to its end, with an eye on the inbox and the claim. A wish to cancel that is found there ends it."""
    work = asyncio.ensure_future(steps)
    under_way = context.under_way if context is not None else None
    with under_way.cancellable(work) if under_way is not None else nullcontext():
        if inbox is None:
            await _finished(work)
            return
        watch = asyncio.ensure_future(inbox.watch(work))
        try:
            await _finished(work)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            failure = None if watch.cancelled() else watch.exception()
        if failure is not None:
            raise failure


async def _all_steps(run: Run) -> None:
    try:
        async with aclosing(run.steps()) as steps:
            async for _ in steps:
                pass
    except asyncio.CancelledError:
        await run.end_cancelled()
        raise


async def _finished(work: asyncio.Future[None]) -> None:
    """Wait until a run is over. One that was cancelled from elsewhere, through the inbox, has ended in good order."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
            work.cancel()
    failure = None if work.cancelled() else work.exception()
    if cancelled is not None:
        raise cancelled
    if failure is not None:
        raise failure


def checked_metadata(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what a caller says of a run, as it will be stored. Raise if it is not JSON, or names a secret."""
    if given is None:
        return EMPTY
    if not isinstance(given, Mapping):
        raise InvalidData("$.metadata", f"expected a mapping, got {type(given).__name__}")
    refuse_secrets(given, "$.metadata")
    plain: dict[str, Any] = codec.decode_plain(codec.encode_json(dict(given), "$.metadata"))
    return plain


def pending_in(session: AgentSession) -> list[str]:
    """The names of the tools whose calls wait for a person."""
    execution = session.state.execution
    return [call.name for call in execution.pending_calls] if execution else []


def require_journal(context: ActionContext | None, what: str) -> Journal:
    if context is None or context.journal is None:
        raise ConfigurationError(f"{what} needs a store with a journal, and SessionRuntime.execute() to hand it over.")
    return context.journal


def owner_here() -> str:
    """How this process names itself on a claim."""
    return f"{socket.gethostname()}:{os.getpid()}"
