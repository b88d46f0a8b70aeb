"""The change of a session's model that a caller requests, made after everything else that a run needs was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.errors import ClaimConflict, SessionConflict
from perdure.loop.factory import LoopFactory
from perdure.model.session import AgentSession
from perdure.protocols import Action, ActionContext, Answer

if TYPE_CHECKING:
    from perdure.actions.definition import ChangeModel

ModelFor = Callable[[AgentSession], "ChangeModel | None"]
"""A function that returns the change of model that a session needs before its next run, or None."""


async def require_changed(loops: LoopFactory, session: AgentSession, change: ChangeModel) -> None:
    """Raise ConfigurationError if the model that a session is changed to cannot be asked from here."""
    await loops.require(loops.model_of(session.definition, change.state_of(session.state)))


async def begun_with(change: ChangeModel, action: Action, session: AgentSession, context: ActionContext) -> Answer:
    """Change a session's model, which makes a version of its own, then execute an action on that version.

    Raise ClaimConflict if somebody else has changed the session too. Nothing is spent then, so all may begin again.
    """
    try:
        await context.execute(session.id, change)
    except SessionConflict as error:
        raise ClaimConflict(session.id, error.expected, error.found) from error
    return Answer(await context.execute(session.id, action))
