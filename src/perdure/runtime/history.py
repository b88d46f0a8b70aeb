"""Reading the record: loops by page or one by one, and events as they were and as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.loop_events import AnyLoopEvent, ParallelLoopEnd
from perdure.model.message import Message
from perdure.model.record import LoopRecord, SessionRecord, with_children
from perdure.model.session import AgentSessionInfo
from perdure.protocols import Journal, JournalEntry, RunOnRecord
from perdure.recording import event_of

LOOK_EVERY = 0.05


async def read_record(
    journal: Journal, info: AgentSessionInfo, *, limit: int | None, before: int | None
) -> SessionRecord:
    """A session's record with the headers of its loops: what each was, from what, how it ended, what it cost."""
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
    """The headers of runs; branches know which of them was selected: that is told right behind the last of them."""
    ends = {run.loop_id: run.last.seq for run in runs}
    headers = {run.loop_id: _header(info, run) for run in runs}
    for group in {header.parallel_group.all_loop_ids for header in headers.values() if header.parallel_group}:
        last = max(ends[loop_id] for loop_id in group if loop_id in ends)
        for entry in await journal.read(info.id, after=last, limit=1):
            event = event_of(entry, info.id, "", _unread)
            if isinstance(event, ParallelLoopEnd):
                headers |= {loop_id: headers[loop_id].selected(event) for loop_id in group if loop_id in headers}
    return list(headers.values())


def _header(info: AgentSessionInfo, run: RunOnRecord) -> LoopRecord:
    record = LoopRecord(loop_id=run.loop_id, session_id=info.id)
    entries = (run.first, run.last) if run.last.seq > run.first.seq else (run.first,)
    for entry in entries:
        if entry.kind in ("agent_start", "agent_end"):
            record = record.after(event_of(entry, info.id, "", _unread), keep_event=False)
    return record


def _unread(message_id: str) -> Message:
    """Stands for a message that a header does not show."""
    return Message("assistant", (), message_id)


async def read_loop(journal: Journal, session_id: str, loop_id: str) -> LoopRecord:
    """The whole record of one loop: its messages, turns and events."""
    runs = await journal.runs(session_id, run=loop_id)
    if not runs:
        raise SessionNotFound(f"loop {loop_id} of {session_id}")
    entries = await journal.read(session_id, run=loop_id)
    message_of = await _messages_of(journal, session_id, runs)
    record = LoopRecord(loop_id=loop_id, session_id=session_id)
    for event in _events(session_id, entries, message_of):
        record = record.after(event)
    return record


def _events(
    session_id: str, entries: Iterable[JournalEntry], message_of: Callable[[str], Message]
) -> Iterable[AnyLoopEvent]:
    agent_of: dict[str | None, str] = {}
    for entry in entries:
        if entry.kind == "agent_start":
            agent_of[entry.run] = entry.body.get("agent_id", "")
        yield event_of(entry, session_id, agent_of.get(entry.run, ""), message_of)


async def _messages_of(journal: Journal, session_id: str, runs: Sequence[RunOnRecord]) -> Callable[[str], Message]:
    by_id: dict[str, Message] = {}
    for run in runs:
        if run.start < run.stop:
            by_id |= {message.id: message for message in await journal.messages(run.log, run.start, run.stop)}

    def message_of(message_id: str) -> Message:
        if message_id not in by_id:
            raise CorruptRecord(session_id, f"message {message_id}", "its run's record names it, and the log lacks it")
        return by_id[message_id]

    return message_of


async def read_events(
    journal: Journal, session_id: str, *, after: int | None, last: int | None, follow: bool
) -> AsyncIterator[AnyLoopEvent]:
    """Events on record, in order; then, if asked to follow, those to come as they are written."""
    cursor = after or 0
    entries = await journal.read(session_id, after=cursor, last=last)
    while True:
        if entries:
            loops = {entry.run for entry in entries if entry.run is not None}
            runs = [run for loop in sorted(loops) for run in await journal.runs(session_id, run=loop)]
            message_of = await _messages_of(journal, session_id, runs)
            for event in _events(session_id, entries, message_of):
                yield event
            cursor = entries[-1].seq
        elif not follow:
            return
        else:
            await asyncio.sleep(LOOK_EVERY)
        if not follow and last is not None:
            return
        entries = await journal.read(session_id, after=cursor, limit=1000)
