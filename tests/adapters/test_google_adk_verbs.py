"""Perdure's own verbs on a session of ADK's, and their effect in ADK."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.adk")

from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.sessions import Session
from google.genai import types
from tests.adapters.adk_process import APP, CALLS, USER, asked

import perdure
from perdure import MemoryStore, Message, SessionBusy, SessionConflict
from perdure.adapters.google_adk import FORKED, PerdureSessionService
from perdure.adapters.home import Home


def said(text: str, role: str = "user", **given: Any) -> Event:
    content = types.Content(role=role, parts=[types.Part(text=text)])
    return Event(**{"author": "user", "invocation_id": "i-1", "content": content, **given})


def texts(session: Session | None) -> list[str | None]:
    assert session is not None
    return [event.content.parts[0].text for event in session.events if event.content and event.content.parts]


class Scene:
    """A service with one session of three events."""

    def __init__(self, store: Any = None, **given: Any) -> None:
        self.service = PerdureSessionService(store=store or MemoryStore(), **given)
        self.chat = self.service.chat(APP, USER, "s")

    async def begin(self) -> Session:
        session = await self.service.create_session(app_name=APP, user_id=USER, session_id="s", state={"n": 0})
        for number in range(3):
            event = said(f"text {number}", timestamp=float(number), actions=EventActions(state_delta={"n": number}))
            await self.service.append_event(session, event)
        return session

    async def load(self, session_id: str = "s", user: str = USER) -> Session | None:
        return await self.service.get_session(app_name=APP, user_id=user, session_id=session_id)

    async def ids(self) -> list[str]:
        return [each.id for each in (await self.service.list_sessions(app_name=APP)).sessions]


async def test_a_runner_goes_on_from_a_fork() -> None:
    """ADK finds it under its id in perdure, with the events and the state of that moment. Both change independently."""
    scene = Scene()
    await scene.service.create_session(app_name=APP, user_id=USER, session_id="s", state={"city": "Rome"})
    assert await asked(scene.service, "s", "question 1") == "answer 1"
    fork = await scene.chat.fork()
    name = FORKED + fork.id
    assert sorted(await scene.ids()) == sorted(["s", name])
    forked, own = await scene.load(name), await scene.load()
    assert forked is not None
    assert own is not None
    assert (forked.events, forked.state) == (own.events, own.state)
    assert await asked(scene.service, name, "question 2") == "answer 2"
    assert await scene.load() == own
    again = await scene.load(name)
    assert again is not None
    assert (again.id, len(again.events)) == (name, 2 * (2 + 2 * CALLS))
    assert sorted(await scene.ids()) == sorted(["s", name])
    assert scene.service.chat(APP, USER, name).id == fork.id
    await scene.service.delete_session(app_name=APP, user_id=USER, session_id=name)
    assert await scene.ids() == ["s"]
    assert await scene.load() == own


async def test_a_fork_begins_at_any_event_or_version() -> None:
    """Its state is that of the version; at an event, it is the current one."""
    scene = Scene()
    session = await scene.begin()
    names = {"app_name": APP, "user_id": USER, "session_id": "s"}
    forks = [
        await scene.service.fork_session(**names),
        await scene.service.fork_session(**names, at=2),
        await scene.service.fork_session(**names, at=session.events[0].id),
        await scene.service.fork_session(**names, version=3),
    ]
    assert [len(fork.events) for fork in forks] == [3, 2, 1, 2]
    assert [fork.state for fork in forks] == [{"n": 2}, {"n": 2}, {"n": 2}, {"n": 1}]
    assert all(fork.id.startswith(FORKED) for fork in forks)
    await scene.service.append_event(forks[1], said("else"))
    again = await scene.service.fork_session(**{**names, "session_id": forks[1].id})
    assert texts(again) == ["text 0", "text 1", "else"]
    with pytest.raises(SessionNotFoundError):
        await scene.service.fork_session(**{**names, "user_id": "bob"})


async def test_a_fork_is_shown_to_its_user_alone() -> None:
    """Any other user who asks for its id gets None, and so does every user for another agent's session."""
    store = MemoryStore()
    scene = Scene(store)
    await scene.begin()
    fork = await scene.chat.fork()
    other = Home("other", store)
    await other.run(other.keep(other.new(other.id_of("chat-1"))))
    for name in (fork.id, "chat-1", "no such", "no id at all!"):
        assert await scene.load(FORKED + name, user="bob") is None
        await scene.service.delete_session(app_name=APP, user_id="bob", session_id=FORKED + name)
    assert await scene.load(FORKED + "chat-1") is None
    assert await scene.load(FORKED + fork.id) is not None
    assert await other.run(other.load(other.id_of("chat-1"))) is not None


