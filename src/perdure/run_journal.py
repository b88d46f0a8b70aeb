"""The stored form of a run's events, and the record that a run writes ahead into a journal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.aio import finish_despite_cancel
from perdure.errors import ClaimConflict, PerdureError, SessionConflict
from perdure.model.ids import SessionId
from perdure.model.loop_events import (
    KINDS,
    UNTOLD,
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    CompactionPart,
    LoopEvent,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    ParallelLoopEnd,
    ParallelLoopStart,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
    TurnStart,
    UnknownEvent,
    shared_fields,
)
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.tool_refs import NOTHING_SAID, Said, SaidByRun
from perdure.model.value import EMPTY, JSON
from perdure.protocols import (
    DEFAULT_TERMS,
    Appended,
    Claim,
    Entry,
    Journal,
    JournalEntry,
    Key,
    RunOnRecord,
    Saving,
    StoredAt,
    Terms,
    is_immediate,
    is_sketchbook,
    knows_waiting,
)
from perdure.sketching import Sketcher, Unfinished

HANDED_OVER = "handed_over"
"""The kind of the entry which says that a run was left to others on purpose."""
_encoder = msgspec.json.Encoder(enc_hook=str)


def entry_of(event: LoopEvent, said: Said = NOTHING_SAID) -> Entry:
    """Return an event as it is stored: with messages by id, and without data that they or the columns have already."""
    form = _form(type(event))
    raw = _encoder.encode(form.refer(event, said))
    # The tag comes first. It is cut off, since the kind has a column of its own.
    return Entry(form.kind, msgspec.Raw(b"{" + raw[form.tag_length :]), None if form.is_of_group else event.loop_id)


class _Form(NamedTuple):
    """The stored form of events of one type. It is worked out once, since a run has many events."""

    kind: str
    tag_length: int
    refer: Callable[[Any, Said], LoopEvent]
    is_of_group: bool


@cache
def _form(event_type: type[LoopEvent]) -> _Form:
    kind = str(event_type.__struct_config__.tag)
    is_of_group = event_type in (ParallelLoopStart, ParallelLoopEnd)
    return _Form(kind, len(f'{{"type":"{kind}",'), _BY_REFERENCE.get(event_type, _without_ids), is_of_group)


def _without_ids(event: LoopEvent, said: Said) -> LoopEvent:
    """Return an event without the ids that the record's columns imply."""
    return replace(event, loop_id="", session_id=None, agent_id="")


_IMPLIED: dict[str, Any] = {"loop_id": "", "session_id": None, "agent_id": ""}
_BY_REFERENCE: dict[type[LoopEvent], Callable[[Any, Said], LoopEvent]] = {
    MessageEnd: lambda event, said: replace(event, **_IMPLIED, message=_stub(event.message)),
    AgentEnd: lambda event, said: replace(event, **_IMPLIED, messages=tuple(map(_stub, event.messages))),
    Compaction: lambda event, said: replace(event, **_IMPLIED, shown=_shown_as(event, _stub)),
    AgentStart: lambda event, said: replace(event, loop_id="", session_id=None),
    ParallelLoopStart: lambda event, said: replace(event, session_id=None),
    ParallelLoopEnd: lambda event, said: replace(event, session_id=None),
    ToolExecutionStart: lambda event, said: replace(event, **_IMPLIED, call=said.dehydrated_call(event.call)),
    ToolExecutionEnd: lambda event, said: replace(event, **_IMPLIED, execution=said.dehydrated(event.execution)),
}
"""The events that are stored in part: messages become ids, and outcomes refer to the messages that hold them."""


class _Stub(msgspec.Struct, frozen=True):
    """A message with nothing but its id. It is stored like such a `Message`, and quicker to make."""

    role: str
    id: str


def _stub(message: Message) -> Message:
    return _Stub("user", message.id)  # type: ignore[return-value]  # it replaces one where events are written


def _shown_as(event: Compaction, form: Callable[[Message], Message]) -> tuple[CompactionPart, ...]:
    return tuple(part if part.message is None else replace(part, message=form(part.message)) for part in event.shown)


