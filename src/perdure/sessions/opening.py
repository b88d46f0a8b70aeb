"""The choices when a session is opened with another definition of its agent than the one it keeps."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec.structs import fields, replace

from perdure.errors import InvalidData, SessionConflict
from perdure.model.definition import AgentDefinition
from perdure.model.session import AgentSession
from perdure.model.value import brief

OnChange = Literal["raise", "keep", "take"]
"""The choices when a session keeps another definition of its agent: an error, the old one or the new one."""


def check_on_change(on_change: object) -> None:
    if on_change not in get_args(OnChange):
        raise InvalidData("$.on_change", f"expected 'raise', 'keep' or 'take', got {brief(on_change)}")


def changed_fields(session: AgentSession, agent: AgentDefinition) -> list[str]:
    """Return the fields in which an agent differs from the one that a session keeps.

    An agent that names no model leaves the choice to the session, which keeps the model named at its creation.
    """
    kept = session.definition
    given = replace(agent, model=kept.model) if agent.model is None else agent
    return [field.name for field in fields(given) if getattr(given, field.name) != getattr(kept, field.name)]


def changed_agent(session: AgentSession, agent: AgentDefinition) -> SessionConflict:
    """Explain that the agent has changed since the session took it over, and name the choices."""
    reason = (
        f"Session {session.id!r} keeps another definition of the agent {agent.name!r}: "
        f"{', '.join(changed_fields(session, agent))} differ. Open it with on_change='take' to give it the new one "
        "from its next run on, or with on_change='keep' to keep the old one."
    )
    return SessionConflict(session.id, session.version, session.version, reason)
