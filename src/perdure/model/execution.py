"""One run of an agent while it is live, and the budget it may spend."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.checks import expect_count, expect_number, expect_text
from perdure.model.ids import Time, new_id, now
from perdure.model.message import ToolCall
from perdure.model.step import AgentStep, AgentStepType, StepExecution
from perdure.model.stop import ExecutionContinuation, StopReason, StopSignal
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, JSON, ErrorRecord, Value, brief, freeze, freeze_json


class ExecutionStatus(StrEnum):
    """The status of one run."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


class ExecutionBudget(Value, frozen=True):
    """The limits of what one run may spend. None is unlimited."""

    max_steps: int | None = None
    """The number of model calls."""
    max_tokens: int | None = None
    """The number of input and output tokens together."""
    max_seconds: float | None = None
    """Seconds of work. Waiting for a person does not count."""
    max_cost: float | None = None
    """Dollars."""
    deadline: Time | None = None
    """The moment, with a time zone, at which the run ends."""

    def __post_init__(self) -> None:
        for name, kind in (("max_steps", int), ("max_tokens", int), ("max_seconds", float), ("max_cost", float)):
            limit = getattr(self, name)
            if limit is not None and not _is_limit(limit, kind):
                wanted = f"{'a whole' if kind is int else 'a'} number of at least 0, or None"
                raise InvalidData(f"$.budget.{name}", f"a limit is {wanted}; got {brief(limit)}")
        if self.deadline is not None and (not isinstance(self.deadline, datetime) or self.deadline.tzinfo is None):
            raise InvalidData("$.budget.deadline", "a deadline is a datetime with a time zone, or None")

    @classmethod
    def unlimited(cls) -> ExecutionBudget:
        """Return a budget without limits."""
        return cls()

    @property
    def is_empty(self) -> bool:
        """True if nothing is limited."""
        return self == ExecutionBudget()

    def reached(self, spent: Spent) -> str | None:
        """Return the name of the first limit that is reached by what was `spent`, if any."""
        limits = (
            ("max_steps", self.max_steps, spent.steps),
            ("max_tokens", self.max_tokens, spent.usage.total_tokens),
            ("max_seconds", self.max_seconds, spent.seconds),
            ("max_cost", self.max_cost, spent.usage.cost),
        )
        for name, limit, value in limits:
            if limit is not None and value >= limit:
                return name
        if self.deadline is not None and spent.at >= self.deadline:
            return "deadline"
        return None

    def is_exhausted(self, spent: Spent) -> bool:
        """Tell whether any limit is reached by what was `spent`."""
        return self.reached(spent) is not None


def _is_limit(limit: Any, kind: type) -> bool:
    is_number = isinstance(limit, int | kind) and not isinstance(limit, bool)
    return is_number and 0 <= limit < 2**64  # which NaN and infinity are not


class Spent(Value, frozen=True):
    """The resources that a run has used so far."""

    steps: int = 0
    """The number of model calls."""
    usage: Usage = Usage()
    """Tokens and money."""
    seconds: float = 0.0
    """Seconds of work."""
    at: Time = msgspec.field(default_factory=now)
    """The time at which this was so."""


class ExternalToolSpec(Value, frozen=True):
    """A tool that is called outside, by the sender of the message: its calls wait for their answers."""

    name: str
    """The name by which the model calls it."""
    description: str = ""
    """A text for the model about when to call it."""
    parameters: Mapping[str, Any] = EMPTY
    """The JSON schema of the arguments."""

    def __post_init__(self) -> None:
        freeze(self, "parameters")