def event_of(
    entry: JournalEntry,
    session_id: str,
    agent_id: str,
    message_of: Callable[[str], Message],
    said: Said = NOTHING_SAID,
) -> AnyLoopEvent:
    """Return the event that an entry of the record means. `message_of` finds a message by its id."""
    if entry.kind not in KINDS:
        return _unknown_event(entry, session_id, agent_id)
    plain = {"agent_id": agent_id, **entry.body, "type": entry.kind, "session_id": session_id, "cursor": entry.seq}
    plain["loop_id"] = entry.run or plain.get("loop_id", "")
    event: AnyLoopEvent = codec.convert(AnyLoopEvent, plain)  # type: ignore[arg-type]  # a union is a type to msgspec
    if isinstance(event, MessageEnd):
        return replace(event, message=message_of(event.message.id))
    if isinstance(event, AgentEnd):
        return replace(event, messages=tuple(message_of(message.id) for message in event.messages))
    if isinstance(event, Compaction):
        return replace(event, shown=_shown_as(event, lambda message: message_of(message.id)))
    if isinstance(event, ToolExecutionStart):
        return replace(event, call=said.hydrated_call(event.call))
    if isinstance(event, ToolExecutionEnd):
        return replace(event, execution=said.hydrated(event.execution))
    return event


def _unknown_event(entry: JournalEntry, session_id: str, agent_id: str) -> UnknownEvent:
    shared = shared_fields(entry.body)
    body = {name: part for name, part in entry.body.items() if name not in shared} if shared else entry.body
    plain = {"at": _time_in(entry.body), "agent_id": agent_id, **shared, "session_id": session_id, "cursor": entry.seq}
    plain["loop_id"] = entry.run or shared.get("loop_id", "")
    return codec.convert(UnknownEvent, {**plain, "type": "unknown_event", "kind": entry.kind, "body": body})


def _time_in(body: JSON) -> datetime:
    """Return the time that an adapter has noted in an entry, in seconds."""
    seconds = body.get("at") if isinstance(body, Mapping) else None
    try:
        return datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, float) else UNTOLD
    except (ValueError, OverflowError, OSError):
        return UNTOLD


def tells_of_run(entry: JournalEntry) -> bool:
    """Tell whether an entry is about a run. Redactions and entries of unknown kinds are not."""
    return entry.kind in KINDS and entry.kind not in ("redacted", "unknown_event")


def is_loop(run: RunOnRecord) -> bool:
    """Tell whether a run is a loop of perdure's: an adapter may note entries under run names of its own."""
    return tells_of_run(run.first) or tells_of_run(run.last)


async def loops_on_record(
    journal: Journal, session_id: str, *, limit: int | None = None, before: int | None = None
) -> Sequence[RunOnRecord]:
    """Return the newest loops on record, oldest first, without the entries of adapters between them."""
    found: list[RunOnRecord] = []
    asked = limit
    while True:
        page = await journal.runs(session_id, limit=asked, before=before)
        found = [*filter(is_loop, page), *found]
        if limit is None or asked is None:
            return found
        if len(found) >= limit or len(page) < asked:
            return found[-limit:]
        # An adapter may have noted any number of runs between two loops, so each page is larger than the last.
        before, asked = page[0].first.seq, asked * 8


_NEED_NOT_WAIT_FOR = (TurnStart, MessageStart)
"""The events that a recovery does not need. They are written together with the next one that it does."""
_NOT_KEPT = (MessageUpdate, ToolExecutionUpdate)
"""The events that are emitted but not stored: later events contain the same text whole."""
_STARTS = (AgentStart, ParallelLoopStart)
_ENDS = (AgentEnd, ParallelLoopEnd)


