"""A graph of LangGraph whose threads are sessions: their content, and the effect of perdure's verbs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Thread
from typing import Any, TypedDict

import pytest

pytest.importorskip("langgraph.graph")

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from tests.adapters.graphs import State, agent, answering, at, chain, said, texts

from perdure import AgentSession, MemoryStore, SessionConflict, SessionNotActive, connect, redacting, redactors
from perdure.adapters.home import Home
from perdure.adapters.langgraph import PerdureSaver
from perdure.errors import InvalidData


@pytest.fixture
def saver() -> PerdureSaver:
    return PerdureSaver(store=MemoryStore())


def shown(saver: PerdureSaver, thread: str) -> list[tuple[str, str]]:
    """Return the messages that perdure shows of a thread."""
    return [(message.role, message.text) for message in saver.blocking_chat(thread).session().state.messages]


def test_a_thread_is_a_session_whose_messages_can_be_read(saver: PerdureSaver) -> None:
    """Words, calls and results are parts of their kinds, and each is stored once."""
    graph = agent(saver)
    graph.invoke(said("Hi"), at("t"))
    session = saver.blocking_chat("t").session()
    assert [message.role for message in session.state.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.state.messages[1].tool_calls[0].arguments == {"at": 1}
    assert session.state.messages[2].tool_results[0].content == "seen 1"
    graph.invoke(said("And now?"), at("t"))
    assert len(saver.blocking_chat("t").history()) == 8


def test_a_checkpoint_is_a_version(saver: PerdureSaver) -> None:
    """There are no other versions: a task's writes are on record and move no version."""
    graph = agent(saver)
    for _ in range(3):
        graph.invoke(said("Hi"), at("t"))
    assert saver.blocking_chat("t").session().version == len(list(graph.get_state_history(at("t")))) == 9


def test_state_comes_back_as_it_was(saver: PerdureSaver) -> None:
    """It does in another saver too, with an empty cache: messages equal LangChain's own, and so do other channels."""
    graph = agent(saver)
    told = graph.invoke(said("Hi", notes=["begun"]), at("t"))
    other = agent(PerdureSaver(store=saver._home.shared))
    found = other.get_state(at("t"))
    assert found.values == told
    assert [type(message) for message in found.values["messages"]] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert found.values["messages"][1].model_dump() == told["messages"][1].model_dump()
    assert found.next == ()


async def test_async_and_sync_code_share_a_thread(tmp_path: Path) -> None:
    """Several event loops and threads use one saver."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    graph = agent(saver)
    await graph.ainvoke(said("one"), at("t"))
    await asyncio.to_thread(graph.invoke, said("two"), at("t"))
    await asyncio.to_thread(lambda: asyncio.run(graph.ainvoke(said("three"), at("t"))))
    assert [text for role, text in await asyncio.to_thread(shown, saver, "t") if role == "user"] == [
        "one",
        "two",
        "three",
    ]


def test_a_message_that_was_changed_is_noticed(saver: PerdureSaver) -> None:
    """It may be changed in place, replaced under its id, or removed: the rest is not stored again."""
    graph = agent(saver)
    graph.invoke(said("Hi"), at("t"))

    def change(state: State) -> dict[str, Any]:
        first, second, _, last, *_ = state["messages"]
        first.content = "Hi there"
        second.tool_calls[0]["args"]["at"] = 77
        return {"messages": [RemoveMessage(last.id), SystemMessage("Be brief")]}

    changing = agent(saver, change)
    before = len(saver.blocking_chat("t").history())
    told = changing.invoke(said("Go"), at("t"))
    assert texts(told) == ["Hi there", "Let me see.", "seen 1", "Go", "Be brief"]
    found = agent(PerdureSaver(store=saver._home.shared)).get_state(at("t")).values
    assert found["messages"] == told["messages"]
    assert found["messages"][1].tool_calls[0]["args"] == {"at": 77}
    assert len(saver.blocking_chat("t").history()) == before + 4  # the two that were changed, and two new ones


def test_a_message_of_a_users_own_class_comes_back(saver: PerdureSaver) -> None:
    """A message with a value that is not JSON comes back too. Both can be read in perdure."""
    answer = Marked("Marked answer", id="m", mark={1, 2})
    odd: dict[str, Any] = {"artifact": {"raw": b"\x00\xff"}, "additional_kwargs": {"a": (1, 2)}}
    result = ToolMessage("seen", tool_call_id="c", id="r", **odd)
    graph = agent(saver, lambda state: {"messages": [answer, result]})
    graph.invoke(said("Hi"), at("t"))
    found = agent(PerdureSaver(store=saver._home.shared)).get_state(at("t")).values["messages"]
    assert type(found[1]) is Marked
    assert found[1] == answer
    assert found[2].artifact == {"raw": b"\x00\xff"}
    assert shown(saver, "t")[1] == ("assistant", "Marked answer")
    count = len(saver.blocking_chat("t").history())
    agent(saver, lambda state: {"notes": ["more"]}).invoke(said("Again"), at("t"))
    assert len(saver.blocking_chat("t").history()) == count + 1


class Marked(AIMessage):
    """A message as users make them."""

    mark: set[int] = set()


def test_a_channel_that_is_not_json_comes_back(saver: PerdureSaver) -> None:
    """Other channels hold any value that LangGraph's serializer can write, stored as JSON."""

    class Odd(TypedDict):
        things: Any

    things = {"set": {1, 2}, "nan": float("inf"), "by number": {1: "one"}, "$": b"\x00", "to": [Send("n", {"m": 1})]}
    builder = StateGraph(Odd)
    builder.add_node("n", lambda state: {"things": things})
    builder.add_edge(START, "n")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"things": None}, at("t"))
    assert graph.get_state(at("t")).values["things"] == things
    stored = json.dumps(dict(saver.blocking_chat("t").session().state.metadata))
    assert "by number" in stored


