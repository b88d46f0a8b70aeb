"""Follow a run from any process: its text so far, and then the rest as it is written.

The record is the truth. Until an answer is on record, its stored pieces are shown. If the record then differs, or the
model begins again, the part that was shown is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from perdure.errors import InvalidData, RunInterrupted
from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentEnd, AgentStart, AnyLoopEvent, MessageEnd, ParallelLoopEnd
from perdure.model.message import Message
from perdure.protocols import Ear, Journal, JournalEntry, RunOnRecord, RunProgress, Sketch, is_sketchbook, said_in
from perdure.run_journal import loops_on_record
from perdure.runtime.record_reader import PAGE, Story, last_of_run
from perdure.sessions.cursors import Place
from perdure.sessions.reply import Chunk

# Seconds between two polls of a journal that does not notify.
LOOK_EVERY = 0.05
LOOK_ANYWAY = 0.25
"""Seconds until a journal that notifies is read anyway: it does not notify that a process has died."""
_RUNS_LOOKED_AT = 20


async def run_to_follow(journal: Journal, session_id: SessionId, place: Place | None) -> RunOnRecord | None:
    """Return the run that a place is in, or the one after it. Without a place, return the last run, or None.

    Raise InvalidData if no run of the session has the place.
    """
    if place is None:
        await _begun(journal, session_id)
        return await last_run(journal, session_id)
    found = await journal.runs(session_id, run=place.run)
    if not found:
        raise InvalidData("$.after", "it is the cursor of a run that this session does not have")
    return (await _next_run(journal, session_id, found[0]) if place.is_end else None) or found[0]


async def last_run(journal: Journal, session_id: SessionId, before: int | None = None) -> RunOnRecord | None:
    """Return the newest run that says something, or None. With `before`, it began before that entry."""
    found = await loops_on_record(journal, session_id, limit=_RUNS_LOOKED_AT, before=before)
    return next((run for run in reversed(found) if not _is_compaction(run.first)), None)


async def _begun(journal: Journal, session_id: SessionId) -> None:
    """Wait while branches are announced and none of them has begun."""
    while True:
        entry = await last_of_run(journal, session_id)
        if entry is None or entry.kind != "parallel_loop_start" or not await journal.is_claimed(session_id):
            return
        await asyncio.sleep(LOOK_EVERY)


def _is_compaction(start: JournalEntry) -> bool:
    """Tell whether a run with this start only compacts: it says nothing, and may come while another run waits."""
    said = start.body if start.kind == "agent_start" else {}
    return bool(said.get("continuation", {}).get("kind") == "compaction")


def _group_of(run: RunOnRecord) -> frozenset[str]:
    """Return the runs that are evaluated side by side with one, including itself."""
    group = run.first.body.get("group") if run.first.kind == "agent_start" else None
    return frozenset(group or {run.loop_id})


async def _next_run(journal: Journal, session_id: SessionId, run: RunOnRecord) -> RunOnRecord | None:
    after, kin = run.last.seq, _group_of(run)
    while entries := await journal.read(session_id, after=after, limit=PAGE):
        for entry in entries:
            if entry.kind == "agent_start" and entry.run not in kin and not _is_compaction(entry):
                return next(iter(await journal.runs(session_id, run=entry.run)), None)
        after = entries[-1].seq
    return None


async def progress_of(journal: Journal, session_id: SessionId, after: int = 0) -> RunProgress:
    """Return how far a session's run has come, also if the journal keeps no pieces of answers."""
    if is_sketchbook(journal):
        return await journal.progress(session_id, after=after)
    # The claim first: everything that its holder wrote before the release is then on record.
    is_claimed = await journal.is_claimed(session_id)
    is_interrupted = not is_claimed and await journal.is_interrupted(session_id)
    last = await journal.read(session_id, last=1)
    return RunProgress(last[-1].seq if last else 0, is_claimed, is_interrupted)


