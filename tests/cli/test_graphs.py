"""Threads of LangGraph on the command line: their interrupts are shown, and perdure does not answer for the graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph")

from tests.adapters.test_langgraph_verbs import Desk

from perdure.adapters.langgraph import PerdureSaver


@pytest.fixture
def desk(home: Path) -> Desk:
    """A person is asked about a refund."""
    desk = Desk(PerdureSaver(store=f"sqlite:///{home}/s.db"))
    desk.ask(700)
    return desk


def test_what_a_thread_waits_for_is_shown(perdure: Callable[..., Any], desk: Desk) -> None:
    """It is shown as long as the interrupt is there, and belongs to the view."""
    said = perdure("--store", "s.db", "show", "t")
    assert "# next: tools\n# waits: tools, for Command(resume=…)\n" in said.out
    perdure("--store", "s.db", "undo", "t")
    assert "waits" not in perdure("--store", "s.db", "show", "t").out
    desk.ask(5)
    desk.decide()
    assert "# next" not in perdure("--store", "s.db", "show", "t").out


def test_a_call_that_may_get_its_result_is_not_said_to_be_lost(perdure: Callable[..., Any], desk: Desk) -> None:
    """It waits for a person, in the thread and in a fork at the call. One that was passed over is lost."""
    assert "refund(" in perdure("--store", "s.db", "show", "t").out
    assert "no result" not in perdure("--store", "s.db", "show", "t").out
    perdure("--store", "s.db", "fork", "t", "t2", "--at", "2")
    assert "no result" not in perdure("--store", "s.db", "show", "t2").out
    desk.saver.blocking_chat("t").inject({"role": "user", "content": "Never mind."})
    assert "no result" in perdure("--store", "s.db", "show", "t").out


def test_events_tell_when_a_task_has_written_what(perdure: Callable[..., Any], desk: Desk) -> None:
    """They have their own name, the time at which the task has written, and its node."""
    lines = perdure("--store", "s.db", "events", "t").lines
    assert len(lines) == 3
    assert all("\tlanggraph.writes\t" in each and "1970-" not in each for each in lines)
    # LangGraph's threads note writes at once, in any order.
    told = {each.rpartition("\t")[2] for each in lines}
    assert {"model wrote messages, notes, branch:to:tools", "tools waits on an interrupt"} < told
    desk.decide()
    told = {each.rpartition("\t")[2] for each in perdure("--store", "s.db", "events", "t").lines[3:]}
    assert told == {"an interrupt is answered", "tools wrote messages, branch:to:model", "model wrote messages, notes"}


def test_the_graph_decides_and_answers(perdure: Callable[..., Any], desk: Desk) -> None:
    """Commands that decide for perdure's own agents say so, and change nothing."""
    before = desk.saver.blocking_chat("t").session()
    assert "Command(resume=…)" in perdure("--store", "s.db", "approve", "t", code=5).err
    assert "graph.invoke({'messages'" in perdure("--store", "s.db", "send", "t", "Hello", code=5).err
    assert "graph.invoke(None, config)" in perdure("--store", "s.db", "recover", "t").err
    assert "--anyway" in perdure("--store", "s.db", "send", "t", "Hello", "--no-wait", code=5).err
    assert "--anyway" in perdure("--store", "s.db", "send", "t", "Hello", "--later", "1h", code=5).err
    for which in ("-s", "t"), ("-c",):
        assert "--anyway" in perdure("--store", "s.db", "chat", *which, stdin="Hello\n", code=5).err
    assert desk.saver.blocking_chat("t").session() == before
    assert not perdure("--store", "s.db", "queue").out
    assert perdure("--store", "s.db", "send", "t", "Hello", "--anyway").out
    assert perdure("--store", "s.db", "chat", "-s", "t", "--anyway", stdin="Hello\n").out


def test_a_thread_that_waits_for_a_person_is_not_purged(perdure: Callable[..., Any], desk: Desk) -> None:
    """As a run of perdure's own that waits: it stays until the graph has the answer."""

    def purged() -> Any:
        time.sleep(1.1)
        return perdure("--store", "s.db", "purge", "--idle", "1s", "--yes", "--json").json

    assert [each["why"] for each in purged()["left"]] == ["approval"]
    assert desk.waits()
    desk.decide()
    assert purged()["erased"] == ["t"]


def test_a_thread_has_no_run_to_replay(perdure: Callable[..., Any], desk: Desk) -> None:
    """Notes of its tasks are not taken for runs whose beginning is lost."""
    said = perdure("--store", "s.db", "replay", "t", code=2)
    assert "nothing to replay" in said.err
    assert "left out" not in said.out
