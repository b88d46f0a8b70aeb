"""Builds a loop from a definition: its model, its tools, its guards, its capabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from perdure.errors import ConfigurationError
from perdure.loop.agent_loop import AgentLoop, LoopSetup
from perdure.loop.compaction_auto import AutoCompaction, AutoCompactor
from perdure.loop.compaction_digest import Digest
from perdure.loop.compaction_options import CompactionOptions
from perdure.loop.compaction_summary import NoteTaker, Summariser
from perdure.loop.compactor import Compactor
from perdure.loop.drivers.offline import OfflineDriver
from perdure.loop.drivers.provider import ProviderDriver
from perdure.loop.drivers.retry import RetryingDriver
from perdure.loop.filters import InputFilter
from perdure.loop.guards import BudgetGuard
from perdure.loop.interceptors import Interceptors
from perdure.loop.subagents import SubagentPolicy, SubagentTool
from perdure.loop.tokens import TokenEstimator
from perdure.loop.tool_use import Concurrency
from perdure.loop.tools import ToolRegistry
from perdure.model.checks import expect, expect_function, expect_method, expect_several
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget
from perdure.model.state import AgentState
from perdure.protocols import Driver, EventHandler, Tool

OFFLINE = ModelConfig("offline")
DEFAULT_COMPACTION = AutoCompaction()


class Capability(Protocol):
    """Adds tools, interceptors or guards to a loop before it is built."""

    def install(self, setup: LoopSetup) -> LoopSetup: ...


class UseGuards:
    """The capability of keeping to a budget, beside the definition's own."""

    def __init__(self, budget: ExecutionBudget) -> None:
        self._budget = expect(budget, ExecutionBudget, "$.budget")

    def install(self, setup: LoopSetup) -> LoopSetup:
        return replace(setup, guards=(*setup.guards, BudgetGuard(self._budget)))


class LoopFactory:
    """Makes loops. The model is the state's, else the definition's, else `model`, else offline.

    An explicit `driver` overrides all. An interceptor may be given as a pair with its priority.
    """

    def __init__(
        self,
        *,
        tools: Iterable[Tool | Callable[..., Any]] = (),
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
    ) -> None:
        if concurrency not in ("sequential", "parallel") and not _is_count(concurrency):
            known = "'sequential', 'parallel' or a number over 0"
            raise ConfigurationError(f"concurrency is {known}, not {concurrency!r}.")
        if not _is_count(max_result_chars):
            raise ConfigurationError(f"max_result_chars is a number over 0, not {max_result_chars!r}.")
        self._tools = expect_several(tools, "$.tools")
        self._subagents = expect_several(subagents, "$.subagents")
        for each in self._subagents:
            expect(each, AgentDefinition, "$.subagents")
        self._policy = SubagentPolicy() if subagent_policy is None else subagent_policy
        expect(self._policy, SubagentPolicy, "$.subagent_policy")
        self._driver = None if driver is None else expect_method(driver, "respond", "$.driver")
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
        self._concurrency = concurrency
        self._keep_traces = keep_traces
        self._max_result_chars = max_result_chars
        self._compaction = _checked_compaction(compaction)
        self._tokens = TokenEstimator()
        self._offline = OfflineDriver()
        self._provider = RetryingDriver(ProviderDriver())
        Interceptors(self._interceptors)
        ToolRegistry((*self._tools, *self._agents_for(None, depth=0)))

    def build(self, definition: AgentDefinition, state: AgentState | None = None, *, depth: int = 0) -> AgentLoop:
        """A loop for an agent of this definition; `depth` is how many agents have called each other to get here."""
        model = self.model_of(definition, state)
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
        )
        for name in definition.capabilities:
            setup = self._capability(name).install(setup)
        return AgentLoop(setup)

    def compactor_of(
        self, options: CompactionOptions, model: ModelConfig, *, summary_model: ModelConfig | None = None
    ) -> Compactor:
        """What compacts views that a model is shown; a summary is written by that model, unless another is named."""
        summariser = self._summariser_of(summary_model or model)
        return Compactor(options, self._tokens, summariser, model=model.name)

    def _auto_compactor(self, model: ModelConfig) -> AutoCompactor | None:
        if self._compaction is None:
            return None
        summariser = self._summariser_of(self._compaction.model or model)
        return AutoCompactor(self._compaction, model, self._tokens, summariser)

    def _summariser_of(self, model: ModelConfig) -> NoteTaker:
        """Who writes summaries; for the offline model fixed rules do, as they do all that it says."""
        driver = self.driver_of(model)
        return Digest() if driver is self._offline else Summariser(driver, model)

    async def aclose(self) -> None:
        """Close the connections to model providers."""
        await self._provider.aclose()

    def model_of(self, definition: AgentDefinition, state: AgentState | None = None) -> ModelConfig:
        override = state.model if state is not None else None
        return override or definition.model_config or self._model or OFFLINE

    def driver_of(self, model: ModelConfig) -> Driver:
        """What calls a model: the factory's own driver, if it was given one."""
        if self._driver is not None:
            return self._driver
        return self._offline if model.name == OFFLINE.name else self._provider

    def tools_of(self, definition: AgentDefinition, depth: int) -> ToolRegistry:
        """The definition's tools; sub-agents are among them until agents have called each other too deep."""
        agents = self._agents_for(definition.name, depth)
        chosen = ToolRegistry((*self._tools, *agents)).select(definition.tools, definition.tools_deny)
        if depth < self._policy.max_depth:
            return chosen
        return ToolRegistry(each for each in chosen if not isinstance(each, SubagentTool))

    def _agents_for(self, caller: str | None, depth: int) -> list[SubagentTool]:
        """Every sub-agent as a tool, but for the caller itself."""
        return [SubagentTool(each, self, depth + 1) for each in self._subagents if each.name != caller]

    def _capability(self, name: str) -> Capability:
        found = self._capabilities.get(name)
        if found is None:
            known = ", ".join(sorted(self._capabilities)) or "none"
            raise ConfigurationError(f"There is no capability named {name!r}. Registered are: {known}.")
        return found


def _checked_compaction(compaction: object) -> AutoCompaction | None:
    if compaction is not None and not isinstance(compaction, AutoCompaction):
        raise ConfigurationError(f"compaction is an AutoCompaction, or None for none; not {compaction!r}.")
    return compaction


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
