"""Actions that change a session's status, as far as the table of legal changes allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.actions.children import spawned_by
from perdure.actions.waiting import end_waiting, is_waiting, names_of_waiting
from perdure.errors import IllegalStatusChange, SessionBusy
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import PARKED, ActionContext, ActionResult, Answer


@dataclass(frozen=True, slots=True)
class SuspendSession:
    """An action that pauses the session: it takes no messages until it is resumed."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.suspended()


@dataclass(frozen=True, slots=True)
class ResumeSession:
    """An action that opens a suspended, completed or failed session again. A parked one is not parked any more."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if session.status is not SessionStatus.SUSPENDED:  # closed by an older release while its run waited
            return await end_waiting(session, session.activated(), context, "the session was closed")
        if is_waiting(session):
            wanted, names = SessionStatus.ACTIVE.value, names_of_waiting(session)
            raise IllegalStatusChange(session.id, session.status.value, wanted, (), None, **names)
        return session.with_tags(tag for tag in session.info.tags if tag != PARKED).activated()


@dataclass(frozen=True, slots=True)
class CompleteSession:
    """An action that closes the session as done. A run that waits for a person ends."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        return await end_waiting(session, session.completed(), context, "the session was completed")


@dataclass(frozen=True, slots=True)
class FailSession:
    """An action that closes the session as failed. A run that waits for a person ends."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        return await end_waiting(session, session.failed(), context, "the session was failed")


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """An action that hides the session and those of its sub-agents from lists. A run that waits for a person ends.

    `RestoreSession` takes it back. Their content stays until `Sessions.erase` or `Sessions.purge` erases it. A store's
    own `delete` erases only one session.
    """

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if context is not None:
            await _hide_children(session, context)
        return await end_waiting(session, session.deleted(), context, "the session was deleted")


async def _hide_children(session: AgentSession, context: ActionContext) -> None:
    children = [info.id for info in await spawned_by(context.store, session.id)]
    for each in (session.id, *children):  # before any of them is hidden: if one is being run, none is
        if context.journal is not None and await context.journal.is_claimed(each):
            raise SessionBusy(each)
    for each in children:
        await context.execute(each, DeleteSession())


@dataclass(frozen=True, slots=True)
class RestoreSession:
    """An action that takes a deletion back. The session and those of its sub-agents have their earlier status again.

    A session whose run waited for a person is active again, since that run ended with the deletion.
    """

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if session.status is not SessionStatus.DELETED:
            return session if context is None else Answer(session)
        if context is not None:
            await _show_children(session, context)
        return session.restored(await _status_before(session, context))


async def _show_children(session: AgentSession, context: ActionContext) -> None:
    for info in await spawned_by(context.store, session.id, deleted=True):
        if info.status is SessionStatus.DELETED:
            await context.execute(info.id, RestoreSession())


async def _status_before(session: AgentSession, context: ActionContext | None) -> SessionStatus:
    """Return the status of the last version that was not deleted."""
    if context is None:
        return SessionStatus.ACTIVE
    # Versions before `first_version` were forgotten, and cannot be loaded.
    for version in range(session.version - 1, session.info.first_version - 1, -1):
        before = await context.store.load(session.id, version)
        if before is not None and before.status is not SessionStatus.DELETED:
            return SessionStatus.ACTIVE if is_waiting(before) else before.status
    return SessionStatus.ACTIVE
