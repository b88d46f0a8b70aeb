"""Verbs that change what the agent is, from its next run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.errors import InvalidData
from perdure.model.checks import text_of
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.protocols import ActionContext


@dataclass(frozen=True, slots=True)
class ChangeSystemPrompt:
    """Another system prompt for this session; anything with a text form will do."""

    may_be_repeated: ClassVar[bool] = True

    text: object

    def __post_init__(self) -> None:
        text_of(self.text, "$.text")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(session.state.with_system_prompt(text_of(self.text, "$.text")))


@dataclass(frozen=True, slots=True)
class ChangeModel:
    """Another model for this session. None goes back to the definition's, or to the one given at the creation.

    With `as_default` the one given at the creation is replaced instead, which a definition's own model outranks.
    """

    may_be_repeated: ClassVar[bool] = True

    config: ModelConfig | str | None
    as_default: bool = False

    def __post_init__(self) -> None:
        if self.config is not None:
            ModelConfig.of(self.config)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(self.state_of(session.state))

    def state_of(self, state: AgentState) -> AgentState:
        """Return a state with the other model."""
        model = None if self.config is None else ModelConfig.of(self.config)
        return state.with_default_model(model) if self.as_default else state.with_model(model)


@dataclass(frozen=True, slots=True)
class ChangeDefinition:
    """Another definition. A system prompt that the session has of its own is kept."""

    may_be_repeated: ClassVar[bool] = True

    definition: AgentDefinition

    def __post_init__(self) -> None:
        if not isinstance(self.definition, AgentDefinition):
            raise InvalidData("$.definition", f"expected an AgentDefinition, got {type(self.definition).__name__}")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        state = session.state
        if state.context.system_prompt == session.definition.system_prompt:
            state = state.with_system_prompt(self.definition.system_prompt)
        return session.with_definition(self.definition).with_state(state)
