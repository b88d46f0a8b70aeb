"""Makes the results of tools fit to be stored and sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import InvalidData, ToolError
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.value import JSON, ErrorRecord, clean_text

MAX_RESULT_BYTES = codec.MAX_BYTES // 4
MAX_RUN_BYTES = codec.MAX_BYTES // 4 * 3
"""The most bytes of long results in a run. They are together in one stored version, which has a cap of its own."""


def as_json(value: Any) -> JSON:
    """Return any value as JSON: structures as they are, NaN and infinities as text, anything else as its own text."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
    except (TypeError, ValueError, RecursionError):
        plain = str(value)
    try:
        codec.check_json(plain)
    except InvalidData:
        plain = _cleaned(plain)
    size = len(msgspec.json.encode(plain))
    if size > MAX_RESULT_BYTES:
        raise ToolError(f"The result has {size:,} bytes, and {MAX_RESULT_BYTES:,} can be kept. Ask for less at a time.")
    return plain


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else str(value)


def _cleaned(value: Any, depth: int = 0) -> JSON:
    # The codec refuses deeper structures, so the beginning of their text has to do.
    if depth >= codec.MAX_DEPTH:
        return clean_text(str(value)[:1000])
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        # The codec refuses integers outside of 64 bits, signed or unsigned.
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, dict):
        return {clean_text(str(key)): _cleaned(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, depth + 1) for item in value]
    return value


class Room:
    """The room that a run's version has left for outcomes, apart from what its messages hold of them."""

    def __init__(self, steps: Iterable[AgentStep], most_chars: int) -> None:
        self._most_chars = most_chars
        self._left = MAX_RUN_BYTES - sum(self._size_of(each) for step in steps for each in step.tool_executions)

    def fitted(self, execution: ToolExecution) -> ToolExecution:
        """Return an outcome that can be saved: itself, or an error in its place if it does not fit."""
        size = self._size_of(execution)
        if size > self._left:
            problem = (
                f"The call was made. Its outcome has {size:,} bytes and was not kept: "
                f"{max(self._left, 0):,} of the {MAX_RUN_BYTES:,} that a run can keep are left. Ask for less at a time."
            )
            return replace(execution, result=None, error=ErrorRecord("ToolError", problem))
        self._left -= size
        return execution

    def _size_of(self, execution: ToolExecution) -> int:
        """Count what a version holds of an outcome: its error, and a result that is too long to be shown whole."""
        result, error = execution.result, execution.error
        is_shown = shortened(result, self._most_chars) is result
        return (0 if is_shown else _bytes_of(result)) + (_bytes_of(error.message) if error else 0)


def _bytes_of(value: JSON) -> int:
    return len(msgspec.json.encode(value))


def shortened(result: JSON, most: int) -> JSON:
    """Return the result as the model is shown it: whole, or its head and tail if it has more than `most` characters."""
    text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
    if len(text) <= most:
        return result
    tail = most // 3
    head = most - tail
    note = f"[… {len(text) - most:,} characters left out here; the whole result is on record …]"
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"
