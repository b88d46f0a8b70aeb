"""A home keeps one framework's sessions, for callers in any event loop or in none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from perdure import AgentSession, MemoryStore, Message, SessionConflict, SessionNotActive, connect
from perdure.adapters.home import Home
from perdure.errors import ConfigurationError, StoreError


def with_text(text: str):
    def change(session: AgentSession) -> AgentSession:
        return session.with_state(session.state.with_transcript(session.state.transcript.append(Message.user(text))))

    return change


def test_a_session_is_created_by_the_first_change(tmp_path: Path) -> None:
    """Each `asyncio.run` has another event loop, and code without one can wait."""
    home = Home("toy", f"sqlite:///{tmp_path}/a.db")
    made = asyncio.run(home.run(home.change(home.id_of("order 7"), with_text("Hi"), name="order 7")))
    again = home.wait(home.change(made.id, with_text("Bye")))
    assert (made.version, again.version, again.info.name) == (1, 2, "order 7")
    assert [message.text for message in again.state.messages] == ["Hi", "Bye"]


def test_changes_that_meet_are_all_kept() -> None:
    """A change that was overtaken is made again on top of the saved session."""
    home = Home("toy", MemoryStore())

    async def all_at_once() -> None:
        changes = [home.change(home.id_of("a"), with_text(str(number))) for number in range(40)]
        await asyncio.gather(*(home.run(change) for change in changes))

    asyncio.run(all_at_once())
    session = home.wait(home.load(home.id_of("a")))
    assert session is not None
    assert {message.text for message in session.state.messages} == {str(number) for number in range(40)}


def test_another_agents_session_is_refused() -> None:
    """Two frameworks that use one id do not write into each other's conversation."""
    store = MemoryStore()
    one, other = Home("one", store), Home("other", store)
    one.wait(one.change(one.id_of("a"), with_text("Hi")))
    with pytest.raises(SessionConflict, match="'one', not to 'other'") as raised:
        other.wait(other.change(other.id_of("a"), with_text("Hi")))
    assert raised.value.agent == "one"


def test_a_deleted_session_is_not_written_to() -> None:
    """A session that was deleted with perdure stays hidden until it is restored."""
    home = Home("toy", MemoryStore())
    session = home.wait(home.change(home.id_of("a"), with_text("Hi")))
    home.blocking_chat(session.id).delete()
    with pytest.raises(SessionNotActive, match="restore"):
        home.wait(home.change(session.id, with_text("Bye")))


def test_owners_are_apart() -> None:
    """Two owners may give their sessions the same name."""
    store = MemoryStore()
    ada, bob = (Home("toy", store, owner=owner) for owner in ("ada", "bob"))
    for home in (ada, bob):
        home.wait(home.change(home.id_of("a"), with_text(str(home.owner))))
    found = ada.wait(ada.load(ada.id_of("a")))
    assert found is not None
    assert (found.info.owner, found.state.messages[0].text) == ("ada", "ada")


def test_a_chat_has_every_verb() -> None:
    """The home loads a verb's change, awaited or not."""
    home = Home("toy", MemoryStore())
    session = home.wait(home.change(home.id_of("a"), with_text("Hi")))

    async def forked() -> str:
        fork = await home.chat(session.id).fork("b")
        await fork.inject(Message.user("And?"))
        return fork.id

    assert asyncio.run(forked()) == "b"
    fork = home.wait(home.load(home.id_of("b")))
    assert fork is not None
    assert [message.text for message in fork.state.messages] == ["Hi", "And?"]
    assert home.blocking_chat(home.id_of("b")).undo() == 1


def test_a_store_that_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
    """It belongs to another event loop."""

    async def given() -> None:
        async with connect(f"sqlite:///{tmp_path}/a.db") as sessions:
            Home("toy", sessions.store)

    with pytest.raises(ConfigurationError, match="nobody has opened"):
        asyncio.run(given())


def test_a_store_that_was_given_is_not_for_forked_children() -> None:
    """Its sessions in memory are the parent's."""
    home = Home("toy", MemoryStore())
    home.wait(home.change(home.id_of("a"), with_text("Hi")))
    child = os.fork()
    if not child:
        try:
            home.wait(home.load(home.id_of("a")))
        except StoreError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
