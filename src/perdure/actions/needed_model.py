"""The model that a run continues with: the one it began with, unless the session was given another since."""

from __future__ import annotations

from perdure import codec
from perdure.errors import ConfigurationError
from perdure.loop.factory import UNASKED, LoopFactory
from perdure.loop.run_events import model_in, snapshot
from perdure.model.definition import ModelConfig
from perdure.model.loop_events import LoopConfigSnapshot
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext


async def require_model(
    loops: LoopFactory,
    session: AgentSession,
    recorded: LoopConfigSnapshot | None,
    *,
    why: str,
    what_to_do: str,
) -> ModelConfig:
    """Return the model of a run. Raise ConfigurationError if it cannot be asked from here."""
    model = _kept_or_recorded(loops, session, recorded)
    if model is None:
        return loops.model_of(session.definition, session.state)
    try:
        await loops.require(model)
    except ConfigurationError as error:
        raise ConfigurationError(f"{why} {model.name!r}. {error}", what_to_do) from None
    return model


def known_model(loops: LoopFactory, session: AgentSession, recorded: LoopConfigSnapshot | None) -> ModelConfig:
    """Return the model of a run that only has to be ended. Nothing more is asked of it."""
    return _kept_or_recorded(loops, session, recorded) or UNASKED


async def recorded_config(
    session: AgentSession, context: ActionContext | None, execution_id: str
) -> LoopConfigSnapshot | None:
    """Return the model that a run began with, from its record, if the session keeps none."""
    if context is None or context.journal is None or session.state.model_for(session.definition) is not None:
        return None
    (*_, run) = await context.journal.runs(session.id, run=execution_id) or (None,)
    config = None if run is None else run.first.body.get("config")
    return None if config is None else codec.convert(LoopConfigSnapshot, config)


def _kept_or_recorded(
    loops: LoopFactory, session: AgentSession, recorded: LoopConfigSnapshot | None
) -> ModelConfig | None:
    """Return the model that the session keeps, or else the one that the run's record names, or None.

    The record does not say where the API key comes from. So the factory's model is taken if it is the same one.
    """
    kept = session.state.model_for(session.definition)
    if kept is not None or recorded is None:
        return kept
    if loops.model is not None and snapshot(loops.model) == recorded:
        return loops.model
    return model_in(recorded)