class ModelOptions(Value, frozen=True):
    """Options for the model in one run alone. For those that are None, the agent's apply."""

    temperature: float | None = None
    """The sampling temperature."""
    top_p: float | None = None
    """The share of likely tokens that are sampled from."""
    max_tokens: int | None = None
    """The number of tokens that one answer may have."""
    thinking: str | None = None
    """`on`, `off`, or how much, as in `ModelConfig`."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                expect_number(getattr(self, name), f"$.model_options.{name}", least=0)
        if self.max_tokens is not None:
            expect_count(self.max_tokens, "$.model_options.max_tokens", least=1)
        if self.thinking is not None:
            expect_text(self.thinking, "$.model_options.thinking", blank=False)


class PendingCall(ToolCall, frozen=True):
    """A tool call that waits: for a person's approval, or for an answer from outside.

    A sub-agent's call shows the calls that wait in its session.
    """

    session_id: str | None = None
    """The sub-agent's session; None for a call of a plain tool."""
    waits_for: tuple[PendingCall, ...] = ()
    """The calls that the sub-agent wants to make: approving its caller's call approves these."""
    external: bool = False
    """True for a call that is made outside: it waits for an answer, not for an approval."""
    begun: int = 0
    """The number of times that the call was started without coming to an outcome: it may have taken effect."""
    begun_at: Time | None = None
    """The time at which a call with an unknown outcome was begun, if that is on record."""

    @classmethod
    def of(
        cls,
        call: ToolCall,
        session_id: str | None = None,
        waits_for: tuple[PendingCall, ...] = (),
        *,
        external: bool = False,
        begun: int = 0,
    ) -> PendingCall:
        """Return a `call` as one that waits.

        `session_id`, `waits_for`, `external` and `begun` are the fields that it gets.
        """
        facts = (call.name, call.arguments, call.id, call.provider, call.opaque)
        return cls(*facts, session_id, waits_for, external, begun, unknown=call.unknown)

    @property
    def outcome_unknown(self) -> bool:
        """True for a call that was begun before and may have been done already: approving it makes it again."""
        return self.begun > 0

    @property
    def warning(self) -> str:
        """The sentence that a person needs to be told before deciding, or an empty text."""
        if not self.outcome_unknown:
            return ""
        since = f" (begun {self.begun_at:%Y-%m-%d %H:%M:%S %Z})" if self.begun_at is not None else ""
        return f"outcome unknown: it may have been done already{since}"

    @property
    def digest(self) -> str:
        """Return the hash that a decision is bound to: of the call, its arguments, and all that waits below it.

        A call that was started since then has another hash, so an old approval does not let it be made again.
        """
        below = [call.digest for call in self.waits_for]
        told: list[object] = [self.id, self.name, self.arguments, below]
        if self.begun:  # otherwise the hash is what earlier releases have stored
            told.append(self.begun)
        return hashlib.sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()

    @property
    def leaves(self) -> tuple[PendingCall, ...]:
        """Return the calls that would be made in the end: those that a sub-agent waits for, or else the call itself."""
        return tuple(leaf for call in self.waits_for for leaf in call.leaves) or (self,)


class CallAnswer(Value, frozen=True):
    """The result of a call that was made outside, or the reason why it failed."""

    call: str
    """The id of the call, or the digest of a sub-agent's call."""
    result: JSON = None
    """The result, or the reason."""
    is_error: bool = False
    """True if the call failed."""

    def __post_init__(self) -> None:
        freeze_json(self, "result")


