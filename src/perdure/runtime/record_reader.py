"""Read the record: loops by page or one by one, and events as they were and as they come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.checks import expect, expect_count, expect_text
from perdure.model.loop_events import (
    AgentEnd,
    AnyLoopEvent,
    HoldChanged,
    ParallelLoopEnd,
    ParallelLoopStart,
    Redacted,
    UnknownEvent,
)
from perdure.model.message import Message
from perdure.model.record import LoopFold, LoopRecord, SessionRecord, with_children
from perdure.model.session import AgentSessionInfo
from perdure.model.tool_refs import Said
from perdure.protocols import FORGOTTEN, Journal, JournalEntry, RunOnRecord, Watch, check_page
from perdure.run_journal import HANDED_OVER, event_of, is_loop, loops_on_record, tells_of_run

# Seconds until a follower reads the record again: without a journal that tells of news, and with one.
LOOK_EVERY = 0.05
LOOK_ANYWAY = 1.0
PAGE = 1000
"""The number of entries of a record that are held at a time."""
NEAR = 64
"""The largest gap between two wanted entries that is read with them, rather than skipped by a read of its own."""
RUNS_AT_ONCE = 200
"""The number of newest runs that are searched for one that was sent the same before."""
RUNS_WHILE_IT_WAITED = 20
"""The number of runs that are searched for those that began while another waited for a person."""
STRANGERS_PASSED = 8
"""The number of loops in a row that continue from others, after which one loop's children are not looked for."""
_OF_HEADERS = frozenset({"agent_start", "compaction", "agent_end"})
_OF_USAGE = frozenset({"turn_start", "message_end", "tool_execution_end", "turn_end"})


async def read_record(
    journal: Journal, info: AgentSessionInfo, *, limit: int | None, before: int | None
) -> SessionRecord:
    """Return a session's record with the headers of its loops: what each was, from what, how it ended, what it cost.

    Branches that were announced and have not begun are on the page with the branch of their group that began last.
    """
    check_page(limit, before)
    runs = await loops_on_record(journal, info.id, limit=limit, before=before)
    told = await _told(journal, info.id, runs)
    headers = {run.loop_id: _header(info.id, run.loop_id, told[run.loop_id]) for run in runs}
    named = {header.parallel_group.all_loop_ids for header in headers.values() if header.parallel_group}
    for group in await _groups(journal, info.id, sorted(named), {run.loop_id: run for run in runs}):
        headers |= _group_headers(info.id, group, headers)
    if before is None:
        headers |= await _announced(journal, info.id)
    loops = with_children(headers.values())
    last = next((loop for loop in reversed(loops) if loop.started_at is not None), None)
    return SessionRecord(
        session_id=info.id,
        agent_id=loops[0].agent_id if loops else "",
        created_at=info.created_at,
        last_active_at=(last.ended_at or last.started_at) if last else None,
        parent_spawn_ref=info.spawn_ref,
        loops=loops,
    )


def _group_headers(session_id: str, group: _Group, headers: dict[str, LoopRecord]) -> dict[str, LoopRecord]:
    """Return the headers of a group's branches, also of those that have not begun. They name the selected branch."""
    found = {loop_id: headers[loop_id] for loop_id in group.ids if loop_id in headers}
    if group.last_begun in headers:
        known = headers[group.last_begun]
        announced = ParallelLoopStart(
            session_id=session_id,
            agent_id=known.agent_id,
            loop_ids=tuple(group.ids),
            parent_loop_id=known.parent_loop_id,
        )
        found |= {loop_id: LoopRecord.pending(announced, loop_id) for loop_id in group.ids if loop_id not in group.runs}
    selection = group.selection
    if selection is None:
        return found
    return {loop_id: header.selected(selection) for loop_id, header in found.items()}


async def _announced(journal: Journal, session_id: str) -> dict[str, LoopRecord]:
    """Return the branches of a group of which none has begun yet: its announcement is then the last event."""
    entry = await last_of_run(journal, session_id)
    if entry is None or entry.kind != "parallel_loop_start":
        return {}
    event = event_of(entry, session_id, "", _unread)
    assert isinstance(event, ParallelLoopStart)
    return {loop_id: LoopRecord.pending(event, loop_id) for loop_id in event.loop_ids}


async def last_of_run(journal: Journal, session_id: str) -> JournalEntry | None:
    """Return the last entry of a session's record that tells of a run. Other entries may follow it."""
    # Usually it is the very last one. Each further read goes eight times as far back.
    entries: Sequence[JournalEntry] = ()
    looked_at, asked = -1, 1
    while looked_at < len(entries):
        looked_at, entries = len(entries), await journal.read(session_id, last=asked)
        found = next((entry for entry in reversed(entries) if tells_of_run(entry)), None)
        if found is not None:
            return found
        asked *= 8
    return None