async def test_what_perdure_changes_the_graph_sees(saver: PerdureSaver) -> None:
    """The graph continues from the state after a trim, its undo and an injected message."""
    graph, chat = agent(saver), saver.chat("t")
    first = await graph.ainvoke(said("Hi"), at("t"))
    await graph.ainvoke(said("And now?"), at("t"))
    whole = (await graph.aget_state(at("t"))).values
    await chat.trim(4)
    assert texts((await graph.aget_state(at("t"))).values) == texts(whole)[4:]
    await chat.undo()
    assert (await graph.aget_state(at("t"))).values["messages"] == whole["messages"]
    await chat.inject({"role": "user", "content": "By the way"})
    told = await graph.ainvoke(said("Well?"), at("t"))
    assert texts(told)[8:10] == ["By the way", "Well?"]
    assert told["messages"][:4] == first["messages"]


async def test_a_compaction_shrinks_what_the_graph_is_given(saver: PerdureSaver) -> None:
    """Undone, it gives the exact messages back; checkpoints before it have them all the time."""
    graph, chat = agent(saver), saver.chat("t")
    for number in range(6):
        await graph.ainvoke(said(f"Question {number} " + "x" * 200), at("t"))
    whole = (await graph.aget_state(at("t"))).values["messages"]
    await chat.compact(keep_last=4)
    short = await graph.aget_state(at("t"))
    assert len(short.values["messages"]) < len(whole)
    length = len(await chat.history())
    told = await graph.ainvoke(said("More"), at("t"))
    assert len(await chat.history()) == length + 4  # the messages under the compaction were not stored again
    assert told["messages"][: len(short.values["messages"])] == short.values["messages"]
    await chat.uncompact()
    assert (await graph.aget_state(at("t"))).values["messages"][: len(whole)] == whole


