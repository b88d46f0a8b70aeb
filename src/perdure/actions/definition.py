"""Actions that change what the agent is, from its next run on."""

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
    """An action that gives a session another system prompt, which may be anything with a text form."""

    may_be_repeated: ClassVar[bool] = True

    text: object
    """The prompt from the next model call on."""

    def __post_init__(self) -> None:
        text_of(self.text, "$.text")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(session.state.with_system_prompt(text_of(self.text, "$.text")))


@dataclass(frozen=True, slots=True)
class ChangeModel:
    """An action that gives a session another model. None restores the definition's, or the one given at the creation.

    With `as_default` it replaces the one given at the creation instead. A definition's own model comes before that.
    """

    may_be_repeated: ClassVar[bool] = True

    config: ModelConfig | str | None
    """The model, as a `ModelConfig` or by its name."""
    as_default: bool = False

    def __post_init__(self) -> None:
        if self.config is not None:
            ModelConfig.of(self.config)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(self.state_of(session.state))

    def state_of(self, state: AgentState) -> AgentState:
        """Return a `state` with the other model."""
        model = None if self.config is None else ModelConfig.of(self.config)
        return state.with_default_model(model) if self.as_default else state.with_model(model)


@dataclass(frozen=True, slots=True)
class ChangeDefinition:
    """An action that gives a session another definition. A system prompt of the session's own is kept."""

    may_be_repeated: ClassVar[bool] = True

    definition: AgentDefinition
    """The definition from the next run on."""

    def __post_init__(self) -> None:
        if not isinstance(self.definition, AgentDefinition):
            raise InvalidData("$.definition", f"expected an AgentDefinition, got {type(self.definition).__name__}")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        state = session.state
        # A prompt that is still the old definition's follows the new one. Any other is the session's own.
        if state.context.system_prompt == session.definition.system_prompt:
            state = state.with_system_prompt(self.definition.system_prompt)
        return session.with_definition(self.definition).with_state(state)
