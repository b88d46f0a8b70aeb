"""Between a session and a loop: claims the session, runs the agent on it, and hands the result over to be saved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import ConfigurationError, PerdureError, StoreError
from perdure.loop.agent_loop import Run
from perdure.loop.factory import LoopFactory
from perdure.loop.narrator import Told
from perdure.loop.tool_use import Decisions
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.lineage import ChildLoopRef
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import EMPTY
from perdure.protocols import ActionContext, Entry, Journal, JournalEntry, Key, StoredAt
from perdure.recording import JournalRecord, see_through

LEASE = 30.0
LOOK_EVERY = 0.2

CANCEL, STEER, QUEUE = "cancel", "steer", "queue"

Spawn = Callable[..., Coroutine[Any, Any, Any]]


class RunOptions(msgspec.Struct, frozen=True):
    """What a run is started with, beside the session's state."""

    inputs: Sequence[Message] = ()
    decisions: Decisions = Decisions()
    key: Key | None = None
    depth: int = 0
    lease: float = LEASE
    taken: int = 0
    written: Mapping[str, StoredAt] = EMPTY
    """Where messages of the state stand in the log already, from before a crash."""
    resumes: bool = False
    """Whether it goes on with a run that was killed."""
    give_up: bool = False
    """Whether the run is to be ended where it stands."""
    model: ModelConfig | None = None
    """The model of a run that goes on; a new one asks the session's."""


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
    record = None
    if context is not None and context.journal is not None:
        record = JournalRecord(context.journal, session, owner=owner_here(), lease=options.lease)
        record.takes_over = options.resumes
        record.taken = options.taken
        record.written.update(options.written)
    run = loop.start(
        state,
        record=record,
        session_id=session.id,
        decisions=options.decisions,
        inputs=options.inputs,
        facts={
            "base_version": session.version,
            "spawn_ref": session.info.spawn_ref,
            "key": (options.key.name, options.key.digest) if options.key else None,
        },
        spawn=spawn,
        told=await _told(session, state, context),
    )
    try:
        if options.give_up:
            await run.give_up()
        else:
            await _carry_through(run, record, context.journal if context else None)
    except asyncio.CancelledError:
        if context is not None and run.is_settled and (record is None or record.claim is not None):
            _hand_over(context, record, options)
            context.interrupted = _after(session, run)
        else:
            await _give_back(record, context)
        raise
    except BaseException:
        await _give_back(record, context)
        raise
    if context is not None:
        _hand_over(context, record, options)
    return _after(session, run)


def _definition_for(session: AgentSession, options: RunOptions) -> AgentDefinition:
    """What the run is made of; one that is only to be ended needs no tools."""
    if not options.give_up:
        return session.definition
    return replace(session.definition, tools=(), tools_deny=(), capabilities=())


async def _told(session: AgentSession, state: AgentState, context: ActionContext | None) -> Told:
    """How far the record has come of a run that is to be continued."""
    if context is None or context.journal is None or state.execution is None:
        return Told()
    if state.status is not ExecutionStatus.IN_PROGRESS:
        return Told()
    loop_id = state.execution.execution_id
    entries = await context.journal.read(session.id, run=loop_id)
    if not entries:
        return Told()
    (run,) = await context.journal.runs(session.id, run=loop_id)
    stored = {message.id: message for message in await context.journal.messages(run.log, run.start, run.stop)}
    said = (entry.body["message"]["id"] for entry in entries if entry.kind == "message_end")
    spawned = (entry.body.get("child") for entry in entries if entry.kind == "tool_execution_end")
    return Told(
        int(entries[-1].body["seq"]),
        tuple(stored[each] for each in said if each in stored),
        tuple(codec.convert(ChildLoopRef, each) for each in spawned if each),
    )


def _hand_over(context: ActionContext, record: JournalRecord | None, options: RunOptions) -> None:
    context.saving = record.saving(options.key) if record is not None else None


async def _give_back(record: JournalRecord | None, context: ActionContext | None) -> None:
    if record is not None and record.claim is not None and context is not None and context.journal is not None:
        with contextlib.suppress(StoreError):
            await context.journal.release(record.claim)


