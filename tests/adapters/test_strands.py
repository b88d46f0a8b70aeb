"""Strands keeps its agents in a store, and perdure's verbs work on their messages."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("strands")

from strands import Agent
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType
from tests import postgres_server
from tests.adapters import strands_process
from tests.adapters.items import ITEMS
from tests.adapters.processes import run_and_kill, run_at_once
from tests.adapters.strands_golden import Crew, told_of
from tests.adapters.strands_process import ScriptedModel, agent_of, turns

from perdure import (
    MemoryStore,
    Message,
    OfflineDriver,
    PostgresStore,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    connect,
    connect_blocking,
)
from perdure.adapters.home import Home
from perdure.adapters.strands import PerdureSessionManager, PerdureSessionRepository
from perdure.errors import ConfigurationError, InvalidData
from perdure.sessions.family_tree import tree_of
from perdure.sessions.shared import SharedStore, shared

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))


@pytest.fixture
def store() -> Iterator[SharedStore]:
    made = shared(MemoryStore())
    yield made
    made.close()


@pytest.fixture
def repository(store: SharedStore) -> PerdureSessionRepository:
    """A repository with a session and an agent without messages."""
    return begun(PerdureSessionRepository(store=store))


def begun(repository: PerdureSessionRepository, session_id: str = "s-1") -> PerdureSessionRepository:
    repository.create_session(Session(session_id, SessionType.AGENT))
    repository.create_agent(session_id, agent())
    return repository


def agent(agent_id: str = "default", **state: Any) -> SessionAgent:
    return SessionAgent(agent_id, state, {"removed_message_count": 0}, {"model_state": {}})


def said(number: int, text: str, **more: Any) -> SessionMessage:
    role = "assistant" if number % 2 else "user"
    return SessionMessage({"role": role, "content": [{"text": text}]}, number, **more)  # type: ignore[typeddict-item]


def say(repository: PerdureSessionRepository, *texts: str, start: int = 0) -> None:
    for number, text in enumerate(texts, start):
        repository.create_message("s-1", "default", said(number, text))


def shown(repository: PerdureSessionRepository, session_id: str = "s-1", **page: int) -> list[tuple[int, str]]:
    """Return the numbers and the texts that Strands is shown."""
    messages = repository.list_messages(session_id, "default", **page)
    return [(each.message_id, each.to_message()["content"][0]["text"]) for each in messages]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def every_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PerdureSessionRepository]:
    made: Any = MemoryStore()
    if request.param == "sqlite":
        made = f"sqlite:///{tmp_path}/a.db"
    elif request.param == "postgres":
        made = PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path))
    store = shared(made)
    yield PerdureSessionRepository(store=store)
    store.close()


def test_a_repository_does_what_strands_asks_of_one(every_kind: PerdureSessionRepository) -> None:
    """Stored values come back the same; a missing one is None, or an error where Strands wants one."""
    repository = every_kind
    assert repository.read_session("s-1") is None
    assert repository.read_agent("s-1", "default") is None
    assert repository.read_message("s-1", "default", 0) is None
    assert repository.read_multi_agent("s-1", "crew") is None
    for missing in (
        lambda: repository.create_agent("s-1", agent()),
        lambda: repository.update_agent("s-1", agent()),
        lambda: repository.create_message("s-1", "default", said(0, "Hi")),
        lambda: repository.list_messages("s-1", "default"),
        lambda: repository.create_multi_agent("s-1", Crew()),  # type: ignore[arg-type]
        lambda: repository.update_multi_agent("s-1", Crew()),  # type: ignore[arg-type]
        lambda: repository.delete_session("s-1"),
    ):
        with pytest.raises(SessionException, match="not exist"):
            missing()
    begun(repository)
    for taken in (lambda: begun(repository), lambda: repository.create_agent("s-1", agent())):
        with pytest.raises(SessionException, match="already exists"):
            taken()
    created_at = repository.read_agent("s-1", "default").created_at  # type: ignore[union-attr]
    repository.update_agent("s-1", agent(seen=[1, {"b": float("inf")}], created_at="never"))
    kept = repository.read_agent("s-1", "default")
    assert kept is not None
    assert (kept.state["seen"], kept.created_at) == ([1, {"b": float("inf")}], created_at)
    repository.create_multi_agent("s-1", Crew(step=1))  # type: ignore[arg-type]
    repository.update_multi_agent("s-1", Crew(step=2))  # type: ignore[arg-type]
    assert repository.read_multi_agent("s-1", "crew") == {"step": 2}
    messages = [SessionMessage.from_dict({**each, "message_id": n}) for n, each in enumerate(ITEMS["strands"])]
    for each in messages:
        repository.create_message("s-1", "default", each)
    assert repository.list_messages("s-1", "default") == messages
    assert repository.list_messages("s-1", "default", limit=2, offset=1) == messages[1:3]
    assert repository.list_messages("s-1", "default", offset=99) == []
    assert repository.read_message("s-1", "default", 1) == messages[1]
    assert repository.read_message("s-1", "default", 99) is None
    repository.delete_session("s-1")
    assert repository.read_agent("s-1", "default") is None
    assert repository.read_session("s-1") is None


def test_an_agent_goes_on_where_it_was(store: SharedStore) -> None:
    """An agent that is made again has the messages and the state of the one before."""
    first = agent_of(store, turns(2))
    first.state.set("seen", 7)
    first("Where is order 0?")
    again = agent_of(store, turns(1))
    assert again.messages == first.messages
    assert again.state.get("seen") == 7
    again("Where is order 1?")
    assert [message["role"] for message in again.messages] == ["user", "assistant", "user", "assistant"] * 2
    assert agent_of(store, []).messages == again.messages


def test_what_agents_say_can_be_read(store: SharedStore) -> None:
    """A message of a real run is kept in parts alone."""
    made = agent_of(store, turns(1))
    made("Where is order 0?")
    messages = made._session_manager.chat.session().state.messages  # type: ignore[union-attr]
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert [type(part).__name__ for message in messages for part in message.parts] == [
        "Text",
        "ToolCall",
        "ToolResult",
        "Text",
    ]


async def test_the_first_agent_is_the_session(repository: PerdureSessionRepository, store: SharedStore) -> None:
    """`perdure show s-1` shows its messages. `perdure tree` shows further agents and multi-agents below it."""
    say(repository, "Hi", "Hello")
    repository.create_agent("s-1", agent("writer"))
    repository.create_multi_agent("s-1", Crew())  # type: ignore[arg-type]
    async with connect(store) as sessions:
        tree = await tree_of(sessions, "s-1", limit=5)
        assert {(each.kind, each.title) for each in tree.children} == {
            ("subagent", "strands “writer”"),
            ("subagent", "strands “crew”"),
        }
        assert [info.id for info in await sessions.store.list(top_level=True)] == ["s-1"]
        assert [message.text for message in (await sessions.session("s-1")).state.messages] == ["Hi", "Hello"]


def test_every_verb_by_the_id_that_the_user_knows(store: SharedStore) -> None:
    """A fork has the messages, the agent sees perdure's, and undo takes a message back."""
    agent_of(store, ["Hello."])("Hi?")
    with connect_blocking(store, driver=OfflineDriver()) as sessions:
        chat = sessions.open("s-1")
        fork = chat.fork("s-9")
        assert len(agent_of(store, [], "s-9").messages) == 2
        chat.send("Really?")
        assert [each["role"] for each in agent_of(store, []).messages] == ["user", "assistant"] * 2
        assert len(chat.diff(fork.id).common) == 2
        chat.undo()
    assert len(agent_of(store, []).messages) == 2


