"""The session recorder: the sessions, loops, groups and links that it makes from events."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure
from perdure import (
    AgentDefinition,
    AgentEnd,
    AgentStart,
    ChildLoopRef,
    ErrorRecord,
    EventBus,
    ExecutionStatus,
    InferenceResponse,
    LoopFactory,
    LoopRecord,
    LoopStatus,
    MemoryStore,
    Message,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    SendMessage,
    SessionRecord,
    SessionRecorder,
    SessionRecorderConfig,
    SessionRuntime,
    SpawnRef,
    StopReason,
    StopSignal,
    ToolCall,
    ToolExecution,
    ToolExecutionEnd,
    ToolExecutionStart,
    TurnEnd,
    TurnStart,
    Usage,
    load_session,
    save_session,
)
from perdure.model.loop_events import (
    Compaction,
    CompactionBlock,
    CompactionPart,
    ContinuationKind,
    InputRejected,
    LoopConfigSnapshot,
    ParallelLoopEnd,
    ParallelLoopStart,
    Redacted,
    ToolExecutionUpdate,
    UnknownEvent,
)
from perdure.model.record import Turn
from perdure.model.value import Value
from perdure.testing import ScriptedDriver

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
USED = Usage(input_tokens=10, output_tokens=5)


class Loop:
    """The events of one loop, each a second after the one before."""

    def __init__(self, loop_id: str, session_id: str | None = "sess", agent_id: str = "agent") -> None:
        self.loop_id = loop_id
        self._ids = {"loop_id": loop_id, "session_id": session_id, "agent_id": agent_id}
        self._seq = 0

    def _next(self, event_type: type, /, **facts: Any) -> Any:
        self._seq += 1
        return event_type(**self._ids, seq=self._seq, at=NOON + timedelta(seconds=self._seq), **facts)

    def start(self, parent: str | None = None, kind: str | None = None, tag: str | None = None, **facts: Any) -> Any:
        continuation = ContinuationKind(kind or ("default" if parent else "initial"), tag)
        return self._next(AgentStart, parent_loop_id=parent, continuation=continuation, **facts)

    def turn(self, index: int = 0) -> Any:
        return self._next(TurnStart, step_id=f"{self.loop_id}-{index}", index=index)

    def answer(self, text: str = "Hello.", index: int = 0) -> Message:
        return Message.assistant(text, metadata={"step_id": f"{self.loop_id}-{index}"})

    def said(self, message: Message, usage: Usage | None = None) -> Any:
        response = InferenceResponse("stop", usage) if usage is not None else None
        return self._next(MessageEnd, message=message, response=response)

    def update(self, text: str = "Hel") -> Any:
        return self._next(MessageUpdate, message_id="m", kind="text", text=text)

    def tool_end(self, call: ToolCall, child: ChildLoopRef | None = None, index: int = 0, **facts: Any) -> Any:
        execution = ToolExecution(call, NOON, NOON, **facts)
        return self._next(ToolExecutionEnd, execution=execution, step_id=f"{self.loop_id}-{index}", child=child)

    def turn_end(self, index: int = 0, usage: Usage = USED) -> Any:
        return self._next(TurnEnd, step_id=f"{self.loop_id}-{index}", index=index, usage=usage)

    def end(self, *messages: Message, status: ExecutionStatus = ExecutionStatus.COMPLETED, **facts: Any) -> Any:
        return self._next(AgentEnd, status=status, messages=messages, **facts)

    def other(self, event_type: type, /, **facts: Any) -> Any:
        return self._next(event_type, **facts)


def fed(*events: Any, config: SessionRecorderConfig | None = None) -> SessionRecorder:
    recorder = SessionRecorder(config)
    for event in events:
        recorder.on_event(event)
    return recorder


def recorded(*events: Any, config: SessionRecorderConfig | None = None) -> SessionRecord:
    """Return the one session that is open after some events."""
    (session,) = fed(*events, config=config).checkpoint()
    return session


def loop_in(session: SessionRecord, loop_id: str) -> LoopRecord:
    loop = session.get_loop(loop_id)
    assert loop is not None
    return loop


def flushed(recorder: SessionRecorder) -> SessionRecord:
    recorder.flush()
    (session,) = recorder.drain_completed()
    return session


def finished(loop_id: str, parent: str | None = None, **facts: Any) -> list[Any]:
    """Return all the events of a loop that answers at once."""
    loop = Loop(loop_id)
    said = loop.answer()
    start = loop.start(parent, **facts)
    return [start, loop.turn(), loop.said(said, USED), loop.turn_end(), loop.end(said, usage=USED)]


def test_a_session_opens_at_the_first_start_of_its_id() -> None:
    """Each id has one session, opened at that event's time, for any number of loops."""
    recorder = fed(*finished("a"), *finished("b", "a"), Loop("c", "other", "helper").start())
    first, second = recorder.checkpoint()
    assert (first.session_id, first.agent_id, len(first.loops)) == ("sess", "agent", 2)
    assert (second.session_id, second.agent_id, len(second.loops)) == ("other", "helper", 1)
    assert first.created_at == NOON + timedelta(seconds=1)
    assert first.last_active_at == NOON + timedelta(seconds=5)


def test_nothing_but_a_start_opens_a_session() -> None:
    """An event of a loop that has not started is not recorded."""
    assert fed(Loop("a").turn()).checkpoint() == ()


def test_a_rotated_id_is_a_new_session() -> None:
    """After a rotation by the caller, the same agent's next loop opens another session."""
    recorder = fed(*finished("a"), Loop("b", "sess-2").start("a"))
    assert [(session.session_id, len(session.loops)) for session in recorder.checkpoint()] == [
        ("sess", 1),
        ("sess-2", 1),
    ]


