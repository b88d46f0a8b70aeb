"""A room for many beside each other, or for one alone."""

from __future__ import annotations

import asyncio

import pytest

from perdure.workers.room import Room


async def test_many_are_in_it_beside_each_other() -> None:
    room = Room()
    async with asyncio.timeout(5), room.beside(), room.beside():
        pass


async def test_one_alone_waits_for_the_others_and_holds_up_those_behind() -> None:
    """Nobody shares it with one that is alone, and nobody passes one that wants to be."""
    room, inside, order = Room(), asyncio.Event(), list[str]()
    leave = asyncio.Event()

    async def first() -> None:
        async with room.beside():
            inside.set()
            await leave.wait()
            order.append("beside")

    async def alone(name: str) -> None:
        async with room.alone():
            order.append(f"{name} begins")
            await asyncio.sleep(0.01)
            order.append(f"{name} ends")

    async def last() -> None:
        async with room.beside():
            order.append("behind")

    tasks = [asyncio.create_task(first())]
    await inside.wait()
    tasks += [asyncio.create_task(each) for each in (alone("one"), alone("two"), last())]
    await asyncio.sleep(0.05)
    assert order == []
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["beside", "one begins", "one ends", "two begins", "two ends", "behind"]


async def test_one_that_gives_up_waiting_lets_the_others_in() -> None:
    room = Room()
    async with room.beside():
        waiting = asyncio.create_task(room.alone().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(5), room.beside():
            pass
