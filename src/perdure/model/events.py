"""The events of the session runtime: frozen, JSON-able, and named by what has happened."""

from __future__ import annotations

from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.model.value import Value


class SessionLoaded(Value, frozen=True, tag="session_loaded"):
    """A session was loaded, and the controllers have seen it."""

    session_id: SessionId
    """The session."""
    version: int
    """The version that was loaded."""
    status: SessionStatus
    """The status of that version."""


class SessionActionExecuted(Value, frozen=True, tag="session_action_executed"):
    """An action has made the next session from the loaded one. It is not saved yet."""

    session_id: SessionId
    """The session."""
    action: str
    """The name of the action's class."""
    before_version: int
    """The version that was loaded."""
    after_version: int
    """The version that the action has made."""
    before_status: SessionStatus
    """The status before the action."""
    after_status: SessionStatus
    """The status after it."""


class SessionSaved(Value, frozen=True, tag="session_saved"):
    """A session was saved as a new version."""

    session_id: SessionId
    """The session."""
    version: int
    """The version that was saved."""
    status: SessionStatus
    """The status of that version."""


class SessionLoadFailed(Value, frozen=True, tag="session_load_failed"):
    """A session could not be loaded."""

    session_id: str
    """The id that was asked for."""
    error: str
    """The error's message."""
    error_type: str
    """The name of the error's class."""


class SessionSaveFailed(Value, frozen=True, tag="session_save_failed"):
    """A session could not be saved. If `persisted`, it was saved, and what comes after the save failed."""

    session_id: SessionId
    """The session."""
    error: str
    """The error's message."""
    error_type: str
    """The name of the error's class."""
    persisted: bool


SessionEvent = SessionLoaded | SessionActionExecuted | SessionSaved | SessionLoadFailed | SessionSaveFailed
"""An event about a session itself."""
