"""The inbox of a session: the items that others post to it, and how each of them ends.

An item waits until a run answers it (queue), takes it in between two steps (steer) or is ended by it (cancel). It is
delivered in the commit that puts its message on record, under its delivery id. Only the record tells what was
delivered. The view may have been reset since, and a message's id may be sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from perdure.aio import finish_despite_cancel
from perdure.errors import (
    ClaimLost,
    ConfigurationError,
    InvalidData,
    SessionBusy,
    SessionConflict,
    SessionLocked,
    SessionNotActive,
    SessionNotFound,
    StoreError,
)
from perdure.loop.agent_loop import Run
from perdure.loop.filters import refusal
from perdure.model.checks import expect_text
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import AgentEnd, AgentStart, AnyLoopEvent, ContinuationKind, InputRejected, MessageEnd
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.value import EMPTY
from perdure.protocols import (
    DEFAULT_TERMS,
    Action,
    ActionContext,
    ActionResult,
    Answer,
    Entry,
    Journal,
    JournalEntry,
    Terms,
)
from perdure.run_journal import JournalRecord, entry_of, loops_on_record, owner_here

Execute = Callable[[str, Action], Awaitable[AgentSession]]
Send = Callable[[JournalEntry], Action]

CANCEL, STEER, QUEUE = "cancel", "steer", "queue"
# Seconds between two reads of a run's inbox: a request to cancel is noticed at most about that much later.
LOOK_EVERY = 0.2
_WORKERS = "workers"
_log = logging.getLogger("perdure.actions")
OLDER_AT_ONCE = 16
"""The number of items from before its claim that a run looks at in one go."""
PAGE = 200
"""The number of entries of a record that are read in one go to find a delivery."""


class Inbox:
    """The items that were posted to one session and have not been dealt with. Each ends in one of these ways:

    - a run takes it in between two steps: a steering message, put on record under its delivery id;
    - a run answers it: the run's start names the delivery id, and its save takes the item;
    - it was answered before, under its key: it is taken without a run;
    - it can never be sent: it is refused on record, where its sender and others can find it;
    - a request to cancel ends the run that is under way, and does not affect a later one.
    """

    def __init__(self, journal: Journal, session_id: str) -> None:
        self._journal = journal
        self.session_id = session_id

    async def post(self, kind: str, item: Mapping[str, Any], **limits: Any) -> JournalEntry:
        """Leave messages with the session: for its run to take in, or to be sent once it is free. Return the item.

        The limits are those of `Journal.post`.
        """
        newest = await self._journal.read(self.session_id, last=1)
        # The delivery can only be on record after this entry, so that no search for it reads the whole record.
        body = {"id": new_id(), "after": newest[-1].seq if newest else 0, **item}
        return JournalEntry(await self._journal.post(self.session_id, Entry(kind, body), **limits), kind, body)

    async def items(self, after: int = 0, most: int | None = None) -> Sequence[JournalEntry]:
        """Return the items after a number that are not taken yet, at most `most` of them."""
        return await self._journal.read(self.session_id, after=after, limit=most, inbox=True)

    async def first_waiting(self) -> JournalEntry | None:
        """Return the first item that still has to be sent, or None.

        Queued items are taken in their order, by the save of the run that answers them. Steering messages behind them
        may have been delivered before.
        """
        # Usually it is the first item. More are read only after steering that was delivered.
        after, most = 0, 1
        while page := await self.items(after, most):
            for entry in page:
                if entry.kind == QUEUE or (entry.kind == STEER and not await self.was_delivered(entry)):
                    return entry
            after, most = page[-1].seq, most * 8
        return None

    async def has(self, item: JournalEntry) -> bool:
        """Tell whether an item is not taken yet."""
        return any(each.seq == item.seq for each in await self.items(item.seq - 1, 1))

    async def was_delivered(self, entry: JournalEntry) -> bool:
        """Tell whether a run has taken an item in: then the record since the item was posted says so."""
        after = entry.body.get("after", 0)
        while page := await self._journal.read(self.session_id, after=after, limit=PAGE):
            if any(_delivers(each, entry.body) for each in page):
                return True
            after = page[-1].seq
        return False

    async def take(
        self,
        session: AgentSession,
        seq: int,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        *,
        terms: Terms = DEFAULT_TERMS,
    ) -> None:
        """Take all items up to one without a run, and put messages and entries about that on record."""

        async def noted() -> None:
            version, lease = session.version, terms.lease
            claim, _ = await self._journal.claim(session.id, version=version, owner=owner_here(), lease=lease)
            try:
                await self._journal.append(claim, messages=messages, entries=entries, taken=seq)
            finally:
                await self._journal.release(claim)

        # A cancellation in between would leave the claim, which blocks others until it lapses.
        await finish_despite_cancel(noted())

    async def refuse(
        self, session: AgentSession, entry: JournalEntry, reason: str, terms: Terms = DEFAULT_TERMS
    ) -> list[AnyLoopEvent]:
        """Take an item that can never be sent. Return the events that tell so.

        Its messages stay in the log, with a loop that was rejected for this reason. The version does not move.
        Recovery leaves the loop alone, since it names no version that it began from.
        """
        story = _refusal(session, entry, reason)
        await self.take(session, entry.seq, messages_in(entry), [entry_of(event) for event in story], terms=terms)
        return story


def item_of(
    messages: Sequence[Message],
    key: str | None = None,
    metadata: Mapping[str, Any] = EMPTY,
    context_data: Mapping[str, Any] | None = None,
    output: Mapping[str, Any] | None = None,
    digest: str | None = None,
) -> dict[str, Any]:
    """Return messages as they wait in an inbox, where they get a delivery id.

    `digest` is the digest of the request that the key stands for.
    """
    return {
        "messages": [message.to_dict() for message in messages],
        "key": key,
        **({"metadata": metadata} if metadata else {}),
        **({"context_data": context_data} if context_data is not None else {}),
        **({"output": output} if output is not None else {}),
        **({"digest": digest} if digest is not None else {}),
    }


def left_to_workers(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item that only a worker sends, in its turn."""
    return {**item, "for": _WORKERS}