async def test_a_redaction_reaches_every_checkpoint(tmp_path: Path) -> None:
    """No trace of the words is left in any file, and the thread can continue."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    graph, canary = agent(saver, wait_for_word, answering), "canary-4711-in-the-mine"
    await graph.ainvoke(said(f"My secret is {canary}"), at("t"))
    await graph.ainvoke(Command(resume="go"), at("t"))
    asked = (await graph.aget_state(at("t"))).values["messages"]
    told = [message.id for message in asked if canary in message.text]
    await saver.chat("t").redact(told)
    states = [state async for state in graph.aget_state_history(at("t"))]
    assert len(states) > 3
    assert canary not in str(states)
    told = await agent(saver).ainvoke(said("Go on"), at("t"))
    assert texts(told)[0] == "[redacted]"
    saver._home.shared.close()
    assert not files_with(canary, tmp_path)


def test_a_later_run_has_what_a_redacting_store_has_kept() -> None:
    """In the process that said it as in every other one. No message is stored again because it was redacted."""
    saver = PerdureSaver(store=redacting(MemoryStore(), redactors.DEFAULT))
    graph, card = agent(saver), "4111 1111 1111 1111"
    for turn in (1, 2):
        graph.invoke(said(f"My card is {card}"), at("t"))
        told = graph.get_state(at("t")).values["messages"]
        assert card not in str(told)
        assert texts({"messages": told})[0] == "My card is [redacted:card-number]"
        assert len(saver.blocking_chat("t").history()) == len(told) == 4 * turn


def files_with(text: str, where: Path) -> list[Path]:
    return [path for path in where.iterdir() if text.encode() in path.read_bytes()]


def wait_for_word(state: State) -> dict[str, Any]:
    """Wait for a person to decide."""
    return {"notes": [str(interrupt({"question": state["messages"][-1].text}))]}


async def test_a_fork_is_a_thread_of_its_own(saver: PerdureSaver) -> None:
    """It continues from any version without copying messages; its parent thread is unchanged."""
    graph, chat = agent(saver), saver.chat("t")
    first = await graph.ainvoke(said("one"), at("t"))
    version = (await chat.session()).version
    second = await graph.ainvoke(said("two"), at("t"))
    await chat.fork("t2", version=version)
    assert (await graph.aget_state(at("t2"))).values == first
    forked = await graph.ainvoke(said("other"), at("t2"))
    assert forked["messages"][:4] == first["messages"]
    assert texts(forked)[4] == "other"
    assert (await graph.aget_state(at("t"))).values == second
    history = [state async for state in graph.aget_state_history(at("t2"))]
    assert [len(state.values["messages"]) for state in history] == [8, 5, 4, 4]
    parent = history[-1].parent_config
    assert (await graph.aget_state({"configurable": {**parent["configurable"]}})).values["messages"]


async def test_an_interrupt_can_be_answered_in_a_fork(saver: PerdureSaver) -> None:
    """A fork of a waiting thread waits too. Each is answered by itself."""
    graph = agent(saver, wait_for_word, answering)
    await graph.ainvoke(said("Hi"), at("t"))
    await saver.chat("t").fork("t2")
    assert (await graph.aget_state(at("t2"))).interrupts == (await graph.aget_state(at("t"))).interrupts != ()
    forked = await graph.ainvoke(Command(resume="yes"), at("t2"))
    assert forked["notes"][0] == "yes"
    assert (await graph.ainvoke(Command(resume="no"), at("t")))["notes"][0] == "no"


async def test_a_subgraph_is_a_session_below_its_thread(saver: PerdureSaver) -> None:
    """It begins with its caller's view: the messages it is given are not stored again."""
    child = chain(answering).compile(checkpointer=True)
    graph = agent(saver, answering, child)
    told = await graph.ainvoke(said("Hi"), at("t"))
    found = [info async for info in all_of(saver)]
    assert [(info.parent_id, info.spawn_ref.tool_name) for info in found if info.spawn_ref] == [("t", "node1")]
    (below,) = [info for info in found if info.spawn_ref]
    async with connect(saver._home.shared) as sessions:
        session = await sessions.session(below.id)
        assert [message.text for message in session.state.messages] == texts(told)
        assert len(await sessions.history(below.id)) == len(told["messages"])
    log = await saver._home.run(saver._home.store.log_of(below.id))
    assert log[1] == 3  # its own answer, and none of its caller's messages
    await saver.adelete_thread("t")
    assert [info async for info in all_of(saver)] == []


async def all_of(saver: PerdureSaver):
    for info in await saver._home.run(saver._home.store.list(agent="langgraph")):
        yield info


async def test_a_run_that_was_overtaken_is_told(saver: PerdureSaver) -> None:
    """It raises SessionConflict; the other run is kept whole, and the next run continues from it."""
    meet = asyncio.Barrier(2)

    async def slow(state: State) -> dict[str, Any]:
        await meet.wait()
        return answering(state)

    graph = agent(saver)
    await graph.ainvoke(said("Hi"), at("t"))
    racing = agent(saver, slow)
    ends = await asyncio.gather(
        racing.ainvoke(said("a"), at("t"), durability="sync"),
        racing.ainvoke(said("b"), at("t"), durability="sync"),
        meet.wait(),
        return_exceptions=True,
    )
    lost = [each for each in ends if isinstance(each, SessionConflict)]
    assert len(lost) == 1
    assert "strict=False" in str(lost[0])
    kept = texts((await graph.aget_state(at("t"))).values)
    assert len(kept) in (5, 8)
    assert ("a" in kept) != ("b" in kept)


