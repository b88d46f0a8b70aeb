"""Links between sessions: who was spawned by whom."""

from __future__ import annotations

from perdure.model.value import Value


class SpawnRef(Value, frozen=True):
    """On a child session: the tool call, in which loop of which session, that spawned it."""

    parent_session_id: str
    parent_loop_id: str
    tool_call_id: str
    tool_name: str


class ChildLoopRef(Value, frozen=True):
    """On a parent's loop: the loop of another session that a tool call spawned."""

    tool_call_id: str
    tool_name: str
    child_loop_id: str
    child_session_id: str
