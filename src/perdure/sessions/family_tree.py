"""A session's runs, branches, sub-agents and forks as one tree, which is not drawn yet."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from perdure.loop.tool_use import UNKNOWN
from perdure.model.loop_events import ToolExecutionStart
from perdure.model.session import SessionStatus
from perdure.model.usage import Usage
from perdure.paging import all_infos
from perdure.sessions.json_forms import of_usage

if TYPE_CHECKING:
    from perdure.model.record import LoopRecord
    from perdure.model.session import AgentSessionInfo
    from perdure.sessions.sessions import Sessions

_DEEPEST = 20
KILLED = "killed"
"""The status of a run whose process has died, and which waits to be recovered."""
HANDED_OVER = "handed over"
"""The status of a run that a worker which was told to stop has handed over."""
LEFT = "left"
"""The status of a run that was decided on, and left to a worker."""
WAITING = "waiting"
"""The status of a run that waits for a person to approve or deny."""


@dataclass
class Node:
    """A session, a run, or a group of parallel branches, with its children."""

    kind: str
    """session, fork, subagent, loop, branch or group."""
    id: str
    title: str = ""
    status: str = ""
    model: str | None = None
    usage: Usage = field(default_factory=Usage)
    seconds: float | None = None
    tools: tuple[str, ...] = ()
    is_selected: bool = False
    stop_reason: str | None = None
    """Why a run ended before it had an answer."""
    unknown: tuple[str, ...] = ()
    """The tools of calls whose outcome is unknown: they were begun, and have no result that tells."""
    children: list[Node] = field(default_factory=list)

    def session_ids(self) -> Iterator[str]:
        """Yield the ids of all sessions in the tree."""
        if self.kind in ("session", "fork", "subagent"):
            yield self.id
        for child in self.children:
            yield from child.session_ids()

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "id": self.id,
            "title": self.title,
            "status": self.status,
            "model": self.model,
            "usage": of_usage(self.usage),
            "seconds": self.seconds,
            "tools": list(self.tools),
            "selected": self.is_selected,
            "stop_reason": self.stop_reason,
            "unknown": list(self.unknown),
            "children": [child.to_json() for child in self.children],
        }


async def killed_in(sessions: Sessions) -> set[str]:
    """Return the sessions whose last run was killed and waits to be recovered."""
    journal = sessions.runtime.journal
    return set() if journal is None else {str(each) for each in await journal.lapsed()}


async def interruption_of(sessions: Sessions, session_id: str) -> str:
    """Return why the run of a session waits to be continued: it was killed, handed over, or left to a worker."""
    from perdure.runtime.record_reader import is_left_to_worker, was_handed_over

    journal = sessions.runtime.journal
    assert journal is not None  # or no run would wait
    if await is_left_to_worker(journal, session_id):
        return LEFT
    return HANDED_OVER if await was_handed_over(journal, session_id) else KILLED


async def tree_of(sessions: Sessions, session_id: str, *, limit: int) -> Node:
    """Return the tree below a session, with the last `limit` runs of each session."""
    return await _Grown(sessions, limit).root(session_id)


class _Grown:
    def __init__(self, sessions: Sessions, limit: int) -> None:
        self._sessions = sessions
        self._limit = limit
        self._killed: set[str] = set()

    async def root(self, session_id: str) -> Node:
        self._killed = await killed_in(self._sessions)
        return await self.session(await self._sessions.info(session_id), "session", 0)

    async def session(self, info: AgentSessionInfo, kind: str, depth: int) -> Node:
        node = Node(kind, info.id, _title_of(info), info.status.value)
        if depth > _DEEPEST:
            return node
        record = await self._sessions.record(info.id, limit=self._limit)
        loops = [await self._sessions.loop(info.id, header.loop_id) for header in record.loops]
        subagents: dict[str, list[Node]] = {}
        spawned: set[tuple[str, str]] = set()
        forks: list[Node] = []
        for child in reversed(await all_infos(self._sessions.headers, parent=info.id)):
            if child.spawn_ref is None:
                forks.append(await self.session(child, "fork", depth + 1))
            else:
                grown = await self.session(child, "subagent", depth + 1)
                subagents.setdefault(child.spawn_ref.parent_loop_id, []).append(grown)
                spawned.add((child.spawn_ref.parent_loop_id, child.spawn_ref.tool_call_id))
        # From the whole loops: the header of a run that has not ended does not know its usage yet.
        node.usage = replace(record, loops=tuple(loops)).total_usage()
        node.children = [*_runs(loops, subagents), *forks]
        status = await self._why_idle(info)
        if status is not None:
            _mark_open(node.children, status)
        idle = [loop for loop in loops if loop.status.is_over or status is not None]
        _mark_unknown(node.children, {loop.loop_id: _left_open(loop, spawned) for loop in idle})
        # The sub-agents of a run that is older than those shown become children of the session.
        node.children += [each for found in subagents.values() for each in found]
        return node

    async def _why_idle(self, info: AgentSessionInfo) -> str | None:
        """Return why nobody is running a run that has not ended. Return None if the session has no such run."""
        if info.id in self._killed:
            return await interruption_of(self._sessions, info.id)
        return WAITING if await self._waits(info) else None

    async def _waits(self, info: AgentSessionInfo) -> bool:
        """Tell whether a session's run waits for a person. Its record says only that it has not ended."""
        if info.status is not SessionStatus.SUSPENDED:
            return False
        execution = (await self._sessions.session(info.id)).state.execution
        return execution is not None and bool(execution.pending_calls)


