"""The runs on record that are forgotten together with versions.

Entries of a record are numbered without a gap. Those of forgotten runs are replaced by empty ones, many in one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from perdure.model.ids import SessionId
from perdure.model.retention import HOLD_CHANGED
from perdure.protocols import FORGOTTEN, ArchivedSession, Entry, JournalEntry
from perdure.redaction.traces import MARK
from perdure.stores.engine import Delete, Insert, Job, Select
from perdure.stores.format.rows import Stretch, prepare_batch
from perdure.stores.jobs.archive.archived import LENT, name_of_log, run_stretches
from perdure.stores.jobs.archive.dumping import read_bodies
from perdure.stores.jobs.record import entries_of, read_entries, read_record
from perdure.stores.jobs.saving import BATCH_COLUMNS, Pack, row_of_batch
from perdure.stores.jobs.tally import Tally
from perdure.stores.tapes import without

_AT_ONCE = 256
_BLANKS_AT_ONCE = 1_000
_STAYING = (MARK, HOLD_CHANGED)
"""Kinds of entries without a run that are kept: redactions, and holds that were placed or lifted."""
_OF_GROUPS = ("parallel_loop_start", "parallel_loop_end")


class Run(NamedTuple):
    """A run on record, and the place of its messages."""

    loop: str
    first_seq: int
    last_seq: int
    log: int | str
    start: int
    stop: int
    told: Mapping[str, Any]
    """The body of its first entry; empty if that is not the start of a loop."""

    @property
    def base_version(self) -> int | None:
        """The version that it started from, if its first entry names it."""
        found = self.told.get("base_version")
        return found if type(found) is int else None

    @property
    def group(self) -> Sequence[str]:
        """The branches of its group, itself included; empty if it is in none."""
        found = self.told.get("group")
        return found if isinstance(found, list | tuple) else ()

    def stretches(self, main: int | str) -> list[Stretch]:
        """Return the stretches of its messages, and of its input if that is in another log: the session's own."""
        found = [(self.log, self.start, self.stop)]
        match self.told.get("input_at"):
            case [int() as start, int() as stop]:
                found.append((main, start, stop))
        return [each for each in found if each[1] < each[2]]


def runs_of(session_id: SessionId, sid: int, logs: Collection[int | str]) -> Job[list[Run]]:
    """Return the runs of a session's record in the order in which they began."""
    columns = ("loop", "first_seq", "last_seq", "log", "first_pos", "end_pos")
    rows = yield Select("run", columns, {"sid": sid}, order="first_seq")
    found = [Run._make((*row, {})) for row in rows]
    if any(isinstance(log, str) for log in logs):
        found = yield from _located(session_id, sid, found)
    firsts: dict[int, JournalEntry] = {}
    for first in range(0, len(found), _AT_ONCE):
        firsts |= yield from read_entries(session_id, sid, (run.first_seq for run in found[first : first + _AT_ONCE]))
    starts = {seq: entry.body for seq, entry in firsts.items() if entry.kind == "agent_start"}
    return [run._replace(told=starts.get(run.first_seq, {})) for run in found]


def _located(session_id: SessionId, sid: int, runs: Iterable[Run]) -> Job[list[Run]]:
    """Return runs with the places of their messages, found by their ids. In a file, rows name only the log."""
    keys: dict[str, int | str] = {}
    logs: dict[str, Mapping[int, bytes]] = {}
    for log, name in (yield Select("log", ("log", "name"), {"sid": sid})):
        if not name.startswith(LENT):
            keys[name] = log
            logs[name_of_log(session_id, name)] = yield from read_bodies(log)
    entries = tuple(Entry(each.kind, each.body, each.run) for each in (yield from read_record(session_id)))
    archived = ArchivedSession(session_id=session_id, heads=(), values={}, logs=logs, entries=entries)
    places = run_stretches(archived)
    found = []
    for run in runs:
        branch, start, stop = places.get(run.loop, ("", 0, 0))
        found.append(run._replace(log=keys.get(branch, run.log), start=start, stop=stop))
    return found


