"""Links between sessions: which one spawned which, and what was taken over from a branch."""

from __future__ import annotations

from perdure.model.value import Value


class SpawnRef(Value, frozen=True):
    """A link on a child session to the tool call that spawned it, in its loop and session."""

    parent_session_id: str
    """The session whose run made the call."""
    parent_loop_id: str
    """That run."""
    tool_call_id: str
    """The id of the call."""
    tool_name: str
    """The name of the tool that was called."""


class ChildLoopRef(Value, frozen=True):
    """A link on a parent's loop to the loop of another session that a tool call spawned."""

    tool_call_id: str
    """The id of the call."""
    tool_name: str
    """The name of the tool that was called."""
    child_loop_id: str
    """The run that the call has spawned."""
    child_session_id: str
    """The session of that run."""


class Adoption(Value, frozen=True):
    """A note on a session: one of its versions has taken over the view of a branch. History finds the view by this."""

    version: int
    """The version that first showed it."""
    at: int = 0
    """The number of messages in the session's own log by then."""
    before: int = 0
    """The version of the adoption before this one; 0 if it is the first."""
