"""The result of a replay, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from perdure.model.value import thawed
from perdure.replay.comparison import CallChange, ReplayResult, StepComparison, TurnComparison
from perdure.replay.story import Call, Step
from perdure.sessions.json_forms import of_usage

_SIGNS = {"same": " ", "changed": "~", "added": "+", "missing": "-", "reordered": "~"}


def lines_of(result: ReplayResult) -> Iterator[str]:
    """Yield a readable comparison: each turn, its steps, and below each step its differences."""
    yield f"session {result.session_id}: {summary(result)}"
    for note in result.notes:
        yield f"  note: {note}"
    for number, turn in enumerate(result.turns, 1):
        yield from _lines_of_turn(number, turn)
    for left in result.left_out:
        yield f"left out: {left.loop_id}: {left.reason}"
    for child in result.children:
        yield from lines_of(child)


def summary(result: ReplayResult) -> str:
    """Return in one line how many steps are the same, and the differences."""
    steps, same = result.steps, sum(step.is_same for step in result.steps)
    told = f"{same} of {len(steps)} steps are the same"
    if result.is_same:
        return told
    return f"{told}; answers changed: {result.changed_answers}, calls changed: {result.changed_calls}"


def _lines_of_turn(number: int, turn: TurnComparison) -> Iterator[str]:
    yield f"turn {number}: {_brief(turn.recorded.text)}"
    if turn.note is not None:
        yield f"  note: {turn.note}"
    for step in turn.steps:
        yield from _lines_of_step(step)
    if turn.ends_otherwise:
        yield f"  - ended {turn.recorded.end}"
        yield f"  + ended {turn.replayed.end}"


def _lines_of_step(step: StepComparison) -> Iterator[str]:
    yield f"{_SIGNS[step.kind]} step {step.index}: {step.kind}{_spent(step)}"
    if step.is_same:
        return
    for line in step.answer_diff() if "answer" in step.differences else ():
        if not line.startswith("@@"):
            yield f"    {line[:1]} {line[1:]}"
    for change in step.calls:
        yield from _lines_of_call(change)
    if "finish" in step.differences and step.recorded and step.replayed:
        yield f"    finish reason: {step.recorded.response.finish_reason} → {step.replayed.response.finish_reason}"


def _lines_of_call(change: CallChange) -> Iterator[str]:
    told = f"    {_SIGNS[change.kind]} call {change.kind}: "
    source = f" [{change.source}]" if change.source not in (None, "recorded") else ""
    match change.kind:
        case "changed":
            assert change.recorded is not None
            assert change.replayed is not None
            yield f"{told}{_call(change.recorded)} → {_call(change.replayed)}{source}"
        case "same" if not change.has_other_result:
            return
        case _:
            call = change.replayed or change.recorded
            assert call is not None
            yield f"{told}{_call(call)}{source}"
    if change.has_other_result and change.recorded and change.replayed:
        yield f"        result: {_brief(change.recorded.result)} → {_brief(change.replayed.result)}"


def _spent(step: StepComparison) -> str:
    """Return how the number of tokens has changed, or "" if it has not, or if one side is missing."""
    if step.recorded is None or step.replayed is None:
        return ""
    before, after = step.recorded.usage.total_tokens, step.replayed.usage.total_tokens
    return "" if before == after else f" (tokens {before:,} → {after:,})"


def _call(call: Call) -> str:
    return f"{call.name}({', '.join(f'{name}={_json(value)}' for name, value in call.arguments.items())})"


def _json(value: object) -> str:
    return msgspec.json.encode(thawed(value)).decode()


def _brief(value: object, most: int = 120) -> str:
    text = " ".join((value if isinstance(value, str) else _json(value)).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def plain(result: ReplayResult) -> dict[str, Any]:
    """Return a result as JSON."""
    return {
        "session": result.session_id,
        "same": result.is_same,
        **counts(result),
        "recorded": of_usage(result.recorded_usage),
        "replayed": of_usage(result.usage),
        "cost_ratio": result.cost_ratio,
        "token_ratio": result.token_ratio,
        "turns": [_plain_turn(turn) for turn in result.turns],
        "left_out": [{"loop": left.loop_id, "reason": left.reason} for left in result.left_out],
        "notes": list(result.notes),
        "kept": list(result.kept),
        "children": [plain(child) for child in result.children],
    }


def counts(result: ReplayResult) -> Mapping[str, int]:
    """Return how many steps there are, and how many are the same or have another answer or other calls."""
    return {
        "steps": len(result.steps),
        "same_steps": sum(step.is_same for step in result.steps),
        "changed_answers": result.changed_answers,
        "changed_calls": result.changed_calls,
    }


def _plain_turn(turn: TurnComparison) -> dict[str, Any]:
    return {
        "loop": turn.recorded.loop_id,
        "asked": turn.recorded.text,
        "same": turn.is_same,
        "ended": {"recorded": turn.recorded.end, "replayed": turn.replayed.end},
        "note": turn.note,
        "steps": [_plain_step(step) for step in turn.steps],
    }


def _plain_step(step: StepComparison) -> dict[str, Any]:
    return {
        "index": step.index,
        "kind": step.kind,
        "differences": list(step.differences),
        "recorded": _plain_side(step.recorded),
        "replayed": _plain_side(step.replayed),
        "calls": [
            {
                "kind": change.kind,
                "source": change.source,
                "recorded": _plain_call(change.recorded),
                "replayed": _plain_call(change.replayed),
            }
            for change in step.calls
        ],
    }


def _plain_side(step: Step | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "text": step.text,
        "finish_reason": step.response.finish_reason,
        "seconds": step.seconds,
        **of_usage(step.usage),
    }


def _plain_call(call: Call | None) -> dict[str, Any] | None:
    if call is None:
        return None
    return {"name": call.name, "arguments": thawed(call.arguments), "result": call.result}
