"""The spans: one for a run, one for each model call, one for each tool call.

What has ended is told to the SDK some at a time: the same work takes half as long where it is done again and again.
A hook of the SDK may raise: that is reported, and never reaches the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
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
_AGENT = contexts.create_key("perdure-agent")
_SOON = 0.05
"""Seconds until what has ended is told to the SDK, at the latest."""
_MOST = 32
"""How many spans that have ended wait for that, at most."""
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

    state: AgentState


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
        self.cleaners: list[Callable[[str], str]] = []
        """What is done to content before it is told: the redaction of the connections that this is of."""
        self._ended: deque[_Call | _AgentTrace] = deque()
        self._timer_in: asyncio.AbstractEventLoop | None = None
        """The loop in which a flush is due. If it was closed before, another loop has to see to it."""

    def clean(self, text: str) -> str:
        """Return content as it may be told."""
        for each in self.cleaners:
            text = each(text)
        return text

    def later(self, ended: _Call | _AgentTrace) -> None:
        """Take a span that has ended, to be told of soon."""
        self._ended.append(ended)
        if len(self._ended) >= _MOST:
            self.flush()
        elif self._timer_in is None or self._timer_in.is_closed():
            self._timer_in = asyncio.get_running_loop()
            self._timer_in.call_later(_SOON, self._due)

    def _due(self) -> None:
        self._timer_in = None
        self.flush()

    def flush(self) -> None:
        """Tell the SDK of all spans that have ended."""
        while self._ended:
            try:
                ended = self._ended.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                ended.finish()
            except Exception as error:  # around a subscriber
                self.report(error)

    def here(self) -> str | None:
        """Return the current span, as it is stored."""
        return _as_text(get_current_span().get_span_context())

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
        """Begin the span of a run."""
        known = asked(model)
        told: dict[str, Any] = {
            names.OPERATION: "invoke_agent",
            names.PROVIDER: known.provider,
            names.REQUEST_MODEL: known.name,
            names.AGENT: session.definition.name,
            names.CONVERSATION: session.id,
        }
        if session.info.owner is not None:
            told[names.OWNER] = session.info.owner
        if self.content and inputs:
            from perdure.telemetry.content import said

            told[names.INPUT_MESSAGES] = self.clean(said(inputs))
        parent, links = (None, ()) if before is None and not is_posted else _place(before, sender)
        began = time_ns()
        span = self.start(f"invoke_agent {session.definition.name}", parent, SpanKind.INTERNAL, told, links, began)
        return RunTrace(self, session, span, parent, began, known)

    def group(self, session: AgentSession, count: int, before: str | None) -> GroupTrace:
        """Begin the span that the branches of an evaluation are beneath."""
        agent = session.definition.name
        told: dict[str, Any] = {names.OPERATION: "invoke_agent", names.AGENT: agent, names.CONVERSATION: session.id}
        told[names.BRANCHES] = count
        parent, links = (None, ()) if before is None else _place(before, None)
        began = time_ns()
        span = self.start(f"invoke_agent {agent}", parent, SpanKind.INTERNAL, told, links, began)
        return GroupTrace(self, session, span, parent, began)


class _AgentTrace:
    """A span that others are beneath. Inside `with` it is the current one; then it ends."""

    def __init__(
        self, tracing: Tracing, session: AgentSession, span: Span, beneath: Context | None, began: int
    ) -> None:
        self.tracing = tracing
        self.session = session
        self.began = began
        self.context = contexts.set_value(_AGENT, self, set_span_in_context(span, beneath))
        self.parent = _as_text(span.get_span_context())
        """The span as it is stored, for whoever continues this run."""
        self._span = span
        self._record: Claimed | None = None
        self._error: BaseException | None = None
        self._at = began
        self._token: Any = None
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost = 0.0

    def __enter__(self) -> Self:
        self._token = contexts.attach(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if self._record is not None and not self._record.was_claimed:
            return  # It never had its session. Its span is not ended, so nobody hears of it.
        self._error, self._at = error, time_ns()
        self.tracing.later(self)

    def finish(self) -> None:
        """Tell of what has ended."""
        raise NotImplementedError


class RunTrace(_AgentTrace):
    """The span of a run, from its claim on to its end or to where it is left, and the spans of its calls."""

    def __init__(
        self, tracing: Tracing, session: AgentSession, span: Span, beneath: Context | None, began: int, model: Asked
    ) -> None:
        super().__init__(tracing, session, span, beneath, began)
        self._model = model
        self._run: Stated | None = None

    def about(self, run: Stated, record: Claimed | None = None) -> Self:
        """Take note of the run that the span is of, and of the record whose claim it begins with, if it has one."""
        self._run = run
        self._record = record
        return self

    def driver(self, driver: Driver) -> TracedDriver:
        """Return a driver whose calls are spans beneath this one."""
        return TracedDriver(self.tracing, driver, self)

    def tool(self, call: ToolCall) -> ToolSpan:
        """Return the span of a tool call. It is the current one until it is told how the call has ended."""
        return ToolSpan(self, call)

    def finish(self) -> None:
        state = None if self._run is None else self._run.state
        execution = None if state is None else state.execution
        status, failed = _outcome_of(execution, self._error)
        if state is not None and self._span.is_recording():
            self._span.set_attributes(self._told(state, execution, status))
        _finish(self._span, failed, self._at)
        seconds = (self._at - self.began) / 1e9
        self.tracing.meters.run(self.session.definition.name, status, failed, seconds, self._model, self.cost)

    def _told(self, state: AgentState, execution: ExecutionState | None, status: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            names.STATUS: status,
            names.INPUT_TOKENS: self.input_tokens,
            names.OUTPUT_TOKENS: self.output_tokens,
        }
        if execution is not None:
            told[names.RUN] = execution.execution_id
            reason = execution.stop_reason
            if reason is not None and reason.value != status:
                told[names.STOP_REASON] = reason.value
        if self.cost:
            told[names.COST] = self.cost
        if self.tracing.content and state.final_response is not None:
            from perdure.telemetry.content import said

            told[names.OUTPUT_MESSAGES] = self.tracing.clean(said([state.final_response], ""))
        return told


class GroupTrace(_AgentTrace):
    """The span that the branches of one evaluation are beneath."""

    def about(self, record: Claimed | None) -> Self:
        """Take note of the record whose claim the evaluation begins with, if it has one."""
        self._record = record
        return self

    def finish(self) -> None:
        if self.input_tokens or self.output_tokens:  # of a model that judges the branches
            told = {names.INPUT_TOKENS: self.input_tokens, names.OUTPUT_TOKENS: self.output_tokens}
            self._span.set_attributes(told)
        error = self._error
        is_failure = error is not None and not isinstance(error, RunInterrupted | asyncio.CancelledError)
        _finish(self._span, type(error).__name__ if is_failure else None, self._at)


class _Call(Span):
    """The span of a call, which is the current one until the call ends.

    The SDK begins it when somebody asks for it, as one who begins a span beneath it does. If nobody has, it is begun
    once the call has ended, at the time at which the call began.
    """

    _kind = SpanKind.INTERNAL
    _made: Span | None = None
    _failed: str | None = None
    _mark: str | None = None
    """An attribute that tells that the call has no outcome, and why."""

    def __init__(self, tracing: Tracing, agent: _AgentTrace | None, beneath: Context) -> None:
        self._tracing = tracing
        self._agent = agent
        self._beneath = beneath
        self._token = contexts.attach(set_span_in_context(self, self._beneath))
        self._at = self._began = time_ns()

    def _name(self) -> str:
        raise NotImplementedError

    def _told_first(self) -> dict[str, Any]:
        """Return what is known of the call before it has ended."""
        raise NotImplementedError

    def _told_last(self) -> dict[str, Any]:
        """Return what is known of the call once it has ended."""
        raise NotImplementedError

    def _measure(self) -> None:
        """Measure the call, if that is measured."""

    def left(self, error: BaseException) -> None:
        """Take what the call was broken off by."""
        if isinstance(error, asyncio.CancelledError):
            self._mark = names.CANCELLED
        else:
            self._failed = type(error).__name__
        self._close()

    def _close(self) -> None:
        """Take the end of the call: its span is not the current one any more."""
        contexts.detach(self._token)
        self._at = time_ns()
        self._tracing.later(self)

    def finish(self) -> None:
        """Tell of a call that has ended. Its span is made all at once, if there is none yet."""
        self._measure()
        told = self._told_last()
        if self._mark is not None:
            told[self._mark] = True
        with self._tracing.making:
            made = self._made
            if made is None:  # it is kept: work that a tool has left behind may still ask for it
                told = self._told_first() | told
                made = self._tracing.start(self._name(), self._beneath, self._kind, told, (), self._began)
                self._made = made
            elif told:
                made.set_attributes(told)
        _finish(made, self._failed, self._at)

    def _span(self) -> Span:
        """Return the SDK's span, begun now if it was not, with the time at which the call began."""
        if self._made is None:
            with self._tracing.making:
                if self._made is None:
                    self._made = INVALID_SPAN  # for a processor that asks for the current span while this is made
                    self._made = self._begun()
        return self._made

    def _begun(self) -> Span:
        try:
            told = self._told_first()
            return self._tracing.start(self._name(), self._beneath, self._kind, told, (), self._began)
        except Exception as error:  # around a subscriber: whoever asks is a tool
            self._tracing.report(error)
            return INVALID_SPAN

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

    _kind = SpanKind.CLIENT
    _reply: ModelReply | None = None

    def __init__(self, tracing: Tracing, agent: _AgentTrace | None, beneath: Context, request: ModelRequest) -> None:
        self._request = request
        super().__init__(tracing, agent, beneath)

    def answered(self, reply: ModelReply) -> None:
        """Take the model's answer."""
        self._reply = reply
        agent = self._agent
        if agent is not None:
            usage = reply.response.usage
            agent.input_tokens += usage.input_tokens
            agent.output_tokens += usage.output_tokens
            agent.cost += usage.cost
        self._close()

    def _name(self) -> str:
        return asked(self._request.model).span_name

    def _measure(self) -> None:
        model, seconds = asked(self._request.model), (self._at - self._began) / 1e9
        if self._reply is not None:
            response = self._reply.response
            self._tracing.meters.chat(model, seconds, response.model, response.usage)
        elif self._failed is not None:
            self._tracing.meters.chat(model, seconds, failed=self._failed)

    def _told_first(self) -> dict[str, Any]:
        told = asked(self._request.model).chat.copy()
        if self._agent is not None:
            told[names.CONVERSATION] = self._agent.session.id
        if self._tracing.content:
            from perdure.telemetry.content import asked_of

            told |= {name: self._tracing.clean(text) for name, text in asked_of(self._request).items()}
        return told

    def _told_last(self) -> dict[str, Any]:
        if self._reply is None:
            return {}
        response = self._reply.response
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

            said_last = said([self._reply.message], response.finish_reason or "")
            told[names.OUTPUT_MESSAGES] = self._tracing.clean(said_last)
        return told