def _after(session: AgentSession, run: Run) -> AgentSession:
    after = session.with_state(run.state)
    return after.suspended() if run.is_waiting else after


async def _carry_through(run: Run, record: JournalRecord | None, journal: Journal | None) -> None:
    """Take every step, with an eye on the inbox and the claim; cancelling this cancels the run, and waits for it."""
    inbox = None if record is None or journal is None else Inbox(run, record, journal)
    if inbox is not None:
        await inbox.open()
    await watched(_all_steps(run, inbox), inbox)


async def watched(steps: Coroutine[Any, Any, None], inbox: Inbox | None) -> None:
    """Do work to its end, with an eye on the inbox and the claim. A wish to cancel that is found there ends it."""
    work = asyncio.ensure_future(steps)
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


async def _all_steps(run: Run, inbox: Inbox | None) -> None:
    try:
        async with contextlib.aclosing(run.steps()) as steps:
            async for _ in steps:
                if inbox is not None:
                    await inbox.deliver()
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


class Inbox:
    """What others have posted to a session: wishes to cancel its run, messages to steer it by, messages to be sent.

    It is taken when the run is saved, up to the first message that still waits. One behind that which was delivered
    is recognised by its id, as is one that a killed run had come to.
    """

    def __init__(self, run: Run | None, record: JournalRecord, journal: Journal) -> None:
        self._run = run
        self._record = record
        self._journal = journal
        self._seen = record.taken
        self._steering: list[JournalEntry] = []
        self._queued: list[JournalEntry] = []

    async def open(self) -> None:
        """See what is there before the run begins. A wish to cancel among it was meant for another run."""
        await self._look()

    async def watch(self, work: asyncio.Future[None]) -> None:
        """Look every now and then, and keep the claim alive while the run is silent. What fails here ends the run.

        It ends by itself with the run: a store may let a cancellation get lost, as `asyncio.wait_for` can.
        """
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + self._record.lease / 3
        try:
            while not work.done():
                await asyncio.sleep(LOOK_EVERY)
                if await self._look():
                    work.cancel()
                if loop.time() >= next_beat:
                    await self._record.beat()
                    next_beat = loop.time() + self._record.lease / 3
        except PerdureError:
            work.cancel()
            raise

    async def _look(self) -> bool:
        """Take note of what is new. True if somebody wishes the run to be cancelled."""
        found = await self._journal.read(self._record.session_id, after=self._seen, inbox=True)
        self._steering += [entry for entry in found if entry.kind == STEER]
        self._queued += [entry for entry in found if entry.kind == QUEUE]
        self._seen = found[-1].seq if found else self._seen
        self._take()
        return any(entry.kind == CANCEL for entry in found)

    async def deliver(self) -> None:
        """Between two steps: put what was posted to steer by into the transcript. Without a run to steer, it waits."""
        if self._run is None or not self._steering:
            return
        steering, self._steering = self._steering, []
        for entry in steering:
            if not was_delivered(entry, self._run.state):
                await self._run.steer(messages_in(entry))
        self._take()

    def _take(self) -> None:
        first_waiting = min((entry.seq for entry in (*self._steering, *self._queued)), default=self._seen + 1)
        self._record.taken = max(self._record.taken, first_waiting - 1)


def was_delivered(entry: JournalEntry, state: AgentState) -> bool:
    """Whether a posted message is in the transcript already."""
    first = messages_in(entry)[0].id
    return any(message.id == first for message in reversed(state.transcript))


def messages_in(entry: JournalEntry) -> list[Message]:
    return [Message.from_dict(plain) for plain in entry.body["messages"]]


async def take(
    journal: Journal, session: AgentSession, seq: int, messages: Sequence[Message] = (), entries: Sequence[Entry] = ()
) -> None:
    """Mark a session's inbox as dealt with up to an item, without a run; and put on record what is to be told of it."""

    async def noted() -> None:
        claim, _ = await journal.claim(session.id, version=session.version, owner=owner_here())
        try:
            await journal.append(claim, messages=messages, entries=entries, taken=seq)
        finally:
            await journal.release(claim)

    await see_through(noted())  # or the claim of one who was cancelled would keep others out until it lapses


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
