"""Reading the record: loops by page or one by one, and events as they were and as they come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec.structs import replace

from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.checks import expect, expect_count, expect_text
from perdure.model.loop_events import AgentEnd, AnyLoopEvent, ParallelLoopEnd, Redacted
from perdure.model.message import Message
from perdure.model.record import LoopRecord, SessionRecord, with_children
from perdure.model.said import Said
from perdure.model.session import AgentSessionInfo
from perdure.protocols import Journal, JournalEntry, RunOnRecord, Watch, check_page
from perdure.recording import event_of

LOOK_EVERY = 0.05
LOOK_ANYWAY = 1.0
PAGE = 1000
"""How many entries of a record are held at a time."""
MOST_CHILDREN = 100
"""How many starts are looked at for the children of one loop; `record()` knows them all."""


async def read_record(
    journal: Journal, info: AgentSessionInfo, *, limit: int | None, before: int | None
) -> SessionRecord:
    """A session's record with the headers of its loops: what each was, from what, how it ended, what it cost."""
    check_page(limit, before)
    runs = await journal.runs(info.id, limit=limit, before=before)
    loops = with_children(await _with_selections(journal, info, runs))
    agent_id = loops[0].agent_id if loops else ""
    last = loops[-1] if loops else None
    return SessionRecord(
        session_id=info.id,
        agent_id=agent_id,
        created_at=info.created_at,
        last_active_at=(last.ended_at or last.started_at) if last else None,
        parent_spawn_ref=info.spawn_ref,
        loops=loops,
    )


async def _with_selections(journal: Journal, info: AgentSessionInfo, runs: Sequence[RunOnRecord]) -> list[LoopRecord]:
    """The headers of runs, whose branches know which of them was selected."""
    headers = {run.loop_id: _header(info.id, run) for run in runs}
    known = {run.loop_id: run for run in runs}
    for group in {header.parallel_group.all_loop_ids for header in headers.values() if header.parallel_group}:
        selection = await _selection(journal, info.id, group, known)
        if selection is not None:
            headers |= {loop_id: headers[loop_id].selected(selection) for loop_id in group if loop_id in headers}
    return list(headers.values())


async def _selection(
    journal: Journal, session_id: str, group: Sequence[str], known: Mapping[str, RunOnRecord]
) -> ParallelLoopEnd | None:
    """Which branch of a group was selected: that is told right behind the last entry of any of them."""
    elsewhere = [run for loop in group if loop not in known for run in await journal.runs(session_id, run=loop)]
    here = [known[loop] for loop in group if loop in known]
    last = max(run.last.seq for run in (*here, *elsewhere))
    while entries := await journal.read(session_id, after=last, limit=1):
        event, last = event_of(entries[0], session_id, "", _unread), entries[0].seq
        if isinstance(event, ParallelLoopEnd) and event.loop_ids == tuple(group):
            return event
        if not isinstance(event, Redacted):  # which may be told at any time
            return None
    return None


def _header(session_id: str, run: RunOnRecord) -> LoopRecord:
    record = LoopRecord(loop_id=run.loop_id, session_id=session_id)
    entries = (run.first, run.last) if run.last.seq > run.first.seq else (run.first,)
    for entry in entries:
        if entry.kind in ("agent_start", "agent_end"):
            record = record.after(event_of(entry, session_id, "", _unread), keep_event=False)
    return record


def _unread(message_id: str) -> Message:
    """Stands for a message that a header does not show."""
    return Message("assistant", (), message_id)


async def read_loop(journal: Journal, session_id: str, loop_id: str) -> LoopRecord:
    """The whole record of one loop: its messages, turns and events."""
    runs = await journal.runs(session_id, run=expect_text(loop_id, "$.loop_id"))
    if not runs:
        raise SessionNotFound(f"loop {loop_id} of {session_id}")
    story = _Story(journal, session_id)
    events = await story.events(await journal.read(session_id, run=loop_id))
    record = LoopRecord(loop_id=loop_id, session_id=session_id).after_all(events)
    last = runs[0].last.seq
    if record.parallel_group is not None:
        group = record.parallel_group.all_loop_ids
        last = max([run.last.seq for loop in group for run in await journal.runs(session_id, run=loop)])
        selection = await _selection(journal, session_id, group, {run.loop_id: run for run in runs})
        record = record if selection is None else record.selected(selection)
    return replace(record, children_loop_ids=await _children(journal, session_id, loop_id, last))


