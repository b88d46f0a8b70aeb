"""The spans: one for a run, one for each model call, one for each tool call.

Every one is started with all that is known then, and told the rest once, when it ends. A hook of the SDK may raise:
that is reported, and never reaches the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    get_tracer,
    set_span_in_context,
)

from perdure.errors import RunInterrupted
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.message import Message, ToolCall
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import JSON, ErrorRecord
from perdure.protocols import Driver, ModelReply, ModelRequest, OnDelta
from perdure.telemetry import attributes as names
from perdure.telemetry.attributes import Asked, asked

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from perdure.telemetry.meters import Meters

Report = Callable[[Exception], None]
_RUN = contexts.create_key("perdure-run")
_OTHER = "_OTHER"
"""What the conventions call an error of which nothing is known."""
CONTINUES, SENT_BY, CALLED_BY = "continues", "sent_by", "called_by"
"""What a link stands for: the run's own earlier part, the message's sender, and whoever has the run continued."""


class Claimed(Protocol):
    """A record that tells whether its session was ever claimed."""

    @property
    def was_claimed(self) -> bool: ...


class Stated(Protocol):
    """A run, as far as its span tells of it."""

    @property
    def state(self) -> AgentState: ...


class Tracing:
    """Makes the spans of one `Telemetry`."""

    def __init__(
        self, provider: TracerProvider | None, meters: Meters, report: Report, *, content: bool = False
    ) -> None:
        self._start = get_tracer("perdure", tracer_provider=provider).start_span
        self.meters = meters
        self.report = report
        self.content = content

    def here(self) -> str | None:
        return _as_text(get_current_span().get_span_context())

    def driver(self, driver: Driver, run: RunTrace | None = None) -> TracedDriver:
        return TracedDriver(self, driver, run)

    def run(
        self,
        session: AgentSession,
        model: ModelConfig,
        before: str | None,
        sender: str | None,
        *,
        is_posted: bool,
        inputs: Sequence[Message],
    ) -> RunTrace:
        parent, links = _place(before, sender, is_posted)
        run = RunTrace(self, session, asked(model))
        told = run.shared_by_all(names.OPERATION, "invoke_agent")
        if self.content and inputs:
            from perdure.telemetry.content import said

            told[names.INPUT_MESSAGES] = said(inputs)
        self._begin_agent(run, told, parent, links)
        return run

    def group(self, session: AgentSession, count: int, before: str | None) -> GroupTrace:
        parent, links = _place(before, None, False)
        group = GroupTrace(self, session)
        told = {names.OPERATION: "invoke_agent", names.BRANCHES: count}
        self._begin_agent(group, {**told, **group.shared}, parent, links)
        return group

    def _begin_agent(
        self, trace: _AgentTrace, told: dict[str, Any], parent: Context | None, links: Sequence[Link]
    ) -> None:
        name = f"invoke_agent {trace.shared[names.AGENT]}"
        span = self._start(name, parent, SpanKind.INTERNAL, told, links, trace.began)
        trace.begin(span, set_span_in_context(span, parent))

    def chat(self, request: ModelRequest, run: RunTrace | None) -> Chat | Untraced:
        """Begin the span of a model call, and make it current."""
        try:
            run = run or _current_run()
            model = asked(request.model)
            told = model.chat if run is None else {**model.chat, **run.shared}
            if self.content:
                from perdure.telemetry.content import asked_of

                told = {**told, **asked_of(request)}
            began = time_ns()
            parent = None if run is None else run.context
            span = self._start(f"chat {model.name}", parent, SpanKind.CLIENT, told, (), began)
            return Chat(self, span, began, set_span_in_context(span, parent), model, run)
        except Exception as error:  # around a subscriber
            self.report(error)
            return UNTRACED

    def tool(self, call: ToolCall, run: RunTrace) -> ToolSpan | Untraced:
        """Begin the span of a tool call, and make it current."""
        try:
            told = {
                names.OPERATION: "execute_tool",
                names.TOOL: call.name,
                names.TOOL_TYPE: "function",
                names.CALL_ID: call.id,
                **run.shared,
            }
            if self.content:
                from perdure.telemetry.content import as_text

                told[names.ARGUMENTS] = as_text(call.arguments)
            began = time_ns()
            span = self._start(f"execute_tool {call.name}", run.context, SpanKind.INTERNAL, told, (), began)
            return ToolSpan(self, span, began, set_span_in_context(span, run.context), call.name)
        except Exception as error:  # around a subscriber
            self.report(error)
            return UNTRACED


class _AgentTrace:
    """A span that others are beneath. Inside `with` it is the current one; then it ends."""

    def __init__(self, tracing: Tracing, session: AgentSession) -> None:
        self.tracing = tracing
        self.session = session
        self.shared = {names.AGENT: session.definition.name, names.CONVERSATION: session.id}
        self.began = time_ns()
        self.context = Context()
        self.parent: str | None = None
        """The span as it is stored, for whoever continues this run."""
        self._span: Span = NonRecordingSpan(SpanContext(0, 0, False))
        self._token: Any = None

    def begin(self, span: Span, context: Context) -> None:
        self._span = span
        self.context = context
        self.parent = _as_text(span.get_span_context())

    def __enter__(self) -> Self:
        self._token = contexts.attach(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        try:
            self._end(error, time_ns())
        except Exception as failure:  # around a subscriber
            self.tracing.report(failure)

    def _end(self, error: BaseException | None, at: int) -> None:
        raise NotImplementedError

    def _finish(self, told: dict[str, Any], failed: str | None, at: int) -> None:
        _finish(self._span, told, failed, at)


class RunTrace(_AgentTrace):
    """The span of a run, from its claim on to its end or to where it is left, and the spans of its calls."""

    def __init__(self, tracing: Tracing, session: AgentSession, model: Asked) -> None:
        super().__init__(tracing, session)
        self._model = model
        self.run: Stated | None = None
        self.record: Claimed | None = None
        self._finish_reason: str | None = None
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost = 0.0

    def shared_by_all(self, *operation: str) -> dict[str, Any]:
        """Return what the run's own span begins with."""
        key, value = operation
        told = {key: value, names.PROVIDER: self._model.provider, names.REQUEST_MODEL: self._model.name, **self.shared}
        owner = self.session.info.owner
        return told if owner is None else {**told, names.OWNER: owner}

    def begin(self, span: Span, context: Context) -> None:
        super().begin(span, contexts.set_value(_RUN, self, context))

    def about(self, run: Stated, record: Claimed | None = None) -> Self:
        """Take note of the run that the span is of, and of the record whose claim it begins with, if it has one."""
        self.run = run
        self.record = record
        return self

    def driver(self, driver: Driver) -> TracedDriver:
        """Return a driver whose calls are spans beneath this one."""
        return self.tracing.driver(driver, self)

    def tool(self, call: ToolCall) -> ToolSpan | Untraced:
        """Begin the span of a tool call, and make it current until it is told how the call has ended."""
        return self.tracing.tool(call, self)

    def charge(self, reply: ModelReply) -> None:
        """Count what a model call of this run has used."""
        usage = reply.response.usage
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.cost += usage.cost
        self._finish_reason = reply.response.finish_reason

    def _end(self, error: BaseException | None, at: int) -> None:
        if self.run is None or (self.record is not None and not self.record.was_claimed):
            return  # it never had its session. Its span is not ended, so nobody hears of it.
        state = self.run.state
        execution = state.execution
        status, failed = _outcome_of(execution, error)
        reason = None if execution is None or execution.stop_reason is None else execution.stop_reason.value
        if self._span.is_recording():
            self._finish(self._told(state, status, reason), failed, at)
        else:
            self._span.end(at)
        seconds = (at - self.began) / 1e9
        self.tracing.meters.run(self.shared[names.AGENT], status, failed, seconds, self._model, self.cost)

    def _told(self, state: AgentState, status: str, reason: str | None) -> dict[str, Any]:
        told: dict[str, Any] = {
            names.STATUS: status,
            names.INPUT_TOKENS: self.input_tokens,
            names.OUTPUT_TOKENS: self.output_tokens,
        }
        if state.execution is not None:
            told[names.RUN] = state.execution.execution_id
        if reason is not None:
            told[names.STOP_REASON] = reason
        if self._finish_reason is not None:
            told[names.FINISH_REASONS] = (self._finish_reason,)
        if self.cost:
            told[names.COST] = self.cost
        if self.tracing.content and state.final_response is not None:
            from perdure.telemetry.content import said

            told[names.OUTPUT_MESSAGES] = said([state.final_response], self._finish_reason)
        return told


