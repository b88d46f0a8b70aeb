"""Builds a loop from a definition: its model, its tools, its guards, its capabilities."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec.structs import replace

from perdure.errors import ConfigurationError
from perdure.loop.agent_loop import AgentLoop, LoopSetup
from perdure.loop.compaction.auto import AutoCompaction, AutoCompactor
from perdure.loop.compaction.options import CompactionOptions
from perdure.loop.drivers.provider import ProviderDriver
from perdure.loop.drivers.retry import RetryingDriver
from perdure.loop.filters import InputFilter
from perdure.loop.guards import BudgetGuard
from perdure.loop.interceptors import Interceptors
from perdure.loop.response_format import Form
from perdure.loop.subagents import SubagentPolicy, SubagentTool
from perdure.loop.tokens import TokenEstimator
from perdure.loop.tool_use import Concurrency
from perdure.loop.tools import FunctionTool, ToolRegistry
from perdure.model.checks import expect, expect_function, expect_method, expect_several
from perdure.model.definition import OWN_DRIVER, AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget, ExternalToolSpec
from perdure.model.schema import check_schema
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.protocols import Driver, EventHandler, Tool, Toolset, is_toolset

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from perdure.loop.compaction.compactor import Compactor
    from perdure.loop.compaction.summary import NoteTaker
    from perdure.loop.drivers.pacing import NameKey, Pace
    from perdure.loop.toolsets import Toolsets
    from perdure.redaction.redactors import Redactor
    from perdure.redaction.texts import Redaction, TextFunction
    from perdure.telemetry.telemetry import Telemetry

T = TypeVar("T")
OFFLINE = ModelConfig("offline")
_ALONE = {OFFLINE.name, "test"}
"""The models that have no provider: ours, and pydantic-ai's for tests."""
UNASKED = ModelConfig("none")
"""The model of a loop that is built only to be inspected or ended, and asks none."""
_NAME_A_MODEL = (
    "Name one: connect(url, model='openai:gpt-5'), AgentDefinition({agent!r}, model='…'), or --model and PERDURE_MODEL "
    "on the command line. The model 'offline' needs no key."
)
DEFAULT_COMPACTION = AutoCompaction()


MakeContext = Callable[[AgentSession, Mapping[str, Any] | None], Any]
"""A function that makes the context of a run's tools if no caller gives one. It gets the session and the caller's
`context_data`, and may be async."""
MakeTitle = Callable[[AgentSession], str | Awaitable[str | None] | None]
"""A function that makes the title of a session after its first answer. It may be async."""


class Capability(Protocol):
    """An extension that adds tools, interceptors or guards to a loop before it is built."""

    def install(self, setup: LoopSetup) -> LoopSetup: ...


class UseGuards:
    """A capability that holds runs to a `budget`, in addition to the definition's own."""

    def __init__(self, budget: ExecutionBudget) -> None:
        self._budget = expect(budget, ExecutionBudget, "$.budget")

    def install(self, setup: LoopSetup) -> LoopSetup:
        """Return the `setup` with one more guard."""
        return replace(setup, guards=(*setup.guards, BudgetGuard(self._budget)))


