"""Guards: they compare what a run has spent with what it may spend, before each step."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from perdure.model.execution import ExecutionBudget, Spent
from perdure.model.state import AgentState
from perdure.model.stop import StopReason, StopSignal


class Guard(Protocol):
    """Asked before each step whether the run must stop."""

    def check(self, state: AgentState, spent: Spent) -> StopSignal | None: ...


_REASONS = {
    "max_steps": StopReason.STEPS_LIMIT_REACHED,
    "max_tokens": StopReason.TOKEN_LIMIT_REACHED,
    "max_cost": StopReason.TOKEN_LIMIT_REACHED,
    "max_seconds": StopReason.TIME_LIMIT_REACHED,
    "deadline": StopReason.TIME_LIMIT_REACHED,
}


class BudgetGuard:
    """Stops a run before the step that would begin over a limit."""

    def __init__(self, budget: ExecutionBudget) -> None:
        self._budget = budget

    def check(self, state: AgentState, spent: Spent) -> StopSignal | None:
        limit = self._budget.reached(spent)
        return None if limit is None else self.signal(limit)

    def signal(self, limit: str) -> StopSignal:
        allowed = getattr(self._budget, limit)
        return StopSignal(_REASONS[limit], f"{limit} of {allowed} reached", source="budget", limit=limit)

    def seconds_left(self, spent: Spent) -> tuple[float, str] | None:
        """How long a call may still take, and the limit that says so; None where time is not limited."""
        left = []
        if self._budget.max_seconds is not None:
            left.append((self._budget.max_seconds - spent.seconds, "max_seconds"))
        if self._budget.deadline is not None:
            left.append(((self._budget.deadline - spent.at).total_seconds(), "deadline"))
        return min(left, default=None)


class TimeLimitReached(Exception):
    """A call was cancelled because the budget's time was up."""

    def __init__(self, limit: str) -> None:
        self.limit = limit
        super().__init__(limit)


class TimeLimit:
    """An `asyncio.timeout` that says which limit it stood for."""

    def __init__(self, left: tuple[float, str] | None) -> None:
        self._limit = left[1] if left else ""
        self._timeout = asyncio.timeout(max(left[0], 0.0) if left else None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            raise TimeLimitReached(self._limit) from None