class ToolSpan(_Call):
    """The span of a tool call."""

    _result: JSON = None

    def __init__(self, run: RunTrace, call: ToolCall) -> None:
        self._call = call
        self._conversation = run.session.id
        super().__init__(run.tracing, run, run.context)

    def ended(self, result: JSON, error: ErrorRecord | None) -> None:
        """Take what came of the call: its result, or an error of the tool's own."""
        if error is None:
            self._result = result
        else:
            self._failed, self._result = error.type, error.message
        self._close()

    def waits(self) -> None:
        """Take that the call has no outcome yet: its sub-agent waits for a person."""
        self._mark = names.AWAITS
        self._close()

    def _name(self) -> str:
        return f"execute_tool {self._call.name}"

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

            told[names.ARGUMENTS] = self._tracing.clean(as_text(self._call.arguments))
        return told

    def _told_last(self) -> dict[str, Any]:
        if not self._tracing.content or self._result is None:
            return {}
        from perdure.telemetry.content import as_text

        return {names.RESULT: self._tracing.clean(as_text(self._result))}


class TracedDriver:
    """A driver each of whose calls is a span: of its run, or else of the current one, or beneath what is current."""

    def __init__(self, tracing: Tracing, driver: Driver, run: RunTrace | None = None) -> None:
        self._tracing = tracing
        self._driver = driver
        self._run = run

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        agent = self._run
        if agent is None:
            span = Chat(self._tracing, _current_agent(), contexts.get_current(), request)
        else:
            span = Chat(self._tracing, agent, agent.context, request)
        try:
            reply = await self._driver.respond(request, on_delta)
        except BaseException as error:
            span.left(error)
            raise
        span.answered(reply)
        return reply


def _finish(span: Span, failed: str | None, at: int) -> None:
    """End a span. Its status names the type of an error, and not its message, which may quote content or a key."""
    if failed is not None:
        span.set_attribute(names.ERROR, failed)
        span.set_status(Status(StatusCode.ERROR, failed))
    span.end(at)


def _current_agent() -> _AgentTrace | None:
    found = contexts.get_value(_AGENT)
    return found if isinstance(found, _AgentTrace) else None


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


def _place(before: str | None, sender: str | None) -> tuple[Context | None, Sequence[Link]]:
    """Return what the span of a continued or posted run is beneath (None: what is current), and what it is linked to.

    One that was posted has a trace of its own: it may begin days later, and a schedule sends again and again.
    """
    earlier = _from_text(before)
    if earlier is None:
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
