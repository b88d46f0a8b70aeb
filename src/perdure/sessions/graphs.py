"""LangGraph's threads as perdure sees them: what they do next, and who answers in them. LangGraph is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import SessionConflict

if TYPE_CHECKING:
    from perdure.model.ids import SessionId
    from perdure.model.message import Message
    from perdure.model.session import AgentSession, AgentSessionInfo
    from perdure.protocols import Journal, JournalEntry
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


class Plan(NamedTuple):
    """The work that a thread has left."""

    next: tuple[str, ...] = ()
    """The nodes that run next."""
    waits: tuple[str, ...] = ()
    """The nodes that wait on an interrupt."""


def is_thread(info: AgentSessionInfo) -> bool:
    """Tell whether a session is a thread of LangGraph, or a subgraph's."""
    return info.agent_name == _AGENT


def may_answer(info: AgentSessionInfo, messages: Sequence[Message]) -> bool:
    """Tell whether a thread's last calls may still get their results: nothing else was said since.

    Only the graph knows whether they wait for a person, run in another process, or were cut off with it.
    """
    return is_thread(info) and bool(messages) and (messages[-1].role == "tool" or bool(messages[-1].tool_calls))


def is_noted(session: AgentSession) -> bool:
    """Tell whether the adapter has saved a thread. A user's own agent may have its name too."""
    return _NOTE in session.state.metadata


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


async def has_interrupt(journal: Journal, session_id: SessionId, metadata: Mapping[str, Any]) -> bool:
    """Tell whether an interrupt of a thread has no answer yet, by the thread's newest metadata.

    A verb that has moved the view may have taken the interrupt away. Only the graph can tell, so it counts here.
    """
    note = metadata.get(_NOTE)
    return isinstance(note, Mapping) and "id" in note and bool(await _interrupted(journal, session_id, note))


async def require_no_graph(sessions: Sessions, session_id: str) -> None:
    """Raise SessionConflict for a message to a thread of LangGraph: its graph would not answer it."""
    info = await sessions.info(session_id)
    if is_thread(info) and is_noted(await sessions.session(session_id)):
        raise SessionConflict(info.id, info.version, info.version, f"{TO_SEND}.", "Nothing was sent.", agent=_AGENT)


async def plan_of(journal: Journal | None, session: AgentSession) -> Plan:
    """Return what a thread does next, and what it waits for. A moved view has no plan."""
    note = session.state.metadata.get(_NOTE)
    if not is_thread(session.info) or not isinstance(note, Mapping) or journal is None or _is_moved(session, note):
        return Plan()
    waits = await _interrupted(journal, session.id, note)
    planned = (key.removeprefix(_PLANNED) for key in session.state.metadata if key.startswith(_PLANNED))
    return Plan(tuple(planned), waits)


async def _interrupted(journal: Journal, session_id: SessionId, note: Mapping[str, Any]) -> tuple[str, ...]:
    return _waiting(await journal.read(session_id, run=note["id"]))


def _is_moved(session: AgentSession, note: Mapping[str, Any]) -> bool:
    """Tell whether a verb has changed what is shown since the graph saved it. Then only the graph can tell its plan."""
    return "id" not in note or "lost_plan" in note or session.state.shown_since > note.get("version", 0)


def _waiting(entries: Iterable[JournalEntry]) -> tuple[str, ...]:
    """Return the nodes whose tasks have raised an interrupt and have written nothing else since."""
    waiting: dict[str, str] = {}
    for entry in entries:
        body: Any = entry.body
        if entry.kind == WRITES and any(channel == _INTERRUPT for _, channel, _ in body["writes"]):
            waiting[body["task"]] = _node(body)
        elif entry.kind == WRITES and any(at >= 0 for at, _, _ in body["writes"]):
            waiting.pop(body["task"], None)
    return tuple(waiting.values())


def _node(body: Mapping[str, Any]) -> str:
    """Return the node of a task, which is the last part of its path."""
    path = str(body.get("path", ""))
    is_node = path.startswith("~__pregel_pull, ")
    return path.rpartition(", ")[2] if is_node else f"task {str(body.get('task', ''))[:8]}"