def test_an_emptied_session_is_still_the_agents(repository: PerdureSessionRepository) -> None:
    """After a verb that leaves no messages shown, the agent continues from the beginning."""
    for verb in ("reset", "rewind"):
        say(repository, "Hi", "Hello")
        chat = repository.chat("s-1")
        chat.reset() if verb == "reset" else chat.rewind(1)
        assert repository.read_agent("s-1", "default") is not None
        assert shown(repository) == []


def test_agents_that_begin_at_once_are_all_there(tmp_path: Path) -> None:
    """One of them is the session, whichever came first, and the others are children."""
    url, names = f"sqlite:///{tmp_path}/a.db", [f"agent-{number}" for number in range(6)]
    told = run_at_once(strands_process.begin_at_once, [(url, name) for name in names])
    repository = PerdureSessionRepository(store=url)
    assert told == [[name] for name in names]
    for name in names:
        (kept,) = repository.list_messages("s-1", name)
        assert kept.message["content"] == [{"text": name}]
    parents = [repository.chat("s-1", name).session().info.parent_id for name in names]
    assert sorted(parents, key=str) == [None, *["s-1"] * 5]
    repository._home.shared.close()


@pytest.mark.parametrize("golden", ["strands-1", "strands-2"])
def test_sessions_of_every_layout_load(store: SharedStore, golden: str) -> None:
    """In the first, a session had no messages and every agent was a child. Both are always read and continued."""
    directory = Path(__file__).parents[1] / "golden" / golden
    with connect_blocking(store) as sessions:
        sessions.import_(directory / "sessions.jsonl")
    assert json.loads(json.dumps(told_of(store))) == json.loads((directory / "told.json").read_text())
    for session_id in ("s-1", "s-2", "user@x / 4"):
        again = agent_of(store, ["Well."], session_id)
        assert again.messages
        again("And now?")
        assert agent_of(store, [], session_id).messages[-2:] == again.messages[-2:]
    repository = PerdureSessionRepository(store=store)
    repository.create_agent("s-1", agent("critic"))
    assert repository.chat("s-1", "critic").session().info.parent_id == "s-1"
    with pytest.raises(SessionException, match="already exists"):
        repository.create_agent("s-1", agent())


