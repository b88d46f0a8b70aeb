"""The capability that makes a loop replay one turn. It is installed on top of the agent's own capabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perdure.loop.agent_loop import LoopSetup, Run
from perdure.loop.compaction.auto import AutoCompactor, Trigger
from perdure.loop.external import ExternalTool
from perdure.loop.guards import BudgetGuard
from perdure.model.execution import ExecutionBudget, ExternalToolSpec, Spent
from perdure.model.loop_events import Compaction
from perdure.model.state import AgentState
from perdure.model.stop import StopReason, StopSignal
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.protocols import ModelRequest, Tool
from perdure.replay.answers import Answers, AnswerUnknown, recorded_tools
from perdure.replay.story import PlayedTurn, Steering

if TYPE_CHECKING:
    from perdure.loop.compaction.compactor import Compacted
    from perdure.loop.compaction.summary import Charge

ENDS_HERE = "replay"
"""The source of the signal that ends a turn where the record does."""


class ReplayTurn:
    """The capability that replays a turn. `is_recorded` tells which tools are answered from the record."""

    def __init__(
        self,
        turn: PlayedTurn,
        answers: Answers,
        is_recorded: Callable[[Tool], bool],
        steer: Steer,
        budget: ExecutionBudget,
        view_lengths: Sequence[int],
    ) -> None:
        self._turn = turn
        self._answers = answers
        self._is_recorded = is_recorded
        self._steer = steer
        self._budget = budget
        self._made = [(*made, length) for made, length in zip(turn.compactions, view_lengths, strict=True)]

    def install(self, setup: LoopSetup) -> LoopSetup:
        guards = setup.guards
        if not self._budget.is_empty:
            guards = (*guards, BudgetGuard(self._budget))
        if self._turn.is_cut:
            guards = (*guards, EndOfRecord(len(self._turn.complete)))
        return replace(
            setup,
            tools=recorded_tools(setup.tools, self._brought, self._answers, self._is_recorded),
            guards=guards,
            interceptors=(*setup.interceptors, AnswerUnknown(self._answers)),
            compaction=RepeatedCompaction(setup.compaction, self._made) if self._made else setup.compaction,
            after_each_step=self._steer,
        )

    @property
    def _brought(self) -> Sequence[ExternalToolSpec]:
        """Return the external tools that are answered from the record. With live tools, the message brings them."""
        return [spec for spec in self._turn.start.external_tools if self._is_recorded(ExternalTool(spec))]


class EndOfRecord:
    """A guard that ends a turn where the run on record was ended from outside."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def check(self, state: AgentState, spent: Spent) -> StopSignal | None:
        if state.step_count < self._steps:
            return None
        return StopSignal(StopReason.STOP_REQUESTED, "the record ends here", source=ENDS_HERE)


class Steer:
    """The messages that steered the run on record, brought in behind the same steps."""

    def __init__(self, steering: Sequence[Steering]) -> None:
        self.left = list(steering)
        """The messages that were not brought in yet."""

    async def __call__(self, run: Run) -> None:
        while self.left and self.left[0].after < run.state.step_count:
            await run.steer(self.left.pop(0).messages)


class RepeatedCompaction(AutoCompactor):
    """A compactor that repeats the compactions on record at the same steps, if the view has the same length as then.

    Otherwise the loop compacts by its own rules.
    """

    def __init__(self, own: AutoCompactor | None, made: Sequence[tuple[int, Compaction, int]]) -> None:
        self._own = own
        self._made = list(made)

    def is_near_window(self, request: ModelRequest) -> bool:
        is_due = any(step == request.step and event.trigger == "window" for step, event, _ in self._made)
        return is_due or (self._own is not None and self._own.is_near_window(request))

    def learn(self, request: ModelRequest, usage: Usage) -> None:
        if self._own is not None:
            self._own.learn(request, usage)

    async def compact(
        self, view: Transcript, request: ModelRequest, trigger: Trigger, charge: Charge
    ) -> Compacted | None:
        from perdure.loop.compaction.compactor import Compacted

        for found in self._made:
            step, event, length = found
            if step == request.step and event.trigger == trigger and len(view) == length:
                # Each compaction on record is repeated once.
                self._made.remove(found)
                charge(event.usage)
                return Compacted(event.block, event.shown, event.usage)
        if self._own is None or (trigger == "window" and not self._own.is_near_window(request)):
            return None
        return await self._own.compact(view, request, trigger, charge)
