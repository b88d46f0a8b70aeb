"""A case: two verbs that meet, on one kind of store. One number chooses them, and everything random."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.pairs.promises import broken_in
from tests.pairs.settling import settle
from tests.pairs.steps import BEFORE, FAULTS, PREPARED, VERBS, Step, go_on
from tests.pairs.wire import Died
from tests.pairs.world import Process, World, opened

from perdure import PerdureError

PAIRS = [(first, second) for first in VERBS for second in VERBS]
KINDS = ("memory", "sqlite", "memory", "file", "memory", "memory", "sqlite", "memory", "postgres") * 2
ROUND = len(PAIRS) * len(KINDS)
"""The number of cases until every ordered pair has been on every kind of store."""
PATIENCE = 120.0
CHANGING = ("RunFailed", "PendingCallsChanged")
"""Refusals that change something: a failed run, and a decision about calls that do not wait any more."""


class Case:
    """The choices of a case's number. Numbers that follow each other are different pairs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.first, self.second = PAIRS[seed % len(PAIRS)]
        self.kind = KINDS[seed // len(PAIRS) % len(KINDS)]
        self.chance = Random(f"case {seed}")
        self.at_once = self.chance.random() < 0.5
        self.two_processes = self.chance.random() < 0.5

    def __str__(self) -> str:
        how = "beside" if self.at_once else "then"
        return f"{self.seed}-{self.kind}-{self.first}-{how}-{self.second}"


async def broken_by(
    case: Case, folder: Path, *, show: Callable[[World], Awaitable[None]] | None = None, **options: Any
) -> tuple[list[str], list[str]]:
    """Play a case to its end. Return the promises that it broke, and its story. `show` is given its world."""
    world = World(case.seed, case.kind, folder, **options)
    stray: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(_told(context)))
    try:
        async with asyncio.timeout(PATIENCE), opened(world):
            await play(world, case)
            await settle(world)
            found = await broken_in(world)
            if show is not None:
                await show(world)
    except TimeoutError:
        return [f"0: it hung for {PATIENCE:g} s"], world.story
    return [*found, *(f"0: nobody heard of {each}" for each in dict.fromkeys(stray) if each)], world.story


async def play(world: World, case: Case) -> None:
    """Bring the session to the beginning of the case, and do the pair."""
    await _before(world, case.chance)
    await _pair(world, case)
    await world.see()


def _told(context: dict[str, Any]) -> str:
    """Return the event loop's report of an error that nobody waited for; reports of the dead count as nothing."""
    error = context.get("exception")
    return "" if isinstance(error, Died) else f"{context['message']}: {type(error).__name__}: {error}"[:300]


async def _before(world: World, chance: Random) -> None:
    (many,) = chance.choices(range(5), (20, 30, 25, 15, 10))
    for step in chance.choices([*BEFORE], [*BEFORE.values()], k=many):
        prepared = PREPARED.get(step.__name__)
        if prepared is not None:
            await world.tolerate(f"before {step.__name__}", prepared(world, await world.process()))
        await _followed(world, step.__name__, step, await world.process())
        await world.see()


async def _followed(world: World, name: str, step: Step, at: Process) -> BaseException | None:
    """Do a verb, and follow what the session then shows. Beside other work, that is not known."""
    await world.follow()
    if world.is_at_work or await _is_busy(world):
        world.views.lose()
    error = await world.tolerate(name, step(world, at))
    if at.has_failed or at.is_gone:
        world.views.lose()
    if name == "undo":
        await world.compare_undo(error)
    await world.follow()
    return error


async def _pair(world: World, case: Case) -> None:
    """Do both verbs, at once or one after the other. A fault strikes the verb beside it, or the next one."""
    at = await world.process()
    other = await world.second_process() if case.two_processes else at
    places = dict(zip((0, 1), (at, other), strict=True))
    names = [case.first, case.second]
    for place, name in enumerate(names):
        comes_first = case.at_once or place == 0 or names[0] in FAULTS
        if name in PREPARED and comes_first:
            await world.tolerate(f"before {name}", PREPARED[name](world, await _alive(world, places[place])))
    if case.chance.random() < 0.15:
        world.limit = 9  # from here on nobody is asked; calls that wait for a person still wait
    if case.at_once:
        await _at_once(world, names, places)
    else:
        await _in_turn(world, names, places)
    for process in world.processes:
        for _ in range(2 if process.is_armed else 0):
            await world.tolerate("go on", go_on(world, process))


async def _at_once(world: World, names: list[str], places: dict[int, Process]) -> None:
    verbs = [(name, places[place]) for place, name in enumerate(names) if name not in FAULTS]
    struck = verbs[0][1] if verbs else places[0]
    for name in names:
        if name in FAULTS:
            await VERBS[name](world, struck)
    world.story.append("at once: " + ", ".join(names))
    await asyncio.gather(*(_soon(world, name, at) for name, at in verbs))


async def _soon(world: World, name: str, at: Process) -> None:
    """Begin a verb after a while, so that it also meets the other one in its middle."""
    await world.wait_turns(world.chance.choice((0, 0, 0, 5, 20, 60)))
    await world.tolerate(name, VERBS[name](world, at))


async def _in_turn(world: World, names: list[str], places: dict[int, Process]) -> None:
    world.story.append("in turn: " + ", ".join(names))
    first, second = names
    if first in FAULTS:
        await VERBS[first](world, places[1])
        await _alone(world, second, places[1])
        return
    await _alone(world, first, places[0])
    at = await _alive(world, places[1])
    if second in PREPARED:
        await world.tolerate(f"before {second}", PREPARED[second](world, at))
    await _alone(world, second, at)


async def _alone(world: World, name: str, at: Process) -> None:
    """Do a verb with nothing beside it. If it is refused, nothing may have changed."""
    if name in FAULTS:
        await VERBS[name](world, at)
        await world.tolerate("go on", go_on(world, at))
        return
    is_quiet = not world.is_at_work and not await _is_busy(world)
    before = await _trace(world)
    error = await _followed(world, name, VERBS[name], at)
    refused = isinstance(error, PerdureError) and not at.has_failed and type(error).__name__ not in CHANGING
    if is_quiet and refused and not world.is_at_work and await _trace(world) != before:
        world.model.note("broken", what=f"0: {name} was refused ({type(error).__name__}), and something has changed")


async def _is_busy(world: World) -> bool:
    """Return True if a run is under way, or was killed, or may begin at any moment.

    The inbox is read first: a queued message leaves it when the run that answers it claims the session. The other way
    round, that run could begin between the two reads and be seen by neither.
    """
    if not await world.look.exists(world.main):
        return False
    if await world.waiting_in(world.main):
        return True
    return await world.look.is_claimed(world.main) or await world.look.is_interrupted(world.main)


async def _trace(world: World) -> list[object]:
    """Return the state that a refusal must not change."""
    session = await world.shown()
    if session is None:
        return []
    record, inbox = await world.look.read(world.main), await world.look.read(world.main, inbox=True)
    return [session.version, session.status, len(record), [entry.seq for entry in inbox]]


async def _alive(world: World, process: Process) -> Process:
    return await world.process() if process.is_gone else process