def test_the_run_that_saves_last_loses(saver: PerdureSaver) -> None:
    """It loses also if it began first. Its tool has run, and its call has no result. The call can be dropped."""

    def call(state: State) -> dict[str, Any]:
        last = state["messages"][-1]
        calls = [{"name": "pay", "args": {}, "id": "c-1"}] if last.text == "first" else []
        return {"messages": [AIMessage(f"Re: {last.text}", tool_calls=calls)]}

    paid = []

    def pay(state: State) -> dict[str, Any]:
        if not state["messages"][-1].tool_calls:
            return {}
        paid.append("first")
        # In a thread, or LangGraph would take it for a part of this run.
        other = Thread(target=graph.invoke, args=(said("second"), at("t")))
        other.start()
        other.join()
        return {"messages": [ToolMessage("paid", tool_call_id="c-1")]}

    graph = agent(saver, call, pay)
    with pytest.raises(SessionConflict, match="tools of this run may have done"):
        # Each step is saved before the next begins, so the other run continues from it.
        graph.invoke(said("first"), at("t"), durability="sync")
    state = graph.get_state(at("t"))
    assert (texts(state.values), state.next, paid) == (["first", "Re: first", "second", "Re: second"], (), ["first"])
    lost = [RemoveMessage(message.id) for message in state.values["messages"][:2]]
    told = graph.invoke({"messages": [*lost, HumanMessage("again")]}, at("t"))
    assert texts(told) == ["second", "Re: second", "again", "Re: again"]


def test_a_checkpoint_leads_to_its_version(saver: PerdureSaver) -> None:
    """A fork of that version has the checkpoint's state. A checkpoint of another thread is refused, with its place."""
    graph, chat = agent(saver), saver.blocking_chat("t")
    for word in ("one", "two"):
        graph.invoke(said(word), at("t"))
    history = list(graph.get_state_history(at("t")))
    for number, state in enumerate(history):
        fork = chat.fork(f"fork-{number}", version=saver.version_of(state.config))
        found = graph.get_state(at(fork.id))
        assert (found.values, found.next) == (state.values, state.next)
    assert saver.version_of(at("t")) == chat.session().version
    with pytest.raises(InvalidData, match="is version 1 of 't'"):
        saver.version_of(at("fork-0", checkpoint_id=history[-1].config["configurable"]["checkpoint_id"]))
    for config in (at("t", checkpoint_id="x"), at("nowhere")):
        with pytest.raises(InvalidData, match="has no checkpoint"):
            saver.version_of(config)


async def test_without_strict_runs_branch(saver: PerdureSaver) -> None:
    """LangGraph's own savers do the same: both are acknowledged and in the history, and one is the state."""
    loose = PerdureSaver(store=saver._home.shared, strict=False)
    graph = agent(loose)
    await graph.ainvoke(said("Hi"), at("t"))
    await asyncio.gather(*(graph.ainvoke(said(word), at("t")) for word in "abcd"))
    found = {text for state in graph.get_state_history(at("t")) for text in texts(state.values)}
    assert set("abcd") <= found


async def test_a_change_by_hand_during_a_run_is_not_overwritten(saver: PerdureSaver) -> None:
    """A new name or tag does not conflict: only changes to the graph's input count."""
    graph = agent(saver)
    await graph.ainvoke(said("Hi"), at("t"))

    async def trimmed(state: State) -> dict[str, Any]:
        await saver.chat("t").trim(1)
        return answering(state)

    async def renamed(state: State) -> dict[str, Any]:
        await saver.chat("t").rename("Greeting")
        return answering(state)

    await agent(saver, renamed).ainvoke(said("one"), at("t"))
    with pytest.raises(SessionConflict):
        await agent(saver, trimmed).ainvoke(said("two"), at("t"), durability="sync")
    assert shown_in(await saver.chat("t").session()) == ["two"]
    assert texts(await graph.ainvoke(said("three"), at("t")))[0] == "two"