class GroupTrace(_AgentTrace):
    """The span that the branches of one evaluation are beneath."""

    record: Claimed | None = None

    def about(self, record: Claimed | None) -> Self:
        """Take note of the record whose claim the evaluation begins with, if it has one."""
        self.record = record
        return self

    def _end(self, error: BaseException | None, at: int) -> None:
        if self.record is not None and not self.record.was_claimed:
            return
        is_failure = error is not None and not isinstance(error, RunInterrupted | asyncio.CancelledError)
        self._finish({}, type(error).__name__ if is_failure else None, at)


class _Call:
    """The span of a call, which is the current one until the call ends."""

    __slots__ = ("_began", "_span", "_token", "_tracing")

    def __init__(self, tracing: Tracing, span: Span, began: int, context: Context) -> None:
        self._tracing = tracing
        self._span = span
        self._began = began
        self._token = contexts.attach(context)

    def _close(self, told: dict[str, Any], failed: str | None) -> float:
        """End the span. Return how many seconds it took."""
        at = time_ns()
        _finish(self._span, told, failed, at)
        return (at - self._began) / 1e9


class Chat(_Call):
    """The span of a model call."""

    __slots__ = ("_model", "_run")

    def __init__(
        self, tracing: Tracing, span: Span, began: int, context: Context, model: Asked, run: RunTrace | None
    ) -> None:
        super().__init__(tracing, span, began, context)
        self._model = model
        self._run = run

    def answered(self, reply: ModelReply) -> None:
        contexts.detach(self._token)
        try:
            if self._run is not None:
                self._run.charge(reply)
            response = reply.response
            seconds = self._close(self._told(reply) if self._span.is_recording() else {}, None)
            self._tracing.meters.chat(self._model, seconds, response.model, response.usage)
        except Exception as error:  # around a subscriber
            self._tracing.report(error)

    def failed(self, error: BaseException) -> None:
        contexts.detach(self._token)
        try:
            if isinstance(error, asyncio.CancelledError):
                self._close({names.CANCELLED: True}, None)
                return
            kind = type(error).__name__
            self._tracing.meters.chat(self._model, self._close({}, kind), failed=kind)
        except Exception as failure:  # around a subscriber
            self._tracing.report(failure)

    def _told(self, reply: ModelReply) -> dict[str, Any]:
        response = reply.response
        usage = response.usage
        told: dict[str, Any] = {
            names.INPUT_TOKENS: usage.input_tokens,
            names.OUTPUT_TOKENS: usage.output_tokens,
        }
        if response.finish_reason is not None:
            told[names.FINISH_REASONS] = (response.finish_reason,)
        if response.model is not None:
            told[names.RESPONSE_MODEL] = response.model
        if response.response_id is not None:
            told[names.RESPONSE_ID] = response.response_id
        if usage.cache_read_tokens:
            told[names.CACHE_READ_TOKENS] = usage.cache_read_tokens
        if usage.cache_write_tokens:
            told[names.CACHE_WRITE_TOKENS] = usage.cache_write_tokens
        if usage.reasoning_tokens:
            told[names.REASONING_TOKENS] = usage.reasoning_tokens
        if usage.cost:
            told[names.COST] = usage.cost
        if self._tracing.content:
            from perdure.telemetry.content import said

            told[names.OUTPUT_MESSAGES] = said([reply.message], response.finish_reason or "")
        return told


