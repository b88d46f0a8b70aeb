"""Between a session and a loop: claims the session, runs the agent on it, and hands the result over to be saved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from perdure.errors import ClaimLost, ConfigurationError, StoreError
from perdure.loop.agent_loop import Run
from perdure.loop.factory import LoopFactory
from perdure.loop.tool_use import Decisions
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import EMPTY
from perdure.protocols import ActionContext, Journal, JournalEntry, Key, StoredAt
from perdure.recording import JournalRecord

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


async def run_agent(
    session: AgentSession,
    state: AgentState,
    loops: LoopFactory,
    context: ActionContext | None,
    options: RunOptions,
    spawn: Spawn | None = None,
) -> AgentSession:
    """Run a state of a session to the end of its execution; the session comes back with what the run has made of it."""
    loop = loops.build(session.definition, state, depth=options.depth)
    record = None
    if context is not None and context.journal is not None:
        record = JournalRecord(context.journal, session, owner=_owner(), lease=options.lease)
        record.taken = options.taken
        record.written.update(options.written)
    run = loop.start(
        state,
        record=record,
        session_id=session.id,
        decisions=options.decisions,
        inputs=options.inputs,
        facts={"base_version": session.version, "spawn_ref": session.info.spawn_ref},
        spawn=spawn,
    )
    try:
        await _carry_through(run, record, context.journal if context else None)
    except asyncio.CancelledError:
        if context is not None:
            _hand_over(context, record, options)
            context.interrupted = _after(session, run)
        raise
    except BaseException:
        await _give_back(record, context)
        raise
    if context is not None:
        _hand_over(context, record, options)
    return _after(session, run)


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
    inbox = Inbox(run, record, journal)
    work = asyncio.ensure_future(_all_steps(run, inbox))
    async with inbox.watched(work):
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
    if work.cancelled():
        return  # asked for through the inbox: the run has ended as stopped
    work.result()


async def _all_steps(run: Run, inbox: Inbox) -> None:
    async for _ in run.steps():
        await inbox.deliver()


class Inbox:
    """What others have posted to a session while it runs: wishes to cancel, and messages to steer by."""

    def __init__(self, run: Run, record: JournalRecord | None, journal: Journal | None) -> None:
        self._run = run
        self._record = record
        self._journal = journal
        self._steering: list[JournalEntry] = []
        self._lost: ClaimLost | None = None

    @contextlib.asynccontextmanager
    async def watched(self, work: asyncio.Future[None]) -> AsyncIterator[None]:
        if self._record is None or self._journal is None:
            yield
            return
        watch = asyncio.ensure_future(self._watch(work, self._record, self._journal))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            if self._lost is not None:
                raise self._lost

    async def _watch(self, work: asyncio.Future[None], record: JournalRecord, journal: Journal) -> None:
        """Look into the inbox every now and then, and keep the claim alive while the run is silent."""
        seen = record.taken
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + record.lease / 3
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if record.claim is None:
                continue
            for entry in await journal.read(record.claim.session_id, after=seen, inbox=True):
                seen = entry.seq
                self._receive(entry, work)
            if loop.time() >= next_beat:
                try:
                    await record.beat()
                except ClaimLost as error:
                    self._lost = error
                    work.cancel()
                    return
                next_beat = loop.time() + record.lease / 3

    def _receive(self, entry: JournalEntry, work: asyncio.Future[None]) -> None:
        if entry.kind == CANCEL:
            assert self._record is not None
            self._record.taken = max(self._record.taken, entry.seq)
            work.cancel()
        elif entry.kind == STEER:
            self._steering.append(entry)

    async def deliver(self) -> None:
        """Between two steps: put what was posted to steer by into the transcript."""
        waiting, self._steering = self._steering, []
        for entry in waiting:
            assert self._record is not None
            self._record.taken = max(self._record.taken, entry.seq)
            await self._run.steer(messages_in(entry))


def messages_in(entry: JournalEntry) -> list[Message]:
    return [Message.from_dict({"format": 1, **plain}) for plain in entry.body["messages"]]


def require_journal(context: ActionContext | None, what: str) -> Journal:
    if context is None or context.journal is None:
        raise ConfigurationError(f"{what} needs a store with a journal, and SessionRuntime.execute() to hand it over.")
    return context.journal


def _owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