def shown_in(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


async def test_time_travel_makes_a_branch(saver: PerdureSaver) -> None:
    """A run may continue from a checkpoint named by its id, strict or not."""
    graph = agent(saver)
    await graph.ainvoke(said("one"), at("t"))
    after_one = await graph.aget_state(at("t"))
    await graph.ainvoke(said("two"), at("t"))
    told = await graph.ainvoke(said("three"), after_one.config)
    assert [text for text in texts(told) if text in ("one", "two", "three")] == ["one", "three"]
    assert (await graph.aget_state(at("t"))).values == told


def test_an_encrypting_serializer_hides_what_was_said(tmp_path: Path) -> None:
    """It may be set later on. perdure shows who spoke, and the words are in no file."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    saver.serde = EncryptedSerializer(Reversed(), JsonPlusSerializer())
    graph, canary = agent(saver), "canary-4711-in-the-mine"
    for _ in range(2):
        told = graph.invoke(said(canary, notes=[canary]), at("t"))
    other = PerdureSaver(store=saver._home.shared, serde=saver.serde)
    assert agent(other).get_state(at("t")).values == told
    assert [role for role, _ in shown(saver, "t")] == ["user", "assistant", "tool", "assistant"] * 2
    assert not any(text for _, text in shown(saver, "t"))
    saver._home.shared.close()
    assert not files_with(canary, tmp_path)


class Reversed:
    """A cipher for tests."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "reversed", bytes(255 - each for each in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return bytes(255 - each for each in ciphertext)


def test_pruning_gives_the_space_back(tmp_path: Path) -> None:
    """The newest checkpoint stays whole, with its pending writes. Values of only older ones are in no file."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    graph = agent(saver)
    graph.invoke(said("Hi", notes=["canary-in-a-note"]), at("t"))
    old = graph.get_state(at("t")).config
    first = graph.get_state(at("t")).values["messages"][0]
    graph.invoke({"messages": [RemoveMessage(first.id)]}, at("t"))
    told = graph.get_state(at("t")).values
    saver.prune(["t"])
    assert graph.get_state(at("t")).values == told
    assert len(list(graph.get_state_history(at("t")))) == 1
    assert saver.get_tuple(old) is None
    assert texts(graph.invoke(said("More"), at("t")))[: len(told["messages"])] == texts(told)


def test_what_a_run_did_can_be_deleted(tmp_path: Path) -> None:
    """The thread is as it was before that run, and no word of the run is in any file."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    graph, canary = agent(saver), "canary-4711-in-the-mine"
    before = graph.invoke(said("Hi"), {**at("t"), "metadata": {"run_id": "one"}})
    graph.invoke(said(canary), {**at("t"), "metadata": {"run_id": "two"}})
    saver.delete_for_runs(["two"])
    assert graph.get_state(at("t")).values == before
    assert texts(graph.invoke(said("Again"), at("t")))[-4] == "Again"
    saver._home.shared.close()
    assert not files_with(canary, tmp_path)


def test_a_copied_thread_goes_its_own_way(saver: PerdureSaver) -> None:
    """All checkpoints and pending writes come with it. An existing thread is not overwritten."""
    graph = agent(saver, wait_for_word, answering)
    graph.invoke(said("Hi"), at("t"))
    saver.copy_thread("t", "copy")
    assert len(list(graph.get_state_history(at("copy")))) == len(list(graph.get_state_history(at("t"))))
    assert graph.invoke(Command(resume="yes"), at("copy"))["notes"][0] == "yes"
    assert graph.get_state(at("t")).interrupts
    with pytest.raises(SessionConflict):
        saver.copy_thread("t", "copy")


def test_owners_do_not_see_each_others_threads() -> None:
    """The same thread id is another session for each of them."""
    store = MemoryStore()
    ann, ben = PerdureSaver(store=store, owner="ann"), PerdureSaver(store=store, owner="ben")
    agent(ann).invoke(said("I am Ann"), at("t"))
    assert ben.get_tuple(at("t")) is None
    assert list(ben.list(None)) == []
    assert [each.config["configurable"]["thread_id"] for each in ann.list(None)] == ["t"] * 3


def test_any_text_names_a_thread(saver: PerdureSaver) -> None:
    """Its session then has another id, and the given name."""
    graph, name = agent(saver), "Ann's order / 7 ✓"
    graph.invoke(said("Hi"), at(name))
    assert saver.blocking_chat(name).session().info.name == name
    assert {each.config["configurable"]["thread_id"] for each in saver.list(None)} == {name}
    graph.invoke(said("Hi"), at(7))  # LangGraph takes numbers too
    assert shown(saver, "7")[0] == ("user", "Hi")


def test_another_frameworks_session_is_refused() -> None:
    """A store serves several frameworks, and an id belongs to one of them. A deleted thread is not written to."""
    store = MemoryStore()
    home = Home("other", store)
    home.wait(home.change(home.id_of("t"), lambda session: session))
    saver = PerdureSaver(store=store)
    with pytest.raises(SessionConflict, match="'other', not to 'langgraph'"):
        agent(saver).invoke(said("Hi"), at("t"))
    agent(saver).invoke(said("Hi"), at("mine"))
    saver.blocking_chat("mine").delete()
    with pytest.raises(SessionNotActive):
        agent(saver).invoke(said("Hi"), at("mine"))


def test_another_channel_can_be_the_conversation() -> None:
    """It may have any name. A channel named `messages` without messages is kept unchanged."""

    class Talk(TypedDict):
        talk: list[AnyMessage]
        messages: list[str]

    builder = StateGraph(Talk)
    builder.add_node("n", lambda state: {"talk": [*state["talk"], AIMessage("Yes")], "messages": ["no message"]})
    builder.add_edge(START, "n")
    builder.add_edge("n", END)
    saver = PerdureSaver(store=MemoryStore(), messages="talk")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"talk": [HumanMessage("Hi")]}, at("t"))
    assert shown(saver, "t") == [("user", "Hi"), ("assistant", "Yes")]
    assert graph.get_state(at("t")).values["messages"] == ["no message"]