async def was_handed_over(journal: Journal, session_id: str) -> bool:
    """Tell whether the process that had a run handed it over on purpose, and was not killed."""
    last = await journal.read(session_id, last=1)
    return bool(last) and last[0].kind == HANDED_OVER


async def is_left_to_worker(journal: Journal, session_id: str) -> bool:
    """Tell whether a run was decided on and handed over, and has not got any further since."""
    newest = await last_of_run(journal, session_id)
    if newest is None or newest.kind != "agent_start":
        return False
    if not any(newest.body.get(decided) for decided in ("approved", "denied", "answered")):
        return False  # the run was interrupted before it asked the model: its caller knows, and nobody has decided
    return any(entry.kind == HANDED_OVER for entry in await journal.read(session_id, after=newest.seq))


async def next_of_run(journal: Journal, session_id: str, after: int) -> JournalEntry | None:
    """Return the first entry behind a number that tells of a run. What adapters have noted between runs is skipped."""
    asked = 1
    while page := await journal.read(session_id, after=after, limit=asked):
        found = next((entry for entry in page if tells_of_run(entry)), None)
        if found is not None:
            return found
        after, asked = page[-1].seq, min(asked * 8, PAGE)
    return None


class _Group:
    """A group of branches as it is on record: those that have begun, and the one that was selected."""

    def __init__(self, ids: Sequence[str], runs: Mapping[str, RunOnRecord]) -> None:
        self.ids = ids
        self.runs = runs
        self.selection: ParallelLoopEnd | None = None
        self.last = max(run.last.seq for run in runs.values())
        self.last_begun = max(runs.values(), key=lambda run: run.first.seq).loop_id


async def _groups(
    journal: Journal, session_id: str, named: Iterable[Sequence[str]], known: Mapping[str, RunOnRecord]
) -> list[_Group]:
    """Return groups of branches, given the branches' ids. Runs that are known are not read again."""
    groups = []
    for ids in named:
        runs = {loop: known[loop] for loop in ids if loop in known}
        runs |= {loop: run for loop in ids if loop not in runs for run in await journal.runs(session_id, run=loop)}
        groups.append(_Group(ids, runs))
    behind = await read_stretches(journal, session_id, [(group.last + 1, group.last + 1) for group in groups])
    for group in groups:
        if group.last + 1 in behind:
            group.selection = await _selection(journal, session_id, group.ids, behind[group.last + 1])
    return groups


async def _selection(
    journal: Journal, session_id: str, group: Sequence[str], entry: JournalEntry
) -> ParallelLoopEnd | None:
    """Return the event that selects a branch of a group. It comes right behind the last entry of any branch."""
    while True:
        event = event_of(entry, session_id, "", _unread)
        if isinstance(event, ParallelLoopEnd) and event.loop_ids == tuple(group):
            return event
        if not isinstance(event, Redacted | HoldChanged | UnknownEvent):  # these may come at any time
            return None
        found = await next_of_run(journal, session_id, entry.seq)
        if found is None:
            return None
        entry = found


async def read_stretches(
    journal: Journal, session_id: str, stretches: Iterable[tuple[int, int]]
) -> dict[int, JournalEntry]:
    """Return the entries of stretches of a record by number. Each stretch is given by its first and last number.

    Numbers without an entry are left out. Stretches near each other are read together, so that many of them take few
    reads.
    """
    found: dict[int, JournalEntry] = {}
    for first, final in _joined(stretches):
        while first <= final:
            page = await journal.read(session_id, after=first - 1, limit=min(PAGE, final - first + 1))
            found |= {entry.seq: entry for entry in page}
            first = page[-1].seq + 1 if page else final + 1
    return found