class _Unwritten:
    """The events of a run that are not on record yet, and the messages in them."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._events: list[LoopEvent] = []
        self._said = SaidByRun()
        self._is_urgent = False
        self.begins_a_run = False
        """True once the start of a run that could be resumed was among the events."""
        self.has_started = False
        """True once any start of a run was among the events, also that of a continued one."""
        self._in_flight: tuple[list[Message], list[LoopEvent]] = ([], [])

    def __bool__(self) -> bool:
        """Tell whether a barrier has something to write."""
        return self._is_urgent or bool(self._messages)

    @property
    def ends_a_run(self) -> bool:
        return any(isinstance(event, _ENDS) for event in self._events)

    def drop_ends(self) -> None:
        """Drop the ends of runs. For recovery a run has not ended until its end is saved."""
        self._events = [event for event in self._events if not isinstance(event, _ENDS)]

    def drop_starts(self) -> None:
        """Drop the starts of calls. A call waits for its start to be on record, so none of these was made."""
        self._events = [event for event in self._events if not isinstance(event, ToolExecutionStart)]

    def put(self, event: LoopEvent) -> None:
        kind = type(event)
        if kind in _NOT_KEPT:
            return
        if isinstance(event, MessageEnd):
            self.say((event.message,))
        elif kind in _NEED_NOT_WAIT_FOR:
            self._events.append(event)
            return
        elif isinstance(event, Compaction):
            self.say(part.message for part in event.shown if part.message is not None)
        elif isinstance(event, _STARTS):
            self.has_started = True
            self.begins_a_run = self.begins_a_run or event.base_version is not None
        self._events.append(event)
        self._is_urgent = True

    def say(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._messages.append(message)
            self._said.hear(message)

    def entries(self) -> list[Entry]:
        """Return the entries to write.

        They are made as late as possible: an outcome's event comes before the message that it can refer to.
        """
        return [entry_of(event, self._said.of(event.loop_id)) for event in self._events]

    def take(self) -> tuple[list[Message], list[Entry]]:
        """Return all messages and entries, to be written now."""
        taken = self._messages, self.entries()
        # Kept until the store has answered: if it fails, the record is asked whether they arrived.
        self._in_flight = self._messages, self._events
        self._messages, self._events, self._is_urgent = [], [], False
        return taken

    def arrived(self) -> None:
        """Note that the events taken last have been written."""
        self._in_flight = [], []

    @property
    def first_in_flight(self) -> LoopEvent | None:
        """The first event of a write that failed. It is not known whether the write arrived."""
        return next((event for event in self._in_flight[1] if event.seq), None)

    def take_back(self) -> None:
        """Count the events of the failed write as unwritten."""
        messages, events = self._in_flight
        # At the front: the events that came meanwhile have to be written after them.
        self._messages[:0], self._events[:0], self._is_urgent = messages, events, True
        self.arrived()


async def _nothing() -> None:
    """Do nothing, for callers that do not ask to be told."""


class _WriteAhead:
    """A writer of events into a journal, in order. Nothing that follows a failed write may be on record before it."""

    def __init__(self, journal: Journal, session_id: SessionId) -> None:
        self._journal = journal
        self.session_id = session_id
        self._unwritten = _Unwritten()
        self.put = self._unwritten.put
        self._writing = asyncio.Lock()
        self._failure: Exception | None = None
        """The error of the last write, until it is known whether the write arrived."""
        self.written: dict[str, StoredAt] = {}
        self.posted: int | None = None
        """The number of the last inbox item at the last write. None if the store does not tell."""
        self.seq = 0
        """The end of the session's record at the last write."""

    def wants(self, kind: type[LoopEvent]) -> bool:
        return kind not in _NOT_KEPT

    async def _append(self, taken: int) -> Appended:
        raise NotImplementedError

    async def _write(self, taken: int = 0) -> None:
        # The order of the record: until it is known what became of the failed write, nothing may follow it.
        if self._failure is not None:
            raise self._failure
        try:
            appended = await self._append(taken)
        except Exception as error:
            self._failure = error
            raise
        self._unwritten.arrived()
        self.posted, self.seq = appended.posted, appended.seq
        self.written.update(appended.written)

    async def _take_back_what_is_lost(self) -> None:
        """Count a failed write as unwritten, unless the record shows that it arrived."""
        first = self._unwritten.first_in_flight
        if first is not None:
            told = await self._journal.read(self.session_id, run=first.loop_id)
            found = [entry for entry in told if entry.kind in KINDS]
            # One event is enough to look at: a write is one commit, so all of its events are there or none.
            if not found or int(found[-1].body["seq"]) < first.seq:
                self._unwritten.take_back()
        self._failure = None
        self._unwritten.drop_starts()


