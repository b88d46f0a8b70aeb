"""The text of an unfinished answer: keeping a piece of it, and reading its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

import msgspec

from perdure.errors import ClaimLost, InvalidData, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import Claim, RunProgress, Sketch
from perdure.stores.engine import Delete, Insert, Job, Lock, Row, Select
from perdure.stores.format.rows import checksum
from perdure.stores.jobs.claiming import held, holder_of, is_in_future, require_absent

COLUMNS = ("sid", "start", "crc", "body")
_Body = tuple[int, str, str, int, str]


def keep(claim: Claim, piece: Sketch) -> Job[bool]:
    """Keep a piece, unless its run has moved on. A piece that starts at 0 replaces all others."""
    yield Lock((claim.session_id,))
    rows = yield Select("session", ("sid", "evt_end"), held(claim))
    if not rows:
        raise ClaimLost(claim.session_id, claim.epoch)
    sid, end = rows[0]
    if end != piece.seq and not (yield from _is_unanswered(sid, end, piece)):
        return False
    if piece.start == 0:
        yield Delete("sketch", {"sid": sid})
    crc, body = sealed(claim.session_id, piece)
    # A write without an answer is repeated with more text, so the row may be there already.
    yield Insert("sketch", COLUMNS, [(sid, piece.start, crc, body)], or_set=("crc", "body"))
    return True


def progress(session_id: SessionId, after: int) -> Job[RunProgress]:
    rows = yield Select("session", ("sid", "evt_end", "claim", "expires"), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    sid, end, claim, expires = rows[0]
    if claim is None:
        return RunProgress(end, False, False)
    is_held = (yield from is_in_future(expires)) and not holder_of(session_id, claim).is_gone
    first = (yield Select("sketch", COLUMNS[1:], {"sid": sid, "start": 0})) if after else []
    rest = yield Select("sketch", COLUMNS[1:], {"sid": sid, "start >=": after}, order="start")
    pieces = sound_pieces(session_id, [*first, *rest])
    is_told = pieces and pieces[0].seq != end and not (yield from _is_unanswered(sid, end, pieces[0]))
    return RunProgress(end, is_held, not is_held, () if is_told else pieces)


def _is_unanswered(sid: int, end: int, piece: Sketch) -> Job[bool]:
    """Tell whether a piece's own run has put nothing on record since. Entries of others do not make a piece void."""
    rows = yield Select("run", ("last_seq",), {"sid": sid, "loop": piece.run})
    return piece.seq <= end and all(last <= piece.seq for (last,) in rows)


def sealed(session_id: str, piece: Sketch) -> tuple[int, bytes]:
    """Return the checksum and the body of a piece's row."""
    body = msgspec.json.encode((piece.seq, piece.run, piece.message_id, piece.attempt, piece.text))
    return _checksum(session_id, piece.start, body), body


def _checksum(session_id: str, start: int, body: bytes) -> int:
    # By the session's id and not its number, which the writer of a piece then need not look up.
    return checksum(body, crc32(session_id.encode()), start)


def sound_pieces(session_id: str, rows: Iterable[Row]) -> tuple[Sketch, ...]:
    """Return the pieces in rows, up to the first damaged one; nothing if they do not belong together."""
    found = tuple(_sound(session_id, rows))
    # Rows may be read one by one, while the pieces of another answer replace these.
    return found if all(piece.seq == found[0].seq for piece in found) else ()


def _sound(session_id: str, rows: Iterable[Row]) -> Iterator[Sketch]:
    for start, crc, body in rows:
        piece = piece_of(session_id, start, crc, body)
        if piece is None:
            return
        yield piece


_BEYOND = 1 << 32
"""The limit for the start of a piece. No answer is that long, and a checksum has 32 bits for a number."""


def piece_of(session_id: str, start: int, crc: int | None, body: bytes) -> Sketch | None:
    """Return the piece in a row; None if the row is not what was written."""
    # Damage can change a column's type, too.
    if type(start) is not int or type(body) is not bytes or not 0 <= start < _BEYOND:
        return None
    if crc is not None and crc != _checksum(session_id, start, body):
        return None
    try:
        seq, run, message_id, attempt, text = msgspec.json.decode(body, type=_Body)
        return Sketch(run, message_id, text, start, attempt, seq)
    except (msgspec.MsgspecError, InvalidData):
        return None