def test_a_taken_number_is_refused(repository: PerdureSessionRepository) -> None:
    """Strands' own file store overwrites the message that another process has kept there."""
    say(repository, "Hi", "Hello")
    with pytest.raises(SessionException, match="continued elsewhere"):
        say(repository, "Mine", start=1)
    assert shown(repository) == [(0, "Hi"), (1, "Hello")]
    say(repository, "Later", start=7)
    say(repository, "Between", start=5)
    assert shown(repository) == [(0, "Hi"), (1, "Hello"), (5, "Between"), (7, "Later")]


def test_an_agent_that_was_overtaken_stays_refused(store: SharedStore) -> None:
    """It cannot continue without the messages it could not keep. One that is made again can."""
    mine, theirs = agent_of(store, ["One.", "Two."]), agent_of(store, ["Uno."])
    theirs("Hola?")
    for _ in range(2):
        with pytest.raises(SessionException, match="continued elsewhere"):
            mine("Hello?")
    again = agent_of(store, ["Well."])
    again("Hello?")
    assert [message["content"][0]["text"] for message in again.messages] == ["Hola?", "Uno.", "Hello?", "Well."]


def test_an_updated_message_costs_what_it_says(tmp_path: Path) -> None:
    """It replaces the other in the view; nothing else is written again, however long the session."""
    repository = begun(PerdureSessionRepository(store=f"sqlite:///{tmp_path}/a.db"))
    say(repository, *(f"{number} {'x' * 500}" for number in range(60)))
    before = repository.read_message("s-1", "default", 30)
    repository.update_message("s-1", "default", said(30, "Said otherwise.", created_at="never"))
    after = repository.read_message("s-1", "default", 30)
    assert before is not None
    assert after is not None
    assert after.created_at == before.created_at
    assert [text[:2].strip() for _, text in shown(repository)] == [str(n) if n != 30 else "Sa" for n in range(60)]
    session = repository.chat("s-1").session()
    assert len(session.state.transcript.pieces) == 3
    assert [len(span) for span in session.state.transcript.spans()] == [30, 1, 29]
    with pytest.raises(SessionException, match="does not exist"):
        repository.update_message("s-1", "default", said(60, "Too late."))
    repository._home.shared.close()