def is_left_to_workers(entry: JournalEntry) -> bool:
    return bool(entry.body.get("for") == _WORKERS)


async def under_way(journal: Journal, session_id: str, key: str) -> JournalEntry | None:
    """Return the start of the run that answers the message of a key, or the item of the inbox in which it waits.

    Return None if neither exists: the message was answered, or never sent.
    """
    if await journal.is_claimed(session_id) or await journal.is_interrupted(session_id):
        for run in await loops_on_record(journal, session_id, limit=1):
            if run.first.kind == "agent_start" and (run.first.body.get("key") or [None])[0] == key:
                return run.first
    items = await Inbox(journal, session_id).items()
    return next((item for item in items if item.kind == QUEUE and item.body.get("key") == key), None)


def _delivers(entry: JournalEntry, item: Any) -> bool:
    if "id" not in item:  # posted by an older release, which knew deliveries by the message
        return entry.kind == "message_end" and entry.body["message"]["id"] == item["messages"][0]["id"]
    return entry.kind in ("agent_start", "message_end") and entry.body.get("posted") == item["id"]


def messages_in(entry: JournalEntry) -> list[Message]:
    return [Message.from_dict(plain) for plain in entry.body["messages"]]


class RunInbox:
    """A session's inbox as its run sees it. Without a run to steer (while answers are compared), steering waits.

    The run's save takes the inbox up to the first item that still waits. An item behind that one which was delivered
    is known by its delivery id. So is the item that the run `answers`, also after a crash.

    Items that were posted before the claim are read in small lots, one lot between two steps. Many may wait, each for a
    run of its own, and none of those runs should read them all. Later items are all read, since one of them may be a
    request to cancel.
    """

    def __init__(self, run: Run | None, record: JournalRecord, inbox: Inbox, *, answers: str | None = None) -> None:
        self._run = run
        self._answers = answers
        self._record = record
        self._inbox = inbox
        self._seen = record.taken
        self._seen_older = record.taken
        """The number up to which the items from before the claim have been read."""
        self._looking = asyncio.Lock()
        self._work: asyncio.Future[None] | None = None
        self._is_unwanted = False
        self._steering: list[JournalEntry] = []
        self._queued: list[JournalEntry] = []

    async def open(self) -> None:
        """Read the inbox as soon as the session is claimed."""
        if self._record.claim is None:
            self._record.when_claimed = self._look_if_needed
        else:
            await self._look_if_needed()

    async def _look_if_needed(self) -> None:
        """Read the inbox, unless the last write has told that nothing is new."""
        is_newer = self._record.posted is None or self._record.posted > max(self._seen, self._posted_before)
        if is_newer or self._seen_older < self._posted_before:
            await self._look_calmly(is_newer)

    @property
    def _posted_before(self) -> int:
        """Return the number of the last item that was posted before the claim."""
        return self._record.posted_at_claim or 0

    async def _look_calmly(self, newer: bool = True) -> None:
        """Read the inbox, and only log a failure: the store may recover, and if it does not, the next write fails."""
        try:
            await self._look(newer)
        except (StoreError, SessionLocked) as error:
            _log.warning("the inbox of session %s could not be read: %s", self._record.session_id, error)

    def attend(self, work: asyncio.Future[None]) -> Watch:
        """Return a watch over work, which a request to cancel ends."""
        loop = asyncio.get_running_loop()
        self._work = work
        if self._is_unwanted:
            loop.call_soon(work.cancel)  # once it has begun: work that never began cannot end in good order
        # A third of the lease, so that two heartbeats may fail before the claim lapses.
        next_beat = loop.time() + self._record.lease / 3
        return Watch(partial(self._watch, work, next_beat), LOOK_EVERY)

    async def _watch(self, work: asyncio.Future[None], next_beat: float) -> None:
        """Read the inbox at intervals, and keep the claim alive. If the claim is lost, cancel the run.

        The watch ends by itself with the run: a store may lose a cancellation, as `asyncio.wait_for` can.
        """
        loop, is_first = asyncio.get_running_loop(), True
        while not work.done():
            if not is_first:  # before the first look, the timer of `Watch` has waited for as long
                await asyncio.sleep(LOOK_EVERY)
            is_first = False
            try:
                await self._look_if_claimed()
                if loop.time() >= next_beat:
                    await self._record.beat()
                    next_beat = loop.time() + self._record.lease / 3
            except ClaimLost:
                work.cancel()
                raise
            except (StoreError, SessionLocked) as error:  # it may be temporary: if not, the next write fails
                _log.warning("the inbox of session %s could not be read: %s", self._record.session_id, error)

    async def _look_if_claimed(self) -> None:
        """Read the inbox once the claim is held: before that, an old request to cancel would look like a new one."""
        if self._record.claim is not None:
            await self._look_calmly()

    async def _look(self, newer: bool) -> None:
        """Read and note what is new. Only one such look runs at a time.

        What one read finds is noted before the next read. A look may be cancelled in between. The run's save would then
        take what was seen but not noted, as if it had been dealt with.
        """
        async with self._looking:
            await self._look_at_older()
            if newer:
                await self._look_at_newer()

    async def _look_at_older(self) -> None:
        """Read the next lot of items from before the claim."""
        before = self._posted_before
        if self._seen_older >= before:
            return
        found = await self._inbox.items(self._seen_older, OLDER_AT_ONCE)
        # An item below that number which is not found has been taken.
        self._seen_older = min(found[-1].seq, before) if len(found) == OLDER_AT_ONCE else before
        self._note([entry for entry in found if entry.seq <= before])

    async def _look_at_newer(self) -> None:
        """Read all items from after the claim that were not seen yet."""
        told = self._record.posted or 0  # before the read: an item below that number which is not found has been taken
        found = await self._inbox.items(max(self._seen, self._posted_before))
        self._seen = max(self._seen, self._posted_before, told, found[-1].seq if found else 0)
        if self._record.posted_at_claim is None:
            self._seen_older = self._seen  # without a claim, nothing tells older items from later ones
        self._note(found)

    def _note(self, found: Sequence[JournalEntry]) -> None:
        """Keep the items that wait. A request to cancel from before the claim was meant for another run."""
        self._steering += [entry for entry in found if entry.kind == STEER and not self._is_answered(entry)]
        self._queued += [entry for entry in found if entry.kind == QUEUE and not self._is_answered(entry)]
        self._take()
        if any(entry.kind == CANCEL and entry.seq > self._posted_before and self._is_meant(entry) for entry in found):
            self._cancel()

    def _is_meant(self, wish: JournalEntry) -> bool:
        """Tell whether a request to cancel is for this run. One that names a run may come just after that has ended."""
        named = (wish.body or EMPTY).get("run")
        return named is None or self._run is None or named == self._run.execution.execution_id

    def _cancel(self) -> None:
        """End the run, once for each request: a second cancel would interrupt its orderly end."""
        if self._work is None:
            self._is_unwanted = True
        else:
            self._work.cancel()

    def _is_answered(self, entry: JournalEntry) -> bool:
        return self._answers is not None and entry.body.get("id") == self._answers

    async def deliver(self) -> None:
        """Put steering messages into the run's transcript, between two steps."""
        if self._record.posted is not None:
            await self._look_if_needed()
        while self._run is not None and self._steering:
            entry = self._steering[0]
            if not await self._inbox.was_delivered(entry):
                await self._run.steer(messages_in(entry), entry.body.get("id"))
            # Not before it is delivered: until then it waits, and no save may take it.
            self._steering.pop(0)
        self._take()

    def _take(self) -> None:
        # A save takes all items up to this number, so it stays below the first that still waits or was not read.
        is_all_seen = self._seen_older >= self._posted_before
        first_unseen = (max(self._seen, self._seen_older) if is_all_seen else self._seen_older) + 1
        waiting = (entry.seq for entry in (*self._steering, *self._queued))
        self._record.taken = max(self._record.taken, min([first_unseen, *waiting]) - 1)


