"""References to tool calls and results in messages, so that nothing else has to hold a copy of them.

An assistant's message holds the calls it asks for, and a tool's message holds a result. Steps and events tell of the
same calls. They are stored with references to the messages, and are made whole when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.model.execution import ExecutionState
from perdure.model.message import Message, ToolCall, ToolResult
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.value import EMPTY

_KEY = "$said"
_SAID: Any = {_KEY: True}
"""A placeholder for a result that a message holds. A result that looks like it is stored inside another one."""


class Said:
    """The calls and results in messages, by the calls' ids."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._calls: dict[str, ToolCall] = {}
        self._results: dict[str, Any] = {}
        for message in messages:
            self.hear(message)

    def hear(self, message: Message) -> None:
        if "compaction" in message.metadata:
            return  # a copy that a compaction shows, with less in it
        for part in message.parts:
            # The first of an id is the run's own: what is heard later must not change what was pointed at.
            if type(part) is ToolCall:
                self._calls.setdefault(part.id, part)
            elif type(part) is ToolResult:
                self._results.setdefault(part.call_id, part.content)

    def dehydrated_call(self, call: ToolCall) -> ToolCall:
        """Return a call as it is stored: by its id alone, if a message holds the same call."""
        return ToolCall("", EMPTY, call.id) if _is_same(self._calls.get(call.id), call) else call

    def hydrated_call(self, call: ToolCall) -> ToolCall:
        return call if call.name else self._calls.get(call.id, call)

    def dehydrated(self, execution: ToolExecution) -> ToolExecution:
        """Return an outcome as it is stored: without what messages hold of it."""
        call = self.dehydrated_call(execution.call)
        is_said = execution.result is not None and _is_same(self._results.get(execution.call.id), execution.result)
        return replace(execution, call=call, result=_SAID if is_said else _plain(execution.result))

    def hydrated(self, execution: ToolExecution) -> ToolExecution:
        """Return an outcome with what messages hold of it."""
        call, result = self.hydrated_call(execution.call), execution.result
        if _looks_dehydrated(result):
            result = self._results.get(call.id, result) if result[_KEY] is True else result[_KEY]
        return replace(execution, call=call, result=result)


class SaidByRun:
    """The calls and results of several runs. Models number calls again in each: one id may be another call there."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._runs: dict[str, Said] = {}
        for message in messages:
            self.hear(message)

    def hear(self, message: Message) -> None:
        run = message.metadata.get("execution_id")
        if isinstance(run, str):  # a run's input is not its own, and has none
            if run not in self._runs:
                self._runs[run] = Said()
            self._runs[run].hear(message)

    def of(self, run: str | None) -> Said:
        return self._runs.get(run or "", NOTHING_SAID)


NOTHING_SAID = Said()


def _looks_dehydrated(result: Any) -> bool:
    return isinstance(result, Mapping) and len(result) == 1 and _KEY in result


def _plain(result: Any) -> Any:
    """Return a result that no message holds, in a form that cannot be taken for a placeholder."""
    return {_KEY: result} if _looks_dehydrated(result) else result


def _is_same(said: Any, given: Any) -> bool:
    """Tell whether two values are written alike. For `==`, True is 1 and 1 is 1.0."""
    if said is given:
        return True
    try:
        return type(said) is type(given) and msgspec.json.encode(said) == msgspec.json.encode(given)
    except (TypeError, ValueError, RecursionError):  # what cannot be written is refused when it is stored
        return False


def dehydrated(execution: ExecutionState) -> ExecutionState:
    """Return a run as it is stored: its steps refer to the messages of their output."""
    return _mapped(execution, Said.dehydrated)


def hydrated(execution: ExecutionState) -> ExecutionState:
    """Return a run from the form in which it is stored. The messages of its output must be there."""
    return _mapped(execution, Said.hydrated)


def _mapped(execution: ExecutionState, change: Any) -> ExecutionState:
    def changed(step: AgentStep) -> AgentStep:
        if not step.tool_executions:
            return step
        said = Said(step.output_messages)
        return replace(step, tool_executions=tuple(change(said, each) for each in step.tool_executions))

    done = tuple(replace(each, step=changed(each.step)) for each in execution.step_executions)
    current = None if execution.current_step is None else changed(execution.current_step)
    return replace(execution, step_executions=done, current_step=current)
