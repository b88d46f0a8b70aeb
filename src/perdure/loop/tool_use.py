"""Carries out the tool calls of one step: which may run, in which order, and what becomes of each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.aio import finish_despite_cancel, is_cancelled, raise_if_cancelled
from perdure.errors import AgentStop, RedactionFailed, ToolError
from perdure.loop.guards import TimeLimitReached
from perdure.loop.interceptors import Blocked, Interceptors
from perdure.loop.results import Room, as_json, shortened
from perdure.loop.run_events import Narrator, Unrecordable
from perdure.loop.tools import CalledOutside
from perdure.model.execution import CallAnswer, PendingCall
from perdure.model.ids import now
from perdure.model.lineage import ChildLoopRef
from perdure.model.message import REDACTIONS, Message, ToolCall
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, JSON, ErrorRecord, clean_text
from perdure.protocols import Tool, ToolContext

if TYPE_CHECKING:
    from perdure.loop.agent_loop import Run
    from perdure.telemetry.spans import RunTrace

Concurrency = Literal["sequential", "parallel"] | int
"""The way in which the tool calls of one step are made. A number says how many are made at once."""

UNKNOWN = "OutcomeUnknown"
"""The type of error of a call that may or may not have taken effect."""
_INTERRUPTED = "This call was interrupted and its outcome is unknown: it may or may not have taken effect."
_CHECK = "Check before you repeat it."

_log = logging.getLogger("perdure.runs")
_CUT_OFF = (
    "session %s: the connection was closed during a call of %s, so the outcome of that call is unknown. A function in "
    "a thread still runs to its end, but its result is lost. Wait for the run before you close, or give it more grace"
)
_session: ContextVar[str | None] = ContextVar("perdure_session", default=None)


def current_session() -> str | None:
    """Return the id of the session that the calling tool serves; None outside of a tool, or of a session."""
    return _session.get()


class Decisions(msgspec.Struct, frozen=True):
    """The decisions of people about calls, by their ids: a hash of what was approved, or the reason of a denial."""

    approved: Mapping[str, str] = EMPTY
    denied: Mapping[str, str] = EMPTY
    unknown: Mapping[str, datetime] = EMPTY
    """Calls that were started before a crash and have no result, with the times at which they were started."""
    waited: Mapping[str, PendingCall] = EMPTY
    """Calls that waited for a person when the run was left, by their ids.

    Each still waits for a decision, whatever rules say now. Those of sub-agents are not among them: whether they wait
    is up to the sub-agent's own session.
    """
    answers: Mapping[str, CallAnswer] = EMPTY
    """Answers to calls that are made outside: this run's by their ids, sub-agents' by their digests."""
    begun: Mapping[str, int] = EMPTY
    """The number of starts of each call without an outcome, by the call's id."""
    agreed: Mapping[str, str] = EMPTY
    """The approvals of calls that were started since and have no outcome: the hash of each by the call's id."""


def begun_before(waiting: Sequence[PendingCall]) -> Mapping[str, int]:
    """Return how often the calls that wait were started before, by their ids."""
    return {call.id: call.begun for call in waiting if call.begun}


