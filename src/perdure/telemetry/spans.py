"""The spans: one for a run, one for each model call, one for each tool call.

Ended spans are passed to the SDK several at a time: in a row, the same work takes half the time. A hook of the SDK may
raise. Its error is reported, and never reaches the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakKeyDictionary

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

    from perdure.redaction.texts import Redaction
    from perdure.telemetry.meters import Meters

Report = Callable[[Exception], None]
_AGENT = contexts.create_key("perdure-agent")
_SOON = 0.05
"""The most seconds until an ended span is passed to the SDK."""
_MOST = 32
"""The most ended spans that wait for that."""
_OTHER = "_OTHER"
"""The conventions' name for an error about which nothing is known."""
CONTINUES, SENT_BY, CALLED_BY = "continues", "sent_by", "called_by"
"""The meanings of a link: to the run's earlier part, to the message's sender, or to the caller that continues it."""


class Claimed(Protocol):
    """A record that tells whether its session was claimed."""

    @property
    def was_claimed(self) -> bool: ...


class Stated(Protocol):
    """The part of a run that its span needs."""

    state: AgentState


class Tracing:
    """The maker of the spans of one `Telemetry`."""

    def __init__(
        self, provider: TracerProvider | None, meters: Meters, report: Report, *, content: bool = False
    ) -> None:
        self.start = get_tracer("perdure", tracer_provider=provider).start_span
        self.making = threading.RLock()
        """The lock that is held while the span of a call is made: tools in several threads may ask for it."""
        # Reentrant: a processor of the SDK may ask for a span while one is being made.
        self.meters = meters
        self.report = report
        self.content = content
        # Weak: a program may open a connection for each of its requests, and all with the same telemetry.
        self.cleaners: WeakKeyDictionary[Redaction, None] = WeakKeyDictionary()
        """The redactions of the connections that use this. Content is redacted before it is traced."""
        self._ended: deque[_Call | _AgentTrace] = deque()
        self._timer_in: asyncio.AbstractEventLoop | None = None
        """The loop with a timer for the next flush. If that loop was closed, another one sets a timer."""

    def clean(self, text: str) -> str:
        """Return content as it may be traced."""
        for each in [*self.cleaners]:
            text = each.text(text)
        return text

    def later(self, ended: _Call | _AgentTrace) -> None:
        """Take an ended span, to be passed to the SDK soon."""
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
        """Pass all ended spans to the SDK."""
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
        """Return the current span in its stored form."""
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
        # A parent of None is the current span.
        parent, links = (None, ()) if before is None and not is_posted else _place(before, sender)
        began = time_ns()
        span = self.start(f"invoke_agent {session.definition.name}", parent, SpanKind.INTERNAL, told, links, began)
        return RunTrace(self, session, span, parent, began, known)

    def group(self, session: AgentSession, count: int, before: str | None) -> GroupTrace:
        """Begin the span above the branches of an evaluation."""
        agent = session.definition.name
        told: dict[str, Any] = {names.OPERATION: "invoke_agent", names.AGENT: agent, names.CONVERSATION: session.id}
        told[names.BRANCHES] = count
        parent, links = (None, ()) if before is None else _place(before, None)
        began = time_ns()
        span = self.start(f"invoke_agent {agent}", parent, SpanKind.INTERNAL, told, links, began)
        return GroupTrace(self, session, span, parent, began)


class _AgentTrace:
    """A span above others. It is the current one while the `with` block lasts, and ends with it."""

    def __init__(
        self, tracing: Tracing, session: AgentSession, span: Span, beneath: Context | None, began: int
    ) -> None:
        self.tracing = tracing
        self.session = session
        self.began = began
        self.context = contexts.set_value(_AGENT, self, set_span_in_context(span, beneath))
        self.parent = _as_text(span.get_span_context())
        """The span in its stored form, for the process that continues this run."""
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
            return  # the run never got its session: a span that is not ended is not exported
        self._error, self._at = error, time_ns()
        self.tracing.later(self)

    def finish(self) -> None:
        """Pass the span to the SDK."""
        raise NotImplementedError