def test_a_loop_without_a_session_is_one_of_its_own() -> None:
    """A loop that was run outside of any session has its own id as session id, and counts no event as unknown."""
    loop = Loop("a", None)
    recorder = fed(loop.start(), loop.turn(), loop.end())
    assert [session.session_id for session in recorder.checkpoint()] == ["a"]
    assert recorder.unknown_events == 0


def test_a_loop_is_recorded_with_all_that_its_events_say() -> None:
    """Every field of a finished loop comes from its events."""
    loop = Loop("a")
    call = ToolCall("look", {"at": "it"}, "call-1")
    asked, answer = Message.user("Hi"), loop.answer()
    asks = Message.assistant(tool_calls=[call], metadata={"step_id": "a-0"})
    told = Message.tool("call-1", "seen", metadata={"step_id": "a-0"})
    last = loop.answer(index=1)
    block = CompactionBlock("block", "trim")
    config = LoopConfigSnapshot("m", "p", temperature=0.5)
    events = [
        loop.start(config=config, metadata={"why": "test"}),
        loop.said(asked),
        loop.turn(0),
        loop.other(MessageStart, message_id=answer.id, role="assistant"),
        loop.said(asks, USED),
        loop.other(ToolExecutionStart, call=call, step_id="a-0"),
        loop.tool_end(call, result="seen", usage=Usage(input_tokens=1)),
        loop.said(told),
        loop.turn_end(0, USED + Usage(input_tokens=1)),
        loop.other(Compaction, block=block),
        loop.turn(1),
        loop.said(last, USED),
        loop.turn_end(1),
        loop.end(
            asked,
            asks,
            told,
            last,
            usage=USED + USED + Usage(input_tokens=1),
            stop_signals=(StopSignal(StopReason.COMPLETED),),
        ),
    ]
    record = loop_in(recorded(*events), "a")
    assert (record.loop_id, record.session_id, record.agent_id) == ("a", "sess", "agent")
    assert (record.status, record.rejection, record.stop_reason) == (LoopStatus.COMPLETED, None, "completed")
    assert (record.started_at, record.ended_at) == (events[0].at, events[-1].at)
    assert (record.config, record.metadata, record.compaction_block) == (config, {"why": "test"}, block)
    assert record.messages == (asked, asks, told, last)
    assert record.events == tuple(events)
    assert record.usage == Usage(input_tokens=21, output_tokens=10)
    first, second = record.turns
    assert (first.index, first.step_id, first.message_ids) == (0, "a-0", (asks.id, told.id))
    assert (first.started_at, first.ended_at) == (events[2].at, events[8].at)
    assert [each.result for each in first.tool_executions] == ["seen"]
    assert (first.usage.input_tokens, second.usage, second.message_ids) == (11, USED, (last.id,))


def test_loops_form_a_tree() -> None:
    """Each child names its parent, and each parent its children, in order."""
    session = recorded(
        *finished("a"),
        *finished("b", "a"),
        *finished("c", "a", kind="rerun", tag="again"),
        *finished("d", "c", kind="branch", tag="x"),
    )
    links = {loop.loop_id: (loop.parent_loop_id, loop.children_loop_ids) for loop in session.loops}
    assert links == {"a": (None, ("b", "c")), "b": ("a", ()), "c": ("a", ("d",)), "d": ("c", ())}
    kinds = [(loop.continuation_kind.kind, loop.continuation_kind.tag) for loop in session.loops]
    assert kinds == [("initial", None), ("default", None), ("rerun", "again"), ("branch", "x")]


def test_a_session_can_be_navigated() -> None:
    """It has roots, children, chains and loops by id; a missing one is empty or None."""
    session = recorded(
        *finished("a"), *finished("b", "a"), *finished("c", "b"), *finished("z"), *finished("y", "elsewhere")
    )
    assert [loop.loop_id for loop in session.root_loops()] == ["a", "z", "y"]
    assert [loop.loop_id for loop in session.children_of("a")] == ["b"]
    assert session.children_of("nobody") == ()
    assert [loop.loop_id for loop in session.chain_to("c")] == ["a", "b", "c"]
    assert [loop.loop_id for loop in session.chain_to("y")] == ["y"]
    assert session.chain_to("nobody") == ()
    assert session.get_loop("nobody") is None
    assert loop_in(session, "z").loop_id == "z"
    assert session.parallel_siblings("a") == session.parallel_siblings("nobody") == ()
    assert session.total_usage() == Usage(input_tokens=50, output_tokens=25)


def test_a_loop_runs_until_its_end() -> None:
    """It is running from its start, and completed by an end that says so."""
    events = finished("a")
    assert loop_in(recorded(*events[:-1]), "a").status is LoopStatus.RUNNING
    assert loop_in(recorded(*events[:-1]), "a").ended_at is None
    assert loop_in(recorded(*events), "a").status is LoopStatus.COMPLETED


def test_a_loop_that_was_stopped_is_complete() -> None:
    """A budget that was reached is a reason to stop, and is on the record."""
    loop = Loop("a")
    signal = StopSignal(StopReason.STEPS_LIMIT_REACHED)
    record = loop_in(recorded(loop.start(), loop.end(status=ExecutionStatus.STOPPED, stop_signals=(signal,))), "a")
    assert (record.status, record.stop_reason) == (LoopStatus.COMPLETED, "steps_limit_reached")


def test_a_loop_that_failed_is_failed() -> None:
    """Its errors are on the record; a turn without a model's answer is not."""
    loop = Loop("a")
    error = ErrorRecord("DriverError", "no")
    record = loop_in(recorded(loop.start(), loop.turn(), loop.end(status=ExecutionStatus.FAILED, errors=(error,))), "a")
    assert (record.status, record.errors, record.turns) == (LoopStatus.FAILED, (error,), ())


def test_an_end_with_a_rejection_is_rejected() -> None:
    """The reason in AgentEnd is the record's."""
    loop = Loop("a")
    record = loop_in(recorded(loop.start(), loop.end(rejection="rude")), "a")
    assert (record.status, record.rejection) == (LoopStatus.REJECTED, "rude")


