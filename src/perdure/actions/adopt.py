"""Adopt a branch: a session shows what one of its forks shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.actions.waiting import end_waiting
from perdure.errors import ConfigurationError, InvalidData, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.lineage import Adoption
from perdure.model.session import AgentSession, forked_from
from perdure.protocols import ActionContext, ActionResult


@dataclass(frozen=True, slots=True)
class AdoptBranch:
    """An action that makes a session show what one of its forks shows, from the next version on.

    Nothing is copied, and the fork stays. A run of this session that waits for a person ends.
    """

    may_be_repeated: ClassVar[bool] = True

    branch_id: str
    """The id of the fork."""

    def __post_init__(self) -> None:
        SessionId(self.branch_id)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if context is None:
            raise ConfigurationError("AdoptBranch needs the store: execute it with SessionRuntime.execute().")
        branch = await context.store.load(self.branch_id)
        if branch is None or branch.info.owner != session.info.owner:
            raise SessionNotFound(self.branch_id)
        await _require_fork(branch, session, context)
        adoption = await _adoption(session, context)
        state = session.state.for_next_execution().with_adopted(branch.state.transcript, adoption)
        return await end_waiting(session, session.with_state(state), context, "a branch was adopted")


async def _adoption(session: AgentSession, context: ActionContext) -> Adoption:
    """Return the note that tells `history()` later what was adopted, and at which length of the log."""
    # The length stays right until the save: if anybody else writes in between, the save raises a conflict.
    end = 0 if context.journal is None else (await context.journal.log_of(session.id))[1]
    before = session.state.adopted
    return Adoption(session.version + 1, end, before.version if before else 0)


async def _require_fork(branch: AgentSession, session: AgentSession, context: ActionContext) -> None:
    """Raise InvalidData unless `branch` is a fork of `session`, or a fork of one of its forks."""
    parent = forked_from(branch.info)
    while parent is not None and parent != session.id:
        page = await context.store.list(id=parent, limit=1)
        parent = forked_from(page.all()[0]) if page else None
    if parent is None:
        raise InvalidData("$.branch", f"{branch.id!r} is not a fork of {session.id!r}; only a fork can be adopted")
