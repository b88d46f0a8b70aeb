"""What a change is sent as, and what is known of the session that it is a change to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any
from zlib import crc32

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionBusy
from perdure.model.ids import replaced_time
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.stores.claims import Holder
from perdure.stores.format.placement import transcripts_of
from perdure.stores.format.rows import seed_of

MOST_WANTED = 16
MOST_AT_ONCE = 256

KEY_IS_SOUND = (
    "key.seal = hashtextextended(key.name, hashtextextended(key.digest, hashint8extended(key.version, key.sid)))"
    " AND key.name_hash = hashtextextended(key.name, key.sid)"
)
LOG_IS_SOUND = "log.seal = hashtextextended(log.name, hashint8extended(log.sid, log.log))"


def require_log(session_id: str | None, log: int, is_sound: bool) -> None:
    """Raise CorruptRecord unless the row that says whose log it is, is what was written."""
    if not is_sound:
        raise CorruptRecord(session_id, f"log {log}", "its checksum does not match")


def plain(text: str) -> str:
    """Text as PostgreSQL can hold it: it knows no NUL."""
    return text.replace("\\", "\\\\").replace("\x00", "\\0") if "\x00" in text or "\\" in text else text


def restored(stored: str) -> str:
    """The text that `plain` was given."""
    if "\\" not in stored:
        return stored
    return "\\".join(part.replace("\\0", "\x00") for part in stored.split("\\\\"))


def given_time() -> float | None:
    """The time to be used instead of the database's own, if somebody has set one."""
    time = replaced_time()
    return None if time is None else time.timestamp()


def holder_of(session_id: str, raw: str) -> Holder:
    try:
        return msgspec.json.decode(raw, type=Holder)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(session_id, "claim", str(error)) from None


def require_gone(session_id: str, raw: str) -> None:
    holder = holder_of(session_id, raw)
    if not holder.is_gone:
        raise SessionBusy(session_id, holder.owner)


class Place(msgspec.Struct, frozen=True):
    """Where a session's rows go: its numbers, and where its log and its record end."""

    sid: int
    log: int
    msg_end: int = 0
    evt_end: int = 0

    def moved(self, messages: int, entries: int) -> Place:
        return Place(self.sid, self.log, self.msg_end + messages, self.evt_end + entries)


class Facts(msgspec.Struct, frozen=True):
    """How the database found a session when a change to it was tried, and whether it was made."""

    n: int
    done: bool
    sid: int | None
    log: int
    version: int
    created: float
    msg_end: int
    evt_end: int
    epoch: int
    claim: str | None
    stands: bool | None
    op: str
    erasures: int
    told: object = None

    @property
    def place(self) -> Place:
        assert self.sid is not None
        return Place(self.sid, self.log, self.msg_end, self.evt_end)


class Parcel:
    """The rows of a batch of changes, on their way into one statement."""

    def __init__(self) -> None:
        self._tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ops", "msgs", "runs", "values", "refs")}
        self._pieces: list[bytes] = []
        self._size = 0

    def put(self, table: str, **columns: Any) -> None:
        self._tables[table].append(columns)

    def bytes_at(self, body: bytes) -> int:
        """Where bytes stand among all that is sent, counted from 1 as SQL does."""
        self._pieces.append(body)
        self._size += len(body)
        return self._size - len(body) + 1

    def put_messages(self, n: int, log: int, start: int, bodies: Sequence[bytes]) -> None:
        seed = seed_of(log)
        for pos, body in enumerate(bodies, start):
            crc = crc32(body, seed + pos)
            self.put("msgs", n=n, log=log, pos=pos, crc=crc, start=self.bytes_at(body), size=len(body))

    def parameters(self) -> dict[str, Any]:
        tables: dict[str, Any] = {name: msgspec.json.encode(rows).decode() for name, rows in self._tables.items()}
        return {**tables, "blob": b"".join(self._pieces)}


def wanted_of(session: AgentSession) -> list[int] | None:
    """The stretches that a load of a settled session reads, in threes; None if they are many, or long."""
    merged: list[list[int]] = []
    views = [session.state.transcript, *_outputs(session)]
    for span in (span for view in views for span in view.spans()):
        assert span.tape.ref is not None
        log, start, stop = int(span.tape.ref.key), span.start, span.stop
        last = merged[-1] if merged else None
        if last is not None and last[0] == log and last[1] <= start <= last[2]:
            last[2] = max(last[2], stop)
        elif not any(each[0] == log and each[1] <= start and stop <= each[2] for each in merged):
            merged.append([log, start, stop])
        if len(merged) > MOST_WANTED:
            return None
    if sum(stop - start for _, start, stop in merged) > MOST_AT_ONCE:
        return None
    return [number for stretch in merged for number in stretch]


def _outputs(session: AgentSession) -> Iterable[Any]:
    """The views of a state come as its transcript, then an input and an output for each step."""
    return list(transcripts_of(session.state))[2::2]


def decode_rows(
    session_id: str | None, log: int, start: int, stop: int, rows: Sequence[tuple[int, int, bytes]]
) -> list[Message]:
    """The messages in (position, checksum, body), which have to be all of a stretch; CorruptRecord if they are not."""
    seed = seed_of(log)
    for expected, (pos, crc, body) in zip(count(start), rows, strict=False):
        if pos != expected:
            raise CorruptRecord(session_id, f"message {expected} of log {log}", "it is missing")
        if crc32(body, seed + pos) != crc:
            raise CorruptRecord(session_id, f"message {pos} of log {log}", "its checksum does not match")
    if len(rows) != stop - start:
        raise CorruptRecord(session_id, f"message {start + len(rows)} of log {log}", "it is missing")
    try:
        return codec.decode_messages([body for _, _, body in rows])
    except InvalidData as error:
        raise CorruptRecord(session_id, f"a message from {start} on in log {log}", str(error)) from None