class ForgottenRuns:
    """The runs that are forgotten with the versions before `before`, and their erasure."""

    def __init__(self, session_id: SessionId, sid: int, before: int, runs: Sequence[Run]) -> None:
        self._session_id = session_id
        self._sid = sid
        self._before = before
        self._runs = runs
        self._gone: set[str] = set()
        self.begin: int | None = None
        """The position in the session's own log where the newer runs begin; None if they have no messages there."""

    @property
    def staying(self) -> list[Run]:
        return [run for run in self._runs if run.loop not in self._gone]

    def find(self, shown: Collection[str], waiting: str | None, kept: Sequence[Stretch], main: int | str) -> Job[None]:
        """Find the runs to forget. `shown` are the runs in versions, `kept` the stretches that these name of own logs.

        A run stays if it led to a version that is kept, or came later, or if all its messages are still shown. A run
        that an adapter has noted under a key is forgotten with the version of that key.
        """
        versions = dict((yield Select("key", ("name", "version"), {"sid": self._sid})))
        last_old = max((run.first_seq for run in self._runs if self._is_old(run)), default=0)
        for run in self._runs:
            # Entries noted by an adapter are not a run. They stay while the last of them is newer than the old runs.
            seq = run.first_seq if run.told else run.last_seq
            is_lost = seq <= last_old and not self._is_whole(run, kept, main)
            if run.loop not in shown and (is_lost or versions.get(run.loop, self._before) < self._before):
                self._gone.add(run.loop)
        self._keep_groups()
        # A waiting run continues at the end of the log, so everything after its beginning is needed.
        since = [run for run in self.staying if run.first_seq > last_old or run.loop == waiting]
        begins = [start for run in since for log, start, _ in run.stretches(main) if log == main]
        self.begin = min(begins, default=None)

    def _is_old(self, run: Run) -> bool:
        """Tell whether a run led to a version that will be forgotten. Its save made the version after its base."""
        return run.base_version is not None and run.base_version + 1 < self._before

    def _is_whole(self, run: Run, kept: Sequence[Stretch], main: int | str) -> bool:
        said = run.stretches(main)
        return bool(said) and not any(without(said, kept))

    def _keep_groups(self) -> None:
        """Keep all branches of a group of which one stays. Missing ones would look as if they were still to come."""
        staying = {run.loop for run in self.staying}
        for run in self._runs:
            if run.loop in self._gone and not staying.isdisjoint(run.group):
                self._gone.discard(run.loop)

    def erase(self, pack: Pack, tally: Tally) -> Job[None]:
        """Replace the entries of forgotten runs, and entries without a run that are older than all runs that stay."""
        if not self._gone:
            return
        gone = [run for run in self._runs if run.loop in self._gone]
        last = max(run.last_seq for run in gone)
        horizon = min((run.first_seq for run in self.staying), default=last + 1)
        record = _Record(self._session_id, self._sid, pack, tally)
        yield from record.blank(lambda entry: self._is_gone(entry, horizon), max(last, horizon - 1))
        for first in range(0, len(gone), _AT_ONCE):
            some = [run.loop for run in gone[first : first + _AT_ONCE]]
            yield Delete("run", {"sid": self._sid, "loop in": some})

    def _is_gone(self, entry: JournalEntry, horizon: int) -> bool:
        if entry.run is not None:
            return entry.run in self._gone
        if entry.kind in _OF_GROUPS:
            staying = {run.loop for run in self.staying}
            return staying.isdisjoint(entry.body.get("loop_ids", ()))
        return entry.kind not in _STAYING and entry.seq < horizon


class _Record:
    """The batches of a session's record, beginning with the first."""

    def __init__(self, session_id: str, sid: int, pack: Pack, tally: Tally) -> None:
        self._session_id = session_id
        self._sid = sid
        self._pack = pack
        self._tally = tally
        self._blank: list[tuple[int, int, bool]] = []
        """Neighbouring batches of which nothing stays: number, number of entries, and True if not empty yet."""

    def blank(self, is_gone: Any, last: int) -> Job[None]:
        """Replace entries up to the number `last` by empty ones. Batches that become empty are joined."""
        done = 0
        while done < last and (rows := (yield from self._page(done))):
            for entries in rows:
                done = entries[-1].seq
                yield from self._take(entries, [is_gone(entry) for entry in entries])
        yield from self._write_blank()

    def _page(self, after: int) -> Job[list[list[JournalEntry]]]:
        where = {"sid": self._sid, "last >": after}
        rows = yield Select("batch", ("last", "count", "run", "crc", "body"), where, order="last", limit=_AT_ONCE)
        numbers = sorted({row[2] for row in rows if row[2] is not None})
        loops = dict((yield Select("run", ("run", "loop"), {"run in": numbers}))) if numbers else {}
        self._numbers = {loop: number for number, loop in loops.items()}
        self._sizes = {row[0]: len(row[4]) for row in rows}
        return [
            entries_of(self._session_id, self._sid, last, count, loops.get(run), crc, body)
            for last, count, run, crc, body in rows
        ]

    def _take(self, entries: Sequence[JournalEntry], gone: Sequence[bool]) -> Job[None]:
        if all(gone):
            is_new = any(entry.kind != FORGOTTEN for entry in entries)
            self._blank.append((entries[-1].seq, len(entries), is_new))
            self._tally.bytes += self._sizes[entries[-1].seq] if is_new else 0
            if sum(count for _, count, _ in self._blank) >= _BLANKS_AT_ONCE:
                yield from self._write_blank()
            return
        yield from self._write_blank()
        if any(gone):
            left = [
                Entry(FORGOTTEN, {}) if is_gone else Entry(each.kind, each.body, each.run)
                for each, is_gone in zip(entries, gone, strict=True)
            ]
            yield from self._write([entries[-1].seq], left)

    def _write_blank(self) -> Job[None]:
        blank, self._blank = self._blank, []
        if any(is_new for _, _, is_new in blank):
            count = sum(count for _, count, _ in blank)
            yield from self._write([last for last, _, _ in blank], [Entry(FORGOTTEN, {})] * count)

    def _write(self, batches: Sequence[int], entries: Sequence[Entry]) -> Job[None]:
        """Write entries in place of batches."""
        batch = prepare_batch(entries, self._pack)
        assert batch is not None
        row = row_of_batch(self._sid, batches[-1], batch, self._numbers.get(batch.run or ""))
        yield Delete("batch", {"sid": self._sid, "last in": [*batches]})
        yield Insert("batch", BATCH_COLUMNS, [row])