def test_what_a_guardrail_replaced_is_not_shown(repository: PerdureSessionRepository) -> None:
    """Strands keeps it; its agents and perdure show the replacement."""
    say(repository, "My card is 4111.")
    message = said(0, "My card is 4111.", redact_message={"role": "user", "content": [{"text": "[blocked]"}]})
    repository.update_message("s-1", "default", message)
    (kept,) = repository.list_messages("s-1", "default")
    assert kept.to_message()["content"] == [{"text": "[blocked]"}]
    assert kept.message["content"] == [{"text": "My card is 4111."}]
    assert [each.text for each in repository.chat("s-1").session().state.messages] == ["[blocked]"]


def test_undo_and_rewind(repository: PerdureSessionRepository) -> None:
    """An agent continues with the next free number."""
    say(repository, "Hi", "Hello", "What?", "That.")
    assert repository.chat("s-1").undo() == 3
    assert shown(repository) == [(0, "Hi"), (1, "Hello"), (2, "What?")]
    say(repository, "Something else.", start=3)
    assert shown(repository)[3:] == [(3, "Something else.")]


def test_compaction_is_seen_by_strands(store: SharedStore) -> None:
    """A summary replaces the messages it covers, even if Strands' own window has dropped some of them."""
    first = agent_of(store, turns(4))
    for order in range(4):
        first(f"Where is order {order}?")
    manager = first._session_manager
    assert isinstance(manager, PerdureSessionManager)
    manager.chat.compact(keep_last=4, compact_strategy="custom", custom_compactor=lambda _: ["Three orders."])
    repository = manager.repository
    assert [each.message_id for each in repository.list_messages("s-1", "default")] == [11, 12, 13, 14, 15]
    assert len(repository.list_messages("s-1", "default", offset=6)) == 5
    again = agent_of(store, turns(1))
    assert again.messages[0]["content"] == [{"text": "Three orders."}]
    again("And now?")
    manager.chat.uncompact()
    assert agent_of(store, []).messages[:16] == first.messages


def test_a_sliding_window_goes_on_over_a_summary(store: SharedStore) -> None:
    """Messages that Strands has dropped from its window stay dropped, and no others are."""
    window = SlidingWindowConversationManager(window_size=4)
    manager = PerdureSessionManager("s-1", store=store)
    first = Agent(
        model=ScriptedModel([f"Answer {n}." for n in range(4)]),
        session_manager=manager,
        conversation_manager=window,
        callback_handler=None,
    )
    for number in range(4):
        first(f"Question {number}?")
    again = Agent(
        model=ScriptedModel([]),
        session_manager=PerdureSessionManager("s-1", store=store),
        conversation_manager=SlidingWindowConversationManager(window_size=4),
        callback_handler=None,
    )
    assert again.messages == first.messages
    manager.chat.compact(keep_last=2, compact_strategy="custom", custom_compactor=lambda _: ["Much was said."])
    after = Agent(
        model=ScriptedModel([]),
        session_manager=PerdureSessionManager("s-1", store=store),
        conversation_manager=SlidingWindowConversationManager(window_size=4),
        callback_handler=None,
    )
    assert [each["content"][0]["text"] for each in after.messages] == ["Much was said.", "Question 3?", "Answer 3."]


