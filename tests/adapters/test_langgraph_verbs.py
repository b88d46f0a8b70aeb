"""Verbs of perdure on a thread of LangGraph that asks a person about a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langgraph.graph")

from langchain_core.messages import AIMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from tests.adapters.graphs import State, at, said, texts

from perdure import MemoryStore, PendingCallsChanged
from perdure.adapters.langgraph import PerdureSaver
from perdure.sessions.blocking import BlockingChat

Change = Callable[[BlockingChat], object]


class Desk:
    """A graph that refunds a customer, if a person agrees."""

    def __init__(self, saver: PerdureSaver | None = None) -> None:
        self.paid: list[int] = []
        self.saver = PerdureSaver(store=MemoryStore()) if saver is None else saver
        builder = StateGraph(State)
        builder.add_node("model", self.model)
        builder.add_node("tools", self.tools)
        builder.add_edge(START, "model")
        builder.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
        builder.add_edge("tools", "model")
        self.graph = builder.compile(checkpointer=self.saver)

    @staticmethod
    def model(state: State) -> dict[str, Any]:
        last = state["messages"][-1]
        wants = isinstance(last, ToolMessage) or not last.text.isdigit()
        calls = [] if wants else [{"name": "refund", "args": {"amount": int(last.text)}, "id": f"c-{last.text}"}]
        return {"messages": [AIMessage(f"Re: {last.text}", tool_calls=calls)], "notes": ["step"]}

    def tools(self, state: State) -> dict[str, Any]:
        (call,) = next(each for each in reversed(state["messages"]) if isinstance(each, AIMessage)).tool_calls
        if interrupt(call["args"]):
            self.paid.append(call["args"]["amount"])
        return {"messages": [ToolMessage("paid", tool_call_id=call["id"])]}

    def ask(self, amount: int, thread: str = "t") -> None:
        self.graph.invoke(said(str(amount)), at(thread))

    def waits(self, thread: str = "t") -> bool:
        state = self.graph.get_state(at(thread))
        assert bool(state.interrupts) == bool(state.next)
        return bool(state.interrupts)

    def decide(self, thread: str = "t") -> None:
        self.graph.invoke(Command(resume=True), at(thread))


@pytest.fixture
def desk() -> Desk:
    """Return a desk with one refund paid, and a person asked about the second."""
    desk = Desk()
    desk.ask(5)
    desk.decide()
    desk.ask(700)
    assert desk.paid == [5]
    assert desk.waits()
    return desk


@pytest.mark.parametrize(
    "change",
    [
        lambda chat: chat.rewind(3),
        lambda chat: chat.rewind(chat.session().state.messages[1].id),
        lambda chat: chat.undo(),
        lambda chat: chat.reset(),
        lambda chat: chat.inject(
            {"role": "assistant", "tool_calls": [{"id": "x", "name": "refund", "arguments": {"amount": 9}}]}
        ),
    ],
    ids=["rewind to a version", "rewind to a message", "undo", "reset", "another call"],
)
def test_an_interrupt_goes_with_the_call_it_asked_about(desk: Desk, change: Change) -> None:
    """An approval would run another call, and is refused. The graph continues with its next message."""
    chat = desk.saver.blocking_chat("t")
    change(chat)
    assert not desk.waits()
    with pytest.raises(PendingCallsChanged, match="fork"):
        desk.decide()
    desk.graph.invoke(None, at("t"))
    assert desk.paid == [5]
    desk.ask(30)
    desk.decide()
    assert desk.paid == [5, 30]


def test_a_fork_at_a_message_waits_for_nothing(desk: Desk) -> None:
    """Its interrupt was about a call that the fork does not show. The thread itself still waits."""
    chat = desk.saver.blocking_chat("t")
    chat.fork("t2", at=2)
    assert not desk.waits("t2")
    with pytest.raises(PendingCallsChanged):
        desk.decide("t2")
    assert desk.paid == [5]
    desk.saver.copy_thread("t2", "t3")
    assert not desk.waits("t3")
    desk.decide()
    assert desk.paid == [5, 700]


@pytest.mark.parametrize(
    "change",
    [
        lambda chat: chat.rename("Refunds"),
        lambda chat: chat.trim(1),
        lambda chat: chat.compact(keep_last=2),
        lambda chat: chat.inject({"role": "user", "content": "Please hurry"}),
        lambda chat: (chat.rewind(3), chat.undo()),
    ],
    ids=["rename", "trim", "compact", "inject", "undo a rewind"],
)
@pytest.mark.parametrize("prune", [False, True])
def test_an_interrupt_stays_with_the_call_it_asked_about(desk: Desk, change: Change, prune: bool) -> None:
    """While the call is the last one shown, it can be approved, also after older checkpoints are pruned."""
    change(desk.saver.blocking_chat("t"))
    if prune:
        desk.saver.prune(["t"])
    assert desk.waits()
    desk.decide()
    assert desk.paid == [5, 700]


def test_what_has_gone_stays_gone_when_a_thread_is_saved_again(desk: Desk) -> None:
    """A pruned thread, and a copy, wait no more than the thread itself did."""
    desk.saver.blocking_chat("t").rewind(3)
    desk.saver.copy_thread("t", "copy")
    desk.saver.prune(["t"])
    for thread in ("t", "copy"):
        assert not desk.waits(thread)
        with pytest.raises(PendingCallsChanged):
            desk.decide(thread)
    assert desk.paid == [5]


def test_a_fork_of_a_version_is_exact(desk: Desk) -> None:
    """It has the channels of that version, and asks again about the call that waited then."""
    chat = desk.saver.blocking_chat("t")
    chat.fork("t2", version=3)
    state = desk.graph.get_state(at("t2"))
    assert (state.next, len(state.values["notes"]), texts(state.values)) == (("tools",), 1, ["5", "Re: 5"])
    desk.decide("t2")
    assert desk.paid == [5, 5]


def test_another_saver_sees_the_same(desk: Desk) -> None:
    """Pending calls are read from the store, not remembered."""
    desk.saver.blocking_chat("t").undo()
    other = PerdureSaver(store=desk.saver._home.shared)
    found = other.get_tuple(at("t"))
    assert found is not None
    assert found.pending_writes == []
    assert [each.pending_writes for each in other.list(at("t"), limit=1)] == [[]]
