"""Sessions with an example of everything the adapter for Strands stores, for the golden files."""

from __future__ import annotations

from typing import Any

from strands import Agent
from tests.adapters.strands_process import ScriptedModel, agent_of, turns

from perdure.adapters.strands import PerdureSessionManager, PerdureSessionRepository

AGENTS = (("s-1", "default"), ("s-1", "writer"), ("s-2", "default"), ("user@x / 4", "default"))


class Crew:
    """The part of a multi-agent that a repository uses."""

    id = "crew"

    def __init__(self, **state: Any) -> None:
        self.state = state

    def serialize_state(self) -> dict[str, Any]:
        return self.state


def furnish_sessions(store: Any) -> None:
    """Save a session with two agents and a multi-agent, a fork of its first agent, and a session with an unusual id."""
    first = agent_of(store, turns(2))
    first.state.set("seen", [1, {"b": None}])
    for order in range(2):
        first(f"Where is order {order}?")
    manager = PerdureSessionManager("s-1", store=store)
    Agent(model=ScriptedModel(["Once."]), agent_id="writer", session_manager=manager, callback_handler=None)("Write!")
    manager.repository.create_multi_agent("s-1", Crew(step=1))  # type: ignore[arg-type]
    manager.chat_of("default").fork("s-2", at=2)
    agent_of(store, ["Hello."], "user@x / 4")("Hi?")


def told_of(store: Any) -> Any:
    """Return all that Strands reads of these sessions, in plain JSON."""
    repository = PerdureSessionRepository(store=store)
    agents = [(names, repository.read_agent(*names), repository.list_messages(*names)) for names in AGENTS]
    return {
        "agents": [
            {"of": names, "kept": kept and kept.to_dict(), "messages": [each.to_dict() for each in messages]}
            for names, kept, messages in agents
        ],
        "crew": repository.read_multi_agent("s-1", "crew"),
    }