async def _children(journal: Journal, session_id: str, loop_id: str, after: int) -> tuple[str, ...]:
    """The loops that go on from one. They begin behind its end, before any that goes on from another.

    From start to start it is one read each, so that neither the session's length nor that of its loops counts.
    """
    children: list[str] = []
    for _ in range(MOST_CHILDREN):
        entry = next(iter(await journal.read(session_id, after=after, limit=1)), None)
        if entry is None:
            break
        begun = entry.body["loop_ids"] if entry.kind == "parallel_loop_start" else [entry.run] if entry.run else []
        runs = [run for loop in begun for run in await journal.runs(session_id, run=loop)]
        found = [run.loop_id for run in runs if run.first.body.get("parent_loop_id") == loop_id]
        if runs and not found and entry.kind in ("agent_start", "parallel_loop_start"):
            break
        children += found
        after = max([entry.seq, *(run.last.seq for run in runs)])
    return tuple(dict.fromkeys(children))


async def read_events(
    journal: Journal, session_id: str, *, after: int | None, last: int | None, follow: bool
) -> AsyncIterator[AnyLoopEvent]:
    """Events on record, in order; then, if asked to follow, those to come as they are written."""
    for name, number in (("after", after), ("last", last)):
        if number is not None:
            expect_count(number, f"$.{name}")
    expect(follow, bool, "$.follow")
    story, cursor = _Story(journal, session_id), after or 0
    entries = await journal.read(session_id, after=cursor, last=last, limit=PAGE if last is None else None)
    while True:
        for event in await story.events(entries):
            yield event
        if entries:
            cursor = entries[-1].seq
        elif not follow:
            return
        else:
            await _more(journal, session_id, cursor)
        if not follow and last is not None:
            return
        entries = await journal.read(session_id, after=cursor, limit=PAGE)


async def _more(journal: Journal, session_id: str, cursor: int) -> None:
    """Wait until there may be more on record. The record is the truth, so it is looked at again in any case."""
    if isinstance(journal, Watch):
        await journal.changed(session_id, cursor, LOOK_ANYWAY)
    else:
        await asyncio.sleep(LOOK_EVERY)


class _Story:
    """Turns entries of a record into events. Each message of a run is read once, and kept until the run has ended."""

    def __init__(self, journal: Journal, session_id: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._agents: dict[str, str] = {}
        self._messages: dict[str, dict[str, Message]] = {}
        self._said: defaultdict[str, Said] = defaultdict(Said)
        self._read_to: dict[str, int] = {}

    async def events(self, entries: Sequence[JournalEntry]) -> list[AnyLoopEvent]:
        for loop in sorted({entry.run for entry in entries if entry.run is not None}):
            for run in await self._journal.runs(self._session_id, run=loop):
                await self._catch_up(run)
        return [self._event(entry) for entry in entries]

    async def _catch_up(self, run: RunOnRecord) -> None:
        self._agents[run.loop_id] = run.first.body.get("agent_id", "")
        start = max(run.start, self._read_to.get(run.loop_id, 0))
        known = self._messages.setdefault(run.loop_id, {})
        if run.loop_id not in self._read_to:
            known |= {message.id: message for message in await self._input_of(run)}
        for message in await self._journal.messages(run.log, start, run.stop) if start < run.stop else ():
            known[message.id] = message
            if message.metadata.get("execution_id") == run.loop_id:  # a log may be read with what other runs have said
                self._said[run.loop_id].hear(message)
        self._read_to[run.loop_id] = max(start, run.stop)

    async def _input_of(self, run: RunOnRecord) -> Sequence[Message]:
        """What the branches of a group answer: it stands in the session's own log, once for all."""
        place = run.first.body.get("input_at")
        if not place:
            return ()
        log, _ = await self._journal.log_of(self._session_id)
        return await self._journal.messages(log, *place)

    def _event(self, entry: JournalEntry) -> AnyLoopEvent:
        known = self._messages.get(entry.run or "", {})

        def message_of(message_id: str) -> Message:
            if message_id not in known:
                problem = "its run's record names it, and the log lacks it"
                raise CorruptRecord(self._session_id, f"message {message_id}", problem)
            return known[message_id]

        agent_id, said = self._agents.get(entry.run or "", ""), self._said[entry.run or ""]
        event = event_of(entry, self._session_id, agent_id, message_of, said)
        if isinstance(event, AgentEnd):
            self._said.pop(event.loop_id, None)
            self._messages.pop(event.loop_id, None)
            self._read_to.pop(event.loop_id, None)
        return event
