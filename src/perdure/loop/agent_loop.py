"""The agent loop: model call, tools, model call, until there is an answer or a reason to stop."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from perdure.aio import finish_despite_cancel, is_cancelled, raise_if_cancelled
from perdure.errors import AgentStop, ContextTooLong, DriverError, RetriesExhausted
from perdure.loop.compaction.auto import AutoCompactor, Trigger
from perdure.loop.cut_off import CutOffAnswer, LostAnswer
from perdure.loop.filters import InputFilter, Warned, judge, refusal
from perdure.loop.guards import UNLIMITED, BudgetGuard, Guard, TimeLimit, TimeLimitReached
from perdure.loop.interceptors import Interceptors
from perdure.loop.prompt import Prompt, Prompts, compile_prompt
from perdure.loop.response_format import Form, complaint, is_complaint
from perdure.loop.run_events import Narrator, Record, ResumePoint, Unrecordable, Unrecorded, sketching_of
from perdure.loop.tool_use import Concurrency, Decisions, ToolUse
from perdure.loop.tools import ToolRegistry
from perdure.model.definition import ModelConfig
from perdure.model.execution import (
    ExecutionBudget,
    ExecutionState,
    ExecutionStatus,
    ExternalToolSpec,
    ModelOptions,
    PendingCall,
    Spent,
)
from perdure.model.ids import new_id, now
from perdure.model.message import Message, Part, ToolCall
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, AgentStepType
from perdure.model.stop import StopReason, StopSignal, cut_off_by
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, ErrorRecord
from perdure.protocols import Driver, EventHandler, ModelReply, ModelRequest, OnDelta, ReadFiles, SessionStore, ToolSpec

if TYPE_CHECKING:
    from perdure.loop.held_back import HeldBack
    from perdure.redaction.texts import Redaction
    from perdure.telemetry.spans import RunTrace


class LoopSetup(msgspec.Struct, frozen=True):
    """Everything that a loop works with. A capability changes it before the loop is built."""

    driver: Driver
    """The driver that asks the model."""
    model: ModelConfig
    """The model that is asked."""
    tools: ToolRegistry
    """The tools that the model may call."""
    budget: ExecutionBudget = ExecutionBudget()
    """The limits of the run."""
    guards: tuple[Guard, ...] = ()
    """The guards that may stop the run before a step."""
    interceptors: tuple[Any, ...] = ()
    """The objects that see, change or block model calls and tool calls, in this order."""
    input_filters: tuple[InputFilter, ...] = ()
    """The filters that input passes before the model is asked."""
    events: EventHandler | None = None
    """The handler that hears every event of the run."""
    concurrency: Concurrency = "parallel"
    """The way in which the tool calls of one step are made: "parallel", "sequential", or how many at once."""
    keep_traces: bool = True
    """True if the prompt keeps the tool calls of earlier runs."""
    max_result_chars: int = 20_000
    """The number of characters of a tool's result that the model is shown."""
    compaction: AutoCompactor | None = None
    """The compactor that shortens the view when the model's window fills."""
    form: Form | None = None
    """The form of answers that the definition asks for."""
    after_each_step: Callable[[Run], Awaitable[None]] | None = None
    """A function that is awaited with the run between two steps, before posted messages are delivered."""
    redaction: Redaction | None = None
    """The redaction of every text before it is shown, told or stored; None if there is none."""


class RunStart(msgspec.Struct, frozen=True):
    """The input of a run, beside the agent's state. A run that is started by itself belongs to no session."""

    record: Record = Unrecorded()
    session_id: str | None = None
    decisions: Decisions = Decisions()
    inputs: Sequence[Message] = ()
    """The messages at the end of the transcript that the run answers. Its first events tell them."""
    facts: Mapping[str, Any] = EMPTY
    """Fields of the AgentStart event that are not taken from the state."""
    spawn: Callable[..., Awaitable[Any]] | None = None
    execution_id: str | None = None
    """The id of a new run, if it is known before it begins."""
    read_files: ReadFiles | None = None
    """A function that reads images and files from the session's store."""
    told: ResumePoint = ResumePoint()
    """The point that a continued run had reached."""
    owner: str | None = None
    context: object = None
    """The context that tools are given."""
    context_data: Mapping[str, Any] | None = None
    lost: LostAnswer | None = None
    """The answer that was under way when the continued run was killed."""
    form: Form | None = None
    """The form of answer that this run alone is asked for."""
    external_tools: tuple[ExternalToolSpec, ...] = ()
    """Tools that this run alone may call, and whose calls are answered from outside."""
    instructions: str | None = None
    """Instructions for this run alone, sent behind the system prompt."""
    model_options: ModelOptions | None = None
    """Options for the model in this run alone."""
    trace: RunTrace | None = None
    """The span of the run; None if it is not traced."""
    store: SessionStore | None = None
    """The store that the session is in, for tools that look at other sessions."""


