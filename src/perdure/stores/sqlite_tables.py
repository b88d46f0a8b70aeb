"""What the jobs of the SQLite store share: rows read and written, each with its checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, islice, repeat
from typing import Any
from zlib import crc32

import apsw
import msgspec

from perdure import codec
from perdure.errors import (
    CorruptRecord,
    InvalidData,
    SessionBusy,
)
from perdure.model.message import Message
from perdure.protocols import Entry
from perdure.stores.claims import Holder
from perdure.stores.format.rows import (
    Batch,
    batch_checksum,
    checksum,
    entry_checksum,
    key_checksum,
    log_checksum,
    seed_of,
)


def holder_of(session_id: str, raw: bytes) -> Holder:
    try:
        return msgspec.json.decode(raw, type=Holder)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(session_id, "claim", str(error)) from None


def require_gone(session_id: str, raw: bytes) -> None:
    holder = holder_of(session_id, raw)
    if not holder.is_gone:
        raise SessionBusy(session_id, holder.owner)


def write_messages(db: apsw.Connection, log: int, start: int, rows: Sequence[bytes]) -> None:
    if rows:
        sums = map(crc32, rows, count(seed_of(log) + start))
        numbered = zip(repeat(log), count(start), sums, rows, strict=False)
        db.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", numbered)


def meta(db: apsw.Connection, key: str) -> Any:
    """Something that the file says of itself."""
    found = first_row(db, "SELECT value FROM meta WHERE key = ?", (key,))
    if found is None:
        raise CorruptRecord(None, f"meta {key}", "it is missing")
    return found[0]


def number(found: Any, session_id: str | None, where: str) -> int:
    """A number that was read; damage can change a column's type."""
    if type(found) is not int:
        raise CorruptRecord(session_id, where, "it is no number")
    return found