class ToolSpan(_Call):
    """The span of a tool call."""

    __slots__ = ("_name",)

    def __init__(self, tracing: Tracing, span: Span, began: int, context: Context, name: str) -> None:
        super().__init__(tracing, span, began, context)
        self._name = name

    def ended(self, result: JSON, error: ErrorRecord | None) -> None:
        """Tell what came of the call: its result, or an error of the tool's own."""
        told: dict[str, Any] = {}
        if self._tracing.content:
            from perdure.telemetry.content import as_text

            told[names.RESULT] = as_text(result if error is None else error.message)
        self._leave(told, None if error is None else error.type)

    def waits(self) -> None:
        """Tell that the call has no outcome yet: its sub-agent waits for a person."""
        self._leave({names.AWAITS: True}, None)

    def left(self, error: BaseException) -> None:
        """Tell what the call was broken off by."""
        if isinstance(error, asyncio.CancelledError):
            self._leave({names.CANCELLED: True}, None)
        else:
            self._leave({}, type(error).__name__)

    def _leave(self, told: dict[str, Any], failed: str | None) -> None:
        contexts.detach(self._token)
        try:
            self._tracing.meters.tool(self._name, self._close(told, failed), failed)
        except Exception as error:  # around a subscriber
            self._tracing.report(error)