def test_what_perdure_says_is_numbered(repository: PerdureSessionRepository) -> None:
    """An agent that is made again sees it; one that has not seen it is refused."""
    say(repository, "Hi", "Hello")
    repository.chat("s-1").inject(Message.user("By the way, hurry."))
    assert shown(repository) == [(0, "Hi"), (1, "Hello"), (2, "By the way, hurry.")]
    with pytest.raises(SessionException, match="continued elsewhere"):
        say(repository, "So what?", start=2)
    say(repository, "I do.", start=3)
    assert shown(repository, offset=2) == [(2, "By the way, hurry."), (3, "I do.")]
    assert repository.read_message("s-1", "default", 2) is not None


def test_a_redacted_message_is_still_valid(store: SharedStore) -> None:
    """None of its text is left, and the agent can continue."""
    first = agent_of(store, turns(1))
    first("Where is order 0? My card is 4111 1111 1111 1111.")
    chat = first._session_manager.chat  # type: ignore[union-attr]
    secret = chat.session().state.messages[0]
    assert chat.redact([secret.id]) == 1
    again = agent_of(store, ["Sure."])
    assert "4111" not in repr(again.messages)
    assert again.messages[0].get("tracking_id") == first.messages[0].get("tracking_id")
    again("And?")
    assert again.messages[0]["content"] == [{"text": "[redacted]"}]


def test_a_fork_is_a_session_with_one_agent(store: SharedStore) -> None:
    """Its id is that of a session of Strands, and nothing is copied."""
    first = agent_of(store, turns(1))
    first("Where is order 0?")
    first._session_manager.chat.fork("s-2", at=2)  # type: ignore[union-attr]
    fork = agent_of(store, ["Well."], "s-2")
    assert fork.messages[:2] == first.messages[:2]
    fork("And order 1?")
    assert len(agent_of(store, [], "s-2").messages) == len(fork.messages)
    assert agent_of(store, []).messages == first.messages
    repository = PerdureSessionRepository(store=store)
    with pytest.raises(SessionException, match="already exists"):
        repository.create_agent("s-2", agent())
    repository.delete_session("s-1")
    assert len(agent_of(store, [], "s-2").messages) == len(fork.messages)


def test_a_deleted_session_is_not_written_to(repository: PerdureSessionRepository) -> None:
    """A session that was deleted with perdure stays hidden until it is restored; Strands' own deletion erases it."""
    say(repository, "Hi")
    home = repository._home
    root = home.blocking_chat(home.id_of("s-1"))
    root.delete()
    for refused in (lambda: say(repository, "Hello", start=1), lambda: repository.read_session("s-1")):
        with pytest.raises(SessionNotActive):
            refused()
    root.restore()
    assert shown(repository) == [(0, "Hi")]
    root.delete()
    repository.delete_session("s-1")
    assert repository.read_session("s-1") is None


def test_a_claimed_session_is_refused(repository: PerdureSessionRepository) -> None:
    """While perdure runs the session, other writers are refused."""
    say(repository, "Hi")
    home, chat = repository._home, repository.chat("s-1")
    claim, _ = home.wait(home.store.claim(chat.id, version=chat.session().version, owner="somebody"))
    with pytest.raises(SessionBusy):
        say(repository, "Hello", start=1)
    with pytest.raises(SessionBusy):
        repository.delete_session("s-1")
    home.wait(home.store.release(claim))
    say(repository, "Hello", start=1)
    assert len(shown(repository)) == 2


def test_another_agents_session_is_refused(store: SharedStore) -> None:
    """Two frameworks that use one id do not write into each other's conversation."""
    other = Home("other", store)
    other.wait(other.keep(other.new(other.id_of("s-1"))))
    with pytest.raises(SessionConflict, match="'other'"):
        PerdureSessionManager("s-1", store=store)


def test_owners_are_apart(store: SharedStore) -> None:
    """Each may have a session of the same name, and a fork of it."""
    for owner in ("ada", "bob"):
        agent_of(store, [f"Hello, {owner}."], owner=owner)("Hi?")
    chat = agent_of(store, [], owner="ada")._session_manager.chat  # type: ignore[union-attr]
    chat.fork("s-2")
    texts = [each["content"][0]["text"] for each in agent_of(store, [], "s-2", owner="ada").messages]
    assert texts == ["Hi?", "Hello, ada."]
    assert agent_of(store, [], "s-2", owner="bob").messages == []