class RunTrace(_AgentTrace):
    """The span of a run, from its claim to its end or to the point where it is left, with the spans of its calls."""

    def __init__(
        self, tracing: Tracing, session: AgentSession, span: Span, beneath: Context | None, began: int, model: Asked
    ) -> None:
        super().__init__(tracing, session, span, beneath, began)
        self._model = model
        self._run: Stated | None = None

    def about(self, run: Stated, record: Claimed | None = None) -> Self:
        """Set the run of the span, and the record whose claim the run begins with, if it has one."""
        self._run = run
        self._record = record
        return self

    def driver(self, driver: Driver) -> TracedDriver:
        """Return a driver whose calls are spans below this one."""
        return TracedDriver(self.tracing, driver, self)

    def tool(self, call: ToolCall) -> ToolSpan:
        """Return the span of a tool call. It is the current one until the end of the call is reported to it."""
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
    """The span above the branches of one evaluation."""

    def about(self, record: Claimed | None) -> Self:
        """Set the record whose claim the evaluation begins with, if it has one."""
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
    """The span of a call. It is the current one until the call ends.

    The SDK's span is begun only when somebody asks for it, for example to begin a span below it. If nobody does, it is
    begun after the call has ended, with the time at which the call began.
    """

    _kind = SpanKind.INTERNAL
    _made: Span | None = None
    _failed: str | None = None
    _mark: str | None = None
    """An attribute which says that the call has no outcome, and why."""

    def __init__(self, tracing: Tracing, agent: _AgentTrace | None, beneath: Context) -> None:
        self._tracing = tracing
        self._agent = agent
        self._beneath = beneath
        self._token = contexts.attach(set_span_in_context(self, self._beneath))
        self._at = self._began = time_ns()

    def _name(self) -> str:
        raise NotImplementedError

    def _told_first(self) -> dict[str, Any]:
        """Return the attributes that are known before the call has ended."""
        raise NotImplementedError

    def _told_last(self) -> dict[str, Any]:
        """Return the attributes that are known once the call has ended."""
        raise NotImplementedError

    def _measure(self) -> None:
        """Measure the call. Calls of tools are not measured."""

    def left(self, error: BaseException) -> None:
        """Take the error that broke the call off."""
        if isinstance(error, asyncio.CancelledError):
            self._mark = names.CANCELLED
        else:
            self._failed = type(error).__name__
        self._close()

    def _close(self) -> None:
        """End the call: its span is not the current one any more."""
        contexts.detach(self._token)
        self._at = time_ns()
        self._tracing.later(self)

    def finish(self) -> None:
        """Pass the ended call to the SDK. If its span was not begun yet, make it in one step."""
        self._measure()
        told = self._told_last()
        if self._mark is not None:
            told[self._mark] = True
        with self._tracing.making:
            made = self._made
            if made is None:  # then it is kept: work that a tool has left behind may still ask for it
                told = self._told_first() | told
                made = self._tracing.start(self._name(), self._beneath, self._kind, told, (), self._began)
                self._made = made
            elif told:
                made.set_attributes(told)
        _finish(made, self._failed, self._at)

    def _span(self) -> Span:
        """Return the SDK's span. Begin it if needed, with the time at which the call began."""
        if self._made is None:
            with self._tracing.making:
                if self._made is None:  # looked at again: another thread may have made it while this one waited
                    # Until it is there, a processor that asks for the current span gets this, and not an endless loop.
                    self._made = INVALID_SPAN
                    self._made = self._begun()
        return self._made

    def _begun(self) -> Span:
        try:
            told = self._told_first()
            return self._tracing.start(self._name(), self._beneath, self._kind, told, (), self._began)
        except Exception as error:  # around a subscriber: the caller is a tool, which must not fail by this
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
    """A driver whose calls are spans: of its run, or else of the current run, or else below the current span."""

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
        except BaseException as error:  # a cancellation too: the span would stay the current one
            span.left(error)
            raise
        span.answered(reply)
        return reply


def _finish(span: Span, failed: str | None, at: int) -> None:
    """End a span. Its status has the type of an error, but not the message, which may quote content or a key."""
    if failed is not None:
        span.set_attribute(names.ERROR, failed)
        span.set_status(Status(StatusCode.ERROR, failed))
    span.end(at)


def _current_agent() -> _AgentTrace | None:
    found = contexts.get_value(_AGENT)
    return found if isinstance(found, _AgentTrace) else None


def _outcome_of(execution: ExecutionState | None, error: BaseException | None) -> tuple[str, str | None]:
    """Return the status of a run, and the type of the error that it failed with."""
    if execution is not None and execution.status is not ExecutionStatus.IN_PROGRESS:
        if execution.status is not ExecutionStatus.FAILED:
            return execution.status.value, None
        return execution.status.value, execution.cause.type if execution.cause else _OTHER
    if error is None and execution is not None and execution.pending_calls:
        return "waiting", None
    if error is None or isinstance(error, RunInterrupted | asyncio.CancelledError):
        return "interrupted", None
    return "interrupted", type(error).__name__


def _place(before: str | None, sender: str | None) -> tuple[Context | None, Sequence[Link]]:
    """Return the parent of the span of a continued or posted run, and its links. A parent of None is the current span.

    A posted run has a trace of its own: it may begin days later, and a schedule sends again and again.
    """
    earlier = _from_text(before)
    if earlier is None:
        sent_by = _from_text(sender)
        return Context(), () if sent_by is None else (Link(sent_by, {names.LINK: SENT_BY}),)
    links, here = [Link(earlier, {names.LINK: CONTINUES})], get_current_span().get_span_context()
    if here.trace_id == earlier.trace_id:  # a sub-agent's run below its continued caller, or the same request
        return None, links
    if here.is_valid:
        links.append(Link(here, {names.LINK: CALLED_BY}))
    return set_span_in_context(NonRecordingSpan(earlier)), links


def _as_text(span: SpanContext) -> str | None:
    """Return a span in the form of W3C's `traceparent`."""
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def _from_text(text: object) -> SpanContext | None:
    """Return the span that a text names. Return None if it names none: the text may come from another program."""
    if not isinstance(text, str):
        return None
    try:
        _, trace_id, span_id, flags = text.split("-")
        found = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    except ValueError:
        return None
    return found if found.is_valid else None
