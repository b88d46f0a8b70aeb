"""The runs of a session: a tree of runs with their branches, sub-agents and compactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.record import LoopRecord, LoopStatus
from perdure.model.stop import StopReason
from perdure.model.transcript import LogRef
from perdure.protocols import Journal, RunOnRecord
from perdure.run_journal import loops_on_record
from perdure.server.pages.texts import shortened
from perdure.sessions.sessions import Sessions

PAGE = 20
"""The most runs of a page. Each is read: with more of them, they would cost more than all else on the page."""
_LEAST_BAR = 1.5
"""The width of the bar of the shortest run, in hundredths."""
_UNDER_WAY = {
    "killed": ("bad", "killed: a worker continues it"),
    "left": ("waits", "left to a worker"),
    "waiting": ("waits", "waits for you"),
}
"""The marks of runs that have not ended, though nobody runs them."""
_MARKS = {
    LoopStatus.COMPLETED: ("done", ""),
    LoopStatus.RUNNING: ("runs", "live"),
    LoopStatus.PENDING: ("not", "not"),
    LoopStatus.REJECTED: ("bad", "bad"),
    LoopStatus.ABORTED: ("not", "not"),
    LoopStatus.FAILED: ("bad", "bad"),
}


_NATURAL_ENDS = (None, StopReason.COMPLETED, StopReason.FINISH_REASON_RECEIVED)


def standing_of(loop: LoopRecord) -> str:
    """Return the state of a run in a word. One that was stopped is completed on record, with a reason."""
    is_stopped = loop.status is LoopStatus.COMPLETED and loop.stop_reason not in _NATURAL_ENDS
    return "stopped" if is_stopped else loop.status.value


@dataclass(frozen=True)
class RunRow:
    """A run in the tree."""

    record: LoopRecord
    title: str
    icon: str
    style: str
    bar: float = 0.0
    """Its duration, in hundredths of the longest."""
    branches: Sequence[RunRow] = ()
    notes: Sequence[str] = ()

    @property
    def id(self) -> str:
        return self.record.loop_id

    @property
    def short(self) -> str:
        return self.record.loop_id[-6:]


@dataclass
class RunList:
    """A page of runs, the newest first."""

    rows: list[RunRow] = field(default_factory=list)
    older: int | None = None
    """The place on record before which the next page ends."""
    records: dict[str, LoopRecord] = field(default_factory=dict)


async def run_list(sessions: Sessions, session_id: SessionId, before: int | None, activity: str) -> RunList:
    """Return the newest runs before a place on record."""
    journal = sessions.runtime.journal
    if journal is None:
        return RunList()
    record = await sessions.record(session_id, limit=PAGE, before=before)
    on_record = {run.loop_id: run for run in await loops_on_record(journal, session_id, limit=PAGE, before=before)}
    first = min((run.first.seq for run in on_record.values()), default=1)
    own, _ = await journal.log_of(session_id)
    titles = {loop: await _title(journal, own, run) for loop, run in on_record.items()}
    longest = max((loop.duration or 0.0 for loop in record.loops), default=0.0)
    rows = {loop.loop_id: _row(loop, titles, longest) for loop in record.loops}
    # Only the newest run can be in one of these states, and it is on the first page.
    if activity in _UNDER_WAY and record.loops and before is None:
        rows[record.loops[-1].loop_id] = _under_way(rows[record.loops[-1].loop_id], activity)
    older = first if len(on_record) >= PAGE and first > 1 else None
    return RunList(list(reversed(_grouped(rows))), older, {loop.loop_id: loop for loop in record.loops})


def _row(loop: LoopRecord, titles: dict[str, str], longest: float) -> RunRow:
    icon, style = ("not", "not") if standing_of(loop) == "stopped" else _MARKS[loop.status]
    if loop.continuation_kind.kind == "compaction":
        icon, style = "fold", "fold"
    if loop.parallel_group is not None and loop.parallel_group.selected_loop_id and not loop.parallel_group.is_selected:
        icon, style = "not", "not"
    taken = loop.duration or 0.0
    bar = max(_LEAST_BAR, 100 * taken / longest) if longest and loop.duration is not None else 0.0
    title = "compaction" if icon == "fold" else titles.get(loop.loop_id) or "run"
    return RunRow(loop, title, icon, style, round(bar, 1), notes=list(_notes(loop)))


def _notes(loop: LoopRecord) -> Sequence[str]:
    """Return further facts about a run, a few words each."""
    notes = []
    if loop.usage.total_tokens:
        notes.append(f"{loop.usage.total_tokens:,} tokens")
    if loop.parallel_group is not None and loop.parallel_group.selected_loop_id:
        notes.append("selected" if loop.parallel_group.is_selected else "kept on record")
    if loop.status not in (LoopStatus.COMPLETED, LoopStatus.RUNNING):
        notes.append(loop.status.value)
    elif loop.stop_reason not in _NATURAL_ENDS:
        notes.append("stopped: " + loop.stop_reason.replace("_", " "))
    if loop.idle >= 1:
        notes.append(f"waited {loop.idle:.0f} s")
    return notes


def _under_way(row: RunRow, activity: str) -> RunRow:
    style, words = _UNDER_WAY[activity]
    return replace(row, icon="bad" if style == "bad" else "runs", style=style, notes=[*row.notes, words])


def _grouped(rows: dict[str, RunRow]) -> list[RunRow]:
    """Return rows in the order of the record. Branches of one group are rows below a row of their own."""
    made: list[RunRow] = []
    done: set[str] = set()
    for row in rows.values():
        group = row.record.parallel_group
        if row.id in done:
            continue
        if group is None or len(group.all_loop_ids) < 2:
            made.append(row)
            continue
        branches = [_branch(rows[each]) for each in group.all_loop_ids if each in rows]
        done |= {each.id for each in branches}
        notes = [f"{len(branches)} branches side by side"]
        made.append(replace(row, icon="fork", style="", bar=0.0, branches=branches, notes=notes))
    return made


def _branch(row: RunRow) -> RunRow:
    """Return the row of a branch. It is named by its model, which tells it from the others."""
    return row if row.record.config is None else replace(row, title=row.record.config.model)


async def _title(journal: Journal, own: LogRef, run: RunOnRecord) -> str:
    """Return the beginning of what a run was asked: the first message of its stretch of log."""
    place = run.first.body.get("input_at") if run.first.kind == "agent_start" else None
    if place:
        return _words(await journal.messages(own, place[0], place[0] + 1))
    return _words(await journal.messages(run.log, run.start, min(run.start + 1, run.stop)))


def _words(messages: Sequence[Message]) -> str:
    return shortened(messages[0].text, 70) if messages else ""