def test_rejected_input_makes_the_loop_rejected() -> None:
    """The rejection of InputRejected holds at the end, though the end does not repeat it."""
    loop = Loop("a")
    record = loop_in(recorded(loop.start(), loop.other(InputRejected, reason="rude"), loop.end()), "a")
    assert (record.status, record.rejection) == (LoopStatus.REJECTED, "rude")


def test_a_flush_aborts_what_has_not_ended() -> None:
    """An aborted loop keeps messages, usage and turns, and gets an end; an ended loop is unchanged."""
    loop = Loop("b")
    answer = loop.answer()
    recorder = fed(*finished("a"), loop.start("a"), loop.turn(), loop.said(answer, USED), loop.turn_end(), loop.turn(1))
    session = flushed(recorder)
    record = loop_in(session, "b")
    assert (record.status, record.messages, record.usage) == (LoopStatus.ABORTED, (answer,), USED)
    assert record.ended_at is not None
    assert [turn.step_id for turn in record.turns] == ["b-0"]
    assert loop_in(session, "a").status is LoopStatus.COMPLETED
    assert loop_in(session, "a").children_loop_ids == ("b",)


def test_a_loop_aborted_within_a_turn_keeps_what_that_has_cost() -> None:
    """The model's answer and its tools count from the moment they are on record, not from the end of the turn."""
    loop = Loop("a")
    call = ToolCall("look", {}, "call-1")
    error = ErrorRecord("ValueError", "no")
    ended = loop.tool_end(call, error=error, usage=Usage(input_tokens=3))
    record = loop_in(flushed(fed(loop.start(), loop.turn(), loop.said(loop.answer(), USED), ended)), "a")
    assert record.usage == USED + Usage(input_tokens=3)
    (turn,) = record.turns
    assert (turn.usage, turn.errors, turn.ended_at) == (record.usage, (error,), record.ended_at)


def test_a_loop_that_goes_on_after_a_crash_is_one_record() -> None:
    """Its earlier start, config and messages stay; the end covers only the later part; lost turns are dropped."""
    loop = Loop("a")
    asked, first, last = Message.user("Hi"), loop.answer("One."), loop.answer("Two.", 2)
    config = LoopConfigSnapshot("m", "p")
    before = [
        loop.start(config=config),
        loop.said(asked),
        loop.turn(),
        loop.said(first, USED),
        loop.turn_end(),
        loop.turn(1),
    ]
    after = [
        loop.start(resumed=True),
        loop.turn(2),
        loop.said(last, USED),
        loop.turn_end(2),
        loop.end(last, usage=USED + USED),
    ]
    record = loop_in(recorded(*before, *after), "a")
    assert (record.status, record.config, record.started_at) == (LoopStatus.COMPLETED, config, before[0].at)
    assert record.messages == (asked, first, last)
    assert [turn.step_id for turn in record.turns] == ["a-0", "a-2"]
    assert record.usage == USED + USED


def test_a_recorder_that_comes_late_knows_a_resumed_loop() -> None:
    """A loop whose first event is a resume starts with that event."""
    start = Loop("a").start("p", resumed=True, config=LoopConfigSnapshot("m", "p"))
    record = loop_in(recorded(start), "a")
    assert (record.agent_id, record.started_at, record.parent_loop_id) == ("agent", start.at, "p")
    assert record.config == start.config


def test_streaming_events_are_left_out_unless_asked_for() -> None:
    """MessageUpdate is accepted either way, and kept only with include_streaming_events."""
    loop = Loop("a")
    events = [loop.start(), loop.turn(), loop.update("Hel"), loop.update("lo."), loop.end()]
    recorder = SessionRecorder()
    assert all(map(recorder.on_event, events))
    assert len(recorder.checkpoint()[0].loops[0].events) == 3
    kept = recorded(*events, config=SessionRecorderConfig(include_streaming_events=True))
    assert loop_in(kept, "a").events == tuple(events)


def test_the_end_says_which_messages_there_are() -> None:
    """AgentEnd.messages is authoritative: it replaces the messages of single events, more or fewer."""
    loop = Loop("a")
    told, untold = loop.answer("told"), loop.answer("untold")
    assert loop_in(recorded(loop.start(), loop.said(told), loop.end(untold, told)), "a").messages == (untold, told)
    assert loop_in(recorded(loop.start(), loop.said(told), loop.end()), "a").messages == ()


def test_before_task_is_asked_once_a_session() -> None:
    """It gets the session at its first start, and not again for later loops."""
    asked: list[str] = []

    def before_task(session: SessionRecord) -> bool:
        asked.append(session.session_id)
        return True

    config = SessionRecorderConfig(before_task=before_task)
    fed(*finished("a"), *finished("b", "a"), Loop("c", "other").start(), config=config)
    assert asked == ["sess", "other"]


def test_a_refused_session_is_not_recorded() -> None:
    """on_event returns False for each of its events; nothing is recorded or counted, and before_task is called once."""
    asked: list[str] = []
    ended: list[SessionRecord] = []

    def before_task(session: SessionRecord) -> bool:
        asked.append(session.session_id)
        return session.session_id != "sess"

    recorder = SessionRecorder(SessionRecorderConfig(before_task=before_task, after_task=ended.append))
    events = [*finished("a"), *finished("b", "a"), *group_events("g1", "g2")]
    assert [recorder.on_event(event) for event in events] == [False] * len(events)
    assert recorder.on_event(Loop("c", "other").start())
    assert asked == ["sess", "other"]
    recorder.flush()
    assert [session.session_id for session in recorder.drain_completed()] == ["other"]
    assert [session.session_id for session in ended] == ["other"]
    assert recorder.unknown_events == 0