class LoopFactory:
    """A factory of loops. The model is the one that the session keeps, or else `model`. Without any, none is asked.

    A session keeps the first of these: the override of `ChangeModel`, its definition's model, and the one given at its
    creation. An explicit `driver` overrides all. An interceptor may be given as a pair with its priority.

    `tools`, `capabilities`, `subagents`, `subagent_policy`, `interceptors`, `input_filters`, `concurrency`,
    `keep_traces`, `max_result_chars`, `compaction`, `context`, `title` and `telemetry` are those of `LoopOptions`.
    `events` hears every event. `pace` is the rate at which models are asked, and `redact` has redactors: `connect`
    gives both.
    """

    def __init__(
        self,
        *,
        tools: Iterable[Tool | Toolset | Callable[..., Any]] = (),
        driver: Driver | None = None,
        model: ModelConfig | str | None = None,
        capabilities: Mapping[str, Capability] | None = None,
        subagents: Sequence[AgentDefinition] = (),
        subagent_policy: SubagentPolicy | None = None,
        interceptors: Sequence[Any] = (),
        input_filters: Sequence[InputFilter] = (),
        events: EventHandler | None = None,
        concurrency: Concurrency = "parallel",
        keep_traces: bool = True,
        max_result_chars: int = 20_000,
        compaction: AutoCompaction | None = DEFAULT_COMPACTION,
        context: MakeContext | None = None,
        title: MakeTitle | None = None,
        pace: Pace | None = None,
        telemetry: Telemetry | None = None,
        redact: Iterable[Redactor | TextFunction] | Redaction | None = None,
    ) -> None:
        if concurrency not in ("sequential", "parallel") and not _is_count(concurrency):
            known = "'sequential', 'parallel' or a number over 0"
            raise ConfigurationError(f"concurrency is {known}, not {concurrency!r}.")
        if not _is_count(max_result_chars):
            raise ConfigurationError(f"max_result_chars is a number over 0, not {max_result_chars!r}.")
        given = expect_several(tools, "$.tools")
        self._subagents = expect_several(subagents, "$.subagents")
        for each in self._subagents:
            expect(each, AgentDefinition, "$.subagents")
        self._policy = SubagentPolicy() if subagent_policy is None else subagent_policy
        expect(self._policy, SubagentPolicy, "$.subagent_policy")
        self._pace = pace
        self.telemetry = None if telemetry is None else _checked_telemetry(telemetry)
        """The telemetry that traces and measures runs; None if there is none."""
        self.redaction = None if redact is None else _redaction_of(redact)
        """The redaction of every text before it is shown, told or stored; None if there is none."""
        if self.telemetry is not None and self.redaction is not None:
            self.telemetry.clean_with(self.redaction)
        self._driver = None if driver is None else self._paced(expect_method(driver, "respond", "$.driver"))
        self._own_model = None if driver is None else _model_of_driver(type(driver).__name__)
        self._model = None if model is None else ModelConfig.of(model)
        expect(capabilities or {}, Mapping, "$.capabilities")  # type: ignore[type-abstract]
        self._capabilities = dict(capabilities or {})
        for name, capability in self._capabilities.items():
            expect_method(capability, "install", f"$.capabilities.{name}")
        self._interceptors = expect_several(interceptors, "$.interceptors")
        filters = expect_several(input_filters, "$.input_filters")
        self._input_filters = tuple(expect_function(each, "$.input_filters") for each in filters)
        self._events = None if events is None else expect_method(events, "emit", "$.events")
        expect(keep_traces, bool, "$.keep_traces")
        self.title = None if title is None else expect_function(title, "$.title")
        self.make_context = None if context is None else expect_function(context, "$.context")
        self._concurrency = concurrency
        self._keep_traces = keep_traces
        self._max_result_chars = max_result_chars
        self._compaction = _checked_compaction(compaction)
        self._tokens = TokenEstimator()
        self._clients = ProviderDriver()
        self._provider = RetryingDriver(self._paced(self._clients, self._clients.name_key))
        Interceptors(self._interceptors)  # made only to be checked: a wrong one fails here, and not in a run
        self._toolsets = _opened([each for each in given if _is_toolset(each)])
        self._tools = self._own_tools = ToolRegistry(each for each in given if not _is_toolset(each))
        self._forms: dict[str, Form] = {}
        self._always: tuple[Capability, ...] = ()
        for each in self._subagents:
            self.learn_output(each)
        self._with_agents(None, depth=0)  # fails here if a sub-agent has the name of a tool

    def varied(
        self, capability: Capability, *, tools: Iterable[Tool] = (), driver: Driver | None = None
    ) -> LoopFactory:
        """Return a factory like this one whose loops all have one more capability, whatever their definitions name.

        It shares connections with this one, which closes them. Events of its loops are sent to no handler.

        `capability` is that one. `tools` are further tools, and `driver` replaces the factory's own.
        """
        other, more = copy(self), tuple(tools)
        other._always = (*self._always, capability)
        other._own_tools = ToolRegistry((*self._own_tools, *more))
        other._tools = ToolRegistry((*self._tools, *more))
        other._events = other.title = None
        if driver is not None:
            other._driver = other._paced(expect_method(driver, "respond", "$.driver"))
            other._own_model = _model_of_driver(type(driver).__name__)
        return other

    def build(
        self,
        definition: AgentDefinition,
        state: AgentState | None = None,
        *,
        depth: int = 0,
        model: ModelConfig | None = None,
        external: Sequence[ExternalToolSpec] = (),
    ) -> AgentLoop:
        """Return a loop for an agent of this definition. Raise ConfigurationError if no model is named for it.

        `depth` is how many agents have called each other to get here. `model` is that of a run that is continued.
        `external` are tools for one run alone. Raise InvalidData if one of them has the name of another tool.

        `definition` is the agent, and `state` the state that the loop is for.
        """
        setup = self._setup(definition, model or self.model_of(definition, state), depth)
        if external:
            from perdure.loop.external import with_external  # few runs bring tools

            setup = replace(setup, tools=with_external(setup.tools, external))
        return AgentLoop(setup)

    def all_tools(self, definition: AgentDefinition, depth: int) -> ToolRegistry:
        """Return the tools of a `definition`, including those that its capabilities add.

        `depth` is the number of agents above this one.
        """
        return self._setup(definition, UNASKED, depth).tools

    def _setup(self, definition: AgentDefinition, model: ModelConfig, depth: int) -> LoopSetup:
        setup = LoopSetup(
            driver=self.driver_of(model),
            model=model,
            tools=self.tools_of(definition, depth),
            budget=definition.budget,
            interceptors=self._interceptors,
            input_filters=self._input_filters,
            events=self._events,
            concurrency=self._concurrency,
            keep_traces=self._keep_traces,
            max_result_chars=self._max_result_chars,
            compaction=self._auto_compactor(model),
            form=self.form_of(definition),
            redaction=self.redaction,
        )
        for name in definition.capabilities:
            setup = self._capability(name).install(setup)
        for each in self._always:
            setup = each.install(setup)
        return setup

    def learn_output(self, definition: AgentDefinition) -> None:
        """Remember the type of an agent's answers, if it was given as one: a store keeps only the schema.

        `definition` is the agent. Raise InvalidData if no answer could be checked against its output.
        """
        output, known = expect(definition, AgentDefinition, "$.agent").output, self._forms.get(definition.name)
        if output is None or (known is not None and known.schema is output):
            return
        form = Form.of(output)
        is_known_type = form.kind is None and known is not None and known.schema == output
        if not is_known_type:  # whose schema alone tells nothing new
            self._forms[definition.name] = form

    def form_of(self, definition: AgentDefinition) -> Form | None:
        """Return the form of an agent's answers, with its type if that was learned here.

        `definition` is the agent.
        """
        if definition.output is None:
            return None
        known = self._forms.get(definition.name)
        if known is not None and known.schema == definition.output:
            return known
        check_schema(definition.output)
        return Form(definition.output)

    def compactor_of(
        self, options: CompactionOptions, model: ModelConfig, *, summary_model: ModelConfig | None = None
    ) -> Compactor:
        """Return a compactor of views that a `model` is shown, by `options`.

        That model writes summaries, unless the `summary_model` is another.
        """
        from perdure.loop.compaction.compactor import Compactor  # most connections never compact

        summariser = self._summariser_of(summary_model or model)
        return Compactor(options, self._tokens, summariser, model=model.name)

    def _auto_compactor(self, model: ModelConfig) -> AutoCompactor | None:
        if self._compaction is None:
            return None
        summariser = partial(self._summariser_of, self._compaction.model or model)
        return AutoCompactor(self._compaction, model, self._tokens, summariser)

    def redacted(self, value: T) -> T:
        """Return a `value` from a caller, without what redactors find in it."""
        return value if self.redaction is None else self.redaction.value(value)

    def _summariser_of(self, model: ModelConfig) -> NoteTaker:
        """Return the writer of summaries, which are redacted like everything that is shown."""
        written = self._note_taker_of(model)
        if self.redaction is None:
            return written
        from perdure.loop.compaction.summary import RedactedNotes

        return RedactedNotes(written, self.redaction)

    def _note_taker_of(self, model: ModelConfig) -> NoteTaker:
        """Return the writer of notes. For the offline model these are made by fixed rules, as its answers are."""
        if self._is_offline(model):
            from perdure.loop.compaction.digest import Digest

            return Digest()
        from perdure.loop.compaction.summary import Summariser

        return Summariser(self.traced(self.driver_of(model)), model)

    def traced(self, driver: Driver) -> Driver:
        """Return a `driver` with traced calls, if anything is traced: for models that are asked beside a run's own."""
        return driver if self.telemetry is None else self.telemetry.driver(driver)

    async def connect_tools(self, definition: AgentDefinition) -> None:
        """Connect to the toolsets that an agent may need, and read what has changed there.

        Every run does this before it begins. An agent that names only tools that are already here needs no toolset.

        `definition` is the agent.
        """
        if not self.needs_toolsets(definition):
            return
        taken = [*(each.name for each in self._own_tools), *(each.name for each in self._subagents)]
        assert self._toolsets is not None
        found = await self._toolsets.tools(taken)
        self._tools = ToolRegistry((*self._own_tools, *found))

    @property
    def known_tools(self) -> frozenset[str]:
        """The names of the tools and sub-agents that are here. Those of a toolset are included once it is connected."""
        return frozenset(each.name for each in self._with_agents(None, depth=0))

    def needs_toolsets(self, definition: AgentDefinition) -> bool:
        """Tell whether an agent, by its `definition`, may call tools that need a connection."""
        if self._toolsets is None:
            return False
        here = {*(each.name for each in self._own_tools), *(each.name for each in self._subagents)}
        return definition.tools is None or not here.issuperset((*definition.tools, *definition.tools_deny))

    async def aclose(self) -> None:
        """Close the connections to model providers and to toolsets."""
        try:
            if self._toolsets is not None:
                await self._toolsets.close()
        finally:
            self._tools = self._own_tools
            await self._provider.aclose()

    @property
    def model(self) -> ModelConfig | None:
        """The model of sessions that are created here, and of those that keep none."""
        return self._model

    def model_of(self, definition: AgentDefinition, state: AgentState | None = None) -> ModelConfig:
        """Return the model that an agent asks. Raise ConfigurationError if none is named anywhere.

        `definition` is the agent, and `state` the state that it is asked in.
        """
        found = self.named_model(definition, state)
        if found is None:
            raise _no_model(definition.name)
        return found

    def named_model(self, definition: AgentDefinition, state: AgentState | None = None) -> ModelConfig | None:
        """Return the model that an agent asks, or the name of the caller's own driver as one. None without either.

        `definition` is the agent, and `state` the state that it is asked in.
        """
        kept = definition.model_config if state is None else state.model_for(definition)
        return kept or self._model or self._own_model

    async def require(self, model: ModelConfig) -> None:
        """Raise ConfigurationError if a model cannot be asked from here: its key or its client is missing."""
        await self.require_known(model)
        if self.driver_of(model) is self._provider:
            await self._clients.require(model)

    async def require_known(self, model: ModelConfig) -> None:
        """Raise ConfigurationError if a model is unknown: its provider is not known, or its driver is not here."""
        if self.driver_of(model) is not self._provider:
            return
        if model.provider == OWN_DRIVER:
            name = model.name.partition(":")[2]
            raise ConfigurationError(f"The driver {name!r} is not here. Only a program can give it: connect(driver=…).")
        await self._clients.require_known(model)

    def driver_of(self, model: ModelConfig) -> Driver:
        """Return the driver for a model: the factory's own driver, if it was given one."""
        if self._driver is not None:
            return self._driver
        return self._offline if self._is_offline(model) else self._provider

    def _is_offline(self, model: ModelConfig) -> bool:
        return self._driver is None and model.name == OFFLINE.name

    @cached_property
    def _offline(self) -> Driver:
        from perdure.loop.drivers.offline import OfflineDriver

        return self._paced(OfflineDriver())

    def _paced(self, driver: Driver, name_key: NameKey | None = None) -> Driver:
        """Return a driver that keeps to the rates of this connection. A retrying driver keeps to them with each try."""
        if self._pace is None:
            return driver
        if isinstance(driver, RetryingDriver):
            return driver.trying(self._paced)
        from perdure.loop.drivers.pacing import PacedDriver  # few connections have a rate

        return PacedDriver(driver, self._pace, name_key)

    def tools_of(self, definition: AgentDefinition, depth: int) -> ToolRegistry:
        """Return the definition's tools. Sub-agents are among them until agents have called each other too deep.

        `definition` is the agent, and `depth` the number of agents above it.
        """
        if self._toolsets is not None and not self._toolsets.are_connected and self.needs_toolsets(definition):
            raise ConfigurationError(
                f"The tools of {self._toolsets} are not known yet.",
                "Call `await loops.connect_tools(definition)` first.",
            )
        chosen = self._with_agents(definition.name, depth).select(definition.tools, definition.tools_deny)
        if depth < self._policy.max_depth:
            return chosen
        return chosen.without(SubagentTool)

    def _with_agents(self, caller: str | None, depth: int) -> ToolRegistry:
        """Return the tools, and every sub-agent as a tool except the caller itself."""
        agents = [SubagentTool(each, self, depth + 1) for each in self._subagents if each.name != caller]
        return ToolRegistry((*self._tools, *agents)) if agents else self._tools

    def _capability(self, name: str) -> Capability:
        found = self._capabilities.get(name)
        if found is None:
            known = ", ".join(sorted(self._capabilities)) or "none"
            raise ConfigurationError(f"No capability is named {name!r}. Registered are: {known}.")
        return found


