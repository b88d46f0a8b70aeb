"""LangGraph's threads on the command line: what waits in them, and who continues them. LangGraph is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perdure.cli.terminal import line

if TYPE_CHECKING:
    from perdure.model.session import AgentSession, AgentSessionInfo
    from perdure.protocols import JournalEntry
    from perdure.sessions.sessions import Sessions

WRITES = "langgraph.writes"
_AGENT, _NOTE, _PLANNED = "langgraph", "langgraph", "channel/branch:to:"
_INTERRUPT, _ANSWER = "__interrupt__", "__resume__"
TO_RUN = "A LangGraph thread: its graph continues it, with graph.invoke(None, config)."
TO_DECIDE = "A LangGraph thread: its graph decides, with graph.invoke(Command(resume=…), config)."
TO_SEND = (
    "A LangGraph thread: its graph answers, with graph.invoke({'messages': […]}, config). "
    "Here perdure's own agent would answer instead"
)


def is_thread(info: AgentSessionInfo) -> bool:
    """Tell whether a session is a thread of LangGraph, or a subgraph's."""
    return info.agent_name == _AGENT


def told_of_writes(body: Any) -> str:
    """Return in a few words what a task has written."""
    if not isinstance(body, Mapping):
        return ""
    channels = [channel for _, channel, _ in body.get("writes", ())]
    if _INTERRUPT in channels:
        return f"{_node(body)} waits on an interrupt"
    written = [channel for channel in channels if channel != _ANSWER]
    if channels and not written:
        return "an interrupt is answered"
    return f"{_node(body)} wrote {', '.join(written) or 'nothing'}"


async def plan_of(sessions: Sessions, session: AgentSession) -> list[str]:
    """Return the lines that tell what a thread does next, and what it waits for. A moved view has no plan."""
    note = session.state.metadata.get(_NOTE)
    journal = sessions.runtime.journal
    if not is_thread(session.info) or not isinstance(note, Mapping) or journal is None or _is_moved(session, note):
        return []
    waits = _waiting(await journal.read(session.id, run=note["id"]))
    next_ = [key.removeprefix(_PLANNED) for key in session.state.metadata if key.startswith(_PLANNED)]
    told = [f"next: {line(', '.join(next_))}"] if next_ else []
    return [*told, *(f"waits: {line(node)}, for Command(resume=…)" for node in waits)]


def _is_moved(session: AgentSession, note: Mapping[str, Any]) -> bool:
    """Tell whether a verb has changed what is shown since the graph saved it. Then only the graph can tell its plan."""
    return "id" not in note or "lost_plan" in note or session.state.shown_since > note.get("version", 0)


def _waiting(entries: Iterable[JournalEntry]) -> list[str]:
    """Return the nodes whose tasks have raised an interrupt and have written nothing else since."""
    waiting: dict[str, str] = {}
    for entry in entries:
        body: Any = entry.body
        if entry.kind == WRITES and any(channel == _INTERRUPT for _, channel, _ in body["writes"]):
            waiting[body["task"]] = _node(body)
        elif entry.kind == WRITES and any(at >= 0 for at, _, _ in body["writes"]):
            waiting.pop(body["task"], None)
    return list(waiting.values())


def _node(body: Mapping[str, Any]) -> str:
    """Return the node of a task, which is the last part of its path."""
    path = str(body.get("path", ""))
    is_node = path.startswith("~__pregel_pull, ")
    return path.rpartition(", ")[2] if is_node else f"task {str(body.get('task', ''))[:8]}"
