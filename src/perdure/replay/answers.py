"""Answers to tool calls that are taken from the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from perdure.errors import AgentStop, ConfigurationError
from perdure.loop.external import ExternalTool
from perdure.loop.interceptors import Interceptor
from perdure.loop.tool_use import Outcome
from perdure.loop.tools import ToolRegistry
from perdure.model.execution import ExternalToolSpec
from perdure.model.state import AgentState
from perdure.model.step import ToolExecution
from perdure.model.value import ErrorRecord, thawed
from perdure.protocols import Tool, ToolContext
from perdure.replay.story import Call, PlayedTurn, key_of

OnUnmatched = Literal["error", "live", "stop"]
Source = Literal["recorded", "again", "elsewhere", "unmatched", "live"]
"""Where the answer to a call came from: its turn on record, for the first time or again, another turn, nowhere, or the
tool itself."""
_ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}


class Answers:
    """The outcomes on record for the calls of one turn. Equal calls are answered in their order, then by the last one.

    A call that the turn did not make is looked for in the others, the nearest before it first.
    """

    def __init__(self, turn: PlayedTurn, turns: Sequence[PlayedTurn], on_unmatched: OnUnmatched) -> None:
        self._turn = turn
        self._left: defaultdict[tuple[str, bytes], list[Call]] = defaultdict(list)
        self._given: dict[tuple[str, bytes], Call] = {}
        for call in _calls_of(turn):
            self._left[call.key].append(call)
        place = next((place for place, each in enumerate(turns) if each.loop_id == turn.loop_id), 0)
        self._nearest = [*reversed(turns[:place]), *turns[place + 1 :]]
        self.on_unmatched = on_unmatched
        self.sources: dict[str, Source] = {}
        """Where the answer to each call of the replay came from, by the call's id."""
        self.stopped_at: str | None = None
        """The call that is not on record and ended the turn, if one did."""

    def take(self, name: str, arguments: Mapping[str, Any], call_id: str) -> Call | None:
        """Return the call on record that answers one; None if there is none."""
        key = key_of(name, arguments)
        own = self._left.get(key) or self._as_made(key)
        if own:
            self.sources[call_id] = "recorded"
            self._given[key] = own.pop(0)
            return self._given[key]
        if key in self._given:
            self.sources[call_id] = "again"
            return self._given[key]
        for turn in self._nearest:
            found = [call for call in _calls_of(turn) if call.key == key and call.outcome is not None]
            if found:
                self.sources[call_id] = "elsewhere"
                return found[-1]
        self.sources[call_id] = "unmatched"
        return None

    def _as_made(self, key: tuple[str, bytes]) -> list[Call] | None:
        """Return calls that were made in this form, after an interceptor had changed what the model asked for."""
        return next((calls for calls in self._left.values() if calls and _made_as(calls[0]) == key), None)

    def outcome(self, name: str, arguments: Mapping[str, Any], call_id: str) -> Outcome | None:
        """Return what a call came to on record; None if it is not there and is to be made."""
        found = self.take(name, arguments, call_id)
        if found is not None:
            if found.outcome is None:
                raise AgentStop("The record ends here: this call has no outcome on it.")
            return Outcome(thawed(found.outcome.result), found.outcome.usage, error=found.outcome.error)
        if self.on_unmatched == "live":
            self.sources[call_id] = "live"
            return None
        if self.on_unmatched == "stop":
            self.stopped_at = name
            raise AgentStop(f"A call of {name} is not on record.")
        return not_on_record(name)


def not_on_record(name: str) -> Outcome:
    """Return what the model is told of a call that nobody answers."""
    told = "No such call is on record, and none is made in a replay. Continue without its result."
    return Outcome(error=ErrorRecord("NotOnRecord", f"{name} was not called. {told}"))


def _calls_of(turn: PlayedTurn) -> Iterable[Call]:
    return (call for step in turn.steps for call in step.calls)


def _made_as(call: Call) -> tuple[str, bytes]:
    return call.key if call.outcome is None else key_of(call.outcome.call.name, call.outcome.call.arguments)


class RecordedTool:
    """A tool as the model is shown it, whose calls are answered from the record."""

    timeout: float | None = None
    idempotent = True
    on_unknown: Literal["error", "rerun", "ask"] = "rerun"

    def __init__(self, shown: Tool, answers: Answers, *, may_be_called: bool = True) -> None:
        self.name = shown.name
        self.description = shown.description
        self.parameters = shown.parameters
        self._shown = shown
        self._answers = answers
        self._may_be_called = may_be_called

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Return False: what people decided is part of the outcomes on record."""
        return False

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments as they are: what was wrong with some of them is on record, too."""
        return arguments

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        found = self._answers.outcome(self.name, arguments, context.call_id)
        if found is not None:
            return found
        if not self._may_be_called:
            raise ConfigurationError(f"{self.name} cannot be called here: only its name is known. Give the tools.")
        fitted = self._shown.check(arguments)
        if self._shown.needs_approval(fitted):
            return Outcome(error=ErrorRecord("NotOnRecord", f"{self.name} needs an approval, and none is on record."))
        return await self._shown.call(arguments, context)


class NamedTool:
    """A tool of which only the name is known: its code is not here. What the model is shown of it is its name."""

    timeout: float | None = None
    idempotent = True
    on_unknown: Literal["error", "rerun", "ask"] = "rerun"
    description = ""
    parameters = _ANYTHING

    def __init__(self, name: str) -> None:
        self.name = name

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        return False

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return arguments

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        return not_on_record(self.name)


class AnswerUnknown(Interceptor):
    """Gives the outcome on record where a call names a tool that does not exist, as it did then."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def after_tool_use(self, execution: ToolExecution, state: AgentState) -> ToolExecution:
        error, call = execution.error, execution.call
        if error is None or error.type != "UnknownTool" or call.id in self._answers.sources:
            return execution
        found = self._answers.take(call.name, call.arguments, call.id)
        if found is None or found.outcome is None:
            return execution
        return replace(execution, result=found.outcome.result, error=found.outcome.error)


def recorded_tools(
    tools: ToolRegistry, external: Sequence[ExternalToolSpec], answers: Answers, is_recorded: Callable[[Tool], bool]
) -> ToolRegistry:
    """Return tools of which some answer from the record, with those that one run brought along."""
    shown: list[Tool] = [*tools, *(ExternalTool(spec) for spec in external if spec.name not in tools)]
    return ToolRegistry(
        RecordedTool(each, answers, may_be_called=not isinstance(each, NamedTool | ExternalTool))
        if is_recorded(each)
        else each
        for each in shown
    )
