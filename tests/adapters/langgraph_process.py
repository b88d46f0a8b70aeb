"""A graph in a process of its own that tests kill: it reports each of its turns on standard output."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.adapters.graphs import State, agent, at, said

from perdure.adapters.langgraph import PerdureSaver


def slowly(state: State) -> dict[str, Any]:
    """Work for a moment, so that a kill may come in the middle of it."""
    time.sleep(0.003)
    return {"notes": [f"{len(state['messages'])}"]}


def answer(state: State) -> dict[str, Any]:
    """Answer the last message."""
    return {"messages": [("ai", f"Answer to {state['messages'][-1].text}")]}


def graph_at(url: str) -> Any:
    """Return the graph, with its threads in a store."""
    return agent(PerdureSaver(store=url), slowly, answer, slowly)


def main(url: str, thread: str, first: int) -> None:
    """Take turns until the process is killed."""
    graph = graph_at(url)
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(first, first + 1_000):
        graph.invoke(said(f"turn {turn}"), at(thread))
        print(turn, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