class Untraced:
    """Stands for the span of a call that could not be begun."""

    def answered(self, reply: ModelReply) -> None:
        """Tell nobody."""

    def failed(self, error: BaseException) -> None:
        """Tell nobody."""

    def ended(self, result: JSON, error: ErrorRecord | None) -> None:
        """Tell nobody."""

    def waits(self) -> None:
        """Tell nobody."""

    def left(self, error: BaseException) -> None:
        """Tell nobody."""


UNTRACED = Untraced()


class TracedDriver:
    """A driver each of whose calls is a span: of its run, or else beneath what is current."""

    def __init__(self, tracing: Tracing, driver: Driver, run: RunTrace | None) -> None:
        self._tracing = tracing
        self._driver = driver
        self._run = run

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        span = self._tracing.chat(request, self._run)
        try:
            reply = await self._driver.respond(request, on_delta)
        except BaseException as error:
            span.failed(error)
            raise
        span.answered(reply)
        return reply


def _finish(span: Span, told: Mapping[str, Any], failed: str | None, at: int) -> None:
    if failed is not None:
        told = {**told, names.ERROR: failed}
        span.set_status(Status(StatusCode.ERROR, failed))
    if told:
        span.set_attributes(told)
    span.end(at)


def _current_run() -> RunTrace | None:
    found = contexts.get_value(_RUN)
    return found if isinstance(found, RunTrace) else None


def _outcome_of(execution: ExecutionState | None, error: BaseException | None) -> tuple[str, str | None]:
    """Return how a run stands, and the type of what it has failed of."""
    if execution is not None and execution.status is not ExecutionStatus.IN_PROGRESS:
        if execution.status is not ExecutionStatus.FAILED:
            return execution.status.value, None
        errors = execution.all_errors
        return execution.status.value, errors[-1].type if errors else _OTHER
    if error is None and execution is not None and execution.pending_calls:
        return "waiting", None
    if error is None or isinstance(error, RunInterrupted | asyncio.CancelledError):
        return "interrupted", None
    return "interrupted", type(error).__name__


def _place(before: str | None, sender: str | None, is_posted: bool) -> tuple[Context | None, Sequence[Link]]:
    """Return what a run's span is begun beneath (None: whatever is current), and what it is linked to."""
    earlier = _from_text(before)
    if earlier is None and not is_posted:
        return None, ()
    if earlier is None:
        # It may begin days later, and a schedule's message is sent again and again: no trace should last so long.
        sent_by = _from_text(sender)
        return Context(), () if sent_by is None else (Link(sent_by, {names.LINK: SENT_BY}),)
    links, here = [Link(earlier, {names.LINK: CONTINUES})], get_current_span().get_span_context()
    if here.trace_id == earlier.trace_id:  # the call of a sub-agent whose caller is continued, or the same request
        return None, links
    if here.is_valid:
        links.append(Link(here, {names.LINK: CALLED_BY}))
    return set_span_in_context(NonRecordingSpan(earlier)), links


def _as_text(span: SpanContext) -> str | None:
    """Return a span as W3C's `traceparent` names it."""
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _from_text(text: object) -> SpanContext | None:
    """Return the span that a text names; None if it names none, as one that was stored by somebody else may."""
    if not isinstance(text, str):
        return None
    try:
        _, trace_id, span_id, flags = text.split("-")
        found = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    except ValueError:
        return None
    return found if found.is_valid else None