def call_hash(call: ToolCall) -> str:
    """Return the hash that older records bind an approval to: of the tool and its arguments, to the byte."""
    return hashlib.sha256(codec.encode([call.name, call.arguments])).hexdigest()


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a call. A tool may return one to say more than its result: its usage, or the loop it spawned."""

    result: JSON = None
    """The result that the model is given."""
    usage: Usage = Usage()
    """The tokens and money that the tool has used, which are charged to the run."""
    child: ChildLoopRef | None = None
    """The link to the loop that the tool has spawned in another session."""
    error: ErrorRecord | None = None
    """The error, if the call has failed."""


class AwaitsApproval(Exception):
    """An exception of a tool that itself waits for a person. Its caller waits too, and shows what for."""

    def __init__(self, session_id: str | None = None, calls: tuple[PendingCall, ...] = ()) -> None:
        self.session_id = session_id
        self.calls = calls
        super().__init__(", ".join(call.name for call in calls))


@runtime_checkable
class Spawns(Protocol):
    """The part of a runner of sub-agents that ends their work early."""

    async def abandon(self, name: str, call: ToolContext) -> Outcome | None:
        """End the work of a call that is given up. Return its outcome so far, or None if it had not begun."""
        ...

    def left_by(self, call_id: str) -> Outcome | None:
        """Return the outcome so far of a call that was cancelled."""
        ...


class _Ready(msgspec.Struct, frozen=True):
    call: ToolCall
    tool: Tool


class _Waits(msgspec.Struct, frozen=True):
    call: PendingCall
    """The call as it would be made: what a person approves is what is run."""


class ToolUse:
    """The tool calls of a run."""

    def __init__(self, run: Run, narrator: Narrator, interceptors: Interceptors, decisions: Decisions) -> None:
        self._run = run
        self._narrator = narrator
        self._interceptors = interceptors
        self._decisions = decisions
        self._stop: AgentStop | None = None
        self._failure: RedactionFailed | None = None
        """The reason why an outcome could not be kept."""
        self._room: Room | None = None

    async def carry_out(self, step: AgentStep) -> None:
        """Run every call of a step that has no outcome yet, except for those that wait for a person."""
        done = {execution.call.id for execution in step.tool_executions}
        ready: list[_Ready] = []
        waiting: list[PendingCall] = []
        for call in step.tool_calls:
            if call.id in done:
                continue
            done.add(call.id)  # of two calls with one id, only the first is made
            if call.id in self._decisions.denied:
                await self._deny(call)
                continue
            decided = await self._decide(call)
            if isinstance(decided, _Ready):
                ready.append(decided)
            elif isinstance(decided, _Waits):
                waiting.append(decided.call)
            else:
                await self._complete(decided)
        waiting += await self._run_all(ready)
        if self._failure is not None:
            raise self._failure
        if self._stop is not None:
            raise self._stop
        by_id = {call.id: call for call in waiting}
        self._run.put_pending([by_id.pop(call.id) for call in step.tool_calls if call.id in by_id])

    async def take_answers(self, step: AgentStep) -> None:
        """Take the answers to calls that were made outside."""
        for call in step.calls_without_outcome:
            answered = self._decisions.answers.get(call.id)
            if answered is not None:
                await self._complete(_answered(call, answered))

    async def end_children(self, step: AgentStep) -> None:
        """End the sub-agents of a run that ends, if they wait for a person or were killed. Their usage is charged.

        Some have waited since before the run was continued, and it has not reached their calls again.
        """
        for call in step.calls_without_outcome:
            left = await self._abandoned(call)
            if left is not None:
                refused = _refused(call, "Stopped", "The run ended before this call had an outcome.")
                # No interceptor is asked: the run is over, and one that fails may be the reason.
                await self._put(call.id, replace(refused, usage=left.usage), left.child)

    async def _abandoned(self, call: ToolCall) -> Outcome | None:
        """End the sub-agent of a call. Return its outcome so far, or None if the call has no sub-agent."""
        if not isinstance(self._run.spawn, Spawns):
            return None
        return await self._run.spawn.abandon(call.name, self._context(call))

    async def _deny(self, call: ToolCall) -> None:
        """Settle a call that a person has denied. A sub-agent that waited for the decision ends; its usage counts."""
        left = await self._abandoned(call)
        refused = _refused(call, "Denied", f"A person has denied this call: {self._decisions.denied[call.id]}")
        if left is None:
            await self._complete(refused)
        else:
            await self._complete(replace(refused, usage=left.usage), left.child)

    async def _decide(self, call: ToolCall) -> _Ready | _Waits | ToolExecution:
        """Return a call as ready to run, as waiting for a person, or as settled without being run."""
        passed = await self._interceptors.pass_through("before_tool_use", call, self._run.state)
        if isinstance(passed, Blocked):
            return self._not_made(call, "Blocked", f"This call was not made: {passed.reason}")
        tool = self._run.setup.tools.get(passed.name)
        if tool is None:
            known = ", ".join(each.name for each in self._run.setup.tools) or "none"
            return self._not_made(call, "UnknownTool", f"No tool is named {passed.name!r}. Available: {known}.")
        try:
            return self._gate(passed if passed.id == call.id else replace(passed, id=call.id), tool)
        except ToolError as error:
            return self._not_made(call, "InvalidArguments", str(error))
        except Exception as error:  # around a tool: its own checks are its code too
            return self._not_made(call, type(error).__name__, clean_text(str(error)))

    def _not_made(self, call: ToolCall, kind: str, why: str) -> ToolExecution:
        """Settle a call that is refused now. If it was started before, its outcome is still unknown.

        Told only why it is refused, a model would correct the call and make it: perhaps a second time.
        """
        if not self._waiting(call).outcome_unknown:
            return _refused(call, kind, why)
        return _refused(call, UNKNOWN, f"{_INTERRUPTED} It was not made again ({kind}: {why}) {_CHECK}")

    def _gate(self, call: ToolCall, tool: Tool) -> _Ready | _Waits | ToolExecution:
        arguments = tool.check(call.arguments)
        if isinstance(tool, CalledOutside):  # only its answer settles it, whatever was approved
            return _Waits(PendingCall.of(call, external=True))
        approved = self._is_approved(call)
        if call.id in self._decisions.unknown and not approved:
            if tool.on_unknown == "error":
                return _refused(call, UNKNOWN, f"{_INTERRUPTED} It was not made again. {_CHECK}")
            # What a person has agreed to may be made again. A rule that is newer than the call has not been asked yet.
            agreed = self._was_approved(call) or not tool.needs_approval(arguments)
            return _Ready(call, tool) if tool.on_unknown == "rerun" and agreed else _Waits(self._waiting(call))
        if approved or not (call.id in self._decisions.waited or tool.needs_approval(arguments)):
            return _Ready(call, tool)
        return _Waits(self._waiting(call))

    def _waiting(self, call: ToolCall) -> PendingCall:
        """Return a call as one that waits. It may have been begun before this decision, or before an earlier one."""
        waiting = PendingCall.of(call, begun=self._decisions.begun.get(call.id, 0))
        if call.id in self._decisions.unknown:
            return replace(waiting, begun_at=self._decisions.unknown[call.id])
        return replace(waiting, begun_at=self._decisions.waited.get(call.id, waiting).begun_at)

    def _is_approved(self, call: ToolCall) -> bool:
        """Tell whether a person has approved this very call. A hash is made only for one that was decided about."""
        bound_to = self._decisions.approved.get(call.id)
        return bound_to is not None and bound_to in (self._waiting(call).digest, call_hash(call))

    def _was_approved(self, call: ToolCall) -> bool:
        """Tell whether a person had approved this very call before it was started, however often that was."""
        bound_to = self._decisions.agreed.get(call.id)
        if bound_to is None:
            return False
        starts = range(self._decisions.begun.get(call.id, 0) + 1)
        return bound_to == call_hash(call) or any(bound_to == PendingCall.of(call, begun=n).digest for n in starts)

    async def _run_all(self, ready: Sequence[_Ready]) -> list[PendingCall]:
        """Run calls one by one, all at once, or a number at a time. Return those that turn out to wait."""
        concurrency = self._run.setup.concurrency
        size = concurrency if isinstance(concurrency, int) else (1 if concurrency == "sequential" else len(ready) or 1)
        waiting: list[PendingCall] = []
        for start in range(0, len(ready), size):
            batch = ready[start : start + size]
            if self._stop is not None or self._failure is not None:
                break
            # On record before any is called: after a crash, these calls may have taken effect.
            for each in batch:
                await self._narrator.tool_started(each.call, self._step.id)
            await self._narrator.barrier()
            waiting += await self._run_batch(batch)
            raise_if_cancelled()  # a tool that tidied up and returned has swallowed the cancellation
        return waiting

    async def _run_batch(self, batch: Sequence[_Ready]) -> list[PendingCall]:
        if len(batch) == 1:
            waits = await self._run_one(batch[0])
            return [] if waits is None else [waits]
        tasks = [asyncio.create_task(self._run_one(each, among_others=True)) for each in batch]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            # If one of them raises, the others are stopped and awaited: no tool may outlive its run.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [waits for waits in outcomes if waits is not None]

    async def _run_one(self, ready: _Ready, *, among_others: bool = False) -> PendingCall | None:
        """Run one call to its outcome. Return the call if it waits for a person instead."""
        started = now()
        try:
            trace = self._run.start.trace
            outcome = await (self._outcome(ready) if trace is None else self._traced_outcome(ready, trace))
        except AwaitsApproval as waits:
            return PendingCall.of(ready.call, waits.session_id, waits.calls)
        except (asyncio.CancelledError, TimeLimitReached):
            if self._run.is_interrupted():
                self._tell_of_interruption(ready)
            left = self._run.spawn.left_by(ready.call.id) if isinstance(self._run.spawn, Spawns) else None
            if left is not None:
                await finish_despite_cancel(self._take_outcome(ready.call, started, left))
            raise
        await self._take_outcome(ready.call, started, outcome)
        if among_others:  # the others may take long, and a crash until then must not lose this outcome
            await self._narrator.barrier()
        return None

    def _tell_of_interruption(self, ready: _Ready) -> None:
        """Log that the outcome of a call is lost, unless recovery makes the call again."""
        if ready.tool.on_unknown == "rerun":
            return
        session, name = self._run.session_id, ready.call.name
        facts = {"session": session, "tool": name, "call": ready.call.id}
        _log.warning(_CUT_OFF, session, name, extra={"facts": facts})

    async def _take_outcome(self, call: ToolCall, started: datetime, outcome: Outcome) -> None:
        execution = ToolExecution(call, started, now(), outcome.result, outcome.error, outcome.usage)
        await self._complete(execution, outcome.child)

    async def _traced_outcome(self, ready: _Ready, trace: RunTrace) -> Outcome:
        span = trace.tool(ready.call)
        try:
            outcome = await self._outcome(ready)
        except AwaitsApproval:
            span.waits()
            raise
        except BaseException as error:
            span.left(error)
            raise
        span.ended(outcome.result, outcome.error)
        return outcome

    async def _outcome(self, ready: _Ready) -> Outcome:
        """Return the outcome of a call. A tool that raises never ends the run, unless it asks for that."""
        token = _session.set(self._run.session_id)
        clock = None if ready.tool.timeout is None else asyncio.timeout(ready.tool.timeout)
        try:
            async with self._run.time_limit(), clock or nullcontext():
                value = await ready.tool.call(ready.call.arguments, self._context(ready.call))
            return _as_outcome(value)
        except (AwaitsApproval, TimeLimitReached, Unrecordable):
            raise
        except AgentStop as stop:
            self._stop = stop
            return Outcome(f"The run was stopped here: {stop.reason}" if stop.reason else "The run was stopped here.")
        except (Exception, SystemExit) as error:  # a tool that calls exit() must not end this process
            if clock is not None and clock.expired():
                return Outcome(error=_timed_out(ready.tool))
            return Outcome(error=ErrorRecord.of(error))
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return Outcome(error=ErrorRecord.of(error))  # not of this task: of something that the tool waited for
        finally:
            _session.reset(token)

    def _context(self, call: ToolCall) -> ToolContext[Any]:
        run = self._run

        async def progress(value: Any) -> None:
            await self._narrator.tool_progress(call.id, as_json(value))

        execution_id, agent_id = run.execution.execution_id, run.state.agent_id
        start = run.start
        return ToolContext(
            *(call.id, execution_id, agent_id, run.session_id, progress, run.spawn),
            owner=start.owner,
            metadata=run.state.metadata,
            context=start.context,
            context_data=start.context_data,
            messages=run.state.transcript,
            store=start.store,
        )

    @property
    def _step(self) -> AgentStep:
        step = self._run.execution.current_step
        assert step is not None
        return step

    async def _complete(self, execution: ToolExecution, child: ChildLoopRef | None = None) -> None:
        """Take an outcome as interceptors leave it."""
        asked = execution.call.id
        try:
            execution = await self._interceptors.pass_through("after_tool_use", execution, self._run.state)
        except AgentStop as stop:
            self._stop = stop
        await self._put(asked, execution, child)

    async def _put(self, call_id: str, execution: ToolExecution, child: ChildLoopRef | None) -> None:
        """Add the outcome of a call to the step under way, and its message to the transcript."""
        asked = next(call for call in self._step.tool_calls if call.id == call_id)
        execution, counts = self._redacted(execution)
        execution = self._fitted(execution)
        step, error = self._step, execution.error
        said = f"{error.type}: {error.message}" if error else execution.result
        shown = shortened(said, self._run.setup.max_result_chars)
        told = {REDACTIONS: counts} if counts else EMPTY
        message = Message.tool(asked.id, shown, name=asked.name, is_error=error is not None, metadata=told)
        self._run.put_step(step.with_changes(tool_executions=(*step.tool_executions, execution)), message)
        await self._narrator.tool_ended(execution, self._run.state.transcript[-1], step.id, child)

    def _redacted(self, execution: ToolExecution) -> tuple[ToolExecution, Mapping[str, int]]:
        """Return an outcome without what redactors find in it, and how often each found something.

        If a redactor fails, the outcome is withheld. The run fails once it is on record that the call was made.
        """
        redaction = self._run.setup.redaction
        if redaction is None:
            return execution, EMPTY
        try:
            return redaction.counted(execution)
        except RedactionFailed as failure:
            self._failure = failure
            return replace(execution, result=None, error=redaction.error(ErrorRecord.of(failure))), EMPTY

    def _fitted(self, execution: ToolExecution) -> ToolExecution:
        """Return an outcome that fits into the run's version: a run can always be saved once its tools have run."""
        if self._room is None:
            steps = [each.step for each in self._run.execution.step_executions]
            self._room = Room([*steps, self._step], self._run.setup.max_result_chars)
        return self._room.fitted(execution)


def _timed_out(tool: Tool) -> ErrorRecord:
    """Return the error of a call that was given up. What a tool has begun may still take effect."""
    late = f"No result within {tool.timeout:g} s."
    if tool.idempotent or tool.on_unknown == "rerun":
        return ErrorRecord("TimeoutError", late)
    return ErrorRecord(UNKNOWN, f"{late} {_INTERRUPTED} {_CHECK}")


def _as_outcome(value: Any) -> Outcome:
    return replace(value, result=as_json(value.result)) if isinstance(value, Outcome) else Outcome(as_json(value))


def _answered(call: ToolCall, answered: CallAnswer) -> ToolExecution:
    at = now()
    if not answered.is_error:
        return ToolExecution(call, at, at, as_json(answered.result))
    said = answered.result if isinstance(answered.result, str) else msgspec.json.encode(answered.result).decode()
    return ToolExecution(call, at, at, error=ErrorRecord("ToolError", clean_text(said)))


def _refused(call: ToolCall, kind: str, message: str) -> ToolExecution:
    at = now()
    return ToolExecution(call, at, at, error=ErrorRecord(kind, message))
