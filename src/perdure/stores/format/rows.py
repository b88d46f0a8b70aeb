"""Rows of logs and of records, and the checksums that tell whether a row is what was written. All stores share them."""

from __future__ import annotations

import hashlib
import re
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor
from typing import Literal, NamedTuple

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionConflict
from perdure.model.ids import new_id
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.transcript import LogRef
from perdure.protocols import Entry, JournalEntry, RunOnRecord
from perdure.stores.format.packing import pack_entries

Values = dict[str, bytes]
LAST = 2**63 - 1
"""The greatest number of a row."""
Stretch = tuple[int | str, int, int]
"""A log, a first position, and the position after the last."""
Attachments = Sequence[tuple[int, codec.Attachment]]
"""The images and files of several messages, each with the place of its message among them."""


def checksum(body: bytes, *place: int) -> int:
    """Return a checksum of bytes at a place. A row that was moved fails it, like one that was changed."""
    seed = 0
    for number in place:
        seed = (seed_of(seed) + number) & 0xFFFFFFFF
    return zlib.crc32(body, seed)


def seed_of(number: int) -> int:
    """Return the seed for the checksums of all rows under a number."""
    # Stored checksums depend on this factor, so it never changes.
    return (number * 1000003) & 0xFFFFFFFF


def check_row(body: bytes, crc: int | None, session_id: str | None, position: str, *place: int) -> None:
    """Raise CorruptRecord unless a row matches its checksum. If that is None, the engine protects the row itself."""
    if crc is None:
        return
    try:
        matches = checksum(body, *place) == crc
    except TypeError:  # damage can change a column's type, too
        matches = False
    if not matches:
        raise CorruptRecord(session_id, position, "its checksum does not match")


def key_checksum(sid: int, name: bytes, digest: bytes, version: int) -> int:
    """Return the checksum of an idempotency key's row."""
    return checksum(b"%b\0%b" % (name, digest), sid, version)


def log_checksum(log: int, sid: int, name: bytes) -> int:
    """Return the checksum of a log's row, which names the session of the log."""
    return checksum(name, log, sid)


def decode_row(body: bytes, session_id: str | None, position: str) -> Message:
    try:
        return codec.decode_message(body)
    except InvalidData as error:
        raise CorruptRecord(session_id, position, str(error)) from None


def operation_id() -> str:
    """Return a mark by which a writer that got no answer can recognise its own write."""
    return new_id()[-12:]


Order = Literal["created", "updated"]
_MINUTE = 60


def minute_of(time: float) -> int:
    """Return the minute of a time. Lists by time of update are indexed by it.

    A save sets it only when it changes, so few saves pay for the indexes. A page is sorted within each minute.
    """
    return floor(time / _MINUTE)


class ListPlace(NamedTuple):
    """A session's place in a list: its time of creation or update, then its number in the store."""

    time: float
    number: int

    def next(self, order: Order) -> str:
        """Return a page's `next`, with which the next page begins after this place."""
        return f"{_MARKS[order]}{self.time!r}_{self.number}"


def page_start(after: str | None, order: Order) -> ListPlace | None:
    """Return the place that a page's `next` names."""
    if after is None:
        return None
    found = _NEXT.fullmatch(after)
    if found is None or int(found["number"]) >= 2**63:
        raise InvalidData("$.after", f"{after!r} is not a page's `next`")
    if found["mark"] != _MARKS[order]:
        raise InvalidData("$.after", f"{after!r} is of a list in another order than {order!r}; begin without `after`")
    return ListPlace(float(found["time"]), int(found["number"]))


_MARKS: Mapping[Order, str] = {"created": "", "updated": "u"}
_NEXT = re.compile(r"(?P<mark>u?)(?P<time>-?[0-9]{1,20}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?)_(?P<number>[0-9]{1,19})")


def another_session(session: AgentSession | AgentSessionInfo) -> SessionConflict:
    """Return the error for a stored session with the same id and version that was created at another time."""
    return SessionConflict(
        session.id,
        session.version,
        session.version,
        f"Session {session.id!r} has been erased and created again since this one was loaded. Nothing was saved. "
        "Load it again and repeat the action, or create this one under another id.",
    )


def runs_in(
    entries: Iterable[JournalEntry],
    stretch_of: Callable[[str], tuple[LogRef, int, int]],
    *,
    limit: int | None = None,
    before: int | None = None,
    run: str | None = None,
) -> list[RunOnRecord]:
    """Return the runs in a record that is read whole, for stores that keep no index of them."""
    ends: dict[str, tuple[JournalEntry, JournalEntry]] = {}
    for entry in entries:
        if entry.run is not None and run in (None, entry.run):
            ends[entry.run] = (ends.get(entry.run, (entry, entry))[0], entry)
    asked = [(loop, first, last) for loop, (first, last) in ends.items() if before is None or first.seq < before]
    chosen = asked if limit is None else asked[max(0, len(asked) - limit) :]
    return [RunOnRecord(loop, first, last, *stretch_of(loop)) for loop, first, last in chosen]


class Batch(msgspec.Struct, frozen=True):
    """The entries that one append puts on record, packed, and the first and last place of each run among them."""

    count: int
    run: str | None
    reach: Mapping[str, tuple[int, int]]
    body: bytes

    @property
    def is_of_one_run(self) -> bool:
        """True if the first entry names a run, and no entry names another one."""
        return len(self.reach) == 1 and self.run in self.reach


def prepare_batch(entries: Sequence[Entry], smaller: Callable[[bytes], bytes] | None = None) -> Batch | None:
    """Return entries ready for the writer. Raise InvalidData before anything is written."""
    if not entries:
        return None
    reach: dict[str, tuple[int, int]] = {}
    for place, entry in enumerate(entries):
        if entry.run is not None:
            known = reach.get(entry.run)
            reach[entry.run] = (place if known is None else known[0], place)
    run, body = pack_entries(prepare_entries(entries), smaller)
    return Batch(len(entries), run, reach, body)


def prepare_entries(entries: Iterable[Entry]) -> list[tuple[Entry, bytes]]:
    """Return entries with their bytes. Raise InvalidData before anything is written."""
    prepared = []
    for entry in entries:
        codec.check_text(f"{entry.kind}/{entry.run}", "$.kind")
        prepared.append((entry, _bytes_of(entry)))
    return prepared


def _bytes_of(entry: Entry) -> bytes:
    if type(entry.body) is msgspec.Raw:  # events of a run are in bytes already
        raw = bytes(entry.body)
        if len(raw) <= codec.MAX_BYTES:
            return raw
    return codec.encode_json(entry.body, f"$.{entry.kind}")


def batch_checksum(sid: int, last: int, batch: Batch) -> int:
    return checksum(batch.body, sid, last, checksum(f"{batch.run}/{batch.count}".encode()))


def entry_checksum(sid: int, seq: int, run: str | None, kind: str, body: bytes) -> int:
    return checksum(body, sid, seq, checksum(f"{run}/{kind}".encode()))


Namer = Callable[[bytes], str]
"""A function that makes a name for a value."""


def is_keyed(name: str) -> bool:
    """Tell whether a name was made with a key. Then its value was sealed, too."""
    return name.startswith("~")


def hash_of(body: bytes) -> str:
    """Return a name for bytes: 128 bits, in 22 characters."""
    return urlsafe_b64encode(hashlib.blake2b(body, digest_size=16).digest())[:22].decode()