def test_a_refused_loop_without_a_session_is_not_counted_either() -> None:
    """A loop that is a session of its own can be refused as well."""
    loop = Loop("a", None)
    recorder = SessionRecorder(SessionRecorderConfig(before_task=lambda _: False))
    assert not any(map(recorder.on_event, [loop.start(), loop.turn(), loop.end()]))
    assert recorder.unknown_events == 0


def test_after_task_is_called_at_the_flush() -> None:
    """It is called once for each session, with its final record."""
    seen: list[SessionRecord] = []
    recorder = fed(*finished("a"), Loop("b").start("a"), config=SessionRecorderConfig(after_task=seen.append))
    assert seen == []
    recorder.flush()
    recorder.flush()
    assert [[loop.status for loop in session.loops] for session in seen] == [[LoopStatus.COMPLETED, LoopStatus.ABORTED]]
    assert tuple(seen) == recorder.drain_completed()


def test_completed_sessions_are_handed_over_once() -> None:
    """No session is returned before a flush, and each is returned once after it."""
    recorder = fed(*finished("a"), Loop("b", "other").start())
    assert recorder.drain_completed() == ()
    recorder.flush()
    assert [session.session_id for session in recorder.drain_completed()] == ["sess", "other"]
    assert recorder.drain_completed() == ()
    assert recorder.checkpoint() == ()


def test_a_checkpoint_finalises_nothing() -> None:
    """It shows a running loop as running, and the loop continues afterwards."""
    events = finished("a")
    recorder = fed(*events[:3])
    (shown,) = recorder.checkpoint()
    assert (loop_in(shown, "a").status, len(loop_in(shown, "a").events)) == (LoopStatus.RUNNING, 3)
    assert recorder.drain_completed() == ()
    assert all(map(recorder.on_event, events[3:]))
    assert loop_in(flushed(recorder), "a").status is LoopStatus.COMPLETED
    assert loop_in(shown, "a").status is LoopStatus.RUNNING


