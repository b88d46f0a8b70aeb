"""DeltaChannels: a channel's value is the list of its writes since an older checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langgraph.channels.delta")

from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import END, START, StateGraph
from tests.adapters.graphs import at

from perdure import MemoryStore
from perdure.adapters.langgraph import PerdureSaver


@pytest.fixture
def saver() -> PerdureSaver:
    return PerdureSaver(store=MemoryStore(), strict=False)


async def put(saver: PerdureSaver, parent: RunnableConfig | None = None, ns: str = "", **values: Any) -> RunnableConfig:
    """Save a checkpoint with these channels behind another."""
    config = at("t", checkpoint_ns=ns) if parent is None else parent
    checkpoint = {**empty_checkpoint(), "id": str(uuid6()), "channel_values": values}
    checkpoint["channel_versions"] = dict.fromkeys(values, 1)
    return await saver.aput(config, checkpoint, {"source": "loop", "step": 0}, dict.fromkeys(values, 1))  # type: ignore[arg-type]  # a dict as LangGraph makes it


async def history(saver: PerdureSaver, config: RunnableConfig, *channels: str) -> Any:
    """Return the history of channels; check it against the sync method and LangGraph's walk from tuple to tuple."""
    found = await saver.aget_delta_channel_history(config=config, channels=channels)
    slow = await BaseCheckpointSaver.aget_delta_channel_history(saver, config=config, channels=channels)
    assert found == slow
    return found


async def test_writes_come_in_order_from_the_oldest(saver: PerdureSaver) -> None:
    """They begin at the checkpoint that has a value of the channel."""
    first = await put(saver, log=["seed"])
    await saver.aput_writes(first, [("log", "a"), ("other", "x")], "task-1")
    second = await put(saver, first)
    await saver.aput_writes(second, [("log", "b")], "task-2")
    third = await put(saver, second)
    found = await history(saver, third, "log", "other")
    assert found["log"] == {"writes": [("task-1", "log", "a"), ("task-2", "log", "b")], "seed": ["seed"]}
    assert found["other"] == {"writes": [("task-1", "other", "x")]}


async def test_what_waits_at_the_checkpoint_itself_is_not_its_history(saver: PerdureSaver) -> None:
    """Its own writes belong to the next step."""
    first = await put(saver, log=["seed"])
    await saver.aput_writes(first, [("log", "a")], "task-1")
    assert (await history(saver, first, "log"))["log"] == {"writes": []}


async def test_nothing_older_than_the_nearest_value_counts(saver: PerdureSaver) -> None:
    """Each channel begins at its last full value."""
    first = await put(saver, log=["old"], tally=[0])
    await saver.aput_writes(first, [("log", "a"), ("tally", 1)], "task-1")
    second = await put(saver, first, log=["new"])
    await saver.aput_writes(second, [("log", "b"), ("tally", 2)], "task-2")
    third = await put(saver, second)
    found = await history(saver, third, "log", "tally")
    assert found["log"] == {"writes": [("task-2", "log", "b")], "seed": ["new"]}
    assert found["tally"] == {"writes": [("task-1", "tally", 1), ("task-2", "tally", 2)], "seed": [0]}


async def test_only_what_is_on_the_way_counts(saver: PerdureSaver) -> None:
    """A sibling's writes are not part of a branch."""
    root = await put(saver, log=[])
    left, right = await put(saver, root), await put(saver, root)
    await saver.aput_writes(left, [("log", "left")], "task-l")
    await saver.aput_writes(right, [("log", "right")], "task-r")
    tip = await put(saver, left)
    assert (await history(saver, tip, "log"))["log"]["writes"] == [("task-l", "log", "left")]


async def test_parallel_tasks_come_in_the_order_of_their_paths(saver: PerdureSaver) -> None:
    """A live run applies them so, whatever their ids and whichever came first."""
    first = await put(saver, log=[])
    await saver.aput_writes(first, [("log", "late")], "a-task", "~2")
    await saver.aput_writes(first, [("log", "early"), ("log", "then")], "z-task", "~1")
    second = await put(saver, first)
    assert [write[2] for write in (await history(saver, second, "log"))["log"]["writes"]] == ["early", "then", "late"]


async def test_namespaces_have_histories_of_their_own(saver: PerdureSaver) -> None:
    """A subgraph's channel of the same name is another."""
    first = await put(saver, log=["root"])
    below = await put(saver, ns="child:1", log=["below"])
    await saver.aput_writes(below, [("log", "b")], "task-1")
    tip = await put(saver, below, ns="child:1")
    assert (await history(saver, tip, "log"))["log"] == {"writes": [("task-1", "log", "b")], "seed": ["below"]}
    assert (await history(saver, first, "log"))["log"] == {"writes": []}


async def test_a_channel_that_was_never_kept_whole_has_no_beginning(saver: PerdureSaver) -> None:
    """Its history goes back to the thread's first checkpoint."""
    first = await put(saver)
    await saver.aput_writes(first, [("log", "a")], "task-1")
    second = await put(saver, first)
    assert (await history(saver, second, "log"))["log"] == {"writes": [("task-1", "log", "a")]}


async def test_no_channels_and_no_thread_are_answered(saver: PerdureSaver) -> None:
    """The answer is empty, and nothing is raised."""
    assert await history(saver, at("t", checkpoint_ns="")) == {}
    assert await history(saver, at("t", checkpoint_ns=""), "log") == {"log": {"writes": []}}
    assert saver.get_delta_channel_history(config=at("t"), channels=["log"]) == {"log": {"writes": []}}


def added(state: Sequence[str], writes: Sequence[Sequence[str]]) -> list[str]:
    return [*state, *(each for write in writes for each in write)]


class Log(TypedDict):
    """A state whose list is kept as its additions."""

    log: Annotated[list[str], DeltaChannel(added, snapshot_frequency=5)]


def logging_graph(saver: PerdureSaver) -> Any:
    builder = StateGraph(Log)
    builder.add_node("n", lambda state: {"log": [f"seen {len(state['log'])}"]})
    builder.add_edge(START, "n")
    builder.add_edge("n", END)
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_graph_with_such_a_channel_survives_pruning_forking_and_copying(durability: str) -> None:
    """The writes of its state are never pruned, and a fork or a copy has them too."""
    saver = PerdureSaver(store=MemoryStore())
    graph = logging_graph(saver)
    for number in range(7):
        told = await graph.ainvoke({"log": [f"said {number}"]}, at("t"), durability=durability)
        await saver.aprune(["t"])
        assert (await graph.aget_state(at("t"))).values == told
    assert len(told["log"]) == 14
    await saver.chat("t").fork("fork")
    await saver.acopy_thread("t", "copy")
    await graph.ainvoke({"log": ["elsewhere"]}, at("t"))
    for thread in ("fork", "copy"):
        assert (await graph.aget_state(at(thread))).values == told
        assert (await graph.ainvoke({"log": ["here"]}, at(thread)))["log"] == [*told["log"], "here", "seen 15"]
        assert (await graph.aget_state(at(thread))).values["log"] == [*told["log"], "here", "seen 15"]
