"""The record of a session, its runs, its inbox and its idempotency keys: reading them, and writing without a claim."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from msgspec.structs import replace

from perdure import codec
from perdure.aio import in_turns
from perdure.errors import CorruptRecord, InvalidData, SessionNotFound
from perdure.model.transcript import LogRef
from perdure.protocols import Entry, JournalEntry, Key, RunOnRecord
from perdure.stores.engine import Insert, Job, Later, Lock, Row, Select, Update, Where
from perdure.stores.format.packing import unpack_entries
from perdure.stores.format.rows import (
    LAST,
    Batch,
    Stretch,
    batch_checksum,
    entry_checksum,
    key_checksum,
    prepare_entries,
)
from perdure.stores.jobs import attachments
from perdure.stores.jobs.claiming import require_absent, sid_of
from perdure.stores.jobs.lines import noted
from perdure.stores.jobs.loading import require_same
from perdure.stores.jobs.saving import (
    BATCH_COLUMNS,
    RUN_COLUMNS,
    end_of_log,
    require_log,
    row_of_batch,
    rows_of_runs,
)

_NEAR = 256
# An empty stretch: its first entry is behind its last.
_NOWHERE = (1, 0)
_RUN = ("loop", "first_seq", "last_seq", "log", "first_pos", "end_pos")


class Asked(NamedTuple):
    """A choice of entries: those after a number, at most the first `limit` or the last `last` of them, or one run's."""

    after: int = 0
    limit: int | None = None
    last: int | None = None
    run: str | None = None

    def cut(self, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
        """Return the chosen entries, given entries in order."""
        chosen = [entry for entry in entries if self.run in (None, entry.run)]
        return chosen[: self.limit] if self.last is None else chosen[max(0, len(chosen) - self.last) :]


ALL = Asked()


def read_record(session_id: str, asked: Asked = ALL) -> Job[list[JournalEntry]]:
    """Return entries of a session's record, in order. Batches are read whole, and cut to what is asked for."""
    sid, end, _ = yield from _ends(session_id, "evt_end", "batch", "last")
    first, final = min(asked.after, end) + 1, end
    if asked.run is not None:
        reach = yield from _reach_of(session_id, sid, asked.run)
        first, final = max(first, reach[0]), min(final, reach[1])
    elif asked.last is not None:
        first = max(first, end - asked.last + 1)
    elif asked.limit is not None:
        final = min(final, first + asked.limit - 1)
    found = yield from _read_batches(session_id, sid, first, final)
    if asked.run is not None and found:
        _require_ends(session_id, asked.run, *(entry for entry in (found[0], found[-1]) if entry.seq in reach))
    return asked.cut(found)


def read_by_batch(session_id: str) -> Job[Iterator[list[JournalEntry]]]:
    """Return all entries of a record, batch by batch. Each is unpacked only when it is reached, to save memory."""
    sid, end, _ = yield from _ends(session_id, "evt_end", "batch", "last")
    return _by_batch(session_id, sid, end, *(yield from _rows_of({"sid": sid})))


def _by_batch(
    session_id: str, sid: int, end: int, rows: Iterable[Row], loops: Mapping[int, str]
) -> Iterator[list[JournalEntry]]:
    """Yield the entries of batches. Raise CorruptRecord if one is missing."""
    following = 1
    for last, count, run, crc, body in in_turns(rows):
        entries = entries_of(session_id, sid, last, count, loops.get(run), crc, body)
        if last - count + 1 != following:
            break
        yield entries
        following = last + 1
    if following != end + 1:
        raise CorruptRecord(session_id, f"event {following}", "it is missing")


def _ends(session_id: str, end: str, table: str, column: str) -> Job[tuple[int, int, int]]:
    """Return a session's number, the end of its record or inbox, and the number up to which the inbox is taken."""
    rows = yield Select("session", ("sid", end, "taken"), {"id": session_id})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    sid, noted, taken = rows[0]
    yield from require_same(session_id, sid)
    newest = yield Select(table, (column,), {"sid": sid}, order=f"-{column}", limit=1)
    found = newest[0][0] if newest else 0
    if noted != found:
        where = f"{'event' if table == 'batch' else table} {noted}"
        raise CorruptRecord(session_id, where, f"it should be the last one, and {found} is")
    return sid, noted, taken


def _reach_of(session_id: str, sid: int, run: str) -> Job[tuple[int, int]]:
    """Return the numbers of a run's first and last entry, 1 and 0 if it has none."""
    where = {"sid": sid, "loop": run}
    rows = yield Select("run", ("first_seq", "last_seq"), where)
    if rows:
        return rows[0][0], rows[0][1]
    if (yield Select("run", ("run",), where, again=True)):
        raise CorruptRecord(session_id, f"run {run}", "the index of runs does not find it")
    return _NOWHERE


def _require_ends(session_id: str, run: str, *ends: JournalEntry) -> None:
    """Raise CorruptRecord if the entry noted as a run's first or last one belongs to another run."""
    if any(entry.run != run for entry in ends):
        raise CorruptRecord(session_id, f"run {run}", "its record does not begin and end where it is noted to")


def _read_batches(session_id: str, sid: int, first: int, final: int) -> Job[list[JournalEntry]]:
    """Return the entries from one number to another. Raise CorruptRecord if one of them is missing."""
    if first > final:
        return []
    where = yield from _stretch(sid, first, final)
    found = _unpacked(session_id, sid, *(yield from _rows_of(where)))
    wanted = [entry for entry in found if first <= entry.seq <= final]
    for expected, entry in zip_longest(range(first, final + 1), wanted):
        if entry is None or entry.seq != expected:
            raise CorruptRecord(session_id, f"event {expected}", "it is missing")
    return wanted


def read_entries(session_id: str, sid: int, numbers: Iterable[int]) -> Job[dict[int, JournalEntry]]:
    """Return entries by their numbers. Raise CorruptRecord if one of them is missing.

    The entries of a whole page of runs take as many statements as those of one run.
    """
    wanted = sorted(set(numbers))
    if not wanted:
        return {}
    batches: set[int] = set()
    for near in _neighbours(wanted):
        where = yield from _stretch(sid, near[0], near[-1])
        rows = yield Select("batch", ("last",), where, order="last")
        ends = [last for (last,) in rows if type(last) is int]  # damage can change a column's type
        batches.update(ends[place] for number in near if (place := bisect_left(ends, number)) < len(ends))
    found = {}
    for entry in _unpacked(session_id, sid, *(yield from _rows_of({"sid": sid, "last in": sorted(batches)}))):
        found[entry.seq] = entry
    for number in wanted:
        if number not in found:
            raise CorruptRecord(session_id, f"event {number}", "it is missing")
    return found


def _neighbours(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield sorted numbers in groups of numbers that are near each other.

    It is cheaper to read past the numbers between two of a group than to find each by a statement of its own.
    """
    group: list[int] = []
    for number in numbers:
        if group and number - group[-1] > _NEAR:
            yield group
            group = []
        group.append(number)
    yield group


def _stretch(sid: int, first: int, final: int) -> Job[Where]:
    """Return the condition for the batches that have the entries from one number to another."""
    # A batch has the number of its last entry. So an entry is in the first batch that ends at or after it.
    bound = yield Select("batch", ("last",), {"sid": sid, "last >=": final}, order="last", limit=1)
    return {"sid": sid, "last >=": first, "last <=": bound[0][0] if bound else LAST}


def _rows_of(where: Where) -> Job[tuple[list[Row], dict[int, str]]]:
    """Return batches in order, and the runs that they name, by their numbers."""
    rows = yield Select("batch", ("last", "count", "run", "crc", "body"), where, order="last")
    numbers = sorted({row[2] for row in rows if row[2] is not None})
    return rows, dict((yield Select("run", ("run", "loop"), {"run in": numbers}))) if numbers else {}


def _unpacked(session_id: str, sid: int, rows: Iterable[Row], loops: Mapping[int, str]) -> Iterator[JournalEntry]:
    for last, count, run, crc, body in in_turns(rows):
        yield from entries_of(session_id, sid, last, count, loops.get(run), crc, body)


def entries_of(
    session_id: str, sid: int, last: int, count: int, run: str | None, crc: int | None, body: bytes
) -> list[JournalEntry]:
    """Return the entries of a batch. Raise CorruptRecord unless its row is what was written."""
    where = f"event {last}"
    is_sound = crc is None or (type(body) is bytes and batch_checksum(sid, last, Batch(count, run, {}, body)) == crc)
    if not is_sound:
        raise CorruptRecord(session_id, where, "its checksum does not match")
    try:
        entries = unpack_entries(run, body)
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None
    if len(entries) != count:
        raise CorruptRecord(session_id, where, f"its batch should hold {count} entries, and holds {len(entries)}")
    return [JournalEntry(seq, each.kind, each.body, each.run) for seq, each in enumerate(entries, last - count + 1)]


def read_inbox(session_id: str, asked: Asked = ALL, *, taken_too: bool = False) -> Job[list[JournalEntry]]:
    """Return the items of a session's inbox that were not taken yet, or all of them, as far as they are asked for."""
    sid, end, taken = yield from _ends(session_id, "inbox_end", "inbox", "seq")
    after = min(max(asked.after, 0 if taken_too else taken), end)
    most = asked.limit if asked.run is None and asked.last is None else None
    final = end if most is None else min(end, after + most)
    columns = ("seq", "run", "kind", "crc", "body")
    rows = yield Select("inbox", columns, {"sid": sid, "seq >": after, "seq <=": final}, order="seq")
    for expected, seq in zip_longest(range(after + 1, final + 1), (row[0] for row in rows)):
        if expected != seq:
            raise CorruptRecord(session_id, f"inbox {expected}", "it is missing")
    return asked.cut([posted_of(session_id, sid, *row) for row in rows])


def read_whole_inbox(session_id: str, asked: Asked = ALL) -> Job[list[JournalEntry]]:
    """Return items of an inbox with the images and files of their messages."""
    found = yield from read_inbox(session_id, asked)
    wanted = {key: f"inbox {entry.seq}" for entry in found for key in codec.hashes_in_post(entry.body)}
    if not wanted:
        return found
    bodies = yield from attachments.read_bodies(session_id, wanted)
    return [replace(entry, body=codec.attached_post(entry.body, bodies)) for entry in found]


def posted_of(
    session_id: str, sid: int, seq: int, run: str | None, kind: str, crc: int | None, body: bytes
) -> JournalEntry:
    """Return an item of an inbox. Raise CorruptRecord unless its row is what was written."""
    is_sound = crc is None or (type(body) is bytes and entry_checksum(sid, seq, run, kind, body) == crc)
    if not is_sound:
        raise CorruptRecord(session_id, f"inbox {seq}", "its checksum does not match")
    return JournalEntry(seq, kind, codec.decode_plain(body), run)


class Post(NamedTuple):
    """A new item of an inbox, with the images and files of its messages apart, and the limits on what may wait."""

    entry: Entry
    body: bytes
    attachments: Sequence[codec.Attachment]
    priority: int = 0
    most: int | None = None
    most_of_owner: int | None = None

    @property
    def is_limited(self) -> bool:
        return self.most is not None or self.most_of_owner is not None

    @classmethod
    def of(cls, entry: Entry, priority: int = 0, most: int | None = None, most_of_owner: int | None = None) -> Post:
        """Return an item ready to be written. Raise InvalidData before anything is written."""
        codec.encode_json(entry.body, f"$.{entry.kind}")
        kept, attachments = codec.detached_post(entry.body)
        ((given, body),) = prepare_entries([Entry(entry.kind, kept, entry.run)])
        return cls(given, body, attachments, priority, most, most_of_owner)


def post(session_id: str, item: Post) -> Job[int]:
    """Put an item into a session's inbox, and return its number."""
    yield Lock((session_id,))
    place = yield from place_in_inbox(session_id)
    if place is None:
        raise SessionNotFound(session_id)
    if item.is_limited:
        from perdure.stores.jobs.waiting import require_room  # imported late: a first turn does not need it

        yield from require_room(session_id, place.owner, place.end - place.taken, item.most, item.most_of_owner)
    return (yield from put_into_inbox(session_id, place, item))


class InboxPlace(NamedTuple):
    """The end of a session's inbox, the number up to which it is taken, and the highest priority that waits in it."""

    sid: int
    log: int | str
    end: int
    taken: int
    priority: int
    owner: str | None


def place_in_inbox(session_id: str) -> Job[InboxPlace | None]:
    rows = yield Select("session", ("sid", "log", "inbox_end", "taken", "priority", "owner"), {"id": session_id})
    return InboxPlace(*rows[0]) if rows else None


def put_into_inbox(session_id: str, place: InboxPlace, item: Post) -> Job[int]:
    """Write an item after the last one, and return its number. The session's row notes that it waits."""
    sid, seq = place.sid, place.end + 1
    yield from write_inbox(sid, [(item.entry, item.body)], seq)
    if item.attachments:
        # An erasure must not find these files unused before they are noted.
        yield Lock((), "share")
        borrowed = [each.hash for each in item.attachments if each.body is None]
        shown = (yield from noted(session_id, sid)) if borrowed else ()
        yield from attachments.require_reachable(session_id, sid, borrowed, shown)
        yield from attachments.write([(0, each) for each in item.attachments], place.log, -seq)
    values: dict[str, object] = {"inbox_end": seq}
    if place.end == place.taken:
        values |= {"priority": item.priority, "since": Later(0.0)}
    elif item.priority > place.priority:
        values["priority"] = item.priority
    yield Update("session", values, {"sid": sid})
    return seq


def note(session_id: str, batch: Batch | None) -> Job[int]:
    """Put entries on a session's record without a claim, and return the number of the last one on record.

    Claims are ignored, and nothing else in the session's row changes. So a run that holds a claim is not disturbed.
    """
    yield Lock((session_id,))
    rows = yield Select("session", ("sid", "evt_end", "log", "msg_end"), {"id": session_id})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    sid, end, log, msg_end = rows[0]
    if batch is None:
        return int(end)
    last = end + batch.count
    numbers = yield from _noted_runs(sid, last, batch, (log, msg_end, msg_end))
    yield Insert("batch", BATCH_COLUMNS, [row_of_batch(sid, last, batch, numbers.get(batch.run))])
    yield Update("session", {"evt_end": last}, {"sid": sid})
    return int(last)


def _noted_runs(sid: int, last: int, batch: Batch, stretch: Stretch) -> Job[dict[str | None, int]]:
    """Extend runs to the entries of a note, and return their numbers. A run keeps its log, which may be a branch's."""
    numbers: dict[str | None, int] = {}
    for row in rows_of_runs(sid, last, batch, stretch):
        _, loop, _, last_seq, log, _, end = row
        there = yield Select("run", ("run", "log"), {"sid": sid, "loop": loop})
        if there:
            numbers[loop], own = there[0]
            grown = {"last_seq": last_seq, "end_pos": end} if own == log else {"last_seq": last_seq}
            yield Update("run", grown, {"run": numbers[loop]})
        else:
            ((numbers[loop],),) = yield Insert("run", RUN_COLUMNS, [row])
    return numbers


def write_inbox(sid: int, items: Iterable[tuple[Entry, bytes]], first: int = 1) -> Job[None]:
    rows = [
        (sid, seq, entry.run, entry.kind, entry_checksum(sid, seq, entry.run, entry.kind, body), body)
        for seq, (entry, body) in enumerate(items, first)
    ]
    if rows:
        yield Insert("inbox", ("sid", "seq", "run", "kind", "crc", "body"), rows)


def runs(
    session_id: str, origin: str, limit: int | None = None, before: int | None = None, run: str | None = None
) -> Job[list[RunOnRecord]]:
    """Return the newest runs on record, oldest first: those that began before entry `before`, or one by its id."""
    sid = yield from sid_of(session_id)
    where: dict[str, object] = {"sid": sid, "first_seq <": LAST if before is None else min(before, LAST)}
    if run is not None:
        where["loop"] = run
    rows = yield Select("run", _RUN, where, order="-first_seq", limit=limit)
    is_sought = run is not None and not rows and before is None and limit != 0
    if is_sought and (yield from _reach_of(session_id, sid, str(run))) != _NOWHERE:
        raise CorruptRecord(session_id, f"run {run}", "the index of runs does not find it")
    return (yield from _on_record(session_id, sid, origin, rows[::-1]))


def branches(session_id: str, origin: str) -> Job[list[RunOnRecord]]:
    """Return the runs that have logs of their own, oldest first. The name of such a log is the run's id."""
    sid = yield from sid_of(session_id)
    names = sorted(name for (name,) in (yield Select("log", ("name",), {"sid": sid, "name !=": ""})))
    rows = (yield Select("run", _RUN, {"sid": sid, "loop in": names}, order="first_seq")) if names else []
    return (yield from _on_record(session_id, sid, origin, rows))


def _on_record(session_id: str, sid: int, origin: str, rows: Sequence[Row]) -> Job[list[RunOnRecord]]:
    ends = yield from read_entries(session_id, sid, (seq for row in rows for seq in row[1:3]))
    yield from _require_logs(session_id, sid, rows)
    found = []
    for loop, first_seq, last_seq, log, start, stop in rows:
        first, last = ends[first_seq], ends[last_seq]
        _require_ends(session_id, loop, first, last)
        found.append(RunOnRecord(loop, first, last, LogRef(origin, log), start, stop))
    return found


def _require_logs(session_id: str, sid: int, rows: Sequence[Row]) -> Job[None]:
    """Raise CorruptRecord if a run is noted in a log of another session or of another branch."""
    numbers = sorted({row[3] for row in rows})
    there = (yield Select("log", ("log", "sid", "name"), {"log in": numbers})) if numbers else []
    names = {log: name for log, owner, name in there if owner == sid}
    for loop, _, _, log, start, stop in rows:
        if names.get(log) not in ("", loop) or not 0 <= start <= stop:
            raise CorruptRecord(session_id, f"run {loop}", "it is noted to be in another log than its own")


def log_of(session_id: str, name: str, origin: str) -> Job[tuple[LogRef, int]]:
    """Return a session's log, or a branch's, and the position after its last message."""
    sid, main, msg_end = yield from _main_log(session_id)
    rows = yield Select("log", ("log", "crc"), {"sid": sid, "name": name})
    if not rows:
        if not name:
            raise CorruptRecord(session_id, "its log", "it is missing")
        raise SessionNotFound(f"{session_id}/{name}")
    log, crc = rows[0]
    require_log(session_id, log, sid, name, crc)
    if not name:
        yield from _require_end(session_id, main, msg_end)
    return LogRef(origin, log), (yield from end_of_log(log))


def _main_log(session_id: str) -> Job[tuple[int, int | str, int]]:
    """Return a session's number, its log, and the end of the log as noted in the session's row."""
    rows = yield Select("session", ("sid", "log", "msg_end"), {"id": session_id})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    sid, log, msg_end = rows[0]
    return sid, log, msg_end


def _require_end(session_id: str, log: int | str, msg_end: int) -> Job[None]:
    """Raise CorruptRecord if the last message of a log is not the one that the session's row names."""
    end = yield from end_of_log(log)
    if end != msg_end:
        raise CorruptRecord(
            session_id, f"message {msg_end - 1} of log {log}", f"it should be the last, and {end - 1} is"
        )


def kept_of_log(session_id: str) -> Job[list[tuple[int, int]]]:
    """Return the stretches that a session keeps of its log, in order: all of it, unless it has forgotten versions."""
    sid, log, msg_end = yield from _main_log(session_id)
    yield from _require_end(session_id, log, msg_end)
    kept = yield Select("ref", ("start", "stop"), {"child": sid, "log": log}, order="start")
    return [(start, min(stop, msg_end)) for start, stop in kept or [(0, msg_end)]]


def find_key(session_id: str, name: str) -> Job[tuple[Key, int] | None]:
    """Return an idempotency key and the version that its run has saved; None if the key or the session is not there."""
    rows = yield Select("session", ("sid",), {"id": session_id})
    if not rows:
        yield from require_absent(session_id)
        return None
    sid = rows[0][0]
    where = {"sid": sid, "name": name}
    found = yield Select("key", ("name", "digest", "version", "crc"), where)
    if found:
        found_name, digest, version, crc = found[0]
        if found_name != name:
            raise CorruptRecord(session_id, f"key {name!r}", f"the index of keys leads to {found_name!r}")
        require_key(session_id, sid, name, digest, version, crc)
        return Key(name, digest), version
    # A key that is lost would let a request run again, so another way is tried before it is called unknown.
    if (yield Select("key", ("sid",), where, again=True)):
        raise CorruptRecord(session_id, f"key {name!r}", "it is noted, and its row is missing or has another name")
    return None


def require_all_keys(session_id: str, sid: int, found: int) -> Job[None]:
    """Raise CorruptRecord if another way to a session's idempotency keys finds more of them."""
    there = yield Select("key", ("sid",), {"sid": sid}, again=True)
    if len(there) != found:
        raise CorruptRecord(session_id, "its idempotency keys", f"{len(there)} are noted, and {found} are there")


def require_key(session_id: str, sid: int, name: str, digest: str, version: int, crc: int | None) -> None:
    """Raise CorruptRecord unless the row of an idempotency key is what was written."""
    if crc is None:
        return
    types = (type(name), type(digest), type(version))
    if types != (str, str, int) or key_checksum(sid, name.encode(), digest.encode(), version) != crc:
        raise CorruptRecord(session_id, f"key {name!r}", "its checksum does not match")