def test_events_of_unknown_loops_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """They are not recorded, on_event returns False, and the log names the loop."""
    recorder = fed(*finished("a"))
    with caplog.at_level(logging.WARNING, "perdure.recorder"):
        assert not recorder.on_event(Loop("ghost").turn())
        assert not recorder.on_event(Loop("ghost").end())
    assert recorder.unknown_events == 2
    assert all("ghost" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2
    assert [loop.loop_id for loop in recorder.checkpoint()[0].loops] == ["a"]


def test_a_group_nobody_announced_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a parallel group with unknown loops is counted, logged, and not recorded."""
    recorder = SessionRecorder()
    with caplog.at_level(logging.WARNING, "perdure.recorder"):
        assert not recorder.on_event(group_end(("x", "y"), 0))
    assert (recorder.unknown_events, len(caplog.records), recorder.checkpoint()) == (2, 2, ())


def group_start(*loop_ids: str, parent: str | None = None) -> ParallelLoopStart:
    return ParallelLoopStart(
        loop_id=loop_ids[0], session_id="sess", agent_id="agent", loop_ids=loop_ids, parent_loop_id=parent, at=NOON
    )


def group_end(loop_ids: tuple[str, ...], index: int, usage: Usage = Usage()) -> ParallelLoopEnd:  # noqa: B008  # frozen
    return ParallelLoopEnd(
        loop_id=loop_ids[0],
        session_id="sess",
        loop_ids=loop_ids,
        selected_loop_id=loop_ids[index],
        selected_config_index=index,
        evaluation_usage=usage,
        at=NOON,
    )


def group_events(*loop_ids: str, index: int = 1, parent: str | None = None) -> list[Any]:
    """Return a group whose branches' events come in turns."""
    stories = [finished(loop_id, parent, kind="branch", tag=str(place)) for place, loop_id in enumerate(loop_ids)]
    mixed = [event for together in zip(*stories, strict=True) for event in together]
    return [group_start(*loop_ids, parent=parent), *mixed, group_end(loop_ids, index, Usage(input_tokens=100))]


def test_announced_branches_are_pending() -> None:
    """From ParallelLoopStart on, each branch is there with its group before its own start; this opens the session."""
    session = recorded(group_start("x", "y", "z", parent="a"))
    assert [(loop.loop_id, loop.status, loop.parent_loop_id) for loop in session.loops] == [
        (name, LoopStatus.PENDING, "a") for name in "xyz"
    ]
    for loop in session.loops:
        assert loop.parallel_group is not None
        assert loop.parallel_group.all_loop_ids == ("x", "y", "z")
        assert (loop.parallel_group.selected_loop_id, loop.parallel_group.is_selected) == (None, False)
        assert loop.started_at is None


def test_a_pending_branch_runs_from_its_start() -> None:
    """The branch that starts is running, and still in its group; the other is pending, and a flush aborts both."""
    recorder = fed(group_start("x", "y"), Loop("y").start(kind="branch", tag="1"))
    (session,) = recorder.checkpoint()
    assert [loop.status for loop in session.loops] == [LoopStatus.PENDING, LoopStatus.RUNNING]
    assert [loop.loop_id for loop in session.parallel_siblings("y")] == ["x", "y"]
    assert [loop.status for loop in flushed(recorder).loops] == [LoopStatus.ABORTED, LoopStatus.ABORTED]


def test_interleaved_events_go_to_their_loops() -> None:
    """Each of the interleaved branches has its own events, in order, and none of another's."""
    events = group_events("x", "y", "z")
    session = recorded(*events)
    for loop in session.loops:
        assert loop.events == tuple(event for event in events[1:-1] if event.loop_id == loop.loop_id)
        assert [message.metadata["step_id"] for message in loop.messages] == [f"{loop.loop_id}-0"]
        assert loop.usage == USED


def test_one_branch_is_selected() -> None:
    """Exactly one has is_selected; all name it, its config, and the judge's usage."""
    session = recorded(*finished("a"), *group_events("x", "y", "z", index=2, parent="a"))
    siblings = session.parallel_siblings("x")
    assert [loop.loop_id for loop in siblings] == ["x", "y", "z"]
    groups = [loop.parallel_group for loop in siblings if loop.parallel_group]
    assert [group.is_selected for group in groups] == [False, False, True]
    assert {(group.selected_loop_id, group.selected_config_index) for group in groups} == {("z", 2)}
    assert [group.evaluation_usage for group in groups] == [Usage(input_tokens=100)] * 3
    assert loop_in(session, "a").children_loop_ids == ("x", "y", "z")


def test_the_judge_counts_once() -> None:
    """The usage of a session is that of all branches, and that of each group's judge once."""
    session = recorded(*group_events("x", "y"), *group_events("v", "w"))
    assert session.total_usage() == Usage(input_tokens=4 * 10 + 2 * 100, output_tokens=4 * 5)


def test_a_branch_that_was_stopped_for_a_quicker_one_is_aborted() -> None:
    """A branch that was cancelled because another was selected does not count as completed."""
    loop = Loop("x")
    signal = StopSignal(StopReason.USER_REQUESTED)
    end = loop.end(status=ExecutionStatus.STOPPED, stop_signals=(signal,))
    session = recorded(group_start("x", "y"), loop.start(kind="branch"), *finished("y", kind="branch"), end)
    assert [branch.status for branch in session.loops] == [LoopStatus.ABORTED, LoopStatus.COMPLETED]


def test_a_group_announced_late_takes_nothing_back() -> None:
    """A branch whose events came before its group keeps them."""
    events = finished("x", kind="branch")
    record = loop_in(recorded(*events, group_start("x", "y")), "x")
    assert (record.status, record.events) == (LoopStatus.COMPLETED, tuple(events))
    assert record.parallel_group is not None


SPAWN = SpawnRef("sess-P", "loop-P", "call-1", "sub_agent")
CHILD = ChildLoopRef("call-1", "sub_agent", "loop-C", "sess-C")


def spawn_events(*, told_by: str) -> dict[str, Any]:
    """Return events of a parent, a child, and the link: in the child's start, the parent's tool, or both."""
    parent, child = Loop("loop-P", "sess-P"), Loop("loop-C", "sess-C", "child")
    call = ToolCall("sub_agent", {}, "call-1")
    return {
        "parent starts": parent.start(),
        "parent's turn": parent.turn(),
        "tool ends": parent.tool_end(call, None if told_by == "child" else CHILD),
        "child starts": child.start(spawn_ref=None if told_by == "parent" else SPAWN),
        "child ends": child.end(),
    }


ORDERS = [
    order
    for order in permutations(("parent starts", "parent's turn", "tool ends", "child starts", "child ends"))
    if order.index("parent starts") < order.index("parent's turn") < order.index("tool ends")
    and order.index("child starts") < order.index("child ends")
]


@pytest.mark.parametrize("told_by", ["parent", "child", "both"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: ", ".join(order))
def test_the_spawn_chain_stands_in_any_order(order: tuple[str, ...], told_by: str) -> None:
    """The child session names its parent's call and the parent's loop the child, once, in any order of events."""
    events = spawn_events(told_by=told_by)
    recorder = fed(*(events[name] for name in order))
    assert recorder.unknown_events == 0
    sessions = {session.session_id: session for session in recorder.checkpoint()}
    assert sessions["sess-C"].parent_spawn_ref == SPAWN
    assert loop_in(sessions["sess-P"], "loop-P").child_loop_refs == (CHILD,)
    assert sessions["sess-P"].parent_spawn_ref is None
    assert loop_in(sessions["sess-C"], "loop-C").child_loop_refs == ()


def test_before_task_sees_who_has_spawned_the_session() -> None:
    """A child whose own start names its parent has the link when before_task is called."""
    seen: list[SpawnRef | None] = []

    def before_task(session: SessionRecord) -> bool:
        seen.append(session.parent_spawn_ref)
        return True

    fed(Loop("loop-C", "sess-C").start(spawn_ref=SPAWN), config=SessionRecorderConfig(before_task=before_task))
    assert seen == [SPAWN]


def test_a_loop_of_a_child_with_a_parent_elsewhere_is_a_root() -> None:
    """A parent in another session keeps its name, and the loop is a root of its own."""
    session = recorded(Loop("loop-C", "sess-C").start("loop-P", kind="initial", spawn_ref=SPAWN))
    (root,) = session.root_loops()
    assert (root.parent_loop_id, root.continuation_kind.kind) == ("loop-P", "initial")


def _long_story(events: int) -> list[Any]:
    """Return a loop with that number of events: turns of five, each with a tool call."""
    loop = Loop("long")
    story: list[Any] = [loop.start()]
    for index in range(events // 5):
        result = Message.tool(f"call-{index}", "5", metadata={"step_id": f"long-{index}"})
        story += [
            loop.turn(index),
            loop.said(loop.answer(index=index), USED),
            loop.tool_end(ToolCall("add", {}, f"call-{index}"), index=index),
            loop.said(result),
            loop.turn_end(index),
        ]
    return story


def _seconds_to_fold(events: int) -> float:
    story = _long_story(events)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        recorder = fed(*story)
        best = min(best, time.process_time() - began)
        assert len(loop_in(recorder.checkpoint()[0], "long").events) == len(story)
    return best


def test_a_long_loop_is_folded_in_linear_time() -> None:
    """Ten times the events take about ten times as long; if each cost the whole, it would be a hundred."""
    assert _seconds_to_fold(20_000) / _seconds_to_fold(2_000) < 30


def test_events_at_once_make_the_same_record_as_one_by_one() -> None:
    """`after_all` equals `after` for each event."""
    story = _long_story(50)
    one_by_one = LoopRecord(loop_id="long", session_id="s")
    for event in story:
        one_by_one = one_by_one.after(event)
    assert LoopRecord(loop_id="long", session_id="s").after_all(story) == one_by_one
    assert len(one_by_one.turns) == 10


def test_a_group_may_end_without_a_selection() -> None:
    """The group was given up: each branch still names it, and none is selected; the record reads back the same."""
    events = group_events("x", "y")[:-1]
    end = ParallelLoopEnd(loop_id="x", session_id="sess", agent_id="agent", loop_ids=("x", "y"), at=NOON)
    session = recorded(*events, end)
    groups = [loop.parallel_group for loop in session.loops if loop.parallel_group is not None]
    assert [(group.all_loop_ids, group.selected_loop_id, group.is_selected) for group in groups] == [
        (("x", "y"), None, False)
    ] * 2
    assert SessionRecord.from_dict(session.to_dict()) == session


def test_a_session_that_continues_after_a_flush_updates_its_record() -> None:
    """The second flush gives one record with the loops of both, and before_task is not called again."""
    asked: list[str] = []
    ended: list[int] = []

    def before_task(session: SessionRecord) -> bool:
        asked.append(session.session_id)
        return True

    config = SessionRecorderConfig(before_task=before_task, after_task=lambda session: ended.append(len(session.loops)))
    recorder = fed(*finished("a"), config=config)
    first = flushed(recorder)
    assert recorder.checkpoint() == ()
    assert all(map(recorder.on_event, finished("b", "a")))
    second = flushed(recorder)
    assert [loop.loop_id for loop in second.loops] == ["a", "b"]
    assert (second.created_at, loop_in(second, "a").children_loop_ids) == (first.created_at, ("b",))
    assert (asked, ended) == (["sess"], [1, 2])


def test_a_session_finalised_twice_is_handed_over_once() -> None:
    """It is returned as of the second time if it was not drained in between."""
    recorder = fed(*finished("a"))
    recorder.flush()
    for event in finished("b", "a"):
        recorder.on_event(event)
    assert [loop.loop_id for loop in flushed(recorder).loops] == ["a", "b"]


def test_a_loop_that_goes_on_after_a_flush_was_not_aborted() -> None:
    """The returned record says aborted; the next one has the later events, and the loop's true end."""
    events = finished("a")
    recorder = fed(*events[:3])
    assert loop_in(flushed(recorder), "a").status is LoopStatus.ABORTED
    assert all(map(recorder.on_event, events[3:]))
    record = loop_in(flushed(recorder), "a")
    assert (record.status, record.events, record.ended_at) == (LoopStatus.COMPLETED, tuple(events), events[-1].at)


def foreign(loop: Loop) -> list[Any]:
    """Return a stream of another agent: its messages name no step."""
    call = ToolCall("look", {}, "call-1")
    asked, asks, told = Message.user("Hi"), Message.assistant(tool_calls=[call]), Message.tool("call-1", "seen")
    answer = Message.assistant("Hello.")
    return [
        loop.start(),
        loop.turn(0),
        loop.said(asked),
        loop.said(asks, USED),
        loop.tool_end(call, result="seen"),
        loop.said(told),
        loop.turn_end(0),
        loop.turn(1),
        loop.said(answer, USED),
        loop.turn_end(1),
        loop.end(asked, asks, told, answer, usage=USED + USED),
    ]


def test_turns_of_foreign_streams_are_kept() -> None:
    """An answer that names no step belongs to the turn under way; a user's message belongs to none."""
    events = foreign(Loop("a"))
    record = loop_in(recorded(*events), "a")
    _, asks, told, answer = record.messages
    assert [turn.message_ids for turn in record.turns] == [(asks.id, told.id), (answer.id,)]
    assert [turn.usage for turn in record.turns] == [USED, USED]
    aborted = loop_in(flushed(fed(*events[:4])), "a")
    assert ([turn.message_ids for turn in aborted.turns], aborted.usage) == ([(asks.id,)], USED)


@pytest.mark.parametrize("late", ["again", "more"])
def test_what_comes_after_the_end_changes_nothing(late: str, caplog: pytest.LogCaptureFixture) -> None:
    """Repeated and late events are counted and logged; the loop stays as it ended."""
    loop, story = Loop("a"), finished("a")
    recorder = fed(*story)
    before = recorder.checkpoint()
    loop._seq = 20
    more = [loop.turn(7), loop.said(loop.answer("Late.", 7), USED), loop.turn_end(7), loop.end(loop.answer("Late."))]
    after = story if late == "again" else more
    with caplog.at_level(logging.WARNING, "perdure.recorder"):
        assert not any(map(recorder.on_event, after))
    assert recorder.checkpoint() == before
    assert (recorder.late_events, recorder.unknown_events, len(caplog.records)) == (len(after), 0, len(after))


def test_a_run_whose_end_was_not_saved_is_resumed_after_it() -> None:
    """Subscribers have got an end that no version holds: the events of the recovery are not late."""
    loop = Loop("a")
    first, last = loop.answer("One."), loop.answer("Two.", 1)
    before = [loop.start(), loop.turn(), loop.said(first, USED), loop.turn_end(), loop.end(first, usage=USED)]
    after = [
        loop.start(resumed=True),
        loop.turn(1),
        loop.said(last, USED),
        loop.turn_end(1),
        loop.end(first, last, usage=USED + USED),
    ]
    recorder = fed(*before, *after)
    record = loop_in(recorder.checkpoint()[0], "a")
    assert (record.messages, record.usage, record.ended_at) == ((first, last), USED + USED, after[-1].at)
    assert recorder.late_events == 0
    assert not recorder.on_event(after[0])
    assert loop_in(recorder.checkpoint()[0], "a") == record


async def test_a_recorder_may_listen_to_a_whole_bus(caplog: pytest.LogCaptureFixture) -> None:
    """The runtime's own events are ignored, uncounted; the run is recorded as the runtime has it."""
    bus, recorder = EventBus(), SessionRecorder()
    bus.wiretap(recorder.on_event)
    loops = LoopFactory(driver=ScriptedDriver(["Hello."]), events=bus)
    runtime = SessionRuntime(MemoryStore(), events=bus)
    session = await runtime.create(AgentDefinition("agent"))
    await runtime.execute(session.id, SendMessage("Hi", loops))
    await bus.emit(Redacted(session_id=session.id, message_ids=("m",)))
    assert caplog.records == []
    assert (recorder.unknown_events, recorder.late_events) == (0, 0)
    (kept,) = recorder.checkpoint()
    (header,) = (await runtime.record(session.id)).loops
    assert [(loop.loop_id, loop.status, loop.usage) for loop in kept.loops] == [
        (header.loop_id, header.status, header.usage)
    ]


def test_an_event_of_an_unknown_kind_is_kept() -> None:
    """It is among the loop's events, changes nothing else, and a saved record reads back the same."""
    loop, story = Loop("a"), finished("a")
    odd = [loop.other(UnknownEvent, kind="billed", body=body) for body in ({"cents": 3}, None, [1], {"type": "x"})]
    session = recorded(*story[:2], odd[0], *story[2:], *odd[1:])
    record = loop_in(session, "a")
    plain = loop_in(recorded(*story), "a")
    assert [event for event in record.events if isinstance(event, UnknownEvent)] == odd
    assert without_events(record) == without_events(plain)
    document = session.to_dict()
    assert SessionRecord.from_dict(document) == session
    written = [event["type"] for event in document["loops"][0]["events"]]
    assert written[2] == "billed"


def without_events(record: LoopRecord) -> Value:
    return msgspec.structs.replace(record, events=())


def test_an_event_of_a_newer_release_is_read_from_a_document_and_written_back() -> None:
    """Kind and fields are the same, known to this release or not."""
    document = recorded(*finished("a")).to_dict()
    newer = {"type": "billed", "loop_id": "a", "seq": 9, "at": "2026-01-01T12:00:09Z", "cents": 3}
    document["loops"][0]["events"].append(newer)
    session = SessionRecord.from_dict(document)
    event = loop_in(session, "a").events[-1]
    assert isinstance(event, UnknownEvent)
    assert (event.kind, event.body, event.seq) == ("billed", {"cents": 3}, 9)
    assert session.to_dict()["loops"][0]["events"][-1] == newer


def test_time_that_a_run_lay_dead_is_no_part_of_its_duration() -> None:
    """The time between a crash and the resume counts neither for the run nor for the turn under way."""
    loop = Loop("a")
    call = ToolCall("look", {}, "call-1")
    asks, last = Message.assistant(tool_calls=[call], metadata={"step_id": "a-0"}), loop.answer("Two.", 1)
    told = Message.tool("call-1", "seen", metadata={"step_id": "a-0"})
    before = [loop.start(), loop.turn(), loop.said(asks, USED)]
    loop._seq = 1000
    after = [loop.start(resumed=True), loop.tool_end(call), loop.said(told), loop.turn_end(), loop.turn(1)]
    after += [loop.said(last, USED), loop.turn_end(1), loop.end(asks, told, last, usage=USED + USED)]
    record = loop_in(recorded(*before, *after), "a")
    assert (record.idle, record.duration) == (998.0, 9.0)
    assert [lasted(turn) for turn in record.turns] == [3.0, 2.0]


def lasted(turn: Turn) -> float:
    assert turn.ended_at is not None
    return (turn.ended_at - turn.started_at).total_seconds()


def test_a_branch_that_never_began_ends_with_its_group() -> None:
    """A branch that was announced but never started is aborted when another is selected."""
    session = recorded(group_start("x", "y"), *finished("y", kind="branch"), group_end(("x", "y"), 1))
    assert [branch.status for branch in session.loops] == [LoopStatus.ABORTED, LoopStatus.COMPLETED]
    assert loop_in(session, "x").ended_at == NOON


SECRET = "card zyxw zyxw zyxw"  # letters that no random id has


def telling(loop: Loop) -> tuple[Message, Message, list[Any]]:
    """Return an answer that calls a tool, the tool's message, and a loop in which every event may quote them."""
    step = {"step_id": f"{loop.loop_id}-0"}
    call = ToolCall("pay", {"card": SECRET}, id="call")
    answer = Message.assistant(f"I use {SECRET}.", tool_calls=[call], metadata=step)
    result = Message.tool("call", f"paid by {SECRET}", metadata=step)
    failed = ErrorRecord("ToolError", f"no more than {SECRET}")
    block = CompactionBlock("block", "llm", NOON, 2, f"notes on {SECRET}", 100, 10)
    shown = (CompactionPart(Message.user(f"notes on {SECRET}")),)
    signal = StopSignal(StopReason.USER_REQUESTED, f"stopped at {SECRET}", source="filter")
    return (
        answer,
        result,
        [
            loop.start(metadata={"about": f"I use {SECRET}."}),
            loop.turn(),
            loop.other(MessageUpdate, message_id=answer.id, kind="text", text=SECRET[:9]),
            loop.other(MessageUpdate, message_id=answer.id, kind="text", text=SECRET[9:]),
            loop.said(answer, USED),
            loop.other(ToolExecutionStart, call=call, step_id=f"{loop.loop_id}-0"),
            loop.other(ToolExecutionUpdate, call_id="call", progress={"card": SECRET}),
            loop.tool_end(call, result=f"paid by {SECRET}", error=failed),
            loop.said(result),
            loop.other(TurnEnd, step_id=f"{loop.loop_id}-0", index=0, usage=USED, errors=(failed,)),
            loop.other(Compaction, block=block, shown=shown),
            loop.other(InputRejected, reason=f"filtered: {SECRET}"),
            loop.end(
                answer, result, rejection=f"filtered: {SECRET}", stop_signals=(signal,), errors=(failed,), usage=USED
            ),
        ],
    )


def redacted(*messages: Message, session_id: str | None = "sess") -> Redacted:
    return Redacted(session_id=session_id, message_ids=tuple(message.id for message in messages))


@pytest.mark.parametrize("heard", range(5, 14))
def test_redacted_text_is_gone_from_the_record(heard: int, tmp_path: Path) -> None:
    """It is gone from all events so far; the other fields stay, in the record and in the file."""
    answer, result, story = telling(Loop("a"))
    config = SessionRecorderConfig(include_streaming_events=True)
    recorder = fed(*story[:heard], config=config)
    before = loop_in(recorder.checkpoint()[0], "a")
    assert recorder.on_event(redacted(answer, result))
    record = loop_in(recorder.checkpoint()[0], "a")
    assert "zyxw" not in repr(record)
    assert [m.id for m in record.messages] == [m.id for m in before.messages]
    assert all(message.metadata["redacted"] is True for message in record.messages)
    kept = ("status", "usage", "started_at", "ended_at", "children_loop_ids", "stop_reason", "compaction_usage")
    assert [getattr(record, name) for name in kept] == [getattr(before, name) for name in kept]
    assert [type(event) for event in record.events] == [type(event) for event in before.events]
    save_session(flushed(recorder), tmp_path)
    assert b"zyxw" not in (tmp_path / "sess.json").read_bytes()
    assert not recorder.on_event(redacted(answer, result)), "there is nothing left to replace"


def test_what_was_flushed_before_a_redaction_is_handed_over_again(tmp_path: Path) -> None:
    """Saving it writes the old file again, without the text; a record that was not drained is changed in place."""
    answer, result, story = telling(Loop("a"))
    recorder = fed(*story, *finished("b", "a"))
    save_session(flushed(recorder), tmp_path)
    assert recorder.on_event(redacted(answer, result))
    save_session(flushed(recorder), tmp_path)
    assert b"zyxw" not in (tmp_path / "sess.json").read_bytes()
    assert load_session("sess", tmp_path).get_loop("b") is not None

    recorder = fed(*story)
    recorder.flush()
    recorder.on_event(redacted(answer, result))
    (waiting,) = recorder.drain_completed()
    assert "zyxw" not in repr(waiting)


@pytest.mark.parametrize("heard", range(5, 13))
def test_later_events_do_not_bring_redacted_text_back(heard: int) -> None:
    """Messages and calls are known by their ids; a later text in other words stays."""
    answer, result, story = telling(Loop("a"))
    summary = CompactionBlock("new", "llm", NOON, 2, "notes on nothing", 100, 10)
    recorder = fed(*story[:heard])
    recorder.on_event(redacted(answer, result))
    for event in story[heard:]:
        if isinstance(event, MessageEnd | MessageUpdate | ToolExecutionStart | ToolExecutionUpdate):
            recorder.on_event(event)
    recorder.on_event(Loop("a").other(Compaction, block=summary))
    recorder.on_event(Loop("a").end(answer, result))
    record = loop_in(recorder.checkpoint()[0], "a")
    assert "zyxw" not in repr(record)
    assert record.compaction_block == summary


def test_another_message_that_quotes_a_redacted_one_stays() -> None:
    """As in a store, it is redacted only by its own id; the loop's messages and events agree."""
    loop = Loop("a")
    asked, answer = Message.user(f"My {SECRET}"), loop.answer(f"You said: My {SECRET}")
    recorder = fed(loop.start(), loop.said(asked), loop.turn(), loop.said(answer, USED), loop.end(asked, answer))
    assert recorder.on_event(redacted(asked))
    record = loop_in(recorder.checkpoint()[0], "a")
    told = [event.message for event in record.events if isinstance(event, MessageEnd)]
    assert [message.text for message in told] == ["[redacted]", f"You said: My {SECRET}"]
    assert tuple(told) == record.messages


def test_pieces_of_a_redacted_message_are_gone_though_it_never_came_to_its_end() -> None:
    """They are known by the message's id; each stays as a piece without its text."""
    answer, _, story = telling(Loop("a"))
    recorder = fed(Loop("a").start(), *story[1:4], config=SessionRecorderConfig(include_streaming_events=True))
    assert recorder.on_event(redacted(answer))
    pieces = loop_in(recorder.checkpoint()[0], "a").events[-2:]
    assert [piece.text for piece in pieces if isinstance(piece, MessageUpdate)] == ["[redacted]", "[redacted]"]


def test_a_redaction_is_about_the_session_that_holds_the_messages() -> None:
    """It is the session that the event names; if that is a fork, or missing, the one whose loops have the messages."""
    answer, result, story = telling(Loop("a"))
    other = telling(Loop("b", "other"))[2]
    other[4] = Loop("b", "other").said(msgspec.structs.replace(answer, parts=Message.assistant("same id").parts))
    for named in ("sess", "fork", None):
        recorder = fed(*story, *other[:5], Loop("c", "fork").start())
        assert recorder.on_event(redacted(answer, result, session_id=named))
        records = {session.session_id: session for session in recorder.checkpoint()}
        assert "zyxw" not in repr(records["sess"])
        assert ("same id" in repr(records["other"])) is (named == "sess")


async def test_a_recorder_hears_of_redactions_in_sessions() -> None:
    """Its record then equals the store's."""
    bus, recorder = EventBus(), SessionRecorder()
    bus.wiretap(recorder.on_event)
    async with perdure.connect("memory://", driver=ScriptedDriver(["Noted."]), events=bus) as sessions:
        chat = await sessions.open("sess")
        await chat.send(f"My {SECRET}")
        recorder.flush()
        await chat.redact([(await chat.history())[0].id])
        kept = flushed(recorder).loops[0]
        stored = await sessions.runtime.loop("sess", kept.loop_id)
    assert kept.messages == stored.messages
    assert [message.text for message in kept.messages] == ["[redacted]", "Noted."]
    assert "zyxw" not in repr(recorder.checkpoint())
