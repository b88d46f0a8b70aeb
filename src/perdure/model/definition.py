"""The definition of an agent: its prompt, model, tools and budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import force_setattr, replace

from perdure.errors import ConfigurationError, InvalidData
from perdure.model.checks import expect, expect_number
from perdure.model.execution import ExecutionBudget, ModelOptions
from perdure.model.schema import output_schema
from perdure.model.secrets import refuse_secrets as refuse_secrets
from perdure.model.secrets import without_secrets
from perdure.model.value import EMPTY, Value, freeze, plain_text

OWN_DRIVER = "driver"
"""The provider on record for a caller's own driver, if no model was named."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ModelConfig(Value, frozen=True):
    """A model, how it is asked, and the name of the environment variable that holds its key."""

    name: str
    """The provider and the model, such as `openai:gpt-5`; or `offline`."""
    base_url: str | None = None
    """The address of the provider's API, if it is not the usual one. It carries no credentials."""
    api_key_env: str | None = None
    """The name of the environment variable that holds the key."""
    temperature: float | None = None
    """The sampling temperature. None leaves it to the provider."""
    max_tokens: int | None = None
    """The number of tokens that one answer may have. None leaves it to the provider."""
    thinking: str | None = None
    """`on`, `off`, or how much: `minimal`, `low`, `medium`, `high`, `xhigh`, `max`."""
    context_window: int | None = None
    """The number of tokens that fit into a prompt, if perdure does not know it for the model."""
    settings: Mapping[str, Any] = EMPTY
    """Further settings of the provider's API, as plain data without secrets."""

    def __post_init__(self) -> None:
        freeze(self, "settings")
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidData("$.model.name", "a model needs a name, such as 'openai:gpt-5' or 'offline'")
        refuse_secrets(self.settings, "$.model.settings")
        for field in ("base_url", "thinking"):
            if getattr(self, field) is not None:
                expect(getattr(self, field), str, f"$.model.{field}")
        # Only the types: numbers out of range may be stored already, and the provider refuses them.
        if self.temperature is not None:
            expect_number(self.temperature, "$.model.temperature", least=float("-inf"))
        for field in ("max_tokens", "context_window"):
            if getattr(self, field) is not None:
                expect(getattr(self, field), int, f"$.model.{field}")
        if self.api_key_env is not None and not _VARIABLE.fullmatch(str(self.api_key_env)):
            raise ConfigurationError(
                "api_key_env is the name of an environment variable, such as 'OPENAI_API_KEY'; what was given is none, "
                "and is not shown here because it may be the key itself."
            )
        if self.base_url and without_secrets(self.base_url) != self.base_url:
            raise ConfigurationError(
                "The model's base_url carries credentials, and would be stored with every session. "
                "Leave them out and name the environment variable that holds the key: api_key_env='…'."
            )
        for field in ("name", "base_url", "api_key_env", "thinking"):
            force_setattr(self, field, plain_text(getattr(self, field)))

    @classmethod
    def of(cls, model: str | ModelConfig) -> ModelConfig:
        """Return a `model` that is given as a config or by its name."""
        return model if isinstance(model, ModelConfig) else cls(model)

    def asked(self, options: ModelOptions | None) -> ModelConfig:
        """Return the model as a run with `options` of its own asks it."""
        if options is None:
            return self
        given = {name: getattr(options, name) for name in ("temperature", "max_tokens", "thinking")}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if options.top_p is not None:
            changes["settings"] = {**self.settings, "top_p": options.top_p}
        return replace(self, **changes)

    @property
    def provider(self) -> str:
        """The part of the name before the colon; the whole name if it has none."""
        return self.name.partition(":")[0]


# A base of its own: only the name of a definition can be given by position.
class _Named(Value, frozen=True):
    name: str
    """The name of the agent, which its sessions keep."""


class AgentDefinition(_Named, frozen=True, kw_only=True):
    """The definition of an agent. `tools=None` allows every registered tool, `()` none."""

    label: str | None = None
    """A name for people."""
    description: str = ""
    """A sentence about what the agent does. An agent that calls it as a tool is told this."""
    system_prompt: str = ""
    """The instructions that the model is told first."""
    model: ModelConfig | str | None = None
    """The model that is asked, as a `ModelConfig` or by its name. Without one, `connect(model=…)` counts."""
    tools: tuple[str, ...] | None = None
    tools_deny: tuple[str, ...] = ()
    """Names of tools that the agent may not use, also where `tools` allows them."""
    capabilities: tuple[str, ...] = ()
    """Names of capabilities of `connect(capabilities=…)` that are installed in each run."""
    budget: ExecutionBudget = ExecutionBudget()
    """The limits of each run."""
    metadata: Mapping[str, Any] = EMPTY
    """JSON values that each new session of the agent begins with, and that carry no secrets."""
    output: Any = None
    """The form of its answers: a type or a JSON schema. Only the schema is stored."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidData("$.name", "an agent needs a name")
        for field in ("label", "description", "system_prompt"):
            text = getattr(self, field)
            if not isinstance(text, str) and not (field == "label" and text is None):
                raise InvalidData(f"$.{field}", f"expected text, got {type(text).__name__}")
        for field in ("name", "label", "description", "system_prompt"):
            force_setattr(self, field, plain_text(getattr(self, field)))
        for field in ("tools", "tools_deny", "capabilities"):
            force_setattr(self, field, _names(field, getattr(self, field)))
        if self.model is not None:
            force_setattr(self, "model", ModelConfig.of(self.model))
        if not isinstance(self.budget, ExecutionBudget):
            raise InvalidData("$.budget", "expected an ExecutionBudget")
        freeze(self, "metadata")
        refuse_secrets(self.metadata, "$.metadata")
        if self.output is not None:
            force_setattr(self, "output", output_schema(self.output, "$.output"))

    @property
    def model_config(self) -> ModelConfig | None:
        """The model as a `ModelConfig`, or None."""
        return None if self.model is None else ModelConfig.of(self.model)


def _names(field: str, names: object) -> tuple[str, ...] | None:
    if names is None and field == "tools":
        return None
    if isinstance(names, str) or not isinstance(names, tuple | list):
        raise InvalidData(f"$.{field}", f"expected a tuple of names, got {type(names).__name__}")
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise InvalidData(f"$.{field}[{place}]", f"expected a name, got {type(name).__name__}")
    return tuple(map(plain_text, names))
