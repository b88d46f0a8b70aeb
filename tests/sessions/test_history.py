"""`history()`: everything that a session has ever shown, in that order, whatever it shows now."""

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
    """Return a function that opens sessions in a store of each kind; another name opens another store."""

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


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", CHANGES)
async def test_what_was_adopted_stays_in_the_history(connect: Connect, change: str) -> None:
    """It comes at the time of the adoption: after what was said before, and before what was said later."""
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
    """This holds if a branch had adopted another, and if one that has grown is adopted again."""
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
    """A compaction's summary is not in the history, whether it was made before the adoption or after it."""
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
        await sessions.erase(branch.id)
        await sessions.gc()
        assert await history(chat) == ["a", "x", "a secret of some length"]
        await chat.redact([(await chat.history())[-1].id])
        assert await history(chat) == ["a", "x", "[redacted]"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("alone", [True, False])
async def test_the_history_moves_to_another_store(connect: Connect, tmp_path: Path, alone: bool) -> None:
    """It moves with the branch that was adopted, and without it."""
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


async def moved(here: Sessions, there: Sessions, session_id: str, path: Path) -> Chat:
    await here.export(path / f"{session_id}.jsonl", [session_id])
    await there.import_(path / f"{session_id}.jsonl")
    return await there.open(session_id)


async def test_a_fork_that_moved_before_its_parent_brings_nothing_twice(connect: Connect, tmp_path: Path) -> None:
    """A fork has a copy of its parent's messages that it shows; so has its own fork, of messages that both show."""
    async with connect() as here, connect("there") as there, connect("third") as third:
        chat = await say(await here.open("talk"), "a", "b")
        fork = await say(await chat.fork(dst="fork"), "x")
        await say(await fork.fork(dst="twig"), "y")
        await say(chat, "c")
        twig = await moved(here, there, "twig", tmp_path)
        fork = await moved(here, there, "fork", tmp_path)
        chat = await moved(here, there, "talk", tmp_path)
        await chat.adopt(fork)
        assert await history(chat) == ["a", "b", "c", "x"]
        await chat.adopt(twig)
        assert await history(chat) == ["a", "b", "c", "x", "y"]
        await chat.reset()
        assert await history(chat) == ["a", "b", "c", "x", "y"]
        assert await history(await moved(there, third, "talk", tmp_path)) == ["a", "b", "c", "x", "y"]


async def test_a_copy_that_has_grown_apart_from_its_log_is_not_taken_for_it(connect: Connect, tmp_path: Path) -> None:
    """The parent moved, and both copies grew: one place then has two different messages."""
    async with connect() as here, connect("there") as there:
        chat = await say(await here.open("talk"), "a")
        there_too = await moved(here, there, "talk", tmp_path)
        await say(there_too, "b of there")
        await say(chat, "b of here")
        await chat.fork(dst="fork")
        await there_too.adopt(await moved(here, there, "fork", tmp_path))
        assert await history(there_too) == ["a", "b of there", "b of here"]


async def test_a_fork_has_what_it_began_with_and_not_what_its_parent_adopted(connect: Connect) -> None:
    """Its versions are its own: a rewind in it, or an adoption before it, changes nothing."""
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
    """A parallel evaluation's answer has a log of its own too."""
    async with connect() as sessions:
        chat = await say(await sessions.open(), "a")
        early, late = await say(await chat.fork(), "x"), await say(await chat.fork(), "y")
        await chat.adopt(early)
        await sessions.execute(chat.id, SendParallel("which?", sessions.loops, configs=["offline", "offline"]))
        await chat.adopt(late)
        await chat.reset()
        assert await history(chat) == ["a", "x", "which?", "yes", "y"]


async def test_a_history_loads_no_version_but_the_newest_and_the_first(connect: Connect) -> None:
    """Adopted messages are read without the views that showed them."""
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
        assert loaded == [None, 1]
        assert await history(chat) == ["a", "b", "c", "x"]


def test_a_state_that_never_adopted_is_stored_as_it_was() -> None:
    assert "adopted" not in AgentState().to_dict()


async def test_copies_of_one_message_are_told_apart_by_their_place(connect: Connect) -> None:
    """A message that was sent twice was said twice: the view and the history show both, before and after a move."""
    once = perdure.Message.user("again", id="m-1")
    async with connect() as sessions:
        chat = await sessions.open("s")
        await chat.send(once)
        await chat.send(once)
        await chat.inject(perdure.Message.user("other words", id="m-1"))
        said = ["again", "yes", "again", "yes", "other words"]
        assert [message.text for message in (await chat.session()).state.messages] == said
        assert await history(chat) == said
        await chat.reset()
        assert await history(chat) == said


async def test_an_evaluation_that_selected_nothing_leaves_the_history_readable(connect: Connect) -> None:
    """The answers of branches are not part of the history if none was selected."""

    def nobody(branches: Any) -> int:
        raise ValueError("none is good")

    async with connect() as sessions:
        chat = await say(await sessions.open("s"), "first")
        parallel = SendParallel("which?", sessions.loops, configs=["offline", "offline"], strategy=nobody)
        with pytest.raises(ValueError, match="none is good"):
            await sessions.execute("s", parallel, on_conflict="raise")
        assert await history(chat) == ["first", "which?"]
        await chat.send("next")
        assert await history(chat) == ["first", "which?", "next", "yes"]


@pytest.fixture
def undone(connect: Connect) -> Any:
    """Return a session with messages that were undone, so that its view is that of an older version."""

    async def made(sessions: Sessions) -> Chat:
        chat = await say(await sessions.open("s"), "1", "2", "3")
        await chat.undo()
        return chat

    return made


async def view(sessions: Sessions, session_id: str) -> list[str]:
    return [message.text for message in (await sessions.session(session_id)).state.messages]


async def test_undo_takes_back_a_clear(connect: Connect, undone: Any) -> None:
    """Clearing changes what is shown, also after an undo."""
    async with connect() as sessions:
        chat = await undone(sessions)
        await sessions.execute("s", ClearSession())
        assert await chat.undo() == 2
        assert await view(sessions, "s") == ["1", "2"]


async def test_undo_in_a_seeded_session_stays_in_that_session(connect: Connect, undone: Any) -> None:
    """A seed from another session brings none of its version numbers along."""
    async with connect() as sessions:
        seed = (await (await undone(sessions)).session()).state
        await sessions.runtime.create(perdure.AgentDefinition("x"), seed=seed, session_id="seeded")
        with pytest.raises(perdure.InvalidData, match="nothing to undo"):
            await sessions.undo("seeded")
        await sessions.inject("seeded", {"role": "user", "content": "4"})
        await sessions.undo("seeded")
        assert await view(sessions, "seeded") == ["1", "2"]


async def test_undo_in_a_conflicts_fork_stays_in_that_fork(connect: Connect, undone: Any) -> None:
    """A fork that a conflict has kept begins a history of its own."""

    class UndoTooLate:
        runs_model = True

        async def execute_on(self, session: Any, context: Any = None) -> Any:
            await sessions.runtime.execute(session.id, perdure.WriteMetadata("k", 1))
            return await perdure.Undo().execute_on(session, context)

    async with connect() as sessions:
        await say(await undone(sessions), "5")
        kept = await sessions.runtime.execute("s", UndoTooLate(), on_conflict="fork")
        assert await view(sessions, kept.id) == ["1", "2"]
        with pytest.raises(perdure.InvalidData, match="nothing to undo"):
            await sessions.undo(kept.id)
        await sessions.inject(kept.id, {"role": "user", "content": "6"})
        await sessions.undo(kept.id)
        assert await view(sessions, kept.id) == ["1", "2"]
