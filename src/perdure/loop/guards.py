"""Guards. Before each step, they compare what a run has spent with what it may spend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from datetime import datetime
from operator import itemgetter
from typing import Any, Protocol

from perdure.model.checks import expect
from perdure.model.execution import ExecutionBudget, Spent
from perdure.model.state import AgentState
from perdure.model.stop import StopReason, StopSignal


class Guard(Protocol):
    """A check, made before each step, of whether the run must stop."""

    def check(self, state: AgentState, spent: Spent) -> StopSignal | None: ...


_REASONS = {
    "max_steps": StopReason.STEPS_LIMIT_REACHED,
    "max_tokens": StopReason.TOKEN_LIMIT_REACHED,
    "max_cost": StopReason.TOKEN_LIMIT_REACHED,
    "max_seconds": StopReason.TIME_LIMIT_REACHED,
    "deadline": StopReason.TIME_LIMIT_REACHED,
}


class BudgetGuard:
    """A guard that stops a run before a step that would begin over a limit of a `budget`."""

    def __init__(self, budget: ExecutionBudget) -> None:
        self._budget = expect(budget, ExecutionBudget, "$.budget")

    def check(self, state: AgentState, spent: Spent) -> StopSignal | None:
        """Return the signal to stop, if a limit is reached by what a run in this `state` has `spent`."""
        limit = self._budget.reached(spent)
        return None if limit is None else self.signal(limit)

    def signal(self, limit: str) -> StopSignal:
        """Return the signal for a `limit`, the name of a field of the budget."""
        allowed = getattr(self._budget, limit)
        return StopSignal(_REASONS[limit], f"{limit} of {allowed} reached", source="budget", limit=limit)

    @property
    def limits_time(self) -> bool:
        """True if the budget limits time."""
        return self._budget.max_seconds is not None or self._budget.deadline is not None

    def time_limits(self, seconds: float, at: datetime) -> Iterator[tuple[float, StopSignal]]:
        """Yield how long a call may still take after `seconds` of the run, with the signal for when that is over.

        `at` is the time now.
        """
        if self._budget.max_seconds is not None:
            yield self._budget.max_seconds - seconds, self.signal("max_seconds")
        if self._budget.deadline is not None:
            yield (self._budget.deadline - at).total_seconds(), self.signal("deadline")


class TimeLimitReached(Exception):
    """A call was cancelled, or not begun, because the budget's time was up."""

    def __init__(self, signal: StopSignal) -> None:
        self.signal = signal
        super().__init__(signal.message)


class TimeLimit:
    """An `asyncio.timeout` for the earliest of several limits, which it names. Nothing begins once that is over."""

    def __init__(self, limits: Iterable[tuple[float, StopSignal]]) -> None:
        self._left = min(limits, key=itemgetter(0), default=None)
        self._timeout = None if self._left is None else asyncio.timeout(self._left[0])

    async def __aenter__(self) -> None:
        if self._left is None or self._timeout is None:
            return
        # `asyncio.timeout` would let the block begin, and cancel it only at its first wait.
        if self._left[0] <= 0:
            raise TimeLimitReached(self._left[1])
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        if self._left is None or self._timeout is None:
            return
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            raise TimeLimitReached(self._left[1]) from None


UNLIMITED = TimeLimit(())
"""The limit of runs without a time limit. It keeps no state, so all of them share it."""
