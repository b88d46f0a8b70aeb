"""Finding messages by their ids: the places where they may be, and the sessions of these places.

Saves keep no index of ids. An engine with a search index has one in there, and fills it at the first question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from perdure import codec
from perdure.aio import in_turns
from perdure.errors import InvalidData
from perdure.model.session import SessionStatus
from perdure.model.transcript import LogRef
from perdure.protocols import MessagePlace
from perdure.stores.engine import Job, Row, Select
from perdure.stores.jobs.claiming import stored_id
from perdure.stores.jobs.lines import noted_by_owners, with_descendants
from perdure.stores.jobs.loading import is_message_sound
from perdure.stores.jobs.saving import is_log_sound

MOST_PLACES = 1_000
"""The most places of one id that are read. An id of that many messages identifies none of them."""
_READ_AT_ONCE = 4_096
_COLUMNS = ("sid", "id", "owner", "status", "created")
Spot = tuple[int | str, int]
"""A log, and a position in it."""


class Asked(NamedTuple):
    """A request for the places of a message, in the sessions of one owner or of all."""

    message_id: str
    owner: str | None
    limit: int


def number_of(message_id: str) -> int:
    """Return the number that an index has in place of an id: 64 bits, which say nothing about an erased message."""
    digest = blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def named(message_id: str) -> Job[list[Spot]]:
    """Return the places where a message may have an id, by reading all messages, for engines without an index."""
    # Bytes are compared first. Only the rows that contain the id are decoded later.
    needle = msgspec.json.encode(message_id)
    found: list[Spot] = []
    for (log,) in (yield Select("log", ("log",), order="log")):
        start = 0
        while True:
            where = {"log": log, "pos >=": start}
            rows = yield Select("msg", ("pos", "body"), where, order="pos", limit=_READ_AT_ONCE)
            found += ((log, pos) for pos, body in in_turns(rows) if type(body) is bytes and needle in body)
            if len(rows) < _READ_AT_ONCE:
                break
            start = rows[-1][0] + 1
    return found


def places_of(asked: Asked, spots: Iterable[Spot], origin: str) -> Job[list[MessagePlace]]:
    """Return the spots that have the message and may be shown. Those in the newest sessions come first."""
    found: list[tuple[float, int, MessagePlace]] = []
    for log, pos in [*spots][:MOST_PLACES]:
        rows = yield Select("msg", ("crc", "body"), {"log": log, "pos": pos})
        if not any(_is_of(asked.message_id, log, pos, *row) for row in rows):
            continue
        session = yield from _shown_by(log, pos, asked.owner)
        if session is not None:
            sid, session_id, _, _, created = session
            found.append((created, sid, MessagePlace(stored_id(session_id), LogRef(origin, log), pos)))
    found.sort(key=lambda each: (*each[:2], each[2].position), reverse=True)
    return [place for _, _, place in found[: asked.limit]]


def _is_of(message_id: str, log: int | str, pos: int, crc: int | None, body: bytes) -> bool:
    """Tell whether a row is sound, and has the message with this id."""
    try:
        return is_message_sound(log, pos, crc, body) and codec.decode_message(body).id == message_id
    except InvalidData:
        return False


def _shown_by(log: int | str, pos: int, owner: str | None) -> Job[Row | None]:
    """Return the session that is named for a message; None if it is hidden, or belongs to another owner.

    It is the session whose log has the message. If that is gone or hidden, it is the oldest that still shows it.
    """
    own = yield from _session_of(log)
    if own is not None:
        return own if owner in (None, own[2]) else None
    where = {"log": log, "start <=": pos, "stop >": pos}
    shown = yield Select("ref", ("child", "since"), where)
    heirs = yield from with_descendants(child for child, since in shown if since is None)
    sids = sorted({*heirs, *(child for child, _ in shown)})
    rows = (yield Select("session", _COLUMNS, {"sid in": sids}, order="sid")) if sids else []
    return next(_open(row for row in rows if owner in (None, row[2])), None)


def _session_of(log: int | str) -> Job[Row | None]:
    """Return the session of a log; None if it is gone or hidden, or if that is not certain.

    A session that has forgotten some of its log has rows for the rest, as others do. So it is found like those.
    """
    for sid, name, crc in (yield Select("log", ("sid", "name", "crc"), {"log": log})):
        if is_log_sound(log, sid, name, crc) and not (yield from noted_by_owners({log: sid})):
            return next(_open((yield Select("session", _COLUMNS, {"sid": sid}))), None)
    return None


def _open(rows: Iterable[Row] | Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if row[3] != SessionStatus.DELETED.value)
