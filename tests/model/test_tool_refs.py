"""Calls and results in steps and events are stored once, in messages, and come back the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.stores.test_rows import Rows

from perdure import codec
from perdure.model.ids import now
from perdure.model.loop_events import LoopEvent, MessageEnd, ToolExecutionEnd, ToolExecutionStart
from perdure.model.message import Message, ToolCall
from perdure.model.step import AgentStep, ToolExecution
from perdure.model.tool_refs import SaidByRun
from perdure.protocols import JournalEntry
from perdure.run_journal import entry_of, event_of
from perdure.testing.samples import new_session

ALIKE: list[Any] = [None, True, 1, 1.0, "1", False, 0, "", [], {}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1], [True]]
ALIKE += [{"$said": True}, {"$said": 1}, {"$said": {"$said": True}}, {"$said": True, "a": 1}, "[… 3 left out]"]
"""Results that are equal but differ in JSON, and some that look like the marker for a result."""

outcomes = st.sampled_from(ALIKE)
runs = st.sampled_from(["run-1", "run-2", None])
calls = st.builds(
    ToolCall, st.sampled_from(["look", "see"]), st.sampled_from([{}, {"n": 1}, {"n": True}]), id=st.sampled_from("ab")
) | st.just(ToolCall("", {"n": 1}, id="c"))


def as_stored(value: Any) -> bytes:
    """Compare to the byte: `==` takes True for 1."""
    return msgspec.json.encode(value, enc_hook=str)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Return a call or a result of any run, perhaps with another's id; or a copy that a compaction shows."""
    run = draw(runs)
    tags: dict[str, Any] = {} if run is None else {"execution_id": run}
    tags |= {"compaction": "truncate"} if draw(st.integers(0, 5)) == 0 else {}
    if draw(st.booleans()):
        return Message.assistant("", tool_calls=[draw(calls)]).with_metadata(**tags)
    return Message.tool(draw(st.sampled_from("ab")), draw(outcomes)).with_metadata(**tags)


@st.composite
def events(draw: st.DrawFn) -> LoopEvent:
    common: dict[str, Any] = {"loop_id": draw(st.sampled_from(["run-1", "run-2"])), "session_id": "s", "agent_id": "me"}
    match draw(st.sampled_from(["message", "start", "end"])):
        case "message":
            return MessageEnd(**common, message=draw(messages()))
        case "start":
            return ToolExecutionStart(**common, call=draw(calls), step_id="1")
    return ToolExecutionEnd(**common, execution=ToolExecution(draw(calls), now(), now(), draw(outcomes)), step_id="1")


@given(st.lists(st.lists(events(), max_size=5), max_size=4))
def test_events_come_back_as_they_were(batches: Sequence[Sequence[LoopEvent]]) -> None:
    """This holds for any shared ids and any time of writing: an event is read with all messages of its run."""
    heard, log, entries = SaidByRun(), [], []
    for batch in batches:
        said = [event.message for event in batch if isinstance(event, MessageEnd)]
        for message in said:
            heard.hear(message)
        log += said
        entries += [entry_of(event, heard.of(event.loop_id)) for event in batch]
    stored = {message.id: codec.decode_message(codec.encode_message(message)) for message in log}
    known = SaidByRun(stored.values())
    told = [event for batch in batches for event in batch]
    for seq, (entry, event) in enumerate(zip(entries, told, strict=True), 1):
        body = codec.decode_plain(bytes(entry.body))
        read = JournalEntry(seq, entry.kind, body, entry.run)
        back = event_of(read, "s", "me", stored.__getitem__, known.of(read.run))
        assert as_stored(back) == as_stored(msgspec.structs.replace(event, cursor=seq))


@given(st.lists(messages(), max_size=4), st.lists(st.tuples(calls, outcomes), max_size=4))
def test_steps_come_back_as_they_were(said: Sequence[Message], done: Sequence[tuple[ToolCall, Any]]) -> None:
    """They are read from a head, which points at the messages of its steps."""
    step = AgentStep.of(said, tool_executions=[ToolExecution(call, now(), now(), result) for call, result in done])
    session = new_session()
    session = session.with_state(session.state.with_execution_started().with_current_step(step))
    rows = Rows()
    kept = rows.keep(session)
    back = rows.load(kept.id, kept.version).state.execution
    assert back is not None
    assert back.current_step is not None
    assert as_stored(back.current_step.tool_executions) == as_stored(step.tool_executions)