class ExecutionState(Value, frozen=True):
    """A run: its steps so far, the step under way, and whether it should continue."""

    execution_id: str = msgspec.field(default_factory=new_id)
    """The id of the run, which is the id of its loop on record."""
    status: ExecutionStatus = ExecutionStatus.PENDING
    """The status of the run."""
    started_at: Time = msgspec.field(default_factory=now)
    """The time at which it began."""
    completed_at: Time | None = None
    """The time at which it ended, or None."""
    step_executions: tuple[StepExecution, ...] = ()
    """The steps that are complete, with their times."""
    continuation: ExecutionContinuation = ExecutionContinuation()
    """The signals to stop, and whether the run continues all the same."""
    current_step_started_at: Time | None = None
    """The time at which the step under way began, or None."""
    current_step: AgentStep | None = None
    """The step under way, or None."""
    pending_calls: tuple[PendingCall, ...] = ()
    """The calls that wait for a person, or for an answer from outside."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors that belong to no step."""
    compaction_usage: Usage = Usage()
    """The usage of models for compacting the transcript during the run."""
    discarded_usage: Usage = Usage()
    """The usage of answers that an interceptor threw away, or that a crash cut off and the model began again."""
    idle: float = 0.0
    """Seconds that the run waited for a person, or was down after a crash, until it was last resumed."""
    response_format: Mapping[str, Any] | None = None
    """The JSON schema of the answer that this run alone is asked for."""
    external_tools: tuple[ExternalToolSpec, ...] = ()
    """Tools that this run alone may call, and whose calls are answered from outside."""
    instructions: str | None = None
    """Instructions for this run alone, sent behind the system prompt."""
    model_options: ModelOptions | None = None
    """Options for the model in this run alone."""

    def __post_init__(self) -> None:
        if self.response_format is not None:
            freeze(self, "response_format")

    @classmethod
    def fresh(cls) -> ExecutionState:
        return cls(status=ExecutionStatus.IN_PROGRESS)

    @property
    def steps(self) -> tuple[AgentStep, ...]:
        return tuple(done.step for done in self.step_executions)

    @property
    def last_step(self) -> AgentStep | None:
        return self.step_executions[-1].step if self.step_executions else None

    @property
    def last_step_type(self) -> AgentStepType | None:
        return self.last_step.step_type if self.last_step else None

    @property
    def has_tool_calls(self) -> bool:
        """True if the step under way, or else the last one, asks for tools."""
        step = self.current_step or self.last_step
        return step is not None and bool(step.tool_calls)

    @property
    def should_stop(self) -> bool:
        if self.continuation.should_stop:
            return True
        return not (self.continuation.is_continuation_requested or self.has_tool_calls)

    @property
    def stop_reason(self) -> StopReason | None:
        reason = self.continuation.stop_reason
        if reason is None and self.status is ExecutionStatus.COMPLETED:
            return StopReason.COMPLETED
        return reason

    @property
    def usage(self) -> Usage:
        return sum((step.usage for step in self._all_steps()), start=self.compaction_usage + self.discarded_usage)

    @property
    def all_errors(self) -> tuple[ErrorRecord, ...]:
        return (*self.errors, *(error for step in self._all_steps() for error in step.all_errors))

    @property
    def cause(self) -> ErrorRecord | None:
        """The error that a failed run ended with: the newest of its own, or else the newest of a tool."""
        errors = self.errors or self.all_errors
        return errors[-1] if errors else None

    @property
    def duration(self) -> float:
        """Seconds from start to end, or to now while it runs, without idle time."""
        return max(0.0, ((self.completed_at or now()) - self.started_at).total_seconds() - self.idle)

    def _all_steps(self) -> tuple[AgentStep, ...]:
        return self.steps if self.current_step is None else (*self.steps, self.current_step)

    def with_current_step(self, step: AgentStep) -> ExecutionState:
        started = self.current_step_started_at or now()
        return msgspec.structs.replace(self, current_step=step, current_step_started_at=started)

    def with_step_started(self) -> ExecutionState:
        return msgspec.structs.replace(self, current_step_started_at=now())

    def with_current_step_completed(self) -> ExecutionState:
        """Return the run with the step under way among the completed ones."""
        if self.current_step is None:
            return self
        done = StepExecution(
            self.current_step, self.current_step_started_at or now(), now(), continuation=self.continuation
        )
        return msgspec.structs.replace(
            self, step_executions=(*self.step_executions, done), current_step=None, current_step_started_at=None
        )

    def with_stop_signal(self, signal: StopSignal) -> ExecutionState:
        return msgspec.structs.replace(self, continuation=self.continuation.with_stop_signal(signal))

    def with_continuation_requested(self, requested: bool = True) -> ExecutionState:
        continuation = self.continuation.with_continuation_requested(requested)
        return self if continuation is self.continuation else msgspec.structs.replace(self, continuation=continuation)

    def with_pending_calls(self, calls: Iterable[ToolCall]) -> ExecutionState:
        waiting = tuple(call if isinstance(call, PendingCall) else PendingCall.of(call) for call in calls)
        return msgspec.structs.replace(self, pending_calls=waiting)

    def with_error(self, error: ErrorRecord) -> ExecutionState:
        return msgspec.structs.replace(self, errors=(*self.errors, error))

    def with_compaction_usage(self, usage: Usage) -> ExecutionState:
        return msgspec.structs.replace(self, compaction_usage=self.compaction_usage + usage)

    def with_discarded_usage(self, usage: Usage) -> ExecutionState:
        return msgspec.structs.replace(self, discarded_usage=self.discarded_usage + usage)

    def with_response_format(self, schema: Mapping[str, Any] | None) -> ExecutionState:
        return msgspec.structs.replace(self, response_format=schema)

    def with_terms(
        self, tools: tuple[ExternalToolSpec, ...], instructions: str | None, options: ModelOptions | None
    ) -> ExecutionState:
        """Return the run with tools, instructions and options of its own."""
        return msgspec.structs.replace(self, external_tools=tools, instructions=instructions, model_options=options)

    def with_idle(self, seconds: float) -> ExecutionState:
        return msgspec.structs.replace(self, idle=self.idle + seconds)

    def ended(self, status: ExecutionStatus) -> ExecutionState:
        return msgspec.structs.replace(self, status=status, completed_at=now())
