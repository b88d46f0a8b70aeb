"""The spans: one for a run, one for each model call, one for each tool call.

Every one is started with all that is known then, and told the rest once, when it ends. A hook of the SDK may raise:
that is reported, and never reaches the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
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
_SHORT = 1_000_000_000
"""Nanoseconds. Until a run has taken so long, the spans of its calls may wait for its end."""
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
        self.start = get_tracer("perdure", tracer_provider=provider).start_span
        self.making = threading.RLock()
        """Held while the span of a call is made: tools in threads may ask for it at once."""
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
        span = self.start(name, parent, SpanKind.INTERNAL, told, links, trace.began)
        trace.begin(span, set_span_in_context(span, parent))

    def chat(self, request: ModelRequest, run: RunTrace | None) -> Chat | Untraced:
        """Return the span of a model call, which is current from now on."""
        try:
            run = run or _current_run()
            return Chat(self, run, asked(request.model), request)
        except Exception as error:  # around a subscriber
            self.report(error)
            return UNTRACED

    def tool(self, call: ToolCall, run: RunTrace) -> ToolSpan | Untraced:
        """Return the span of a tool call, which is current from now on."""
        try:
            return ToolSpan(self, run, call)
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
        self._calls: list[_Call] = []
        """Calls that have ended, and whose spans are made with that of the run, or before."""
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

    def later(self, call: _Call) -> None:
        """Take a call that has ended. In a run that takes longer, its span is made at once: somebody may watch."""
        self._calls.append(call)
        if call.ended_at - self.began > _SHORT:
            self._finish_calls()

    def _finish_calls(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call.finish()

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
        self._finish_calls()
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


class _Call(Span):
    """The span of a call, which is the current one until the call ends.

    The SDK begins it when somebody asks for it, as a span beneath it does. If nobody has, it is made at the end of a
    short run together with the others, at a third of what each of them would take in its turn.
    """

    def __init__(self, tracing: Tracing, run: RunTrace | None, name: str, kind: SpanKind) -> None:
        self._tracing = tracing
        self._run = run
        self._name = name
        self._kind = kind
        self._parent = None if run is None else run.context
        self._made: Span | None = None
        self._began = time_ns()
        self._at = 0
        self._failed: str | None = None
        self._rest: dict[str, Any] = {}
        self._token = contexts.attach(set_span_in_context(self, self._parent))

    def _told_first(self) -> dict[str, Any]:
        """Return what is known of the call before it has ended."""
        raise NotImplementedError

    def _told_last(self) -> dict[str, Any]:
        """Return what is known of the call once it has ended."""
        raise NotImplementedError

    def _measure(self, seconds: float) -> None:
        raise NotImplementedError

    def _close(self, failed: str | None = None, **rest: Any) -> None:
        """Take the end of the call: its span is not current any more, and is told of."""
        contexts.detach(self._token)
        self._at, self._failed, self._rest = time_ns(), failed, rest
        try:
            self._measure((self._at - self._began) / 1e9)
            if self._made is not None:
                _finish(self._made, self._told_last(), failed, self._at)
            elif self._run is None:
                self.finish()
            else:
                self._run.later(self)
        except Exception as error:  # around a subscriber
            self._tracing.report(error)

    @property
    def ended_at(self) -> int:
        return self._at

    def finish(self) -> None:
        """Make the span of a call that has ended, all at once."""
        told = self._told_first() | self._told_last()
        if self._failed is not None:
            told[names.ERROR] = self._failed
        span = self._tracing.start(self._name, self._parent, self._kind, told, (), self._began)
        if self._failed is not None:
            span.set_status(Status(StatusCode.ERROR, self._failed))
        span.end(self._at)

    def _span(self) -> Span:
        """Return the SDK's span, begun now if it was not, with the time at which the call began."""
        if self._made is None:
            with self._tracing.making:
                if self._made is None:
                    self._made = INVALID_SPAN  # for a processor that asks for the current span while this is made
                    told = self._told_first()
                    self._made = self._tracing.start(self._name, self._parent, self._kind, told, (), self._began)
        return self._made

    def end(self, end_time: int | None = None) -> None:
        self._span().end(end_time)

    def get_span_context(self) -> SpanContext:
        return self._span().get_span_context()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span().set_attributes(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self._span().set_attribute(key, value)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self._span().add_event(name, attributes, timestamp)

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        self._span().add_link(context, attributes)

    def update_name(self, name: str) -> None:
        self._span().update_name(name)

    def is_recording(self) -> bool:
        return self._span().is_recording()

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._span().set_status(status, description)

    def record_exception(
        self, exception: BaseException, attributes: Any = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        self._span().record_exception(exception, attributes, timestamp, escaped)


class Chat(_Call):
    """The span of a model call."""

    def __init__(self, tracing: Tracing, run: RunTrace | None, model: Asked, request: ModelRequest) -> None:
        self._model = model
        self._request = request
        self._reply: ModelReply | None = None
        super().__init__(tracing, run, model.span_name, SpanKind.CLIENT)

    def answered(self, reply: ModelReply) -> None:
        self._reply = reply
        if self._run is not None:
            self._run.charge(reply)
        self._close()

    def failed(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._close(**{names.CANCELLED: True})
        else:
            self._close(type(error).__name__)

    def _measure(self, seconds: float) -> None:
        if self._reply is not None:
            response = self._reply.response
            self._tracing.meters.chat(self._model, seconds, response.model, response.usage)
        elif self._failed is not None:
            self._tracing.meters.chat(self._model, seconds, failed=self._failed)

    def _told_first(self) -> dict[str, Any]:
        told = self._model.chat.copy()
        if self._run is not None:
            told[names.CONVERSATION] = self._run.session.id
        if self._tracing.content:
            from perdure.telemetry.content import asked_of

            told |= asked_of(self._request)
        return told

    def _told_last(self) -> dict[str, Any]:
        told = self._rest
        if self._reply is None:
            return told
        response = self._reply.response
        usage = response.usage
        told[names.INPUT_TOKENS] = usage.input_tokens
        told[names.OUTPUT_TOKENS] = usage.output_tokens
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

            told[names.OUTPUT_MESSAGES] = said([self._reply.message], response.finish_reason or "")
        return told


class ToolSpan(_Call):
    """The span of a tool call."""

    def __init__(self, tracing: Tracing, run: RunTrace, call: ToolCall) -> None:
        self._call = call
        self._result: JSON = None
        self._conversation = run.session.id
        super().__init__(tracing, run, f"execute_tool {call.name}", SpanKind.INTERNAL)

    def ended(self, result: JSON, error: ErrorRecord | None) -> None:
        """Take what came of the call: its result, or an error of the tool's own."""
        self._result = result if error is None else error.message
        self._close(None if error is None else error.type)

    def waits(self) -> None:
        """Take that the call has no outcome yet: its sub-agent waits for a person."""
        self._close(**{names.AWAITS: True})

    def left(self, error: BaseException) -> None:
        """Take what the call was broken off by."""
        if isinstance(error, asyncio.CancelledError):
            self._close(**{names.CANCELLED: True})
        else:
            self._close(type(error).__name__)

    def _measure(self, seconds: float) -> None:
        self._tracing.meters.tool(self._call.name, seconds, self._failed)

    def _told_first(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            names.OPERATION: "execute_tool",
            names.TOOL: self._call.name,
            names.TOOL_TYPE: "function",
            names.CALL_ID: self._call.id,
            names.CONVERSATION: self._conversation,
        }
        if self._tracing.content:
            from perdure.telemetry.content import as_text

            told[names.ARGUMENTS] = as_text(self._call.arguments)
        return told

    def _told_last(self) -> dict[str, Any]:
        if self._tracing.content and self._result is not None:
            from perdure.telemetry.content import as_text

            return {**self._rest, names.RESULT: as_text(self._result)}
        return self._rest


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