def _joined(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, final in sorted(stretches):
        if joined and first - joined[-1][1] <= NEAR:
            joined[-1] = (joined[-1][0], max(joined[-1][1], final))
        else:
            joined.append((first, final))
    return joined


async def _told(journal: Journal, session_id: str, runs: Sequence[RunOnRecord]) -> dict[str, list[JournalEntry]]:
    """Return the entries that headers are made of: a run's start and its end, and its compactions.

    Few runs are read whole. These have compacted, have not ended, or begin or end with an entry of an unknown kind.
    """
    told = {run.loop_id: [run.first, run.last] if run.last.seq > run.first.seq else [run.first] for run in runs}
    whole = {run.loop_id: run for run in runs if _is_read_whole(told[run.loop_id])}
    entries = await read_stretches(journal, session_id, [(run.first.seq, run.last.seq) for run in whole.values()])
    known: dict[str, list[JournalEntry]] = {loop_id: [] for loop_id in whole}
    for _, entry in sorted(entries.items()):
        if entry.run in known and tells_of_run(entry):
            known[entry.run].append(entry)
    return told | {loop_id: _ends_and_compactions(found) for loop_id, found in known.items()}


def _is_read_whole(ends: Sequence[JournalEntry]) -> bool:
    if not all(map(tells_of_run, ends)):
        return True
    return len(ends) > 1 and (not _has_ended(ends[-1]) or _has_compacted(ends[0], ends[-1]))


def _ends_and_compactions(entries: list[JournalEntry]) -> list[JournalEntry]:
    if len(entries) < 2 or not _has_ended(entries[-1]):
        return entries
    first, *_, last = entries
    made = [entry for entry in entries if entry.kind == "compaction"] if _has_compacted(first, last) else []
    return [first, *made, last]


def _header(session_id: str, loop_id: str, told: Sequence[JournalEntry]) -> LoopRecord:
    """Return the header of a run, which is made of its start, its end and its compactions.

    If the run has not ended, for example because it waits for a person, its usage so far is taken from its steps.
    """
    fold = LoopFold(LoopRecord(loop_id=loop_id, session_id=session_id))
    kinds = _OF_HEADERS if told and _has_ended(told[-1]) else _OF_HEADERS | _OF_USAGE
    for entry in told:
        if entry.kind in kinds:
            fold.take(event_of(entry, session_id, "", _unread), keep_event=False)
    header = fold.record()
    return header if header.status.is_over else replace(header, messages=(), turns=(), child_loop_refs=())


def _has_ended(last: JournalEntry) -> bool:
    return last.kind == "agent_end"


def _has_compacted(first: JournalEntry, last: JournalEntry) -> bool:
    if not _has_ended(last):
        return False
    is_compaction = first.kind == "agent_start" and first.body.get("continuation", {}).get("kind") == "compaction"
    # Older releases do not count compactions. There, the usage of one tells of it.
    return is_compaction or bool(last.body.get("compactions") or last.body.get("compaction_usage"))


def _unread(message_id: str) -> Message:
    """Return a stand-in for a message that a header does not show."""
    return Message("assistant", (), message_id)


async def read_loop(journal: Journal, session_id: str, loop_id: str) -> LoopRecord:
    """Return the whole record of one loop: its messages, turns and events."""
    runs = await journal.runs(session_id, run=expect_text(loop_id, "$.loop_id"))
    if not any(map(is_loop, runs)):
        reason = f"Session {session_id!r} has no loop {loop_id!r} that has begun."
        raise SessionNotFound(session_id, None, reason, "Its record() lists them.")
    story = Story(journal, session_id)
    events = await story.events(await journal.read(session_id, run=loop_id))
    record = LoopRecord(loop_id=loop_id, session_id=session_id).after_all(events)
    if record.parallel_group is not None:
        known = {run.loop_id: run for run in runs}
        (group,) = await _groups(journal, session_id, [record.parallel_group.all_loop_ids], known)
        record = record if group.selection is None else record.selected(group.selection)
    children = await _children(journal, session_id, runs[0])
    return replace(record, children_loop_ids=children)


async def _children(journal: Journal, session_id: str, own: RunOnRecord) -> tuple[str, ...]:
    """Return the loops that continue from one, in the order in which they began, except those that began much later.

    `record()` reads all loops, and so also shows a loop that continues from one that was taken back long ago.
    """
    while_it_waited = await loops_on_record(journal, session_id, limit=RUNS_WHILE_IT_WAITED, before=own.last.seq)
    begun = [run for run in while_it_waited if run.first.seq > own.first.seq]
    begun += [run async for run in _behind(journal, session_id, own)]
    return tuple(dict.fromkeys(run.loop_id for run in begun if parent_in(run) == own.loop_id))


async def _behind(journal: Journal, session_id: str, own: RunOnRecord) -> AsyncIterator[RunOnRecord]:
    """Yield the runs that began behind the end of one, until several in a row do not continue from it.

    Each step from one start to the next is one read. So neither the session's length nor that of its loops matters.
    """
    after, strangers = own.last.seq, 0
    while strangers < STRANGERS_PASSED:
        entry = await next_of_run(journal, session_id, after)
        if entry is None:
            return
        names = entry.body["loop_ids"] if entry.kind == "parallel_loop_start" else [entry.run] if entry.run else []
        runs = [run for loop in names for run in await journal.runs(session_id, run=loop)]
        for run in runs:
            yield run
        is_kin = not runs or any(parent_in(run) == own.loop_id for run in runs)
        strangers = 0 if is_kin else strangers + 1
        after = max([entry.seq, *(run.last.seq for run in runs)])


def parent_in(run: RunOnRecord) -> str | None:
    """Return the loop that a run continues from, as its start tells."""
    parent: str | None = _said_by(run).get("parent_loop_id")
    return parent


def _said_by(run: RunOnRecord) -> Mapping[str, Any]:
    """Return the body of a run's start, or nothing if its first entry is of an unknown kind, which may say anything."""
    return run.first.body if run.first.kind == "agent_start" else {}


async def read_events(
    journal: Journal, session_id: str, *, after: int | None, last: int | None, follow: bool
) -> AsyncIterator[AnyLoopEvent]:
    """Yield the events on record, in order. With `follow`, then yield those to come, as they are written."""
    for name, number in (("after", after), ("last", last)):
        if number is not None:
            expect_count(number, f"$.{name}")
    expect(follow, bool, "$.follow")
    story, cursor = Story(journal, session_id), after or 0
    entries = await journal.read(session_id, after=cursor, last=last, limit=PAGE if last is None else None)
    while True:
        for event in await story.events([entry for entry in entries if entry.kind != FORGOTTEN]):
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
    """Wait until there may be more on record. The record is the truth, so it is read again after a while anyway."""
    if isinstance(journal, Watch):
        await journal.changed(session_id, cursor, LOOK_ANYWAY)
    else:
        await asyncio.sleep(LOOK_EVERY)


class Story:
    """A reader that turns entries into events. It reads each message of a run once, and keeps it until the run ends."""

    def __init__(self, journal: Journal, session_id: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._agents: dict[str, str] = {}
        self._messages: defaultdict[str, _Spoken] = defaultdict(_Spoken)
        self._said: defaultdict[str, Said] = defaultdict(Said)
        self._read_to: dict[str, int] = {}

    async def events(self, entries: Sequence[JournalEntry]) -> list[AnyLoopEvent]:
        for loop in sorted({entry.run for entry in entries if entry.run is not None}):
            for run in await self._journal.runs(self._session_id, run=loop):
                await self._catch_up(run)
        return [self._event(entry) for entry in entries]

    async def _catch_up(self, run: RunOnRecord) -> None:
        self._agents[run.loop_id] = _said_by(run).get("agent_id", "")
        start = max(run.start, self._read_to.get(run.loop_id, 0))
        spoken = self._messages[run.loop_id]
        if run.loop_id not in self._read_to:
            for message in await self._input_of(run):
                spoken.hear(message, is_own=False)
        for message in await self._journal.messages(run.log, start, run.stop) if start < run.stop else ():
            is_own = message.metadata.get("execution_id") == run.loop_id  # a log has the messages of other runs, too
            spoken.hear(message, is_own=is_own)
            if is_own:
                self._said[run.loop_id].hear(message)
        self._read_to[run.loop_id] = max(start, run.stop)

    async def _input_of(self, run: RunOnRecord) -> Sequence[Message]:
        """Return the messages that the branches of a group answer. The session's own log has them, once for all."""
        place = _said_by(run).get("input_at")
        if not place:
            return ()
        log, _ = await self._journal.log_of(self._session_id)
        return await self._journal.messages(log, *place)

    def _event(self, entry: JournalEntry) -> AnyLoopEvent:
        spoken = self._messages[entry.run or ""]

        def message_of(message_id: str) -> Message:
            found = spoken.get(message_id)
            if found is None:
                problem = "its run's record names it, and the log lacks it"
                raise CorruptRecord(self._session_id, f"message {message_id}", problem)
            return found

        agent_id, said = self._agents.get(entry.run or "", ""), self._said[entry.run or ""]
        event = event_of(entry, self._session_id, agent_id, message_of, said)
        # Nothing names a run's messages after its end, and a long record must not be in memory as a whole.
        if isinstance(event, AgentEnd):
            self._said.pop(event.loop_id, None)
            self._messages.pop(event.loop_id, None)
            self._read_to.pop(event.loop_id, None)
        return event


class _Spoken:
    """The messages of a log that a run may name, by id.

    Messages of several runs may share an id. A run means the last one of them before its own last answer. A run that
    has not answered means the last of all.
    """

    def __init__(self) -> None:
        self._known: dict[str, Message] = {}
        self._later: dict[str, Message] = {}
        self._has_answered = False

    def hear(self, message: Message, *, is_own: bool) -> None:
        if is_own:
            self._known |= self._later
            self._later.clear()
            self._has_answered = True
        copies = self._later if message.id in self._known and not is_own else self._known
        copies[message.id] = message

    def get(self, message_id: str) -> Message | None:
        known = self._known.get(message_id)
        return known if self._has_answered else self._later.get(message_id, known)