class Watch:
    """A task that begins after a delay. Most runs have ended by then, and need no task."""

    def __init__(self, watch: Callable[[], Coroutine[Any, Any, None]], after: float) -> None:
        self._watch = watch
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(after, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> BaseException | None:
        """Stop watching. Return the error that the watch has failed with, or None."""
        self._timer.cancel()
        if self._task is None:
            return None
        self._task.cancel()
        await asyncio.wait({self._task})
        return None if self._task.cancelled() else self._task.exception()


class WaitingMessages:
    """The sequel that sends what waits in a session's inbox, item by item, once no run holds the session.

    It stops at the first item that is left to workers: this process may lack their tools. `send` makes the action that
    sends an item.
    """

    def __init__(self, execute: Execute, inbox: Inbox, send: Send) -> None:
        self._execute = execute
        self._inbox = inbox
        self._send = send

    async def is_needed(self) -> bool:
        entry = await self._inbox.first_waiting()
        return entry is not None and not is_left_to_workers(entry)

    async def carry_out(self) -> None:
        while await self.is_needed():
            try:
                await self._execute(self._inbox.session_id, SendPosted(self._inbox, self._send))
            except SessionConflict:
                continue  # the session was changed since it was loaded
            except (SessionBusy, SessionNotActive, SessionNotFound):
                return  # it is sent when that run ends, or when the session is resumed


class SendPosted:
    """An action that sends the first message that waits in a session's inbox. If none waits, nothing happens.

    The message is looked up once the session is loaded, and the claim compares the version. So two processes that try
    at once send it once. A message that is left to workers is sent only `by_worker`.
    """

    def __init__(self, inbox: Inbox, send: Send, *, by_worker: bool = False) -> None:
        self._inbox = inbox
        self._send = send
        self._by_worker = by_worker

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        entry = await self._inbox.first_waiting()
        if entry is None or (is_left_to_workers(entry) and not self._by_worker):
            return Answer(session)
        terms = DEFAULT_TERMS if context is None else context.terms
        try:
            made = await self._send(entry).execute_on(session, context)
        except InvalidData as error:
            if not error.path.startswith(("$.key", "$.message", "$.output", "$.external_tools")):
                raise
            # It can never be sent; left in the inbox, it would be tried again after every run.
            _log.warning("a message that was posted to session %s is refused: %s", session.id, error)
            for event in await self._inbox.refuse(session, entry, error.problem, terms):
                if context is not None:
                    await context.emit(event)
            return Answer(session)
        if isinstance(made, Answer):  # its key says that it has been sent before
            await self._inbox.take(session, entry.seq, terms=terms)
        return made


class DropWaiting:
    """An action that takes back every message that waits in a session's inbox. Each is refused on record.

    With a `key`, only that message is taken back, and only if it is the next to be sent. `dropped` has the items, in
    their order.
    """

    may_be_repeated = True

    def __init__(self, reason: str, *, key: str | None = None) -> None:
        self._reason = expect_text(reason, "$.reason", blank=False)
        self._key = key
        self.dropped: list[JournalEntry] = []

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if context is None or context.journal is None:
            raise ConfigurationError("This store has no inboxes, so nothing waits there.")
        inbox = Inbox(context.journal, session.id)
        while (entry := await inbox.first_waiting()) is not None and self._is_meant(entry):
            story = await inbox.refuse(session, entry, self._reason)
            self.dropped.append(entry)
            for event in story:
                await context.emit(event)
        if self._key is not None:
            return Answer(session)
        if left := await inbox.items():  # requests to cancel, and steering that was delivered
            await inbox.take(session, left[-1].seq)
        return Answer(session)

    def _is_meant(self, entry: JournalEntry) -> bool:
        return self._key is None or (entry.body.get("key") == self._key and not self.dropped)


def _refusal(session: AgentSession, entry: JournalEntry, reason: str) -> list[AnyLoopEvent]:
    """Return the events of a loop that was rejected before it began."""
    messages, execution = tuple(messages_in(entry)), session.state.execution
    common: dict[str, Any] = {"loop_id": new_id(), "session_id": session.id, "agent_id": session.state.agent_id}
    said = [MessageEnd(**common, seq=seq, message=message) for seq, message in enumerate(messages, 2)]
    return [
        AgentStart(
            **common,
            seq=1,
            parent_loop_id=execution.execution_id if execution else None,
            continuation=ContinuationKind("default" if execution else "initial"),
        ),
        *said,
        InputRejected(**common, seq=len(said) + 2, reason=reason),
        AgentEnd(
            **common,
            seq=len(said) + 3,
            status=ExecutionStatus.STOPPED,
            messages=messages,
            stop_signals=(refusal(reason),),
            rejection=reason,
        ),
    ]
