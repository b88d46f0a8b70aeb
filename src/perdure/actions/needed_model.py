"""The model that a run goes on with: the one it was begun with, unless the session was given another since."""

from __future__ import annotations

from perdure import codec
from perdure.errors import ConfigurationError
from perdure.loop.factory import UNASKED, LoopFactory
from perdure.loop.narrator import model_in, snapshot
from perdure.model.definition import ModelConfig
from perdure.model.loop_events import LoopConfigSnapshot
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext


async def require_model(
    loops: LoopFactory,
    session: AgentSession,
    context: ActionContext | None,
    execution_id: str,
    *,
    why: str,
    what_to_do: str,
) -> ModelConfig:
    """Return the model of a run. Raise ConfigurationError if it cannot be asked from here."""
    model = await _kept_or_recorded(loops, session, context, execution_id)
    if model is None:
        return loops.model_of(session.definition, session.state)
    try:
        await loops.require(model)
    except ConfigurationError as error:
        raise ConfigurationError(f"{why} {model.name!r}. {error}", what_to_do) from None
    return model


async def known_model(
    loops: LoopFactory, session: AgentSession, context: ActionContext | None, execution_id: str
) -> ModelConfig:
    """Return the model of a run that is to be ended, which asks it nothing more."""
    return await _kept_or_recorded(loops, session, context, execution_id) or UNASKED


async def _kept_or_recorded(
    loops: LoopFactory, session: AgentSession, context: ActionContext | None, execution_id: str
) -> ModelConfig | None:
    """Return what the session keeps, or else what the run's record names; None if neither names a model.

    The record leaves out where the key comes from, so that the factory's model is taken if it is the same one.
    """
    kept = session.state.model_for(session.definition)
    if kept is not None or context is None or context.journal is None:
        return kept
    (*_, run) = await context.journal.runs(session.id, run=execution_id) or (None,)
    config = None if run is None else run.first.body.get("config")
    if config is None:
        return None
    recorded = codec.convert(LoopConfigSnapshot, config)
    if loops.model is not None and snapshot(loops.model) == recorded:
        return loops.model
    return model_in(recorded)