class Follower:
    """A follower of one run, or of a group of runs that are evaluated side by side, to its end."""

    def __init__(self, journal: Journal, session_id: SessionId, run: RunOnRecord, place: Place | None) -> None:
        self._journal = journal
        self._session_id = session_id
        self._story = Story(journal, session_id)
        self.runs = _group_of(run)
        self.is_group = len(self.runs) > 1
        self._seq = run.first.seq - 1
        self._sought = place if place is not None and place.run in self.runs else None
        """The place to begin at, until it is reached."""
        self._passed = 0
        """The number of characters before it, of the messages that were passed."""
        self._is_whole = True
        """True if the message that the place is in is on record."""
        self._kept = 0
        """The number of characters that were read of the pieces of the message under way."""
        self.place = Place(run.loop_id)
        self.base_version: int | None = None
        """The version that the run last began or continued from: its end makes the next one."""
        self.is_over = False
        """True if the record tells that the run has ended."""

    async def chunks(self, patience: float, killed: Callable[[], None] = lambda: None) -> AsyncIterator[Chunk]:
        """Yield the text of the run until it is over, or waits for a person.

        Call `killed` when its process is gone. Raise RunInterrupted if it is not recovered within `patience` seconds.
        """
        async with listening(self._journal, self._session_id) as wait:
            deadline: float | None = None
            while True:
                progress = await progress_of(self._journal, self._session_id, self._kept)
                is_told = progress.seq > self._seq  # before `news`, which reads up to there
                for chunk in [each async for each in self.news(progress)]:
                    yield chunk
                if self.is_over or not (is_told or progress.is_claimed or progress.is_interrupted):
                    break
                if progress.is_interrupted and deadline is None:
                    killed()
                deadline = self._deadline(deadline, patience) if progress.is_interrupted else None
                if not is_told:
                    await wait()
        for chunk in self._last():
            yield chunk

    def _deadline(self, deadline: float | None, patience: float) -> float:
        time = asyncio.get_running_loop().time()
        if deadline is not None and time >= deadline:
            raise RunInterrupted(self._session_id)
        return time + patience if deadline is None else deadline

    async def news(self, progress: RunProgress) -> AsyncIterator[Chunk]:
        """Yield the text of entries that were not read yet, then the pieces of the message being written."""
        while self._seq < progress.seq and not self.is_over:
            page = await self._journal.read(
                self._session_id, after=self._seq, limit=min(PAGE, progress.seq - self._seq)
            )
            for event in await self._story.events(self._own(page)):
                async for chunk in self.hear(event):
                    yield chunk
            self._seq = page[-1].seq if page else progress.seq
        pieces = progress.sketches
        if pieces and pieces[0].run in self.runs and not self.is_over:
            for chunk in self._sketched(pieces):
                yield chunk

    def _own(self, page: Sequence[JournalEntry]) -> list[JournalEntry]:
        """Return the entries that tell of the run. Once another run begins, this one is over."""
        own: list[JournalEntry] = []
        for entry in page:
            if entry.kind == "agent_start" and entry.run not in self.runs and not _is_compaction(entry):
                self.is_over = True
                break
            if entry.run in self.runs or entry.kind == "parallel_loop_end":
                own.append(entry)
        return own

    async def hear(self, event: AnyLoopEvent) -> AsyncIterator[Chunk]:
        """Yield the text that an event adds to the run's."""
        match event:
            case AgentStart():
                self.base_version = event.base_version
            case MessageEnd() if is_answer(event.message, event.loop_id) and not self.is_group:
                for chunk in self._told(event.message):
                    yield chunk
            case AgentEnd():
                self.is_over = self.is_over or not self.is_group
            case ParallelLoopEnd() if self.is_group and self.runs == {*event.loop_ids}:
                self.is_over = True
                for message in await self._selected(event.selected_loop_id):
                    for chunk in self._told(message):
                        yield chunk

    async def _selected(self, loop_id: str | None) -> list[Message]:
        """Return what the selected branch of a group has said. Before the selection, it is not known which that is."""
        runs = await self._journal.runs(self._session_id, run=loop_id) if loop_id else ()
        said = [message for run in runs for message in await self._journal.messages(run.log, run.start, run.stop)]
        return [message for message in said if is_answer(message, loop_id)]

    def _told(self, message: Message) -> Iterator[Chunk]:
        """Yield what is new in a message that is on record."""
        if self._is_passed(message):
            return
        place = self.place
        is_seen = place.message_id == message.id and not message.is_superseded and place.is_in(message.text)
        if not self._is_whole and place.offset and not is_seen:
            yield self._restarted()
        if message.is_superseded:  # another one takes its place
            return
        if self._is_whole or place.message_id != message.id:
            self.place = self.place.in_message(message.id)
        self._is_whole, self._kept = True, 0
        yield from self._say(message.text[self.place.offset :])

    def _is_passed(self, message: Message) -> bool:
        """Tell whether a message comes before the place to begin at. If it does not, the place is reached."""
        sought = self._sought
        if sought is None:
            return False
        if message.id != sought.message_id and not message.is_superseded:
            self._passed += len(message.text)
        if message.id != sought.message_id and self._passed <= sought.base:
            return True
        self._reach()
        return False

    def _reach(self) -> None:
        """Begin at the place that was sought: everything after it is shown."""
        if self._sought is not None:
            self.place, self._sought, self._is_whole = self._sought, None, False

    def _sketched(self, pieces: Sequence[Sketch]) -> Iterator[Chunk]:
        """Yield what is new in a message that is being written."""
        self._reach()
        first = pieces[0]
        if (self.place.message_id, self.place.attempt) != (first.message_id, first.attempt) or self._is_whole:
            if self.place.offset and not self._is_whole:
                yield self._restarted()
            self.place = self.place.in_message(first.message_id, first.attempt)
            self._is_whole, self._kept = False, 0
        yield from self._grown(pieces)

    def _grown(self, pieces: Sequence[Sketch]) -> Iterator[Chunk]:
        if self._kept:
            text = ""
            for piece in pieces[1:]:
                text += piece.text if piece.start == self._kept + len(text) else ""
            is_gap = len(pieces) > 1 and not text
            self._kept = 0 if is_gap else self._kept + len(text)
            yield from self._say(text)
            return
        text = said_in(pieces)
        if len(text) < self.place.offset:
            return  # the reader has seen more than was kept so far
        if not self.place.is_in(text):
            yield self._restarted()
            self.place = self.place.in_message(pieces[0].message_id, pieces[0].attempt)
            self._is_whole = False
        self._kept = len(text)
        yield from self._say(text[self.place.offset :])

    def _say(self, text: str) -> Iterator[Chunk]:
        if text:
            offset = self.place.end
            self.place = self.place.after(text)
            yield Chunk(text, offset=offset, place=self.place)

    def _restarted(self) -> Chunk:
        """Return the chunk that takes back what was shown of the message under way."""
        self.place, self._is_whole, self._kept = Place(self.place.run, base=self.place.base), True, 0
        return Chunk(restarts=True, offset=self.place.base, place=self.place)

    def _last(self) -> Iterator[Chunk]:
        """Yield a chunk that takes back what was shown of a message that was never completed."""
        self._reach()
        if self.place.offset and not self._is_whole:
            yield self._restarted()


def is_answer(message: Message, loop_id: str | None) -> bool:
    """Tell whether a run has said a message itself. The role is not enough: what it was sent may have any role."""
    return message.role == "assistant" and message.metadata.get("execution_id") == loop_id


@asynccontextmanager
async def listening(journal: Journal, session_id: SessionId) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Yield a function that waits until there may be news. It returns after a while anyway: the store is the truth."""

    async def pause() -> None:
        await asyncio.sleep(LOOK_EVERY)

    if not isinstance(journal, Ear):
        yield pause
        return
    async with journal.listening(session_id) as heard:

        async def hear() -> None:
            await heard(LOOK_ANYWAY)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # asyncio.wait_for may have lost the cancellation
                raise asyncio.CancelledError

        yield hear