def test_the_chat_of_one_of_several_agents(store: SharedStore) -> None:
    """The caller must name the agent if there are several, or none yet."""
    manager = PerdureSessionManager("s-1", store=store)
    with pytest.raises(ConfigurationError, match="has 0 agents"):
        _ = manager.chat
    for name in ("writer", "critic"):
        Agent(model=ScriptedModel([]), agent_id=name, session_manager=manager, callback_handler=None)
    with pytest.raises(ConfigurationError, match="chat_of"):
        _ = manager.chat
    assert manager.chat_of("critic").length() == 0
    with pytest.raises(SessionException, match="does not exist"):
        manager.chat_of("nobody")


@pytest.mark.parametrize("session_id", ["", " ", None, 5])
def test_an_id_is_a_text_that_is_not_blank(store: SharedStore, session_id: Any) -> None:
    """It is refused before anything is kept, by the name of the argument. It may be of any length."""
    with pytest.raises(InvalidData, match=r"\$\.session_id"):
        PerdureSessionManager(session_id, store=store)
    agent_of(store, ["Hello."], "long " * 500)("Hi?")
    assert len(agent_of(store, [], "long " * 500).messages) == 2


async def test_it_can_be_called_where_an_event_loop_runs(store: SharedStore) -> None:
    """Strands calls it there from `invoke_async`: the loop waits, and then continues."""
    made = agent_of(store, turns(3))
    await made.invoke_async("Where is order 0?")
    await asyncio.gather(*(agent_of(store, turns(1), f"s-{n}").invoke_async("Where?") for n in range(2, 6)))
    made("Where is order 1?")  # in a thread of Strands' own
    assert len(agent_of(store, []).messages) == 8


def test_two_who_begin_at_once_have_one_session(store: SharedStore) -> None:
    """The second one finds it."""
    made: list[PerdureSessionManager] = []
    threads = [Thread(target=lambda: made.append(PerdureSessionManager("s-1", store=store))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each acknowledged message is there, under its number, and no number has two."""
    url, rounds, names = f"sqlite:///{tmp_path}/a.db", 100 if TORTURE else 3, ("a", "b", "c", "d")
    repository = PerdureSessionRepository(store=url)
    for number in range(rounds):
        begun(repository, f"s-{number}")
    told = run_at_once(strands_process.write_at_once, [(url, name, 8, rounds) for name in names])
    for number in range(rounds):
        kept = dict(shown(repository, f"s-{number}"))
        assert sorted(kept) == [*range(32)]
        for name, numbers in zip(names, told, strict=True):
            assert [kept[each] for each in numbers[number]] == [f"{name}-{place}" for place in range(8)]
    repository._home.shared.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(50 if TORTURE else 3))
def test_a_killed_agent_goes_on(tmp_path: Path, seed: int) -> None:
    """Every given answer is there, Strands mends a call without its result, and the agent answers."""
    url = f"sqlite:///{tmp_path}/a.db"
    told = run_and_kill(strands_process.run, (url, 60), random.Random(seed).random() * 0.5)
    again = agent_of(url, ["Well."])
    kept = PerdureSessionRepository(store=url).list_messages("s-1", "default")
    assert len(kept) >= max(told, default=0)
    assert [each.message_id for each in kept] == [*range(len(kept))]
    asked = [each.message["content"][0].get("text") for each in kept[::4]]
    assert asked == [f"Where is order {order}?" for order in range(len(asked))]
    again("And now?")
    assert again.messages[-1]["content"] == [{"text": "Well."}]
    assert agent_of(url, []).messages[-2:] == again.messages[-2:]
    shared(url).close()