@lru_cache(64)
def _model_of_driver(name: str) -> ModelConfig:
    """Return a model that names a caller's own driver. It is the same object each time, so it is described once."""
    return ModelConfig(f"{OWN_DRIVER}:{name}")


def _is_toolset(given: Tool | Toolset | Callable[..., Any]) -> TypeIs[Toolset]:
    return type(given) is not FunctionTool and is_toolset(given)


def _opened(toolsets: Sequence[Toolset]) -> Toolsets | None:
    if not toolsets:
        return None
    from perdure.loop.toolsets import Toolsets

    return Toolsets(toolsets)


def require_provider(model: ModelConfig) -> None:
    """Raise ConfigurationError for a name that no client would know. A program should not start with it."""
    if ":" not in model.name and model.name not in _ALONE:
        what = f"{model.name} cannot be asked: its provider is not named."
        advice = f"Name a model with its provider, such as 'openai:{model.name}'. The model 'offline' needs none."
        raise ConfigurationError(what, advice, missing="model", name=model.name)


def _no_model(agent: str) -> ConfigurationError:
    what = f"No model is named for the agent {agent!r}."
    return ConfigurationError(what, _NAME_A_MODEL.format(agent=agent), missing="model", name=agent)


def _redaction_of(redact: Iterable[Redactor | TextFunction] | Redaction) -> Redaction | None:
    from perdure.redaction.texts import Redaction  # few connections redact

    return Redaction.of(redact)


def _checked_compaction(compaction: object) -> AutoCompaction | None:
    if compaction is not None and not isinstance(compaction, AutoCompaction):
        raise ConfigurationError(f"compaction is an AutoCompaction, or None for none; not {compaction!r}.")
    return compaction


def _checked_telemetry(given: object) -> Telemetry:
    from perdure.telemetry.telemetry import Telemetry

    if not isinstance(given, Telemetry):
        raise ConfigurationError(f"telemetry is a perdure.Telemetry, or None for none; not {given!r}.")
    return given


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
