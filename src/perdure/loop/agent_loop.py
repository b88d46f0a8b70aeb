"""The agent loop: model call, tools, model call, until there is an answer or a reason to stop."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.errors import DriverError
from perdure.loop.drivers.retry import RetriesExhausted
from perdure.loop.guards import BudgetGuard, Guard, TimeLimit, TimeLimitReached
from perdure.loop.interceptors import AgentStop, Interceptors
from perdure.loop.narrator import Narrator, Record, Unrecordable, Unrecorded
from perdure.loop.prompt import Prompt
from perdure.loop.response_format import check_response
from perdure.loop.tool_use import Concurrency, Decisions, ToolUse
from perdure.loop.tools import ToolRegistry
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionBudget, ExecutionStatus, Spent
from perdure.model.ids import new_id, now
from perdure.model.message import Message
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, AgentStepType
from perdure.model.stop import StopReason, StopSignal
from perdure.model.value import ErrorRecord
from perdure.protocols import Driver, EventHandler, ModelReply, ModelRequest, ToolSpec


class LoopSetup(msgspec.Struct, frozen=True):
    """All that a loop works with. A capability changes it before the loop is built."""

    driver: Driver
    model: ModelConfig
    tools: ToolRegistry
    budget: ExecutionBudget = ExecutionBudget()
    guards: tuple[Guard, ...] = ()
    interceptors: tuple[Any, ...] = ()
    events: EventHandler | None = None
    concurrency: Concurrency = "parallel"
    keep_traces: bool = True
    max_result_chars: int = 20_000


class AgentLoop:
    """Runs an agent's state to the end of an execution. It keeps nothing between runs."""

    def __init__(self, setup: LoopSetup) -> None:
        self.setup = setup

    async def run(self, state: AgentState) -> AgentState:
        """The state at the end of the run. One that is in progress is continued, with the same execution id."""
        run = self.start(state)
        async for _ in run.steps():
            pass
        return run.state

    async def iterate(self, state: AgentState) -> AsyncIterator[AgentState]:
        """The state after each step, and last the state at the end of the run."""
        run = self.start(state)
        async for after_step in run.steps():
            yield after_step
        yield run.state

    def start(
        self,
        state: AgentState,
        *,
        record: Record | None = None,
        session_id: str | None = None,
        decisions: Decisions | None = None,
        inputs: Sequence[Message] = (),
        facts: Mapping[str, Any] | None = None,
        spawn: Callable[..., Awaitable[Any]] | None = None,
    ) -> Run:
        """A run that has not begun yet, for callers who need its state at any time.

        `inputs` are the messages at the end of the transcript that the run answers, told as its first; `facts` go
        into the AgentStart event.
        """
        return Run(
            self.setup, state, record or Unrecorded(), session_id, decisions or Decisions(), inputs, facts or {}, spawn
        )


