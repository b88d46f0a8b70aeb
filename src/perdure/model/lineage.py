"""Links between sessions: who was spawned by whom, and what was taken over from a branch."""

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


class Adoption(Value, frozen=True):
    """On a session: that a version of it has taken over what a branch showed, so that its history finds it again."""

    version: int
    """The version that first showed it."""
    at: int = 0
    """How many messages stood in the session's own log by then."""
    before: int = 0
    """The version of the adoption before this one; 0 if it is the first."""