def _runs(loops: Sequence[LoopRecord], subagents: dict[str, list[Node]]) -> list[Node]:
    """Return the runs in the order in which they began, with the branches of a group below one node."""
    nodes: list[Node] = []
    seen: set[str] = set()
    known = {loop.loop_id: loop for loop in loops}
    for loop in loops:
        if loop.loop_id in seen:
            continue
        group = loop.parallel_group
        if group is None or len(group.all_loop_ids) < 2:
            nodes.append(_run(loop, "loop", subagents))
            continue
        seen.update(group.all_loop_ids)
        branches = [known[each] for each in group.all_loop_ids if each in known]
        nodes.append(_group(branches, subagents))
    return nodes


def _group(branches: Sequence[LoopRecord], subagents: dict[str, list[Node]]) -> Node:
    group = branches[0].parallel_group
    judged = group.evaluation_usage if group else Usage()
    settled = any(branch.parallel_group and branch.parallel_group.is_selected for branch in branches)
    over = all(branch.status.is_over for branch in branches)
    return Node(
        "group",
        branches[0].loop_id,
        f"{len(branches)} branches: {_asked(branches[0])}",
        "completed" if settled else "aborted" if over else "running",
        usage=sum((branch.usage for branch in branches), start=judged),
        seconds=max((branch.duration for branch in branches if branch.duration is not None), default=None),
        children=[_run(branch, "branch", subagents) for branch in branches],
    )


def _run(loop: LoopRecord, kind: str, subagents: dict[str, list[Node]]) -> Node:
    group = loop.parallel_group
    config = loop.config
    name = config.name if config and config.name and config.name != config.model and kind == "branch" else None
    calls = [done for turn in loop.turns for done in turn.tool_executions]
    unknown = tuple(done.call.name for done in calls if done.error is not None and done.error.type == UNKNOWN)
    return Node(
        kind,
        loop.loop_id,
        name or (_asked(loop) if kind == "loop" else _answered(loop)),
        loop.status.value,
        config.model if config else None,
        loop.usage,
        loop.duration,
        tuple(done.call.name for done in calls),
        bool(group and group.is_selected),
        loop.stop_reason if loop.stop_reason != "completed" else None,
        unknown,
        subagents.pop(loop.loop_id, []),
    )


def _mark_open(runs: Iterable[Node], status: str) -> None:
    """Give runs that have not ended the status that says why nobody is running them."""
    for node in runs:
        if node.kind in ("loop", "branch", "group"):
            _mark_open(node.children, status)
            node.status = status if node.status in ("running", "pending") else node.status


def _mark_unknown(runs: Iterable[Node], left_open: Mapping[str, tuple[str, ...]]) -> None:
    """Add the calls that runs have left open to those with an unknown outcome, by the ids of the runs."""
    for node in runs:
        if node.kind == "group":
            _mark_unknown(node.children, left_open)
        elif node.kind in ("loop", "branch"):
            node.unknown += left_open.get(node.id, ())


def _left_open(loop: LoopRecord, spawned: Container[tuple[str, str]]) -> tuple[str, ...]:
    """Return the tools of calls that were begun and have no result. Those of sub-agents have sessions that tell."""
    begun = {event.call.id: event.call.name for event in loop.events if isinstance(event, ToolExecutionStart)}
    ended = {done.call.id for turn in loop.turns for done in turn.tool_executions}
    return tuple(name for call, name in begun.items() if call not in ended and (loop.loop_id, call) not in spawned)


def _asked(loop: LoopRecord) -> str:
    said = [message.text for message in loop.messages if message.role == "user"]
    if not said and any(message.is_note for message in loop.messages):
        return "continues the run before"
    return said[0] if said else loop.continuation_kind.kind


def _answered(loop: LoopRecord) -> str:
    said = [message.text for message in loop.messages if message.role == "assistant" and message.text]
    return said[-1] if said else ""


def _title_of(info: AgentSessionInfo) -> str:
    return f"{info.agent_name} “{info.name}”" if info.name else info.agent_name