async def test_what_is_undone_adk_does_not_see() -> None:
    """A session that was loaded before is stale; the state stays, since it is not a message."""
    scene = Scene()
    session = await scene.begin()
    await scene.chat.trim(keep_last=1)
    with pytest.raises(StaleSessionError):
        await scene.service.append_event(session, said("late"))
    loaded = await scene.load()
    assert loaded is not None
    assert (texts(loaded), loaded.state) == (["text 2"], {"n": 2})
    await scene.chat.undo()
    assert texts(await scene.load()) == ["text 0", "text 1", "text 2"]


async def test_a_compaction_is_seen_and_can_be_taken_back() -> None:
    """ADK's next run has the shorter history, and the exact events come back."""
    scene = Scene()
    session = await scene.begin()
    for number in range(3, 40):
        await scene.service.append_event(session, said(f"text {number} " + "x" * 400, timestamp=float(number)))
    before = await scene.load()
    assert before is not None
    await scene.chat.compact(keep_last=5)
    loaded = await scene.load()
    assert loaded is not None
    assert len(loaded.events) < 20
    assert texts(loaded)[-5:] == texts(before)[-5:]
    again = await scene.load()
    assert again is not None
    assert again.events == loaded.events  # ids and times of perdure's own messages stay from load to load
    assert await asked(scene.service, "s", "question 1") == "answer 1"
    await scene.chat.uncompact()
    restored = await scene.load()
    assert restored is not None
    assert restored.events[: len(before.events)] == before.events


async def test_what_perdure_says_is_an_event() -> None:
    """Its id, time and author stay."""
    scene = Scene()
    await scene.begin()
    await scene.chat.inject([Message.user("from outside"), Message.assistant("noted", id="m-1")])
    loaded, again = await scene.load(), await scene.load()
    assert loaded is not None
    assert again is not None
    assert texts(loaded)[-2:] == ["from outside", "noted"]
    assert [event.author for event in loaded.events[-2:]] == ["user", "model"]
    assert loaded.events == again.events
    assert loaded.events[-2].timestamp > 1_700_000_000
    assert all(event.invocation_id for event in loaded.events)
    await scene.service.append_event(loaded, said("more"))
    assert texts(await scene.load())[-1] == "more"


async def test_what_perdure_answers_is_by_the_agent_that_spoke_last() -> None:
    """Under any other name ADK would quote it to the model as the words of another agent."""
    scene = Scene()
    session = await scene.begin()
    await scene.service.append_event(session, said("Indeed.", "model", author="weather"))
    await scene.chat.inject(Message.assistant("And dry."))
    await scene.chat.inject(Message.assistant("And warm."))
    loaded = await scene.load()
    assert loaded is not None
    assert [event.author for event in loaded.events[-3:]] == ["weather"] * 3


async def test_what_is_redacted_is_gone_from_adk_too() -> None:
    """It is gone at once, and the session can continue: the event keeps its place, its id and its author."""
    scene = Scene()
    session = await scene.begin()
    assert texts(await scene.load())[1] == "text 1"
    await scene.chat.redact([session.events[1].id])
    loaded = await scene.load()
    assert loaded is not None
    assert loaded.events[1].id == session.events[1].id
    assert loaded.events[1].author == "user"
    assert "text 1" not in loaded.model_dump_json()
    await scene.service.append_event(loaded, said("more"))
    assert "text 1" not in str(await scene.load())


async def test_a_deleted_session_is_not_there_until_it_is_restored() -> None:
    """ADK does not find a session that was deleted with perdure, and its id is not free."""
    scene = Scene()
    session = await scene.begin()
    await scene.chat.delete()
    assert await scene.load() is None
    assert await scene.ids() == []
    with pytest.raises(SessionNotFoundError):
        await scene.service.append_event(session, said("late"))
    with pytest.raises(AlreadyExistsError):
        await scene.service.create_session(app_name=APP, user_id=USER, session_id="s")
    await scene.chat.restore()
    assert len(texts(await scene.load())) == 3


