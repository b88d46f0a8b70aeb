"""Answers to tool calls, taken from the record."""

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
"""The source of the answer to a call: its turn on record ("recorded", or "again" if the answer was given before),
another turn ("elsewhere"), none ("unmatched"), or the tool itself ("live")."""
_ANYTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}


class Answers:
    """The outcomes on record for the calls of one turn.

    Equal calls are answered in their order. Further calls of the kind get the last answer again. A call that the turn
    did not make is looked for in the other turns: first in those before it, the nearest first, then in later ones.
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
        """The source of the answer to each call of the replay, by the call's id."""
        self.stopped_at: str | None = None
        """The tool whose call is not on record and ended the turn, if one did."""

    def take(self, name: str, arguments: Mapping[str, Any], call_id: str) -> Call | None:
        """Return the call on record that answers a call, or None if none does."""
        key = key_of(name, arguments)
        # First as the model asked for it: an interceptor may have changed the call before it was made.
        own = self._left.get(key) or self._as_made(key)
        # The first that is left: equal calls may have had different results, in this order.
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
        """Return the calls that were made in this form, after an interceptor had changed the model's arguments."""
        return next((calls for calls in self._left.values() if calls and _made_as(calls[0]) == key), None)

    def outcome(self, name: str, arguments: Mapping[str, Any], call_id: str) -> Outcome | None:
        """Return the outcome of a call on record, or None if it has none there and must be made."""
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
    """Return the error that the model gets for a call that is not on record."""
    told = "No such call is on record, and none is made in a replay. Continue without its result."
    return Outcome(error=ErrorRecord("NotOnRecord", f"{name} was not called. {told}"))


def _calls_of(turn: PlayedTurn) -> Iterable[Call]:
    return (call for step in turn.steps for call in step.calls)


def _made_as(call: Call) -> tuple[str, bytes]:
    return call.key if call.outcome is None else key_of(call.outcome.call.name, call.outcome.call.arguments)


class RecordedTool:
    """A tool that is shown to the model as it is, and whose calls are answered from the record."""

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
        """Return False, since the outcomes on record include the decisions of people."""
        return False

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments unchanged, since errors in them are on record, too."""
        return arguments

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        found = self._answers.outcome(self.name, arguments, context.call_id)
        if found is not None:
            return found
        if not self._may_be_called:
            raise ConfigurationError(f"{self.name} cannot be called here: only its name is known. Give the tools.")
        fitted = self._shown.check(arguments)
        # Nobody is there to approve a call during a replay.
        if self._shown.needs_approval(fitted):
            return Outcome(error=ErrorRecord("NotOnRecord", f"{self.name} needs an approval, and none is on record."))
        return await self._shown.call(arguments, context)


class NamedTool:
    """A tool whose code is not here. Only its name is known, and that is all that the model is shown."""

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
    """An interceptor for calls that name a tool that does not exist. It gives the outcome on record."""

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
    """Return the tools with those that came with the message. Some answer from the record, as `is_recorded` tells."""
    shown: list[Tool] = [*tools, *(ExternalTool(spec) for spec in external if spec.name not in tools)]
    return ToolRegistry(
        RecordedTool(each, answers, may_be_called=not isinstance(each, NamedTool | ExternalTool))
        if is_recorded(each)
        else each
        for each in shown
    )
