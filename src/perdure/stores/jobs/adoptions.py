"""What a session has taken over from branches: the stretches of logs that each adoption was the first to name.

Views repeat each other, so that to load each adopted one would cost the square of their number. Here heads are read
alone, and of what they share with the ones before nothing is looked at twice.
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
    """Return what was adopted by a version that tells of an adoption, and before it, oldest first.

    What the session began with is left out.
    """
    sid = yield from sid_of(session_id)
    oldest = yield from oldest_head(session_id, sid)
    found: list[tuple[Adoption, StoredHead]] = []
    while version >= oldest.head.info.version:
        head = yield from _head(session_id, sid, version)
        adoption = _adoption_in(head, session_id, version)
        if adoption is None or adoption.version != version:
            break  # a release that did not know of adoptions has copied this from another session
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
    """Return the names that logs have in every store, without those that are not known. A copy has its original's."""
    rows = yield Select("log", ("log", "sid", "name"), {"log in": sorted(logs, key=str)})
    sids = sorted({sid for _, sid, _ in rows})
    ids = dict((yield Select("session", ("sid", "id"), {"sid in": sids}))) if sids else {}
    # A copy of a copy is named by all who have kept it; the last name is the original's.
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
        """Return the stretches that a version shows or covers and no version before it did, in the view's order."""
        found = yield from gather_unmet(self._session_id, head, self._values, self._blocks)
        self._values = found.parts
        try:
            new = [each for stretch in self._named(head, found.values) for each in self._met.add(stretch)]
        except (InvalidData, KeyError, TypeError, ValueError) as error:
            raise CorruptRecord(self._session_id, f"head {head.head.info.version}", str(error)) from None
        self._blocks |= found.blocks
        return new

    def _named(self, head: StoredHead, values: Mapping[str, bytes]) -> Iterator[Stretch]:
        """Yield what a view names. Blocks that were met before are not among the values."""
        prefix, rest = (part_of_view(head, name, values) for name in ("prefix", "transcript"))
        yield from stretches_in(codec.decode_plain(_behind(self._prefix, prefix)), values)
        self._prefix = prefix
        yield from stretches_in(codec.decode_plain(rest), values)


def _behind(before: bytes, raw: bytes) -> bytes:
    """Return a list without its beginning, if that is all of another list: most views only grow at their end."""
    if raw == before:
        return b"[]"
    if len(before) > 2 and raw.startswith(before[:-1] + b","):
        return b"[" + raw[len(before) :]
    return raw


class _Stretches:
    """Stretches of logs, those that touch made one."""

    def __init__(self) -> None:
        self._ends: dict[int | str, list[tuple[int, int]]] = {}

    def add(self, stretch: Stretch) -> list[Stretch]:
        """Add a stretch. Return what of it was not there."""
        log, start, stop = stretch
        known = self._ends.setdefault(log, [])
        # The first that ends at or behind the start, and the first that begins behind the stop.
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
