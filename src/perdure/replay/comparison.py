"""A replay compared with the stored run, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, unified_diff
from typing import Any, Literal

import msgspec

from perdure.model.execution import ExecutionStatus
from perdure.model.usage import Usage
from perdure.replay.answers import Source
from perdure.replay.recording import LeftOut
from perdure.replay.story import Call, PlayedTurn, Step

Kind = Literal["same", "changed", "added", "missing"]
CallKind = Literal["same", "changed", "added", "missing", "reordered"]
Difference = Literal["answer", "calls", "results", "finish"]
SameAnswer = Callable[[str, str], bool]
"""A function that tells whether two answers count as the same."""


class CallChange(msgspec.Struct, frozen=True):
    """A tool call on record beside its counterpart in the replay."""

    kind: CallKind
    """The kind of change."""
    recorded: Call | None = None
    """The call on record, or None."""
    replayed: Call | None = None
    """The call in the replay, or None."""
    source: Source | None = None
    """The source of the answer to the replayed call, or None if the call was made, as all are with live tools."""

    @property
    def name(self) -> str:
        """The name of the tool."""
        call = self.replayed or self.recorded
        assert call is not None
        return call.name

    @property
    def has_other_result(self) -> bool:
        """Tell whether the model was told different results for two equal calls. Both must have an outcome."""
        before, after = self.recorded, self.replayed
        if self.kind == "changed" or before is None or after is None or before.outcome is None or after.outcome is None:
            return False
        return before.result != after.result


class StepComparison(msgspec.Struct, frozen=True):
    """One step on record beside its counterpart in the replay."""

    index: int
    """The step's place in the turn on record, or in the replay if the step was added there."""
    recorded: Step | None = None
    """The step on record, or None."""
    replayed: Step | None = None
    """The step in the replay, or None."""
    calls: tuple[CallChange, ...] = ()
    """The changes of its tool calls."""
    differences: tuple[Difference, ...] = ()
    """The differences that were found."""

    @property
    def kind(self) -> Kind:
        """ "same", "changed", "added" or "missing"."""
        if self.recorded is None:
            return "added"
        if self.replayed is None:
            return "missing"
        return "changed" if self.differences else "same"

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return self.kind == "same"

    def answer_diff(self) -> list[str]:
        """Return how the answer's text has changed, as lines of a unified diff."""
        before = self.recorded.text.splitlines() if self.recorded else []
        after = self.replayed.text.splitlines() if self.replayed else []
        # Without the two lines that would name files.
        return list(unified_diff(before, after, n=1, lineterm=""))[2:]


class TurnComparison(msgspec.Struct, frozen=True):
    """One turn on record beside its replay."""

    recorded: PlayedTurn
    """The turn on record."""
    replayed: PlayedTurn
    """The turn in the replay."""
    steps: tuple[StepComparison, ...]
    """The steps of both, side by side."""
    session_id: str
    """The session that the turn was replayed in."""
    note: str | None = None
    """A remark, such as that the turn was replayed only as far as the record goes."""

    @property
    def ends_otherwise(self) -> bool:
        """Tell whether the replay ended in another way. The ends are not compared if the turn on record was cut."""
        return not self.recorded.is_cut and self.recorded.end != self.replayed.end

    @property
    def fails(self) -> bool:
        """Tell whether the replay failed, and the turn on record did not."""
        failed = ExecutionStatus.FAILED
        return self.replayed.status is failed and self.recorded.status is not failed

    @property
    def is_same(self) -> bool:
        """True if no step differs, and the turn ends in the same way."""
        return all(step.is_same for step in self.steps) and not self.ends_otherwise


