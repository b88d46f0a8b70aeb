"""What a verb costs as a session grows: the same, or what it returns. Costs are counted, not timed."""

from __future__ import annotations

from tests.counted import CountingStore, Counts

import perdure
from perdure import SendParallel, Sessions
from perdure.testing import ScriptedDriver


def connected(store: CountingStore) -> Sessions:
    return perdure.connect(store, driver=ScriptedDriver(lambda _: "yes"))


async def _record(runs: int, groups: int = 0) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for number in range(runs):
            await chat.send(f"say {number}")
        for number in range(groups):
            action = SendParallel(f"which {number}?", sessions.loops, configs=["offline", "offline"])
            await sessions.execute("a", action)
        with store.counted() as counts:
            record = await chat.record()
        assert len(record.loops) == runs + 2 * groups
    return counts


async def test_a_record_takes_as_many_statements_for_many_runs_as_for_few() -> None:
    """The ends of all runs of a page are read together."""
    few, many = await _record(5), await _record(50)
    assert many.statements == few.statements
    assert many.read < 11 * few.read


async def test_a_record_of_parallel_runs_takes_as_many_statements_for_many_groups_as_for_few() -> None:
    """Which branch was selected is read for all groups together."""
    few, many = await _record(2, groups=2), await _record(2, groups=20)
    assert many.statements == few.statements
