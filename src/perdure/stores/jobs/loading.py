"""Reading a session: its head, the values that it names, and the messages of its view that are not at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionNotFound, VersionForgotten
from perdure.model.message import Message
from perdure.stores.cache import CachedSession
from perdure.stores.engine import Count, Job, Select
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.placement import has_end
from perdure.stores.format.rows import Stretch, Values, check_row, checksum, seed_of
from perdure.stores.jobs.claiming import count_of_erasures, number, require_absent
from perdure.stores.jobs.saving import Place, end_of_log, owner_of_log
from perdure.stores.jobs.values import gather
from perdure.stores.tapes import TapeCache, without

# To handle many messages at once is quicker than one by one, while they fit into the processor's cache.
_DECODED_AT_ONCE = 128
_READ_AT_ONCE = 512
# From this many on, the garbage collector is spared the messages. For fewer, the effort is greater than the gain.
_LONG = 4_096


class Loaded(msgspec.Struct, frozen=True):
    """The result of a load, from which the store makes the session. `head` is None if nothing has changed."""

    erasures: int
    head: StoredHead | None = None
    values: Values = {}
    fetched: Sequence[tuple[int | str, int, list[Message]]] = ()
    """Messages that were not at hand, each list with its log and first position."""
    place: Place | None = None


class Load:
    """A request for a session, in a given version or the newest. `known` is the session at hand.

    With `last`, only that many messages at the end of its view are read. A session that is wholly at hand stays so.
    """

    def __init__(
        self,
        session_id: str,
        version: int | None,
        origin: str,
        known: CachedSession | None = None,
        cached: Mapping[str, bytes] = {},
        *,
        last: int | None = None,
    ) -> None:
        self.session_id = session_id
        self.version = version
        self.known = known
        self.cached = cached
        self.last = None if known is not None and known.at_hand else last
        self._origin = origin
        self._tapes: TapeCache | None = None

    @property
    def tapes(self) -> TapeCache:
        """The tapes at hand."""
        if self._tapes is None:  # only when something has to be read: a long history has many
            self._tapes = TapeCache(self._origin, None if self.known is None else self.known.session)
        return self._tapes

    @property
    def may_be_at_hand(self) -> bool:
        """True if all that is asked for is at hand, provided that the session has not changed."""
        known = self.known
        if known is None or self.version not in (None, known.session.version):
            return False
        return known.at_hand or (self.last is not None and has_end(known.session.state.transcript, self.last))

    def missing(self, head: StoredHead, values: Values) -> list[Stretch]:
        """Return the stretches of logs that have to be read."""
        return self.tapes.missing(head.wanted(values, self.last))

    def is_current(self) -> Job[Loaded | None]:
        """Return a result without a head if the session at hand is current; None if it is not."""
        assert self.known is not None
        seen = yield from peek(self.session_id)
        return Loaded(seen[1]) if seen == (self.known.session.version, self.known.erasures) else None

    def job(self) -> Job[Loaded | None]:
        return (yield from _load(self))


def _load(asked: Load) -> Job[Loaded | None]:
    session_id, version = asked.session_id, asked.version
    rows = yield Select("session", ("sid", "version", "log", "msg_end", "evt_end"), {"id": session_id})
    if not rows:
        yield from require_absent(session_id)
        return None
    sid, newest, log, msg_end, evt_end = rows[0]
    yield from require_same(session_id, sid)
    wanted = newest if version is None else version
    found = yield Select("head", ("version", "crc", "body"), {"sid": sid, "version": wanted})
    if version is None or not found:
        if not found and version is not None:  # the newest is never forgotten: if it is missing, that is damage
            yield from _require_unforgotten(session_id, sid, wanted)
        last = yield Select("head", ("version",), {"sid": sid}, order="-version", limit=1)
        if not is_there(session_id, version, newest, last[0][0] if last else None, bool(found)):
            return None
    at, crc, body = found[0]
    if at != wanted:
        raise CorruptRecord(session_id, f"head {wanted}", f"the index finds head {at} in its place")
    head = StoredHead(unpacked_head(body, crc, session_id, sid, wanted), session_id, wanted)
    values = yield from gather(session_id, head, asked.cached)
    fetched = []
    for each, start, stop in asked.missing(head, values):
        fetched.append((each, start, (yield from read_messages(session_id, each, start, stop))))
    erasures = yield from count_of_erasures()
    return Loaded(erasures, head, values, fetched, Place(sid, log, msg_end, evt_end))


def _require_unforgotten(session_id: str, sid: int, version: int) -> Job[None]:
    """Raise VersionForgotten if a missing version was forgotten."""
    from perdure.stores.jobs.oldest import first_version  # imported late: most versions asked for are there

    with suppress(CorruptRecord):  # the caller reports the damage
        first = yield from first_version(session_id, sid)
        if version < first:
            raise VersionForgotten(session_id, version, first)


def is_there(session_id: str, version: int | None, newest: Any, last: Any, is_found: bool) -> bool:
    """Tell whether a version has a head. Raise CorruptRecord if it should have one and has none."""
    if version is None and not (newest == last and is_found):
        raise CorruptRecord(session_id, f"head {newest}", f"it should be the last one, and head {last} is")
    if is_found:
        return True
    known = [number(each, session_id, "version") for each in (newest, last) if each is not None]
    if version is not None and version > max(known, default=0):
        return False
    raise CorruptRecord(session_id, f"head {version}", "it is missing")


def require_same(session_id: str, sid: int) -> Job[None]:
    """Raise CorruptRecord if an index leads to the row of another session."""
    rows = yield Select("session", ("id",), {"sid": sid})
    found = rows[0][0] if rows else None
    if found != session_id:
        raise CorruptRecord(session_id, "in the index of ids", f"it leads to {found!r}")


def peek(session_id: str) -> Job[tuple[int, int] | None]:
    """Return a session's version, and the number of erasures so far; None if the session does not exist."""
    rows = yield Select("session", ("version",), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        return None
    return rows[0][0], (yield from count_of_erasures())


def newest_head() -> Job[None]:
    """Read the newest head of the newest session. In a sealed store it is sealed, so this needs the key."""
    yield from _head_in_order("-sid -version")


def oldest_head() -> Job[None]:
    """Read the oldest head of the oldest session."""
    yield from _head_in_order("sid version")


def _head_in_order(order: str) -> Job[None]:
    for sid, version, crc, body in (yield Select("head", ("sid", "version", "crc", "body"), order=order, limit=1)):
        # Damage may have taken the mark of a sealed row from it.
        check_row(body, crc, None, f"head {version}", sid, version)


def newest_message() -> Job[None]:
    """Read the last message of the newest log, which is in another table than heads."""
    for log, pos, crc, body in (yield Select("msg", ("log", "pos", "crc", "body"), order="-log -pos", limit=1)):
        if not is_message_sound(log, pos, crc, body):
            raise CorruptRecord(None, f"message {pos} of log {log}", "its checksum does not match")


def exists(session_id: str) -> Job[bool]:
    return (yield from peek(session_id)) is not None


def read_messages(session_id: str | None, log: int | str, start: int, stop: int) -> Job[list[Message]]:
    """Return the messages of a stretch. Raise CorruptRecord if one is missing or damaged."""
    messages: list[Message] = []
    is_long = stop - start >= _LONG
    for low in range(start, stop, _READ_AT_ONCE):
        high = min(stop, low + _READ_AT_ONCE)
        where = {"log": log, "pos >=": low, "pos <": high}
        rows = yield Select("msg", ("pos", "crc", "body"), where, order="pos")
        some = decoded(session_id, log, low, high, rows)
        if is_long:
            _spare_collector(some)
        messages += some
    return messages


def _spare_collector(messages: list[Message]) -> None:
    from perdure.codec.tracking import untrack  # imported late: most processes read no long session

    untrack(messages)


def decoded(session_id: str | None, log: int | str, start: int, stop: int, rows: Sequence[Any]) -> list[Message]:
    """Return the messages in rows of (position, checksum, body). Raise CorruptRecord unless the stretch is complete."""
    messages: list[Message] = []
    for low in range(0, len(rows), _DECODED_AT_ONCE):
        messages += _decoded_at_once(session_id, log, start + low, rows[low : low + _DECODED_AT_ONCE])
    if len(messages) != stop - start:
        raise CorruptRecord(session_id, f"message {start + len(messages)} of log {log}", "it is missing")
    return messages


def _decoded_at_once(session_id: str | None, log: int | str, start: int, rows: Sequence[Any]) -> list[Message]:
    positions, sums, bodies = zip(*rows, strict=True)
    if positions != tuple(range(start, start + len(rows))) or not _are_sound(log, start, sums, bodies):
        raise _damage(session_id, log, start, rows)
    try:
        return codec.decode_messages(bodies)
    except InvalidData as error:
        raise CorruptRecord(session_id, f"a message from {start} on in log {log}", str(error)) from None


def _are_sound(log: int | str, start: int, sums: Sequence[Any], bodies: Sequence[Any]) -> bool:
    if not isinstance(log, int):  # in files, each line has a checksum of its own
        return True
    seed = seed_of(log)
    try:
        return sums == tuple(map(crc32, bodies, range(seed + start, seed + start + len(bodies))))
    except TypeError:  # a flipped bit can turn bytes into a text
        return False


def _damage(session_id: str | None, log: int | str, start: int, rows: Sequence[Any]) -> CorruptRecord:
    """Return the error for the first row that is missing or damaged."""
    for expected, (pos, crc, body) in enumerate(rows, start):
        if pos != expected:
            return CorruptRecord(session_id, f"message {expected} of log {log}", "it is missing")
        if not is_message_sound(log, pos, crc, body):
            return CorruptRecord(session_id, f"message {pos} of log {log}", "its checksum does not match")
    raise AssertionError("it is called where something is wrong")


def is_message_sound(log: int | str, pos: int, crc: int | None, body: bytes) -> bool:
    """Tell whether a message's row matches its checksum. In files, the engine checks each line."""
    return not isinstance(log, int) or (type(body) is bytes and checksum(body, log, pos) == crc)


def read_log(log: int | str, start: int, stop: int) -> Job[list[Message]]:
    """Return messages of a log, no matter who shows them. Raise SessionNotFound if it does not have them now."""
    ((held,),) = yield Count("msg", {"log": log, "pos >=": start, "pos <": stop})
    if held < stop - start and not (yield from _should_reach(log, start, stop)):
        raise SessionNotFound(f"log {log}")
    return (yield from read_messages(None, log, start, stop))


def _should_reach(log: int | str, start: int, stop: int) -> Job[bool]:
    """Tell whether a log should have all messages of a stretch, so that a missing one is damage."""
    owner = yield from owner_of_log(log)
    if owner is None:
        return False
    kept = yield Select("ref", ("log", "start", "stop"), {"child": owner, "log": log})
    if kept:  # the rest was forgotten, or the log is damaged and its heads say what it had
        return not any(without([(log, start, stop)], kept))
    ((main, msg_end),) = yield Select("session", ("log", "msg_end"), {"sid": owner})
    return (main == log and msg_end >= stop) or (yield from end_of_log(log)) >= stop
