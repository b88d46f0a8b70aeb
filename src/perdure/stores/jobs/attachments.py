"""Images and files: their bytes, each once under its hash, and the messages that show them.

A message names bytes by their hash. A row of `attached` repeats that, and reading and erasing use these rows. Forks
show their parent's messages, so bytes are never noted or kept for a fork.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.stores.engine import Delete, Insert, Job, Select
from perdure.stores.format.rows import LAST, Attachments, Stretch
from perdure.stores.jobs.claiming import sid_of
from perdure.stores.jobs.lines import noted, own_stretches

if TYPE_CHECKING:
    from perdure.stores.jobs.tally import Tally

_AT_ONCE = 512
Place = tuple[int | str, int]
"""A log, and the position of a message in it. A position below 0 is an item in the inbox of the log's session."""


def write(attachments: Attachments, log: int | str, start: int) -> Job[None]:
    """Write the bytes that messages bring along, and note which message shows which."""
    bodies = {each.hash: each for _, each in attachments if each.body is not None}
    if bodies:
        rows = [(each.hash, each.size, each.body) for each in bodies.values()]
        yield Insert("blob", ("hash", "size", "body"), rows, or_set=(), whose=("log", log))
    noted_at = dict.fromkeys((each.hash, log, start + place) for place, each in attachments)
    yield Insert("attached", ("hash", "log", "pos"), [*noted_at], or_set=())


def require_reachable(session_id: str, sid: int, hashes: Iterable[str], shown: Iterable[Stretch]) -> Job[None]:
    """Raise InvalidData if one of the hashes is in no message that the session has, or shows of others.

    A caller that may write a message that names bytes may also read them. So it must not be enough to know a hash.
    """
    stretches = [*shown]
    for key in sorted(hashes):
        if (yield from _place_of(sid, key, stretches)) is None:
            problem = (
                f"session {session_id!r} has no file of this hash; send its bytes, as `chat.read(part)` gives them"
            )
            raise InvalidData("$.hash", problem)


def read(session_id: str, hashes: Collection[str]) -> Job[dict[str, bytes]]:
    """Return bytes that messages of a session name. Raise InvalidData for a hash that none of them names."""
    sid = yield from sid_of(session_id)
    places: dict[str, str] = {}
    shown = None
    for key in hashes:
        # First in the session's own logs. What it shows of others is read only if that is not enough.
        place = yield from _place_of(sid, key, ())
        if place is None:
            shown = (yield from noted(session_id, sid)) if shown is None else shown
            place = yield from _place_of(sid, key, shown)
        if place is None:
            yield from _require_unnamed(session_id, sid, key, shown or ())
            if not (yield Select("log", ("log",), {"sid": sid, "name": ""})):
                raise CorruptRecord(session_id, "its log", "it is missing")
            raise InvalidData("$.hash", f"session {session_id!r} has no file of the hash {key}")
        places[key] = name_of(*place)
    return (yield from read_bodies(session_id, places))


def read_bodies(session_id: str | None, places: Mapping[str, str]) -> Job[dict[str, bytes]]:
    """Return bytes by their hashes. Raise CorruptRecord, with the place, if they are missing or do not match."""
    found: dict[str, bytes] = {}
    for key, place in places.items():
        try:
            rows = yield Select("blob", ("body",), {"hash": key})
        except CorruptRecord as damage:
            raise CorruptRecord(session_id, place, f"its file {key} cannot be read: {damage.reason}") from None
        if not rows:
            raise CorruptRecord(session_id, place, f"its file {key} is missing")
        body = rows[0][0]
        if type(body) is not bytes or codec.hash_of_bytes(body) != key:
            raise CorruptRecord(session_id, place, f"the hash of its file {key} does not match")
        found[key] = body
    return found


def name_of(log: int | str, pos: int) -> str:
    """Return a text that names a place."""
    return f"message {pos} of log {log}" if pos >= 0 else f"inbox {-pos}"


def _place_of(sid: int, key: str, shown: Iterable[Stretch]) -> Job[Place | None]:
    """Return the place of a message with these bytes that a session has, or shows of others; None if it has none."""
    for log, start, stop in chain(_with_inbox((yield from own_stretches(sid))), shown):
        where = {"hash": key, "log": log, "pos >=": start, "pos <": stop}
        for (pos,) in (yield Select("attached", ("pos",), where, limit=1)):
            return log, pos
    return None


def _with_inbox(own: Collection[Stretch]) -> list[Stretch]:
    """Return stretches of a session's logs, extended to the items of its inbox, whose places are below 0."""
    whole = [log for log, start, stop in own if (start, stop) == (0, LAST)]
    in_part = [each for each in own if each[0] not in whole]
    posted = {(log, -LAST, 0) for log, _, _ in in_part}
    return [*((log, -LAST, LAST) for log in whole), *posted, *in_part]


def _require_unnamed(session_id: str, sid: int, key: str, shown: Iterable[Stretch]) -> Job[None]:
    """Raise CorruptRecord if a message names a hash that is not noted for it."""
    for log, start, stop in chain((yield from own_stretches(sid)), shown):
        for pos, hashes in (yield from named_in(log, start, stop)):
            if key in hashes:
                raise CorruptRecord(session_id, name_of(log, pos), f"that it has the file {key} is not noted")


def named_in(log: int | str, start: int = 0, stop: int = LAST) -> Job[list[tuple[int, frozenset[str]]]]:
    """Return the messages of a stretch that name bytes, each with the hashes. Unreadable ones are left out."""
    found: list[tuple[int, frozenset[str]]] = []
    while True:
        where = {"log": log, "pos >=": start, "pos <": stop}
        rows = yield Select("msg", ("pos", "body"), where, order="pos", limit=_AT_ONCE)
        for pos, body in rows:
            if hashes := hashes_in(body):
                found.append((pos, hashes))
        if len(rows) < _AT_ONCE:
            return found
        start = rows[-1][0] + 1


def hashes_in(body: object) -> frozenset[str]:
    """Return the hashes that a message's row names; none if it cannot be read."""
    try:
        return codec.hashes_in(body) if type(body) is bytes else frozenset()
    except InvalidData:  # a load and the check report it
        return frozenset()


def attached_to(logs: Collection[int | str]) -> Job[set[str]]:
    """Return the hashes that are noted for messages of logs."""
    if not logs:
        return set()
    return {key for (key,) in (yield Select("attached", ("hash",), {"log in": sorted(logs, key=str)}))}


def forget_unused(hashes: Iterable[str], tally: Tally | None = None) -> Job[None]:
    """Erase the bytes among these that no message names any more."""
    for key in hashes:
        if not (yield Select("attached", ("log",), {"hash": key}, limit=1)):
            if tally is not None:
                tally.bytes += sum(size for (size,) in (yield Select("blob", ("size",), {"hash": key})))
            yield Delete("blob", {"hash": key})


def unused() -> Job[list[str]]:
    """Return the hashes of bytes that no message names."""
    # By pages of hashes: a store may have millions of files, most of them in use.
    found: list[str] = []
    last = ""
    while page := [key for (key,) in (yield Select("blob", ("hash",), {"hash >": last}, order="hash", limit=_AT_ONCE))]:
        for key in page:
            if not (yield Select("attached", ("log",), {"hash": key}, limit=1)):
                found.append(key)
        last = page[-1]
    return found