class ReplayResult(msgspec.Struct, frozen=True):
    """The result of a replay."""

    session_id: str
    """The session that was replayed."""
    turns: tuple[TurnComparison, ...] = ()
    """The turns, in order."""
    left_out: tuple[LeftOut, ...] = ()
    """The runs that were not replayed, with the reasons."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be replayed as it was."""
    children: tuple[ReplayResult, ...] = ()
    """The replays of its sub-agents' sessions."""
    kept: tuple[str, ...] = ()
    """The ids of the sessions in which the replay was kept, if it was."""

    @property
    def steps(self) -> tuple[StepComparison, ...]:
        """Return the steps of all turns, those of sub-agents' sessions included."""
        own = (step for turn in self.turns for step in turn.steps)
        return (*own, *(step for child in self.children for step in child.steps))

    @property
    def is_same(self) -> bool:
        """Tell whether every answer, call, result, finish reason and end is the same. Costs do not count."""
        return all(turn.is_same for turn in self.turns) and all(child.is_same for child in self.children)

    @property
    def fails(self) -> bool:
        """Tell whether a turn failed that did not fail on record, as all do if the model cannot be asked."""
        return any(turn.fails for turn in self.turns) or any(child.fails for child in self.children)

    @property
    def changed_answers(self) -> int:
        """The number of steps with another answer."""
        return sum("answer" in step.differences for step in self.steps)

    @property
    def changed_calls(self) -> int:
        """The number of steps with other tool calls."""
        return sum("calls" in step.differences for step in self.steps)

    @property
    def recorded_usage(self) -> Usage:
        """Return the model's usage on record for the steps that were replayed."""
        return sum((step.recorded.usage for step in self.steps if step.recorded), start=Usage())

    @property
    def usage(self) -> Usage:
        """Return the model's usage in the replay."""
        return sum((step.replayed.usage for step in self.steps if step.replayed), start=Usage())

    @property
    def cost_ratio(self) -> float | None:
        """Return the replay's cost as a multiple of that on record, or None if one is unknown or the latter is 0."""
        before, after = self.recorded_usage, self.usage
        if not (before.is_cost_known and after.is_cost_known and before.cost):
            return None
        return after.cost / before.cost

    @property
    def token_ratio(self) -> float | None:
        """Return the replay's tokens as a multiple of those on record, or None if none are on record."""
        before = self.recorded_usage.total_tokens
        return self.usage.total_tokens / before if before else None

    def __str__(self) -> str:
        # Imported here, since that module imports this one.
        from perdure.replay.report import lines_of

        return "\n".join(lines_of(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON."""
        # Imported here, since that module imports this one.
        from perdure.replay.report import plain

        return plain(self)


def compared(
    recorded: PlayedTurn, replayed: PlayedTurn, sources: Mapping[str, Source], same_answer: SameAnswer
) -> list[StepComparison]:
    """Return the steps of two turns side by side. A step that was added or is missing does not shift the others."""
    before, after = recorded.complete, replayed.complete if recorded.is_cut else replayed.steps
    pairs = _pairs([_signature(step) for step in before], [_signature(step) for step in after])
    return [
        _compared(
            right if left is None else left,
            None if left is None else before[left],
            None if right is None else after[right],
            sources,
            same_answer,
        )
        for left, right in pairs
    ]


def _signature(step: Step) -> tuple[object, ...]:
    return (step.text, tuple(call.key for call in step.calls))


def _pairs(before: Sequence[Any], after: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Yield pairs of places of items that belong together, with None in place of a missing counterpart."""
    # Place by place: a step with another answer is one changed step, not one that is missing and one that was added.
    if len(before) == len(after):
        yield from ((place, place) for place in range(len(before)))
        return
    # By default it would ignore items that are frequent in a long sequence.
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for _, start, stop, other_start, other_stop in matcher.get_opcodes():
        most = max(stop - start, other_stop - other_start)
        for offset in range(most):
            left, right = start + offset, other_start + offset
            yield left if left < stop else None, right if right < other_stop else None


def _compared(
    index: int, before: Step | None, after: Step | None, sources: Mapping[str, Source], same_answer: SameAnswer
) -> StepComparison:
    calls = _calls(before.calls if before else (), after.calls if after else (), sources)
    differences: list[Difference] = []
    old, new = before.text if before else "", after.text if after else ""
    if old != new and (before is None or after is None or not same_answer(old, new)):
        differences.append("answer")
    if any(change.kind != "same" for change in calls):
        differences.append("calls")
    if any(change.has_other_result for change in calls):
        differences.append("results")
    if before is not None and after is not None and before.response.finish_reason != after.response.finish_reason:
        differences.append("finish")
    return StepComparison(index, before, after, calls, tuple(differences))


def _calls(before: Sequence[Call], after: Sequence[Call], sources: Mapping[str, Source]) -> tuple[CallChange, ...]:
    """Return calls side by side. Pair calls of equal tool and arguments first, then calls of the same tool in order."""
    left, right = list(enumerate(before)), list(enumerate(after))
    found: list[tuple[tuple[int, int], CallChange]] = []

    def pair(is_alike: Callable[[Call, Call], bool], kind: Callable[[int, int], CallKind]) -> None:
        for at, old in list(left):
            match = next(((place, new) for place, new in right if is_alike(old, new)), None)
            if match is not None:
                place, new = match
                left.remove((at, old))
                right.remove(match)
                found.append(((place, 0), CallChange(kind(at, place), old, new, sources.get(new.id))))

    is_permuted = sorted(call.key for call in before) == sorted(call.key for call in after)
    pair(lambda old, new: old.key == new.key, lambda at, place: "reordered" if is_permuted and at != place else "same")
    pair(lambda old, new: old.name == new.name, lambda at, place: "changed")
    found += [((at, 1), CallChange("missing", old)) for at, old in left]
    found += [((place, 2), CallChange("added", None, new, sources.get(new.id))) for place, new in right]
    # In the order of the replay. A missing call comes behind the replayed one at the same place.
    return tuple(change for _, change in sorted(found, key=lambda each: each[0]))
