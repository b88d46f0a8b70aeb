"""Changes that are bound to a version."""

from __future__ import annotations

import pytest

from perdure import InvalidData, SessionConflict, connect


async def test_a_change_is_made_to_the_version_that_was_seen() -> None:
    """If the session has changed since, nothing is changed, even if the action could be repeated."""
    async with connect("memory://", model="offline") as sessions:
        chat = await sessions.open("a")
        await chat.send("hello")
        seen = (await sessions.info("a")).version
        await sessions.expecting(seen).trim("a", 1)
        with pytest.raises(SessionConflict) as caught:
            await sessions.expecting(seen).rename("a", "late")
        assert (caught.value.expected, caught.value.found) == (seen, seen + 1)
        assert (await sessions.info("a")).version == seen + 1
        await sessions.rename("a", "any version will do")


async def test_of_two_who_saw_the_same_one_changes_it() -> None:
    async with connect("memory://", model="offline") as sessions:
        await sessions.open("a")
        bound = sessions.of("ann").expecting(1)
        await sessions.of("ann").open("b")
        await bound.rename("b", "first")
        with pytest.raises(SessionConflict):
            await bound.rename("b", "second")


async def test_what_is_no_version_is_refused() -> None:
    async with connect("memory://", model="offline") as sessions:
        with pytest.raises(InvalidData):
            sessions.expecting(-1)
