"""Threads with an example of everything LangGraph's checkpointer stores, for the golden files."""

from __future__ import annotations

import datetime
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langgraph.types import Interrupt, Send, interrupt
from tests.adapters.graphs import agent, answering, at, chain, said

from perdure.adapters.langgraph import PerdureSaver

CHANNELS: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True], "$": "text"},
    "odd": {"set": {1}, "inf": float("inf"), 7: b"\x00\xff", "when": datetime.date(2026, 1, 2)},
    "send": [Send("node", {"m": [AIMessage("to be sent", id="s")]})],
}


def furnish_threads(saver: PerdureSaver) -> None:
    """Save a conversation with a subgraph, one that waits for a person, and values that are not JSON."""
    graph = agent(saver, answering, chain(answering).compile(checkpointer=True))
    for word in ("One", "Two"):
        graph.invoke(said(word), at("talk"))
    agent(saver, lambda state: {"notes": [interrupt("May I?")]}).invoke(said("Wait"), at("waiting"))
    tuple_ = saver.get_tuple(at("talk"))
    assert tuple_ is not None
    odd = ToolMessage("seen", tool_call_id="c", id="r", artifact={"raw": b"\x00\xff"})
    checkpoint = {**tuple_.checkpoint, "channel_values": {**CHANNELS, "messages": [odd]}}
    config = {"configurable": {"thread_id": "odd", "checkpoint_ns": ""}}
    saver.put(config, checkpoint, {"source": "update", "step": 1}, {})  # type: ignore[arg-type,typeddict-item]
    saver.put_writes(tuple_.config, [("notes", ["later"])], "task", "~path")


def told_of(saver: PerdureSaver) -> Any:
    """Return all that LangGraph reads of all threads, in plain JSON."""
    return [
        {
            "place": each.config["configurable"],
            "parent": each.parent_config and each.parent_config["configurable"],
            "metadata": dict(each.metadata),
            "versions": each.checkpoint["channel_versions"],
            "values": {name: plain(value) for name, value in sorted(each.checkpoint["channel_values"].items())},
            "writes": plain(each.pending_writes),
        }
        for each in saver.list(None)
    ]


def plain(value: Any) -> Any:
    """Return a value in plain JSON, without keys that another release of LangChain may add."""
    match value:
        case BaseMessage():
            return {
                "message": [value.type, value.id, value.text],
                "calls": plain(getattr(value, "tool_calls", None)),
                "artifact": plain(getattr(value, "artifact", None)),
            }
        case Send():
            return ["send", value.node, plain(value.arg)]
        case Interrupt():
            return ["interrupt", plain(value.value)]
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
    return repr(value)
