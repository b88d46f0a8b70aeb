"""One step of a run: what went to the model, what came back, which tools ran."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from perdure.model.ids import Time, new_id, now
from perdure.model.message import Message, ToolCall
from perdure.model.stop import ExecutionContinuation
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import JSON, ErrorRecord, Value, freeze_json


class AgentStepType(StrEnum):
    """The outcome of a step. It is always derived from what is in the step."""

    ERROR = "error"
    TOOL_EXECUTION = "tool_execution"
    FINAL_RESPONSE = "final_response"


class InferenceResponse(Value, frozen=True):
    """The facts about a model's answer. Its message is the step's first output."""

    finish_reason: str | None = None
    """The provider's reason for the end of the answer."""
    usage: Usage = Usage()
    """Tokens and money of the call."""
    model: str | None = None
    """The name of the model that answered."""
    provider: str | None = None
    """The name of its provider."""
    response_id: str | None = None
    """The provider's id of the answer."""


class ToolExecution(Value, frozen=True):
    """One tool call that was carried out: its result, or its error."""

    call: ToolCall
    """The call."""
    started_at: Time
    """The time at which it began."""
    completed_at: Time | None = None
    """The time at which it ended, or None."""
    result: JSON = None
    """The result, as plain data."""
    error: ErrorRecord | None = None
    """The error, if the call has failed."""
    usage: Usage = Usage()
    """Tokens and money that the tool has used itself."""

    def __post_init__(self) -> None:
        freeze_json(self, "result")

    @property
    def duration(self) -> float | None:
        return None if self.completed_at is None else (self.completed_at - self.started_at).total_seconds()


class AgentStep(Value, frozen=True, gc=True, dict=True):
    """A snapshot of one model call and the tools it led to. Messages are spans of a transcript, not copies.

    It has a `__dict__`, which is not part of its value: it keeps what is worked out once.
    """

    id: str = msgspec.field(default_factory=new_id)
    """The id of the step."""
    input_messages: Transcript = msgspec.field(default_factory=Transcript)
    """The messages that the model was shown."""
    output_messages: Transcript = msgspec.field(default_factory=Transcript)
    """The answer, and the results of the tools."""
    inference_response: InferenceResponse = InferenceResponse()
    """The facts about the model's answer."""
    tool_executions: tuple[ToolExecution, ...] = ()
    """The tool calls that were carried out."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the step itself."""

    @classmethod
    def of(
        cls,
        output: Iterable[Message],
        *,
        input: Transcript | None = None,
        response: InferenceResponse | None = None,
        tool_executions: Iterable[ToolExecution] = (),
        errors: Iterable[ErrorRecord] = (),
    ) -> AgentStep:
        return cls(
            input_messages=input or Transcript(),
            output_messages=Transcript.of(output),
            inference_response=response or InferenceResponse(),
            tool_executions=tuple(tool_executions),
            errors=tuple(errors),
        )

    @cached_property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the model asked for in this step."""
        return tuple([call for message in self.output_messages for call in message.tool_calls])

    def with_changes(self, more_calls: Iterable[ToolCall] = (), **changes: Any) -> AgentStep:
        """Return the step with other fields. `more_calls` are the calls in output that it gains."""
        changed = msgspec.structs.replace(self, **changes)
        # Its calls stay known. To find them again, all of its output would have to be read for each message.
        changed.__dict__["tool_calls"] = (*self.tool_calls, *more_calls)
        return changed

    @property
    def calls_without_outcome(self) -> tuple[ToolCall, ...]:
        done = {execution.call.id for execution in self.tool_executions}
        return tuple(call for call in self.tool_calls if call.id not in done)

    @property
    def all_errors(self) -> tuple[ErrorRecord, ...]:
        """The step's own errors and those of its tools."""
        return (*self.errors, *(run.error for run in self.tool_executions if run.error is not None))

    @property
    def step_type(self) -> AgentStepType:
        if self.all_errors:
            return AgentStepType.ERROR
        return AgentStepType.TOOL_EXECUTION if self.tool_calls else AgentStepType.FINAL_RESPONSE

    @property
    def usage(self) -> Usage:
        """The usage of the model call, and of the tools' own model calls (sub-agents)."""
        return sum((run.usage for run in self.tool_executions), start=self.inference_response.usage)


class StepExecution(Value, frozen=True):
    """A completed step with its times, and the signals that there were when it ended."""

    step: AgentStep
    """The step."""
    started_at: Time
    """The time at which it began."""
    completed_at: Time = msgspec.field(default_factory=now)
    """The time at which it ended."""
    continuation: ExecutionContinuation = ExecutionContinuation()
    """The signals that there were then."""

    @property
    def id(self) -> str:
        return self.step.id

    @property
    def duration(self) -> float:
        return (self.completed_at - self.started_at).total_seconds()