def first_row(db: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> Any:
    """The first row, or None."""
    return db.execute(sql, bindings).fetchone()


def rows_of(db: apsw.Connection, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
    return db.execute(sql, bindings).fetchall()


def read_messages(db: apsw.Connection, session_id: str | None, log: int, start: int, stop: int) -> list[Message]:
    cursor = db.execute(
        "SELECT pos, crc, body FROM msg WHERE log = ? AND pos >= ? AND pos < ? ORDER BY pos", (log, start, stop)
    )
    messages: list[Message] = []
    while rows := list(islice(cursor, _ROWS_AT_ONCE)):
        messages += _decoded(session_id, log, start + len(messages), rows)
    if len(messages) != stop - start:
        raise CorruptRecord(session_id, f"message {start + len(messages)} of log {log}", "it is missing")
    return messages


# Enough to look at them all at once, which is quicker than one by one; few enough to stay in the processor's cache.
_ROWS_AT_ONCE = 128


def _decoded(session_id: str | None, log: int, start: int, rows: Sequence[Any]) -> list[Message]:
    positions, sums, bodies = zip(*rows, strict=True)
    stop, seed = start + len(rows), seed_of(log)
    try:
        expected = tuple(map(crc32, bodies, range(seed + start, seed + stop)))
    except TypeError:  # a flipped bit can make a text of bytes
        raise _damage(session_id, log, start, rows) from None
    if positions != tuple(range(start, stop)) or sums != expected:
        raise _damage(session_id, log, start, rows)
    try:
        return codec.decode_messages(bodies)
    except InvalidData as error:
        raise CorruptRecord(session_id, f"a message from {start} on in log {log}", str(error)) from None


def _damage(session_id: str | None, log: int, start: int, rows: Sequence[Any]) -> CorruptRecord:
    """What is wrong with the first row that is not what it should be."""
    for expected, (pos, crc, body) in enumerate(rows, start):
        if pos != expected:
            return CorruptRecord(session_id, f"message {expected} of log {log}", "it is missing")
        if type(body) is not bytes or checksum(body, log, pos) != crc:
            return CorruptRecord(session_id, f"message {pos} of log {log}", "its checksum does not match")
    raise AssertionError("it is called where something is wrong")


def write_batch(db: apsw.Connection, sid: int, last: int, batch: Batch | None, stretch: tuple[int, int, int]) -> None:
    """Put a batch on record, the last of whose entries has that number; its runs' messages stand in that stretch."""
    if batch is not None:
        runs = _write_runs(db, sid, last - batch.count + 1, batch.reach, stretch)
        db.execute(
            "INSERT INTO batch (sid, last, count, run, crc, body) VALUES (?, ?, ?, ?, ?, ?)",
            (sid, last, batch.count, runs.get(batch.run), batch_checksum(sid, last, batch), batch.body),
        )


def write_posted(db: apsw.Connection, sid: int, seq: int, entry: Entry, body: bytes) -> None:
    db.execute(
        "INSERT INTO inbox (sid, seq, run, kind, crc, body) VALUES (?, ?, ?, ?, ?, ?)",
        (sid, seq, entry.run, entry.kind, entry_checksum(sid, seq, entry.run, entry.kind, body), body),
    )


def _write_runs(
    db: apsw.Connection,
    sid: int,
    first: int,
    reach: Mapping[str, tuple[int, int]],
    stretch: tuple[int, int, int],
) -> dict[str | None, int]:
    """The numbers of the runs that entries belong to, by their loops' ids; each run notes how far it goes."""
    upsert = (
        "INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq, end_pos = excluded.end_pos RETURNING run"
    )
    return {
        loop: first_row(db, upsert, (sid, loop, first + start, first + end, *stretch))[0]
        for loop, (start, end) in reach.items()
    }


def new_log(db: apsw.Connection, sid: int, name: str = "") -> int:
    """Begin a log of a session, and return its number."""
    db.execute("INSERT INTO log (sid, name) VALUES (?, ?)", (sid, name))
    log = db.last_insert_rowid()
    db.execute("UPDATE log SET crc = ? WHERE log = ?", (log_checksum(log, sid, name.encode()), log))
    return log


def is_log_sound(log: int, sid: int, name: str, crc: int) -> bool:
    """Whether the row that says whose log it is, is what was written."""
    return type(sid) is int and type(name) is str and log_checksum(log, sid, name.encode()) == crc


def require_log(session_id: str | None, log: int, sid: int, name: str, crc: int) -> None:
    if not is_log_sound(log, sid, name, crc):
        raise CorruptRecord(session_id, f"log {log}", "its checksum does not match")


def write_key(db: apsw.Connection, sid: int, name: str, digest: str, version: int) -> None:
    db.execute(
        "INSERT OR REPLACE INTO key (sid, name, digest, version, crc) VALUES (?, ?, ?, ?, ?)",
        (sid, name, digest, version, key_checksum(sid, name.encode(), digest.encode(), version)),
    )


def require_key(session_id: str, sid: int, name: str, digest: str, version: int, crc: int) -> None:
    """Raise CorruptRecord unless the row of an idempotency key is what was written."""
    types = (type(name), type(digest), type(version))
    if types != (str, str, int) or key_checksum(sid, name.encode(), digest.encode(), version) != crc:
        raise CorruptRecord(session_id, f"key {name!r}", "its checksum does not match")


def require_same(found: str, session_id: str) -> None:
    """Raise CorruptRecord if the row that an index leads to is another's."""
    if found != session_id:
        raise CorruptRecord(session_id, "in the index of ids", f"it leads to {found!r}")


def require_absent(db: apsw.Connection, session_id: str) -> None:
    """Raise CorruptRecord if a session that was not found is there all the same."""
    again = "SELECT 1 FROM session INDEXED BY session_again WHERE substr(id, -4) = substr(?1, -4) AND +id = ?1"
    if first_row(db, again, (str(session_id),)) is not None:
        raise CorruptRecord(session_id, "in the index of ids", "it is missing or leads elsewhere")
