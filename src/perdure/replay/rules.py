"""Rules that decide whether a replay counts as different."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.errors import InvalidData
from perdure.replay.comparison import ReplayResult

Name = Literal["any", "answers", "calls", "results", "ends", "cost", "tokens"]
_RATIOS = ("cost", "tokens")
_NAMES = ("any", "answers", "calls", "results", "ends", *_RATIOS)


class Rule(msgspec.Struct, frozen=True):
    """A difference that makes a replay count as different.

    Rules are `answers`, `calls`, `results`, `ends`, `any` difference between turns, and ratios. A replay that cost more
    than 1.2 times the run on record breaks `cost=1.2`, and `tokens=1.2` likewise.
    """

    name: Name
    """The name of the difference."""
    most: float | None = None
    """The ratio that is allowed, for `cost` and `tokens`."""

    @classmethod
    def of(cls, text: str) -> Rule:
        """Return the rule that a `text` such as `calls` or `cost=1.2` names. Raise InvalidData if it names none."""
        name, sign, number = text.partition("=")
        is_ratio = name in _RATIOS
        try:
            most = float(number) if is_ratio and sign else None
        except ValueError:
            most = None
        if (
            # A ratio that is NaN or infinite fails the comparison, and is refused as well.
            name not in _NAMES
            or is_ratio is not (most is not None and 0 <= most < float("inf"))
            or (sign and not is_ratio)
        ):
            known = "any, answers, calls, results, ends, cost=RATIO or tokens=RATIO"
            raise InvalidData("$.fail_on", f"a rule is {known}; got {text!r}")
        return cls(name, most)  # type: ignore[arg-type]  # as was just asked

    def __str__(self) -> str:
        return self.name if self.most is None else f"{self.name}={self.most:g}"

    def is_broken(self, result: ReplayResult) -> bool:
        """Tell whether a replay, by its `result`, breaks the rule.

        A rule about the cost is also broken if a price is not known. A turn that fails in the replay alone breaks every
        rule: a turn without answers costs nothing, and changes none.
        """
        if result.fails:
            return True
        before, after, most = result.recorded_usage, result.usage, self.most or 0.0
        match self.name:
            case "any":
                return not result.is_same
            case "answers":
                return result.changed_answers > 0
            case "calls":
                return result.changed_calls > 0
            case "results":
                return any("results" in step.differences for step in result.steps)
            case "ends":
                return any(turn.ends_otherwise for each in (result, *result.children) for turn in each.turns)
            case "cost":
                is_known = before.is_cost_known and after.is_cost_known
                return not is_known or after.cost > most * before.cost
        return after.total_tokens > most * before.total_tokens
