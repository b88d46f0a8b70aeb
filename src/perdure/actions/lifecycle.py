"""Verbs that move a session's status along its table."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.errors import IllegalStatusChange
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import ActionContext


@dataclass(frozen=True, slots=True)
class SuspendSession:
    """Pause the session: it takes no messages until it is resumed."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.suspended()


@dataclass(frozen=True, slots=True)
class ResumeSession:
    """Open a suspended, completed or failed session again."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        execution = session.state.execution
        if execution is not None and execution.pending_calls:
            waiting = ", ".join(call.name for call in execution.pending_calls)
            raise IllegalStatusChange(
                session.id,
                session.status.value,
                SessionStatus.ACTIVE.value,
                (),
                reason=f"tool calls wait for approval ({waiting}): execute ApproveToolCalls or DenyToolCalls instead",
            )
        return session.activated()


@dataclass(frozen=True, slots=True)
class CompleteSession:
    """Close the session as done."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.completed()


@dataclass(frozen=True, slots=True)
class FailSession:
    """Close the session as failed."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.failed()


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Hide the session from lists. Its content stays until the store's `delete` erases it."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.deleted()