class Run:
    """One execution under way. `state` is always current, also when the run is cancelled."""

    def __init__(
        self,
        setup: LoopSetup,
        state: AgentState,
        record: Record,
        session_id: str | None,
        decisions: Decisions,
        inputs: Sequence[Message],
        facts: Mapping[str, Any],
        spawn: Callable[..., Awaitable[Any]] | None,
    ) -> None:
        self.state = state
        self.session_id = session_id
        self.spawn = spawn
        self._inputs = inputs
        self._setup = setup
        self._facts = {**facts, "approved": decisions.approved, "denied": decisions.denied}
        self._interceptors = Interceptors(setup.interceptors)
        self._guard = BudgetGuard(setup.budget)
        self._narrator = Narrator(record, setup.events, session_id)
        self._tools = ToolUse(self, self._narrator, self._interceptors, decisions)
        self._began = now()
        self._active_before = sum((done.duration for done in state.execution.step_executions), 0.0) if state.execution else 0.0
        self._repaired = False

    @property
    def setup(self) -> LoopSetup:
        return self._setup

    @property
    def is_waiting(self) -> bool:
        """Whether the run has paused until a person decides about calls."""
        execution = self.state.execution
        return execution is not None and bool(execution.pending_calls)

    def spent(self) -> Spent:
        """What the run has used; time it waited for a person, or lay dead after a crash, does not count."""
        seconds = self._active_before + (now() - self._began).total_seconds()
        return Spent(self.state.step_count, self.state.usage, seconds, now())

    async def steps(self) -> AsyncIterator[AgentState]:
        """Go on step by step; the run has ended, or waits for a person, when there are no more."""
        try:
            async for state in self._steps():
                yield state
        except Unrecordable as refused:
            raise refused.error from None

    async def _steps(self) -> AsyncIterator[AgentState]:
        try:
            await self._begin()
            while not await self._is_over():
                await self._step()
                if self.is_waiting:
                    await self._narrator.barrier()
                    return
                yield self.state
        except asyncio.CancelledError:
            await self._end_cancelled()
            raise
        except Unrecordable:
            raise
        except AgentStop as stop:
            self.state = self.state.with_stop_signal(StopSignal(StopReason.STOP_REQUESTED, stop.reason, source="agent_stop"))
        except TimeLimitReached as reached:
            self.state = self.state.with_stop_signal(self._guard.signal(reached.limit))
        except Exception as error:
            await self._fail(error)
        await self._end()

    async def _begin(self) -> None:
        resumed = self.state.status is ExecutionStatus.IN_PROGRESS
        if not resumed:
            parent = self.state.execution.execution_id if self.state.execution else None
            self.state = self.state.with_execution_started()
            self._narrator.begin(self.state, self._setup.model, self._facts, parent, resumed=False)
            self.state = await self._interceptors.pass_through("before_execution", self.state)
        else:
            self._narrator.begin(self.state, self._setup.model, self._facts, None, resumed=True)
        await self._narrator.started()
        for message in self._inputs:
            await self._narrator.message_ended(message)

    async def _is_over(self) -> bool:
        execution = self.state.execution
        assert execution is not None
        if execution.current_step is not None:
            return False
        if execution.step_executions and execution.should_stop and not await self._goes_on():
            return True
        signal = self._stop_signal()
        if signal is not None:
            self.state = self.state.with_stop_signal(signal)
        return signal is not None

    async def _goes_on(self) -> bool:
        """Whether something asks for another step although the run would stop: a repair, or an interceptor."""
        execution = self.state.execution
        assert execution is not None
        if execution.continuation.should_stop:
            return False
        problem = check_response(self.state)
        if problem is not None and not self._repaired:
            self._repaired = True
            self.state = self.state.with_messages(Message.user(problem, metadata={"is_trace": True}))
            return True
        if problem is not None:
            raise DriverError(f"The answer does not fit the response format, and neither did the first: {problem}")
        self.state = await self._interceptors.pass_through("on_stop", self.state)
        assert self.state.execution is not None
        return not self.state.execution.should_stop

    def _stop_signal(self) -> StopSignal | None:
        spent = self.spent()
        for guard in (self._guard, *self._setup.guards):
            signal = guard.check(self.state, spent)
            if signal is not None:
                return signal
        return None

    async def _step(self) -> None:
        execution = self.state.execution
        assert execution is not None
        if execution.current_step is None:
            await self._infer()
            assert self.state.execution is not None
        step = self.state.execution.current_step  # type: ignore[union-attr]  # set by _infer
        assert step is not None
        if step.tool_calls:
            await self._tools.carry_out(step)
        if self.is_waiting:
            return
        self.state = self.state.with_current_step_completed()
        self.state = await self._interceptors.pass_through("after_step", self.state)
        await self._narrator.turn_ended(self.state)

    async def _infer(self) -> None:
        """Ask the model; its answer is the step under way."""
        assert self.state.execution is not None
        self.state = self.state.with_execution(self.state.execution.with_continuation_requested(False).with_step_started())
        self.state = await self._interceptors.pass_through("before_step", self.state)
        step_id, message_id = new_id(), new_id()
        await self._narrator.turn_started(step_id, self.state.step_count)
        given = self.state.transcript
        request = await self._interceptors.pass_through("before_inference", self._request(), self.state)
        await self._narrator.barrier()
        await self._narrator.message_started(message_id, "assistant")
        async with self.time_limit():
            reply: ModelReply = await self._setup.driver.respond(request, self._narrator.deltas_of(message_id))
        reply = await self._interceptors.pass_through("after_inference", reply, self.state)
        message = replace(reply.message, id=message_id)
        step = AgentStep.of([message], input=given, response=reply.response)
        self.state = self.state.with_current_step(replace(step, id=step_id))
        await self._narrator.message_ended(self.state.transcript[-1], reply.response)

    def _request(self) -> ModelRequest:
        execution = self.state.execution
        return ModelRequest(
            model=self._setup.model,
            messages=Prompt(
                self.state.transcript,
                keep_traces=self._setup.keep_traces,
                execution_id=execution.execution_id if execution else None,
            ),
            system_prompt=self.state.context.system_prompt,
            tools=tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in self._setup.tools),
            response_format=self.state.context.response_format,
            step=self.state.step_count,
        )

    def time_limit(self) -> TimeLimit:
        """Cancels what runs inside it when the budget's time is up."""
        return TimeLimit(self._guard.seconds_left(self.spent()))

    async def steer(self, messages: Sequence[Message]) -> None:
        """Between two steps: messages that others send into the run, which then goes on for at least another step."""
        self.state = self.state.with_messages(*messages).with_continuation_requested()
        for message in messages:
            await self._narrator.message_ended(message)

    def put_step(self, step: AgentStep) -> None:
        """The step under way, with what a tool has added to it."""
        self.state = self.state.with_current_step(step)

    def put_pending(self, calls: Sequence[Any]) -> None:
        assert self.state.execution is not None
        self.state = self.state.with_execution(self.state.execution.with_pending_calls(tuple(calls)))

    async def _fail(self, error: Exception) -> None:
        """The run cannot go on: what happened stands in an error of its own, and the run is failed."""
        reason = StopReason.RETRY_LIMIT_REACHED if isinstance(error, RetriesExhausted) else StopReason.ERROR_FORBADE
        text = "".join(traceback.format_exception(error)) if not isinstance(error, DriverError) else None
        execution = self.state.execution
        assert execution is not None
        execution = execution.with_error(ErrorRecord.of(error, traceback=text))
        execution = execution.with_stop_signal(StopSignal(reason, str(error)[:500], source=type(error).__name__))
        self.state = self.state.with_execution(execution)
        self.state = await self._interceptors.on_error(error, self.state)

    async def _end(self) -> None:
        self._close(self._status())
        self.state = await self._interceptors.pass_through("after_execution", self.state)
        await self._narrator.ended(self.state)

    async def _end_cancelled(self) -> None:
        if self.state.execution is not None and self.state.status is ExecutionStatus.IN_PROGRESS:
            self.state = self.state.with_stop_signal(
                StopSignal(StopReason.USER_REQUESTED, "the run was cancelled", source="cancel")
            )
            self._close(ExecutionStatus.STOPPED)
            await self._narrator.ended(self.state)

    def _close(self, status: ExecutionStatus) -> None:
        execution = self.state.with_current_step_completed().execution
        assert execution is not None
        self.state = self.state.with_execution(execution.ended(status))

    def _status(self) -> ExecutionStatus:
        execution = self.state.execution
        assert execution is not None
        if execution.errors:
            return ExecutionStatus.FAILED
        reason = execution.continuation.stop_reason
        if reason is not None and reason.was_force_stopped:
            return ExecutionStatus.STOPPED
        if execution.last_step_type is AgentStepType.ERROR:
            return ExecutionStatus.FAILED
        return ExecutionStatus.COMPLETED
