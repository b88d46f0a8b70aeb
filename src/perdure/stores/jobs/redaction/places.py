"""Messages in logs, by their positions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from perdure.stores.format.rows import Stretch

Log = int | str


class Places:
    """A set of places in logs, sorted, so that a stretch is compared with few of them."""

    def __init__(self) -> None:
        self._positions: dict[Log, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._positions.values()))

    def __contains__(self, place: tuple[Log, int]) -> bool:
        return self.touch((place[0], place[1], place[1] + 1))

    def add(self, log: Log, position: int) -> None:
        if (log, position) not in self:
            insort(self._positions.setdefault(log, []), position)

    def logs(self) -> Iterator[Log]:
        return iter([*self._positions])

    def in_log(self, log: Log) -> list[int]:
        """Return the positions in a log."""
        return [*self._positions.get(log, ())]

    def touch(self, stretch: Stretch) -> bool:
        """Tell whether one of the places is in a stretch."""
        log, start, stop = stretch
        positions = self._positions.get(log, [])
        place = bisect_left(positions, start)
        return place < len(positions) and positions[place] < stop