class JournalRecord(_WriteAhead):
    """The record that a run writes ahead into a journal: before anything that cannot be undone, it is on record.

    The first write also claims the session. The claim ends with the save that carries `saving()`, or with `leave()`,
    and in no other way.
    """

    def __init__(
        self,
        journal: Journal,
        session: AgentSession,
        *,
        owner: str,
        terms: Terms = DEFAULT_TERMS,
        taken: int = 0,
        takes_over: bool = False,
    ) -> None:
        super().__init__(journal, session.id)
        self._is_immediate = is_immediate(journal)
        # Not the session: a long one would wait for the garbage collector, which stops all threads to free it.
        self._version = session.version
        self._owner = owner
        self._terms = terms
        self.claim: Claim | None = None
        self.was_claimed = False
        self.takes_over = takes_over
        """True if it continues a killed run, whose claim is still on the session."""
        self.is_unfinished = takes_over
        """True if a run is on record that has to be recovered unless it is saved."""
        self.ends_anyway = False
        """True if the run has to end on record even if its end cannot be saved."""
        self.taken = taken
        self._branches: list[BranchRecord] = []
        self._sketcher: Sketcher | None = None
        self.posted_at_claim: int | None = None
        """The number of the last inbox item when the session was claimed. None before that."""
        self.when_claimed: Callable[[], Awaitable[None]] = _nothing
        """A function that is awaited once the session is claimed."""

    @property
    def lease(self) -> float:
        return self._terms.lease

    def say(self, messages: Sequence[Message]) -> None:
        """Take messages that do not belong to one single loop."""
        self._unwritten.say(messages)

    async def barrier(self) -> None:
        is_first = self.claim is None
        if self._is_immediate:  # its verbs never wait, so no other task can come in between, and no lock is needed
            if self._unwritten or is_first:
                await self._write()
        else:
            async with self._writing:  # a task must not pass its barrier while another still writes its events
                if self._unwritten or self.claim is None:
                    await finish_despite_cancel(self._write())
        if is_first:
            await self.when_claimed()

    async def _write(self, taken: int = 0) -> None:
        begins_a_run = self._unwritten.begins_a_run
        await super()._write(taken)
        self.is_unfinished = self.is_unfinished or begins_a_run

    async def _append(self, taken: int) -> Appended:
        if self.claim is None and not knows_waiting(self._journal):
            await self._note_what_was_posted()
        messages, entries = self._unwritten.take()
        if self.claim is not None:
            return await self._journal.append(self.claim, messages=messages, entries=entries, taken=taken)
        self.claim, appended = await self._claimed(messages, entries)
        self.was_claimed = True
        if appended.posted is not None:
            self.posted_at_claim = appended.posted
        return appended

    async def _note_what_was_posted(self) -> None:
        """Read the number of the last inbox item before the claim, for a store whose claim does not tell it."""
        found = await self._journal.read(self.session_id, inbox=True)
        self.posted_at_claim = found[-1].seq if found else 0

    async def _claimed(self, messages: list[Message], entries: list[Entry]) -> tuple[Claim, Appended]:
        limits = {} if self._terms.per_owner is None else {"per_owner": self._terms.per_owner}
        try:
            return await self._journal.claim(
                self.session_id,
                version=self._version,
                owner=self._owner,
                lease=self._terms.lease,
                messages=messages,
                entries=entries,
                take_over=self.takes_over,
                **limits,
            )
        except SessionConflict as conflict:
            raise ClaimConflict(conflict.session_id, conflict.expected, conflict.found) from None

    def begin_answer(self, run: str, answer: Unfinished) -> None:
        """Keep the text of an answer while it is being written, if that takes long and the journal is a Sketchbook."""
        sketcher = self._sketcher
        if sketcher is None and self.claim is not None and is_sketchbook(self._journal):
            sketcher = self._sketcher = Sketcher(self._journal, self.claim)
        if sketcher is not None:
            sketcher.begin(run, answer, self.seq)

    def end_answer(self) -> None:
        if self._sketcher is not None:
            self._sketcher.end()

    @property
    def is_sketching(self) -> bool:
        """Return True while a piece of an answer is being written."""
        return self._sketcher is not None and self._sketcher.is_writing

    async def end_sketches(self) -> None:
        """Wait until no piece of an answer is being written: the store may be closed next."""
        if self._sketcher is not None:
            await self._sketcher.idle()

    async def leave(self) -> None:
        """Give the claim back without a save. A run that has no end on record is left for recovery."""
        if self.claim is not None:
            await finish_despite_cancel(self._leave(self.claim))

    async def _leave(self, claim: Claim) -> None:
        is_over = not self.is_unfinished
        if self.is_unfinished:
            if not self.ends_anyway:
                self._unwritten.drop_ends()
            # What cannot be written now is lost. The claim stays on the session, so the run is recovered.
            with contextlib.suppress(PerdureError):
                is_over = await self._write_what_is_left()
        with contextlib.suppress(PerdureError):  # if the store fails here too, the claim lapses with its lease
            await self._journal.release(claim, interrupted=not is_over)
        self.claim = None

    async def _write_what_is_left(self) -> bool:
        """Write the events that are unwritten. Return whether the run has ended on record."""
        await self._take_back_what_is_lost()
        is_over = self._unwritten.ends_a_run
        if self._unwritten:
            # Only with its end are the run's inbox items taken. Otherwise they are left to its recovery.
            await self._write(self.taken if is_over else 0)
        if not is_over and self.claim is not None and self._unwritten.has_started:
            # The next worker sees that this process was not killed by the run, and does not count a death.
            await self._journal.append(self.claim, entries=[Entry(HANDED_OVER, EMPTY)])
        return is_over

    def branch(self, loop_id: str) -> BranchRecord:
        """Return the record of one branch of a parallel evaluation. It writes under the claim of the group."""
        self._branches.append(BranchRecord(self._journal, self, loop_id))
        return self._branches[-1]

    async def write_branch(self, name: str, messages: Sequence[Message], entries: Sequence[Entry]) -> Appended:
        """Write into a branch's own log. Return the places of the messages.

        Messages that the group has written for all branches are left out.
        """
        assert self.claim is not None
        own = [message for message in messages if message.id not in self.written]
        return await self._journal.append(self.claim, messages=own, entries=entries, log=name)

    async def beat(self) -> None:
        """Keep the claim alive."""
        if self.claim is not None:
            await self._journal.heartbeat(self.claim)

    def saving(self, key: Key | None = None) -> Saving | None:
        """Return what the save has to carry: the claim, the places of messages, and the entries not written yet."""
        if self.claim is None:
            return None
        written = dict(self.written)
        for branch in self._branches:
            written |= branch.written
        return Saving(self.claim, written, tuple(self._unwritten.entries()), self.taken, key)


class BranchRecord(_WriteAhead):
    """The record of one branch of a parallel evaluation: a log of its own, under the claim of the group."""

    def __init__(self, journal: Journal, group: JournalRecord, loop_id: str) -> None:
        super().__init__(journal, group.session_id)
        self._group = group
        self._loop_id = loop_id

    async def barrier(self) -> None:
        async with self._writing:
            if self._unwritten:
                await finish_despite_cancel(self._write())

    async def _append(self, taken: int) -> Appended:
        return await self._group.write_branch(self._loop_id, *self._unwritten.take())

    async def settle(self) -> None:
        """Write the rest before the group ends or is left, including a write that has failed."""
        if self._failure is not None:
            await self._take_back_what_is_lost()
        await self.barrier()


def owner_here() -> str:
    """Return the name of this process on a claim: its host and its number."""
    return f"{socket.gethostname()}:{os.getpid()}"