BY_ITSELF = RunStart()


class AgentLoop:
    """A loop that runs an agent's state to the end of an execution, with a `setup`. It keeps nothing between runs."""

    def __init__(self, setup: LoopSetup) -> None:
        self.setup = setup

    async def run(self, state: AgentState) -> AgentState:
        """Return the state at the end of the run. A run in progress is continued, with the same execution id.

        `state` is the state from which it begins.
        """
        run = self.start(state)
        async for _ in run.steps():
            pass
        return run.state

    async def iterate(self, state: AgentState) -> AsyncGenerator[AgentState, None]:
        """Yield the state after each step, and at last the state at the end of the run.

        `state` is the state from which it begins.
        """
        run = self.start(state)
        async with aclosing(run.steps()) as steps:
            async for after_step in steps:
                yield after_step
        yield run.state

    def start(self, state: AgentState, start: RunStart = BY_ITSELF) -> Run:
        """Return a run that has not begun yet, for callers that need its state at any time.

        `state` is the state from which it begins, and `start` has the facts of a run in a session.
        """
        return Run(self.setup, state, start)


class Run:
    """One execution under way. `state` is always current, even when the run is cancelled."""

    def __init__(self, setup: LoopSetup, state: AgentState, start: RunStart) -> None:
        decisions = start.decisions
        self.state = state
        self.session_id = start.session_id
        self.spawn = start.spawn
        self.start = start
        self._setup = setup
        self._facts = {**start.facts, "approved": decisions.approved, "denied": decisions.denied}
        self._facts["answered"] = tuple(decisions.answers)
        self._driver = setup.driver
        if start.trace is not None:
            self._facts["trace"] = start.trace.parent
            self._driver = start.trace.driver(setup.driver)
        self._interceptors = Interceptors(setup.interceptors)
        self._guards = (BudgetGuard(setup.budget), *setup.guards)
        self._timed = [each for each in self._guards if isinstance(each, BudgetGuard) and each.limits_time]
        self._narrator = Narrator(start.record, setup.events, start.session_id, start.told, setup.redaction)
        self._tools = ToolUse(self, self._narrator, self._interceptors, decisions)
        self._prompts = Prompts()
        self._began = now()
        self._meter = _Meter(state)
        self._call_ids = {call.id for step in _steps_of(state) for call in step.tool_calls}
        self._repaired = any(map(is_complaint, start.told.messages))  # before the run was interrupted, perhaps
        self._so_far: CutOffAnswer | None = None
        self._sketching = sketching_of(start.record)
        self.is_settled = False
        """True once the run has ended, or waits for a person: then there is something to save."""
        self._said = [message for message in start.inputs if not message.is_note]
        """The messages that input filters are asked about. A note of perdure's is not what a user says."""
        self.is_input_accepted = not (self._said and setup.input_filters)
        """True once input filters have passed what the run answers. Until then, no model is shown it."""
        self.between_steps: Callable[[], Awaitable[None]] = _nothing
        """A function that is awaited after each step. It delivers what others have posted."""
        self.is_interrupted: Callable[[], bool] = _never
        """A function that tells, when the run is cancelled, whether it is left for recovery instead of ended."""

    @property
    def setup(self) -> LoopSetup:
        return self._setup

    @property
    def execution(self) -> ExecutionState:
        """The execution of this run. It exists once the run has begun."""
        assert self.state.execution is not None
        return self.state.execution

    @property
    def is_waiting(self) -> bool:
        """True if the run has paused until a person decides about calls."""
        execution = self.state.execution
        return execution is not None and bool(execution.pending_calls)

    def spent(self) -> Spent:
        """Return what the run has used. Time when it waited for a person, or was down after a crash, does not count."""
        at = now()
        return Spent(self.state.step_count, self._meter.usage(self.state), self._seconds(at), at)

    def _seconds(self, at: datetime) -> float:
        return self._meter.seconds_before + (at - self._began).total_seconds()

    async def steps(self) -> AsyncGenerator[AgentState, None]:
        """Run step by step, and yield the state after each. After the last, the run has ended or waits for a person."""
        with _unwrapped():
            async with aclosing(self._steps()) as steps:
                async for state in steps:
                    yield state

    async def _steps(self) -> AsyncGenerator[AgentState, None]:
        ended_by: BaseException | None = None
        try:
            await self._begin()
            while not await self._is_over():
                await self._step()
                raise_if_cancelled()  # a tool or a driver may have taken the cancellation for its own
                if self.is_waiting:
                    await self._narrator.barrier()
                    # The pause is on record now: from here on, a cancellation leaves the run as it waits.
                    self.is_settled = True
                    return
                yield self.state
                if self._setup.after_each_step is not None:
                    await self._setup.after_each_step(self)
                await self.between_steps()
        except asyncio.CancelledError as error:
            if is_cancelled():
                await self.end_cancelled()
                raise
            ended_by = error  # not of this run: of something that it waited for
        except Unrecordable:
            raise  # the record refuses events, so the end of the run could not be recorded either
        except Exception as error:
            ended_by = error
        await self._end(ended_by)

    async def _begin(self, *, gives_up: bool = False) -> None:
        resumed = self.state.status is ExecutionStatus.IN_PROGRESS
        parent = self.state.execution.execution_id if self.state.execution and not resumed else None
        if resumed:
            self._restart_step()
            self._count_idle()
        else:
            self.state = self.state.with_execution_started(self.start.execution_id)
            if self.start.form is not None:
                self.state = self.state.with_execution(self.execution.with_response_format(self.start.form.schema))
            terms = self.start.external_tools, self.start.instructions, self.start.model_options
            if any(terms):
                self.state = self.state.with_execution(self.execution.with_terms(*terms))
        self._narrator.begin(self.state, self._setup.model, self._facts, parent, resumed=resumed)
        await self._narrator.started()
        if not resumed:
            for message in self.start.inputs:
                await self._narrator.message_ended(message)
        if self.start.lost is not None and self.execution.current_step is None:
            await self._keep_lost_answer(self.start.lost, gives_up=gives_up)
        if self.start.decisions.answers and self.execution.current_step is not None and not gives_up:
            # In the commit of the run's start: after a crash, an acknowledged answer is not asked for again.
            await self._tools.take_answers(self.execution.current_step)
        await self._narrator.barrier()
        if not self.is_input_accepted:
            await self._filter_inputs()
        if not resumed:
            self.state = await self._interceptors.pass_through("before_execution", self.state)

    async def _filter_inputs(self) -> None:
        warnings, rejected = await judge(self._setup.input_filters, self._said)
        if rejected is not None:
            await self._narrator.rejected(rejected.reason)
            self.state = self.state.with_stop_signal(refusal(rejected.reason))
            return
        self.is_input_accepted = True
        await self._warn(warnings)

    async def _warn(self, warnings: Sequence[Warned]) -> None:
        for warned in warnings:
            note = self._redacted(Message.system(warned.text, metadata={"is_trace": True}))
            self.state = self.state.with_messages(note)
            await self._narrator.message_ended(note)

    def _restart_step(self) -> None:
        """Continue a step that was interrupted. Its time counts from now: the pause is not work.

        A step without an answer is begun again, even after an answer that would otherwise be the last. Something asked
        for that step, a repair or a steering message, and still has no answer.
        """
        execution = self.execution
        if execution.current_step is not None:
            self.state = self.state.with_execution(execution.with_step_started())
        elif execution.current_step_started_at is not None:
            self.state = self.state.with_continuation_requested()

    def _count_idle(self) -> None:
        """Count the time since the last event as idle, in the state and on record alike."""
        idle = max(0.0, (self._began - (self.start.told.at or self._began)).total_seconds())
        if idle:
            self._facts["idle"] = idle
            self.state = self.state.with_execution(self.execution.with_idle(idle))

    async def _is_over(self) -> bool:
        execution = self.execution
        if execution.current_step is not None:
            return False
        if execution.continuation.should_stop:
            return True
        if execution.step_executions and execution.should_stop and not await self._goes_on():
            self._tell_cut_off()
            return True
        signal = self._stop_signal()
        if signal is not None:
            self.state = self.state.with_stop_signal(signal)
        return signal is not None

    def _tell_cut_off(self) -> None:
        """Stop the run with the model's reason, if the last answer was cut off. A resumed run does the same."""
        step = self.state.last_step
        reason = cut_off_by(step.inference_response.finish_reason) if step is not None else None
        if reason is not None:
            said = f"the model's answer was cut off ({reason.value})"
            self.state = self.state.with_stop_signal(StopSignal(reason, said, source="model"))

    async def _goes_on(self) -> bool:
        """Tell whether a repair or an interceptor asks for another step although the model has answered."""
        form = self._form()
        problem = form.problem(self.state.final_response) if form is not None else None
        if problem is not None and not self._repaired:
            self._repaired = True
            await self._ask_again(problem)
            return True
        if problem is not None:
            raise DriverError(f"The answer does not fit the form that was asked for, nor did the first one: {problem}")
        self.state = await self._interceptors.pass_through("on_stop", self.state)
        return not self.execution.should_stop

    async def _ask_again(self, problem: str) -> None:
        message = self._redacted(complaint(problem, self.execution.execution_id, self.state.agent_id))
        self.state = self.state.with_messages(message)
        await self._narrator.message_ended(message)

    def _form(self) -> Form | None:
        """Return the form that the answer has to have: the run's own, the state's, or the definition's."""
        schema = self.state.response_format
        if schema is None:
            return self._setup.form
        given = self.start.form
        return given if given is not None and given.schema == schema else Form(schema)

    def _stop_signal(self) -> StopSignal | None:
        spent = self.spent()
        for guard in self._guards:
            signal = guard.check(self.state, spent)
            if signal is not None:
                return signal
        return None

    async def _step(self) -> None:
        if self.execution.current_step is None:
            await self._infer()
        step = self.execution.current_step
        assert step is not None
        if step.tool_calls:
            await self._tools.carry_out(step)
        if self.is_waiting:
            return
        self.state = self.state.with_current_step_completed()
        self.state = await self._interceptors.pass_through("after_step", self.state)
        await self._narrator.turn_ended(self.state)

    async def _infer(self) -> None:
        """Ask the model. Its answer becomes the step under way."""
        self.state = self.state.with_execution(self.execution.with_continuation_requested(False).with_step_started())
        self.state = await self._interceptors.pass_through("before_step", self.state)
        step_id, message_id = new_id(), new_id()
        await self._narrator.turn_started(step_id, self.state.step_count)
        request = self._request()
        if self._setup.compaction is not None and self._setup.compaction.is_near_window(request):
            request = self._request() if await self._compact("window", request) else request
        request = await self._prepared(request)
        await self._narrator.message_started(message_id, "assistant")
        self._so_far = CutOffAnswer(step_id, message_id)
        try:
            reply = await self._ask(request, message_id)
        except ContextTooLong:
            if not await self._compact("context_too_long", request):
                raise
            reply = await self._ask(await self._prepared(self._request()), message_id)
        self._so_far = None  # the answer is whole: an error from here on does not cut it off
        given = self.state.transcript.without_blocks()
        reply = await self._inspected(reply)
        said = self._redacted(reply.message)  # behind interceptors, which may add to it
        message = replace(said, id=message_id, parts=self._with_own_ids(said.parts))
        if cut_off_by(reply.response.finish_reason) is not None:
            message = message.with_metadata(incomplete=True)
        step = AgentStep(id=step_id, input_messages=given, inference_response=reply.response)
        self.put_step(step, message)
        await self._narrator.message_ended(self.state.transcript[-1], reply.response)

    async def _prepared(self, request: ModelRequest) -> ModelRequest:
        """Return the request as interceptors leave it, once everything that led to it is on record."""
        request = await self._interceptors.pass_through("before_inference", request, self.state)
        if not isinstance(request.messages, Prompt):  # an interceptor's own messages, which must be as valid
            request = replace(request, messages=Prompt(request.messages))
        await self._narrator.barrier()
        return request

    async def _ask(self, request: ModelRequest, message_id: str) -> ModelReply:
        assert self._so_far is not None
        on_delta = self._so_far.listening(request, self._narrator.deltas_of(message_id))
        held = self._held_back(on_delta)
        sketching = self._sketching
        if sketching is not None:
            sketching.begin_answer(self.execution.execution_id, self._so_far)
        try:
            async with self.time_limit():
                reply: ModelReply = await self._driver.respond(request, held or on_delta)
            if held is not None:
                reply = await held.end(reply)
        finally:
            if sketching is not None:
                sketching.end_answer()
        if self._setup.compaction is not None:
            self._setup.compaction.learn(request, reply.response.usage)
        return reply

    def _held_back(self, tell: OnDelta) -> HeldBack | None:
        """Return a filter that keeps secrets out of a stream; None if nothing is redacted."""
        if self._setup.redaction is None:
            return None
        from perdure.loop.held_back import HeldBack  # few runs redact

        return HeldBack(self._setup.redaction, tell)

    async def _inspected(self, reply: ModelReply) -> ModelReply:
        """Return the answer as interceptors leave it. If they throw it away, its tokens still count."""
        try:
            inspected: ModelReply = await self._interceptors.pass_through("after_inference", reply, self.state)
        except BaseException:  # a cancellation too: the provider has counted the tokens already
            self.state = self.state.with_execution(self.execution.with_discarded_usage(reply.response.usage))
            raise
        return inspected

    async def _compact(self, trigger: Trigger, request: ModelRequest) -> bool:
        """Compact what the model is shown, on record. Return False if nothing can be gained."""
        if self._setup.compaction is None:
            return False
        async with self.time_limit():
            made = await self._setup.compaction.compact(self.state.transcript, request, trigger, self._charge)
        if made is None:
            return False
        from perdure.loop.compaction.compactor import overlaid  # most runs never compact

        self.state = self.state.with_transcript(overlaid(self.state.transcript, made))
        await self._narrator.compacted(made.block, made.shown, made.usage, trigger)
        return True

    def _charge(self, usage: Usage) -> None:
        """Count what a compaction has used, whether or not it succeeds."""
        self.state = self.state.with_execution(self.execution.with_compaction_usage(usage))

    def _with_own_ids(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the parts, with unique ids for their tool calls: decisions and sub-agents are found by these ids."""
        own: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall):
                own_id = self._own_id(part.id)
                self._call_ids.add(own_id)
                part = part if own_id == part.id else replace(part, id=own_id)
            own.append(part)
        return tuple(own)

    def _own_id(self, call_id: str) -> str:
        """Return an id that no other call of this run has, and no call of an earlier run that was taken back.

        Some models number their calls again in every answer. An old approval would then pass a new call.
        """
        if self.state.execution_count > 1 and _may_come_again(call_id):
            call_id = f"{call_id}-{self.execution.execution_id[-8:]}"
        return new_id() if call_id in self._call_ids else call_id

    def _prompt(self) -> Prompt:
        if self._setup.keep_traces:
            return self._prompts.of(self.state.transcript)
        compiled = partial(compile_prompt, keep_traces=False, execution_id=self.execution.execution_id)
        return Prompt(self.state.transcript, compiled)

    def _request(self) -> ModelRequest:
        form = self._form()
        return ModelRequest(
            model=self._setup.model.asked(self.execution.model_options),
            messages=self._prompt(),
            system_prompt=self.state.system_prompt,
            tools=tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in self._setup.tools),
            response_format=None if form is None else form.schema,
            step=self.state.step_count,
            read_files=self.start.read_files,
            deadline=self._deadline(),
        )

    def _deadline(self) -> datetime | None:
        """Return when the budget's time is up; None if it sets no time limit."""
        at = now()
        limits = [left for budget in self._timed for left, _ in budget.time_limits(self._seconds(at), at)]
        return at + timedelta(seconds=min(limits)) if limits else None

    def time_limit(self) -> TimeLimit:
        """Return a limit that cancels what runs inside it when the budget's time is up."""
        if not self._timed:
            return UNLIMITED
        at = now()
        return TimeLimit(limit for budget in self._timed for limit in budget.time_limits(self._seconds(at), at))

    async def steer(self, messages: Sequence[Message], posted: str | None = None) -> None:
        """Add messages that others send into the run, between two steps. The run then takes another step.

        Input filters judge them like any input. Rejected messages are put on record, and the model never sees them.
        """
        messages = tuple(self._told_apart(self._redacted(message)) for message in messages)
        warnings, rejected = await judge(self._setup.input_filters, messages)
        if rejected is not None:
            await self._narrator.rejected(rejected.reason, tuple(message.id for message in messages))
        else:
            self.state = self.state.with_messages(*messages).with_continuation_requested()
        for message in messages:
            await self._narrator.message_ended(message, posted=posted)
        if rejected is None:
            await self._warn(warnings)

    def _redacted(self, message: Message) -> Message:
        redaction = self._setup.redaction
        return message if redaction is None else redaction.message(message)

    def _told_apart(self, message: Message) -> Message:
        """Return the message, under a new id if the run has its id already: record and save find messages by id."""
        return replace(message, id=new_id()) if self._narrator.has_told(message.id) else message

    def put_step(self, step: AgentStep, message: Message) -> None:
        """Add a message to the output of the step under way, and to the transcript."""
        self.state = self.state.with_step_output(step, message)

    def put_pending(self, calls: Sequence[PendingCall]) -> None:
        if calls or self.execution.pending_calls:
            self.state = self.state.with_execution(self.execution.with_pending_calls(tuple(calls)))

    async def _end(self, ended_by: BaseException | None) -> None:
        await self._end_children()
        try:
            if ended_by is not None:
                await self._take_in(ended_by)
            self._close(self._status())
            self.state = await self._interceptors.pass_through("after_execution", self.state)
        except Exception as error:  # an interceptor's
            self.state = self.state.with_execution(self._with_cause(error))
            self._close(self._status())
        self.is_settled = True  # first: a cancellation during the last event must not end the run again
        await self._narrator.ended(self.state)

    async def _take_in(self, ended_by: BaseException) -> None:
        """Note what has ended the run: a signal if it was asked to stop, an error if it failed."""
        await self._keep_cut_off_answer()
        self.state = self.state.with_execution(self._with_cause(ended_by))
        if not isinstance(ended_by, AgentStop | TimeLimitReached):
            self.state = await self._interceptors.on_error(ended_by, self.state)

    def _with_cause(self, ended_by: BaseException) -> ExecutionState:
        return _with_cause(self.state, ended_by, self._setup.redaction)

    async def give_up(self, failure: ErrorRecord | None = None) -> None:
        """Resume a run only to end it as it is: as cancelled, or as failed if a failure is given."""
        with _unwrapped():
            await self._begin(gives_up=True)
        await self.end_cancelled(failure)

    async def end_cancelled(self, failure: ErrorRecord | None = None) -> None:
        """End the run as stopped on request, unless it has ended already or is left for recovery.

        With a `failure`, it ends as failed.
        """
        if self.state.status is not ExecutionStatus.IN_PROGRESS or self.is_settled or self.is_interrupted():
            return
        with _unwrapped():
            with suppress(asyncio.CancelledError):  # it is being cancelled already
                await self._end_children()
            await self._keep_cut_off_answer()
            if failure is None:
                signal = StopSignal(StopReason.USER_REQUESTED, "the run was cancelled", source="cancel")
                self.state = self.state.with_stop_signal(signal)
            else:
                self.state = self.state.with_execution(self.execution.with_error(failure))
            self._close(ExecutionStatus.STOPPED if failure is None else ExecutionStatus.FAILED)
            self.is_settled = True
            await self._narrator.ended(self.state)

    async def _end_children(self) -> None:
        """End the sub-agents that calls of the step under way still wait for."""
        step = self.state.execution.current_step if self.state.execution else None
        if step is not None and step.calls_without_outcome:
            await finish_despite_cancel(self._tools.end_children(step))

    async def _keep_cut_off_answer(self) -> None:
        """Keep the text of an answer that was cut off, as a message that is marked incomplete."""
        so_far, self._so_far = self._so_far, None
        if so_far is None or not so_far.text.strip():
            return
        step = so_far.step(self.state.transcript.without_blocks())
        self.state = self.state.with_current_step(step)
        await self._narrator.message_ended(self.state.transcript[-1], step.inference_response)

    async def _keep_lost_answer(self, lost: LostAnswer, *, gives_up: bool) -> None:
        """Keep the part of an answer that a killed process had, on record before the model is asked again.

        A new answer takes its place: the part is neither shown nor a step, but its cost counts. If the run is only
        ended, the part is kept like any answer that was cut off.
        """
        answer = CutOffAnswer(new_id(), lost.message_id).found(lost.text, self._request())
        if gives_up:
            self.state = self.state.with_execution(self.execution.with_step_started())
            await self._narrator.turn_started(answer.step_id, self.state.step_count)
            self._so_far = answer
            await self._keep_cut_off_answer()
            return
        tags = {"execution_id": self.execution.execution_id, "agent_id": self.state.agent_id}
        message, response = answer.superseded(tags)
        self.state = self.state.with_execution(self.execution.with_discarded_usage(response.usage))
        await self._narrator.message_ended(message, response)

    def _close(self, status: ExecutionStatus) -> None:
        execution = self.state.with_current_step_completed().execution
        assert execution is not None
        self.state = self.state.with_execution(execution.with_pending_calls(()).ended(status))

    def _status(self) -> ExecutionStatus:
        execution = self.execution
        if execution.errors:
            return ExecutionStatus.FAILED
        reason = execution.continuation.stop_reason
        if reason is not None and reason.was_force_stopped:
            return ExecutionStatus.STOPPED
        if execution.last_step_type is AgentStepType.ERROR:
            return ExecutionStatus.FAILED
        return ExecutionStatus.COMPLETED


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the error with which a record has refused an event, instead of `Unrecordable`."""
    try:
        yield
    except Unrecordable as refused:
        raise refused.error from None


async def _nothing() -> None:
    """Deliver nothing: without a journal, no messages are posted to a run."""


def _never() -> bool:
    return False


_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
"""The random ids of one provider, which accepts no others."""


def _may_come_again(call_id: str) -> bool:
    """Tell whether a provider's id for a call is too short to be random."""
    return len(call_id) < 16 and _MISTRAL_ID.fullmatch(call_id) is None


def _steps_of(state: AgentState) -> tuple[AgentStep, ...]:
    current = state.execution.current_step if state.execution else None
    return state.steps if current is None else (*state.steps, current)


class _Meter:
    """The usage of a run. Each step is counted once, so a long run is not added up again before every step."""

    def __init__(self, state: AgentState) -> None:
        resumed = state.execution if state.status is ExecutionStatus.IN_PROGRESS else None
        done = resumed.step_executions if resumed else ()
        self.seconds_before = sum((each.duration for each in done), 0.0)
        self._counted = 0
        self._usage = Usage()

    def usage(self, state: AgentState) -> Usage:
        """Return the usage of all completed steps, of compactions, and of discarded answers."""
        done = state.execution.step_executions if state.execution else ()
        self._usage = sum((each.step.usage for each in done[self._counted :]), start=self._usage)
        self._counted = len(done)
        if state.execution is None:
            return self._usage
        return self._usage + state.execution.compaction_usage + state.execution.discarded_usage


def _with_cause(state: AgentState, ended_by: BaseException, redaction: Redaction | None) -> ExecutionState:
    """Return a run's execution with what has ended it: a signal, and an error unless it was asked to stop."""
    execution = state.execution
    assert execution is not None
    match ended_by:
        case AgentStop():
            reason = ended_by.reason if redaction is None else redaction.told(ended_by.reason)
            signal = StopSignal(StopReason.STOP_REQUESTED, reason, source="agent_stop")
            return execution.with_stop_signal(signal)
        case TimeLimitReached():
            return execution.with_stop_signal(ended_by.signal)
    why = StopReason.RETRY_LIMIT_REACHED if isinstance(ended_by, RetriesExhausted) else StopReason.ERROR_FORBADE
    text = "".join(traceback.format_exception(ended_by)) if not isinstance(ended_by, DriverError) else None
    error = ErrorRecord.of(ended_by, traceback=text)
    error = error if redaction is None else redaction.error(error)  # before it is cut off below
    signal = StopSignal(why, error.message[:500], source=error.type)
    return execution.with_error(error).with_stop_signal(signal)
