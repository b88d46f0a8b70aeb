"""The events of the session runtime: frozen, JSON-able, and named by what has happened."""

from __future__ import annotations

from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.model.value import Value


class SessionLoaded(Value, frozen=True, tag="session_loaded"):
    """A session was loaded, and the controllers have seen it."""

    session_id: SessionId
    version: int
    status: SessionStatus


class SessionActionExecuted(Value, frozen=True, tag="session_action_executed"):
    """An action has made the next session from the loaded one. It is not saved yet."""

    session_id: SessionId
    action: str
    before_version: int
    after_version: int
    before_status: SessionStatus
    after_status: SessionStatus


class SessionSaved(Value, frozen=True, tag="session_saved"):
    """A session was saved as a new version."""

    session_id: SessionId
    version: int
    status: SessionStatus


class SessionLoadFailed(Value, frozen=True, tag="session_load_failed"):
    """A session could not be loaded."""

    session_id: str
    error: str
    error_type: str


class SessionSaveFailed(Value, frozen=True, tag="session_save_failed"):
    """A session could not be saved. If `persisted`, it was saved, and what comes after the save failed."""

    session_id: SessionId
    error: str
    error_type: str
    persisted: bool


SessionEvent = SessionLoaded | SessionActionExecuted | SessionSaved | SessionLoadFailed | SessionSaveFailed
