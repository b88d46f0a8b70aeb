"""Threads stored by an older release: LangGraph always reads them as it did then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("langgraph.graph")

from tests.adapters.graphs import agent, at, said, texts
from tests.adapters.langgraph_golden import told_of

from perdure import MemoryStore, connect_blocking
from perdure.adapters.langgraph import PerdureSaver

GOLDEN = Path(__file__).parents[1] / "golden" / "langgraph-1"


def test_threads_of_the_first_release_load() -> None:
    """They have every checkpoint, pending writes, and values that are not JSON, after an export and an import."""
    saver = PerdureSaver(store=MemoryStore())
    with connect_blocking(saver._home.shared) as sessions:
        sessions.import_(GOLDEN / "threads.jsonl")
    told = json.loads((GOLDEN / "told.json").read_text())
    assert len(told) > 10
    assert json.loads(json.dumps(told_of(saver))) == told
    graph = agent(saver)
    assert texts(graph.invoke(said("Three"), at("talk")))[-4] == "Three"
    assert graph.get_state(at("waiting")).interrupts[0].value == "May I?"
