"""Replays a run's events to rebuild its state, for example after its process was killed.

While an event is replayed, the clock shows that event's own time. The state then has the times of the live run.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from perdure.loop.compaction.compactor import overlaid
from perdure.loop.filters import refusal
from perdure.loop.tool_use import Decisions, begun_before
from perdure.model.execution import CallAnswer, ExecutionState, ExecutionStatus, PendingCall
from perdure.model.ids import use
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    Compaction,
    InputRejected,
    MessageEnd,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
)
from perdure.model.message import Message
from perdure.model.state import AgentState
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage


class Replay:
    """The state of a run while its events are applied one by one."""

    def __init__(self, state: AgentState) -> None:
        self.state = state
        self._started_calls: dict[str, datetime] = {}
        self._ended: ToolExecution | None = None
        self._step_id = state.execution.current_step.id if state.execution and state.execution.current_step else None
        self._approved: dict[str, str] = {}
        self._denied: dict[str, str] = {}
        self._answers: dict[str, CallAnswer] = {}
        self._refused: set[str] = set()
        self._waited: dict[str, PendingCall] = {}
        self._begun: dict[str, int] = {}

    @property
    def decisions(self) -> Decisions:
        """Return what people decided and answered, the calls started without an outcome, and the calls that waited."""
        unknown, waited = dict(self._started_calls), dict(self._waited)
        return Decisions(self._approved, self._denied, unknown, waited, self._answers, self._begun)

    def apply_all(self, events: Iterable[AnyLoopEvent]) -> Replay:
        for event in events:
            at = event.at
            with use(clock=lambda at=at: at):  # type: ignore[misc]  # a default argument binds the loop's variable
                self._apply(event)
        return self

    def _apply(self, event: AnyLoopEvent) -> None:
        match event:
            case AgentStart():
                self._start(event)
            case TurnStart():
                self._step_id = event.step_id
                self._change(self._execution.with_continuation_requested(False).with_step_started())
            case InputRejected():
                self._refuse(event)
            case MessageEnd():
                self._say(event)
            case ToolExecutionStart():
                self._started_calls[event.call.id] = event.at
                self._begun[event.call.id] = self._begun.get(event.call.id, 0) + 1
            case ToolExecutionEnd():
                self._ended = event.execution
            case TurnEnd():
                self.state = self.state.with_current_step_completed()
            case Compaction():
                self.state = self.state.with_transcript(overlaid(self.state.transcript, event))
                self._change(self._execution.with_compaction_usage(event.usage))
            case AgentEnd():
                self._end(event)

    @property
    def _execution(self) -> ExecutionState:
        assert self.state.execution is not None
        return self.state.execution

    def _change(self, execution: ExecutionState) -> None:
        self.state = self.state.with_execution(execution)

    def _start(self, event: AgentStart) -> None:
        self._approved |= event.approved
        self._denied |= event.denied
        self._answers |= {answer.call: answer for answer in event.answers}
        if event.resumed and self.state.status is ExecutionStatus.IN_PROGRESS:
            self._resume(event)
            return
        fresh = replace(ExecutionState.fresh(), execution_id=event.loop_id, response_format=event.response_format)
        fresh = fresh.with_terms(event.external_tools, event.instructions, event.model_options)
        self.state = replace(self.state.with_execution(fresh), execution_count=self.state.execution_count + 1)

    def _refuse(self, event: InputRejected) -> None:
        """Take in a rejection. Messages that were to steer the run stay out of the transcript.

        Without such messages, all of the run's input was rejected, and the run stops.
        """
        self._refused.update(event.message_ids)
        if not event.message_ids:
            self.state = self.state.with_stop_signal(refusal(event.reason))

    def _resume(self, event: AgentStart) -> None:
        # Not calls of sub-agents: whether these wait is up to the sub-agent's own session.
        self._waited |= {call.id: call for call in self._execution.pending_calls if call.session_id is None}
        self._begun |= begun_before(self._execution.pending_calls)
        execution = self._execution.with_pending_calls(()).with_idle(event.idle)
        # As in the live run, the time of a continued step counts from here: the pause is not work.
        self._change(execution if execution.current_step is None else execution.with_step_started())

    def _end(self, event: AgentEnd) -> None:
        """End the run. If it was cut short, the step under way is completed first."""
        ended = self._execution.with_current_step_completed().with_pending_calls(())
        continuation = replace(ended.continuation, stop_signals=event.stop_signals)
        compacted = event.compaction_usage  # empty in older records
        ended = replace(ended, compaction_usage=ended.compaction_usage if compacted == Usage() else compacted)
        ended = replace(ended, discarded_usage=event.discarded_usage)
        self._change(replace(ended, errors=event.errors, continuation=continuation).ended(event.status))

    def _say(self, event: MessageEnd) -> None:
        message = event.message
        # The first part of an answer that this run asked for again: it is not shown, but its tokens count.
        if message.is_superseded and message.metadata.get("execution_id") == event.loop_id:
            self._change(self._execution.with_discarded_usage(event.response.usage if event.response else Usage()))
            return
        if message.id in self._refused:
            return
        if self._step_id is None or message.metadata.get("step_id") != self._step_id:
            self._hear(message)  # also one that was copied from elsewhere, with the tags it had there
        elif message.role == "assistant":
            self._answer(message, self._step_id, event)
        else:
            self._tool_result(message)

    def _hear(self, message: Message) -> None:
        self.state = self.state.with_messages(message)
        if self._execution.step_executions:
            self.state = self.state.with_continuation_requested()

    def _answer(self, message: Message, step_id: str, event: MessageEnd) -> None:
        step = AgentStep.of([message], input=self.state.transcript.without_blocks(), response=event.response)
        self.state = self.state.with_current_step(replace(step, id=step_id))

    def _tool_result(self, message: Message) -> None:
        step = self._execution.current_step
        assert step is not None
        output = Transcript((*step.output_messages.pieces, *Transcript.of([message]).pieces))
        changes: dict[str, Any] = {"output_messages": output}
        if self._ended is not None:
            changes["tool_executions"] = (*step.tool_executions, self._ended)
            # Only now: between an outcome and its message there may be a crash, and then the call has no result.
            self._started_calls.pop(self._ended.call.id, None)
        self._ended = None
        self.state = self.state.with_current_step(replace(step, **changes))
