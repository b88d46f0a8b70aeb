"""The messages that a session has adopted from branches: the stretches of logs that an adoption was the first to name.

Views repeat each other, so the cost of loading each adopted one would grow with the square of their number. Here only
heads are read, and parts that they share with earlier ones are not read again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.lineage import Adoption
from perdure.model.transcript import LogRef
from perdure.protocols import Adopted
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Stretch, Values
from perdure.stores.format.views import part_of_view, stretches_in
from perdure.stores.jobs.archive.archived import LENT, name_of_log
from perdure.stores.jobs.claiming import sid_of
from perdure.stores.jobs.oldest import oldest_head
from perdure.stores.jobs.values import gather_unmet


def adoptions(session_id: str, version: int, origin: str) -> Job[list[Adopted]]:
    """Return the adoptions up to a version that contains one, oldest first.

    Messages that the session began with are left out.
    """
    sid = yield from sid_of(session_id)
    oldest = yield from oldest_head(session_id, sid)
    found: list[tuple[Adoption, StoredHead]] = []
    while version >= oldest.head.info.version:
        head = yield from _head(session_id, sid, version)
        adoption = _adoption_in(head, session_id, version)
        if adoption is None or adoption.version != version:
            break  # an older release, which knows no adoptions, has copied this from another session
        found.append((adoption, head))
        version = adoption.before if 0 < adoption.before < version else 0
    views = _Views(session_id)
    if found:
        yield from views.new_in(oldest)
    adopted = []
    for adoption, head in reversed(found):
        new = yield from views.new_in(head)
        adopted.append(Adopted(adoption.at, tuple((LogRef(origin, log), start, stop) for log, start, stop in new)))
    return adopted


def names_of(logs: Sequence[int | str]) -> Job[dict[int | str, str]]:
    """Return the names that logs have in every store. A copy has its original's name. Unknown logs are left out."""
    rows = yield Select("log", ("log", "sid", "name"), {"log in": sorted(logs, key=str)})
    sids = sorted({sid for _, sid, _ in rows})
    ids = dict((yield Select("session", ("sid", "id"), {"sid in": sids}))) if sids else {}
    # The name of a copy of a copy begins with those who have kept it. The last part is the original's name.
    copies = {log: name.rpartition(LENT)[2] for log, _, name in rows if name.startswith(LENT)}
    return {log: name_of_log(ids[sid], name) for log, sid, name in rows if sid in ids} | copies


def _head(session_id: str, sid: int, version: int) -> Job[StoredHead]:
    rows = yield Select("head", ("crc", "body"), {"sid": sid, "version": version})
    if not rows:
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    crc, body = rows[0]
    return StoredHead(unpacked_head(body, crc, session_id, sid, version), session_id, version)


def _adoption_in(head: StoredHead, session_id: str, version: int) -> Adoption | None:
    try:
        told = codec.decode_plain(bytes(head.head.state)).get("adopted")
        return None if told is None else codec.convert(Adoption, told)
    except (InvalidData, AttributeError) as error:
        raise CorruptRecord(session_id, f"head {version}", str(error)) from None


class _Views:
    """The views of versions, one after another."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._values: Values = {}
        self._blocks: set[str] = set()
        self._met = _Stretches()
        self._prefix = b""

    def new_in(self, head: StoredHead) -> Job[list[Stretch]]:
        """Return the stretches that a version is the first to show or cover, in the order of its view."""
        found = yield from gather_unmet(self._session_id, head, self._values, self._blocks)
        self._values = found.parts
        try:
            new = [each for stretch in self._named(head, found.values) for each in self._met.add(stretch)]
        except (InvalidData, KeyError, TypeError, ValueError) as error:
            raise CorruptRecord(self._session_id, f"head {head.head.info.version}", str(error)) from None
        self._blocks |= found.blocks
        return new

    def _named(self, head: StoredHead, values: Mapping[str, bytes]) -> Iterator[Stretch]:
        """Yield the stretches that a view names. Blocks that were met before are not among the values."""
        prefix, rest = (part_of_view(head, name, values) for name in ("prefix", "transcript"))
        yield from stretches_in(codec.decode_plain(_behind(self._prefix, prefix)), values)
        self._prefix = prefix
        yield from stretches_in(codec.decode_plain(rest), values)


def _behind(before: bytes, raw: bytes) -> bytes:
    """Return a list in JSON without the items of an earlier one that it begins with. Most views grow at their end."""
    if raw == before:
        return b"[]"
    # Compared as bytes, so that known items are not even decoded.
    if len(before) > 2 and raw.startswith(before[:-1] + b","):
        return b"[" + raw[len(before) :]
    return raw


class _Stretches:
    """Stretches of logs, joined where they touch."""

    def __init__(self) -> None:
        self._ends: dict[int | str, list[tuple[int, int]]] = {}

    def add(self, stretch: Stretch) -> list[Stretch]:
        """Add a stretch. Return the parts of it that are new."""
        log, start, stop = stretch
        known = self._ends.setdefault(log, [])
        # `low`: the first that ends at or after the start. `high`: the first that begins after the stop.
        low = bisect_left(known, start, key=lambda each: each[1])
        high = low
        new: list[Stretch] = []
        position = start
        while high < len(known) and known[high][0] <= stop:
            if position < known[high][0]:
                new.append((log, position, known[high][0]))
            position = max(position, known[high][1])
            high += 1
        if position < stop:
            new.append((log, position, stop))
        joined = known[low:high]
        known[low:high] = [(min([start, *(each[0] for each in joined)]), max([stop, *(each[1] for each in joined)]))]
        return new