def test_a_turn_costs_what_it_adds(tmp_path: Path) -> None:
    """The bytes of a turn are the same at 40 and at 400 messages."""
    saver = PerdureSaver(store=f"sqlite:///{tmp_path}/a.db")
    graph = agent(saver)

    def grown(turns: int) -> int:
        for _ in range(turns):
            graph.invoke(said("Hi"), at("t"))
        saver._home.shared.close()
        return (tmp_path / "a.db").stat().st_size

    grown(10)
    early = -(grown(0) - grown(10))
    grown(80)
    late = -(grown(0) - grown(10))
    assert late < 1.5 * early


@pytest.mark.parametrize("thread", [None, "", " "])
def test_a_thread_has_an_id(saver: PerdureSaver, thread: Any) -> None:
    """Otherwise all callers without one would share a conversation."""
    with pytest.raises(InvalidData, match=r"id of a thread.*thread_id"):
        saver.get_tuple({"configurable": {"thread_id": thread}})


def test_an_owners_thread_is_listed_by_its_first_words() -> None:
    """Its id says its name already, behind the owner's mark."""
    saver = PerdureSaver(store=MemoryStore(), owner="ada")
    for thread in ("t", "user@x.com"):
        agent(saver).invoke(said("Hi"), at(thread))
    assert saver.blocking_chat("t").session().info.name is None
    saver.blocking_chat("t").fork("t-2")
    assert [each.config["configurable"]["thread_id"] for each in saver.list(at("t-2"))] == ["t-2"]
    assert saver.blocking_chat("user@x.com").session().info.name == "user@x.com"


def test_bad_input_is_refused(saver: PerdureSaver) -> None:
    """The error says what is expected, and nothing is changed."""
    agent(saver).invoke(said("Hi"), at("t"))
    with pytest.raises(InvalidData, match="'keep_latest' or 'delete'"):
        saver.prune(["t"], strategy="all")
    with pytest.raises(InvalidData):
        PerdureSaver(store=MemoryStore(), messages="")
    with pytest.raises(InvalidData):
        PerdureSaver(store=MemoryStore(), strict=1)  # type: ignore[arg-type]  # as callers do
    assert len(list(saver.list(at("t")))) == 3


def test_versions_of_channels_stay_of_their_kind(saver: PerdureSaver) -> None:
    """A thread from a saver with texts for versions continues with texts: they are compared."""
    first, second = f"{3:032}.{0.5:016}", saver.get_next_version(f"{3:032}.{0.5:016}", None)
    assert second > first
    assert saver.get_next_version(None, None) == 1
    assert saver.get_next_version(4, None) == 5


async def test_what_came_out_of_order_is_listed_in_order(saver: PerdureSaver) -> None:
    """The newest checkpoint is that of the greatest id, whichever came last."""
    graph = agent(saver)
    await graph.ainvoke(said("Hi"), at("t"))
    newest = await saver.aget_tuple(at("t"))
    assert newest is not None
    older = {**newest.checkpoint, "id": "00000000-0000-6000-8000-000000000000"}
    await saver.aput({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, older, {"source": "update"}, {})  # type: ignore[typeddict-item]
    found = await saver.aget_tuple(at("t"))
    assert found is not None
    assert found.checkpoint["id"] == newest.checkpoint["id"]
    ids = [each.checkpoint["id"] async for each in saver.alist(at("t"), limit=2)]
    assert ids == sorted(ids, reverse=True)
    assert ids[0] == newest.checkpoint["id"]
    await saver.aprune(["t"])
    assert [each.checkpoint["id"] async for each in saver.alist(at("t"))] == [newest.checkpoint["id"]]