async def test_a_session_that_perdure_runs_is_busy() -> None:
    """The event is refused with nothing stored, and lands once the run is over."""
    scene = Scene()
    session = await scene.begin()
    store = scene.service._home.shared
    key = scene.service.id_of(APP, USER, "s")
    kept = await store.load(key)
    assert kept is not None
    claim, _ = await store.claim(key, version=kept.version, owner="somebody")
    with pytest.raises(SessionBusy):
        await scene.service.append_event(session, said("now", actions=EventActions(state_delta={"user:a": 1})))
    await store.release(claim)
    assert (await scene.load()).state == {"n": 2}  # type: ignore[union-attr]
    await scene.service.append_event(session, said("now"))
    assert texts(await scene.load())[-1] == "now"


async def test_another_agents_session_is_refused() -> None:
    """Another agent has the id that the ADK session would get."""
    store = MemoryStore()
    scene = Scene(store)
    other = Home("other", store)
    await other.run(other.keep(other.new(scene.service.id_of(APP, USER, "s"))))
    with pytest.raises(SessionConflict, match="'other', not to 'google-adk'"):
        await scene.load()


async def test_a_session_belongs_to_its_user() -> None:
    """It does not show in another user's connection, and erasing its owner erases it."""
    service = PerdureSessionService(store=MemoryStore())
    for user in ("ada", "bob"):
        session = await service.create_session(app_name=APP, user_id=user, session_id="s")
        await service.append_event(session, said("Hi", actions=EventActions(state_delta={"user:n": user, "app:n": 1})))
    async with perdure.connect(service._home.shared) as sessions:
        (hers,) = await sessions.of("ada").list(tag=APP)
        assert hers.id == service.id_of(APP, "ada", "s")
        await sessions.erase_owner("ada")
    assert await service.get_session(app_name=APP, user_id="ada", session_id="s") is None
    assert await service.get_user_state(app_name=APP, user_id="ada") == {}
    left = await service.get_session(app_name=APP, user_id="bob", session_id="s")
    assert left is not None
    assert left.state == {"user:n": "bob", "app:n": 1}


async def test_owners_are_apart() -> None:
    """Services of two owners have sessions, users and apps of their own in one store."""
    store = MemoryStore()
    acme, other = (PerdureSessionService(store=store, owner=owner) for owner in ("acme", "other"))
    for service, name in ((acme, "acme"), (other, "other")):
        state = {"n": name, "user:n": name, "app:n": name}
        await service.create_session(app_name=APP, user_id=USER, session_id="s", state=state)
    for service, name in ((acme, "acme"), (other, "other")):
        (listed,) = (await service.list_sessions(app_name=APP)).sessions
        assert listed.state == {"n": name, "user:n": name, "app:n": name}
        (listed,) = (await service.list_sessions(app_name=APP, user_id=USER)).sessions
        assert listed.state["n"] == name
    await acme.delete_session(app_name=APP, user_id=USER, session_id="s")
    assert len((await other.list_sessions(app_name=APP)).sessions) == 1


async def test_it_is_found_and_shown_as_any_session(tmp_path: Path) -> None:
    """A search and a list find it, and its history shows it."""
    scene = Scene(f"sqlite:///{tmp_path}/a.db")
    await scene.begin()
    async with perdure.connect(scene.service._home.shared) as sessions:
        (hit, *_) = await sessions.search("text 1")
        assert hit.session_id == scene.chat.id
        (listed,) = await sessions.list(tag=APP)
        assert (listed.title, listed.message_count, listed.owner, listed.tags) == ("text 0", 3, USER, (APP,))


def test_code_without_an_event_loop_has_the_verbs() -> None:
    """A script can call them."""
    scene = Scene()
    asyncio.run(scene.begin())
    fork = scene.service.blocking_chat(APP, USER, "s").fork()
    assert len(texts(asyncio.run(scene.load(FORKED + fork.id)))) == 3
