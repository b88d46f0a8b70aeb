"""`history()`: all that a session came to show, in the order in which it did, whatever it shows now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server
from tests.stories import KINDS

import perdure
from perdure import (
    AgentState,
    Chat,
    ClearSession,
    FileStore,
    MemoryStore,
    PostgresStore,
    SendParallel,
    Sessions,
    SessionStore,
    SqliteStore,
)
from perdure.testing import ScriptedDriver

Connect = Callable[..., Sessions]


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Sessions in a store of each kind; another one for each name."""

    def connected(name: str = "here", **options: Any) -> Sessions:
        store: SessionStore
        match request.param:
            case "memory":
                store = MemoryStore()
            case "sqlite":
                store = SqliteStore(tmp_path / f"{name}.db")
            case "postgres":
                where = tmp_path / name
                store = PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
            case _:
                store = FileStore(tmp_path / name)
        return perdure.connect(store, **{"driver": ScriptedDriver(lambda _: "yes"), **options})

    return connected


async def say(chat: Chat, *lines: str) -> Chat:
    for line in lines:
        await chat.inject({"role": "user", "content": line})
    return chat


async def history(chat: Chat) -> list[str]:
    return [message.text for message in await chat.history()]


CHANGES: dict[str, Callable[[Sessions, Chat], Any]] = {
    "reset": lambda sessions, chat: chat.reset(),
    "clear": lambda sessions, chat: sessions.execute(chat.id, ClearSession()),
    "rewind": lambda sessions, chat: chat.rewind(2),
    "undo": lambda sessions, chat: chat.undo(),
    "trim": lambda sessions, chat: chat.trim(keep_last=0),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_was_adopted_stays_in_the_history(connect: Connect, change: str) -> None:
    """It stands where the session came to show it: behind what was said before, ahead of what was said after."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        branch = await say(await chat.fork(), "x", "y")
        await say(chat, "b")
        await chat.adopt(branch)
        await say(chat, "c")
        assert await history(chat) == ["a", "b", "x", "y", "c"]
        await CHANGES[change](sessions, chat)
        assert await history(chat) == ["a", "b", "x", "y", "c"]
        await say(chat, "d")
        assert await history(chat) == ["a", "b", "x", "y", "c", "d"]


async def test_each_adoption_stands_in_its_place_and_no_message_twice(connect: Connect) -> None:
    """Also where a branch had adopted another, and where one is adopted again once it has gone on."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        branch = await say(await chat.fork(), "x")
        twig = await say(await branch.fork(), "t")
        await branch.adopt(twig)
        await chat.adopt(branch)
        await chat.reset()
        await say(chat, "b")
        await say(branch, "y")
        await chat.adopt(branch)
        await chat.reset()
        assert await history(chat) == ["a", "x", "t", "b", "y"]
        assert await history(branch) == ["a", "x", "t", "y"]


async def test_what_a_branch_had_covered_is_adopted_with_it(connect: Connect) -> None:
    """What compaction says in the place of others is said by nobody, before the adoption and after it."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        branch = await say(await chat.fork(), "x", "y", "z")
        await branch.compact(compact_strategy="truncate", keep_last=1)
        await chat.adopt(branch)
        await say(chat, "b")
        await chat.compact(compact_strategy="truncate", keep_last=1)
        await chat.reset()
        assert await history(chat) == ["a", "x", "y", "z", "b"]


async def test_the_branch_may_be_erased_and_its_words_redacted(connect: Connect) -> None:
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        branch = await say(await chat.fork(), "x", "a secret of some length")
        await chat.adopt(branch)
        await chat.reset()
        await sessions.delete(branch.id)
        await sessions.gc()
        assert await history(chat) == ["a", "x", "a secret of some length"]
        await chat.redact([(await chat.history())[-1].id])
        assert await history(chat) == ["a", "x", "[redacted]"]


@pytest.mark.parametrize("alone", [True, False])
async def test_the_history_moves_to_another_store(connect: Connect, tmp_path: Path, alone: bool) -> None:
    """With the branch that was adopted, and without it."""
    async with connect() as sessions, connect("there") as there:
        chat = await say(await sessions.open("talk"), "a")
        await chat.adopt(await say(await chat.fork(dst="branch"), "x"))
        await chat.reset()
        await say(chat, "b")
        await sessions.export(tmp_path / "moved.jsonl", ["talk"] if alone else None)
        await there.import_(tmp_path / "moved.jsonl")
        moved = await there.open("talk")
        assert await history(moved) == ["a", "x", "b"]
        await moved.adopt(await say(await moved.fork(), "y"))
        await moved.reset()
        assert await history(moved) == ["a", "x", "b", "y"]


async def test_a_fork_has_what_it_began_with_and_not_what_its_parent_adopted(connect: Connect) -> None:
    """Its versions are its own: neither a rewind in it nor an adoption before it takes or adds anything."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a", "b")
        await chat.adopt(await say(await chat.fork(), "x"))
        await chat.rewind(2)
        fork = await say(await chat.fork(), "c")
        assert await history(fork) == ["a", "c"]
        await fork.rewind((await fork.history())[0].id)
        await fork.reset()
        await fork.rewind(1)
        assert await history(fork) == ["a", "c"]
        seeded = await sessions.runtime.create(perdure.AgentDefinition("a"), seed=(await chat.session()).state)
        assert seeded.state.adopted is None
        assert await history(chat) == ["a", "b", "x"]


async def test_selected_branches_and_adopted_ones_stand_in_order(connect: Connect) -> None:
    """A parallel evaluation's answer stands in a log of its own too."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        early, late = await say(await chat.fork(), "x"), await say(await chat.fork(), "y")
        await chat.adopt(early)
        await sessions.execute(chat.id, SendParallel("which?", sessions.loops, configs=["offline", "offline"]))
        await chat.adopt(late)
        await chat.reset()
        assert await history(chat) == ["a", "x", "which?", "yes", "y"]


async def test_a_history_without_adoptions_reads_no_further_version(connect: Connect) -> None:
    """One that has adopted reads one more for each time."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a", "b", "c")
        loaded: list[int | None] = []
        session_of = sessions.session

        async def counted(session_id: str, version: int | None = None) -> Any:
            loaded.append(version)
            return await session_of(session_id, version)

        sessions.session = counted  # type: ignore[method-assign]
        await chat.history()
        assert loaded == [None, 1]
        await chat.adopt(await say(await chat.fork(), "x"))
        loaded.clear()
        await chat.history()
        assert loaded == [None, 1, 5]


def test_a_state_that_never_adopted_is_stored_as_it_was() -> None:
    assert "adopted" not in AgentState().to_dict()
