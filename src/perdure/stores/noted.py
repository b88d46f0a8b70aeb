"""What a store notes of a session beside its heads, for erasures to go by, held against what the heads name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from perdure.protocols import Problem
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.rows import Stretch
from perdure.stores.moving import merged
from perdure.stores.renaming import OpenHead

_REFS = "Do not delete the session it shows, which would erase that part. Copying the store into a new one mends it."
KEPT = "It keeps text from being erased. Copying the store into a new one leaves it behind."
_USES = "Delete no other session, which might erase it. Copying the store into a new one mends it."


class Noted(NamedTuple):
    """What is noted of a session beside its heads: its logs, what it shows of others', the values it uses."""

    own: Collection[Any]
    refs: Sequence[Stretch]
    uses: Collection[str]


def wrong_notes(
    session_id: str, heads: Mapping[int, bytes], value_of: Callable[[str], bytes], noted: Noted
) -> Iterator[Problem]:
    """The notes that erasures go by, against all that the heads name."""
    cached = lru_cache(64)(value_of)  # neighbouring versions are made of much the same
    named = {key for version, raw in heads.items() for key in StoredHead(raw, session_id, version).gathered(cached)}
    for key in sorted(named - set(noted.uses)):
        what = "a version names it, and that is not noted where deletions look"
        yield Problem(session_id, f"value {key}", what, _USES)
    for key in sorted(set(noted.uses) - named):
        yield Problem(session_id, f"value {key}", "it is noted to be used, and no version names it", KEPT)
    yield from wrong_refs(session_id, stretches_in(session_id, heads, cached), noted)


def wrong_refs(session_id: str, shown: Iterable[Stretch], noted: Noted) -> Iterator[Problem]:
    foreign = [stretch for stretch in shown if stretch[0] not in noted.own]
    for log, start, stop in without(foreign, noted.refs):
        what = "the session shows it, and that is not noted where deletions look"
        yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, _REFS)
    for log, start, stop in without(noted.refs, foreign):
        what = "it is noted that the session shows it, and no version does"
        yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, KEPT)


def stretches_in(session_id: str, heads: Mapping[int, bytes], value_of: Callable[[str], bytes]) -> set[Stretch]:
    """All stretches of logs that versions name."""
    met: set[Stretch] = set()

    def meet(log: int | str, start: int, stop: int) -> int | str:
        met.add((log, start, stop))
        return log

    for version, raw in heads.items():
        OpenHead(raw, session_id, version, value_of).renamed(meet)
    return met


def without(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> Iterator[Stretch]:
    """What is in the one and not in the other."""
    spans: dict[int | str, list[tuple[int, int]]] = {}
    for log, low, high in merged(others):
        spans.setdefault(log, []).append((low, high))
    for log, begin, stop in merged(stretches):
        start, known = begin, spans.get(log, [])
        first = max(0, bisect_right(known, (start, stop)) - 1)
        for low, high in known[first:]:
            if low >= stop:
                break
            if start < low:
                yield log, start, low
            start = max(start, high)
        if start < stop:
            yield log, start, stop
