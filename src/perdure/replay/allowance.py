"""The budget of a replay, or of several replays together."""

from __future__ import annotations

from datetime import timedelta

from perdure.model.checks import expect
from perdure.model.execution import ExecutionBudget, Spent
from perdure.model.ids import now
from perdure.model.usage import Usage
from perdure.replay.story import PlayedTurn


class Allowance:
    """A `budget` that turns spend one after the other. Its time counts from the first turn."""

    def __init__(self, budget: ExecutionBudget) -> None:
        self._budget = expect(budget, ExecutionBudget, "$.budget")
        self._steps = 0
        self._usage = Usage()
        self._deadline = budget.deadline

    def left(self) -> ExecutionBudget | None:
        """Return the budget of the next turn, or None if nothing is left."""
        budget, at = self._budget, now()
        if budget.is_empty:
            return budget
        if budget.max_seconds is not None and (self._deadline is None or self._deadline == budget.deadline):
            until = at + timedelta(seconds=budget.max_seconds)
            self._deadline = until if budget.deadline is None else min(until, budget.deadline)
        # Seconds become a deadline: each turn by itself would count them from its own beginning.
        timed = ExecutionBudget(budget.max_steps, budget.max_tokens, None, budget.max_cost, self._deadline)
        if timed.is_exhausted(Spent(self._steps, self._usage, 0.0, at)):
            return None
        return ExecutionBudget(
            None if budget.max_steps is None else budget.max_steps - self._steps,
            None if budget.max_tokens is None else budget.max_tokens - self._usage.total_tokens,
            None,
            None if budget.max_cost is None else max(0.0, budget.max_cost - self._usage.cost),
            self._deadline,
        )

    def spend(self, turn: PlayedTurn) -> None:
        """Subtract what a `turn` has used."""
        self._steps += len(turn.steps)
        self._usage = self._usage + turn.usage
