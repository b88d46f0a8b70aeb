"""Graphs of LangGraph with scripted nodes, for the tests of its checkpointer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

Node = Callable[[Any], Any]


class State(TypedDict):
    """A conversation, and a list beside it."""

    messages: Annotated[list[AnyMessage], add_messages]
    notes: Annotated[list[str], operator.add]


def at(thread: str, **more: Any) -> Any:
    """Return the config of a thread."""
    return {"configurable": {"thread_id": thread, **more}}


def said(text: str, **more: Any) -> dict[str, Any]:
    """Return a graph's input: a person's words."""
    return {"messages": [HumanMessage(text)], **more}


def answering(state: State) -> dict[str, Any]:
    """Call a tool, return its result, and answer: three messages."""
    turn = len(state["messages"])
    call = {"name": "look", "args": {"at": turn}, "id": f"call-{turn}"}
    return {
        "messages": [
            AIMessage("Let me see.", tool_calls=[call], response_metadata={"model": "scripted"}),
            ToolMessage(f"seen {turn}", tool_call_id=f"call-{turn}", name="look"),
            AIMessage(f"Answer {turn} to: {state['messages'][-1].text}"),
        ],
        "notes": [f"turn {turn}"],
    }


def chain(*nodes: Node) -> StateGraph[Any, Any, Any, Any]:
    """Return a graph of nodes, one after the other."""
    builder = StateGraph(State)
    names = [START, *(f"node{number}" for number in range(len(nodes))), END]
    for name, node in zip(names[1:], nodes, strict=False):
        builder.add_node(name, node)
    for one, other in pairwise(names):
        builder.add_edge(one, other)
    return builder


def agent(saver: Any, *nodes: Node) -> Any:
    """Return a graph that is ready to run; without nodes, one that answers."""
    return chain(*(nodes or (answering,))).compile(checkpointer=saver)


def texts(state: Any) -> list[str]:
    """Return the texts of a state's messages."""
    return [message.text for message in state["messages"]]
