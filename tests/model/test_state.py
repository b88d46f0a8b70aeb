"""The agent's state: its lasting part, its part per run, and how a step joins both."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from tests.strategies import states

from perdure.errors import ConfigurationError
from perdure.model import ids
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.lineage import Adoption
from perdure.model.message import Message, ToolCall
from perdure.model.state import AgentContext, AgentState
from perdure.model.step import AgentStep, AgentStepType, InferenceResponse
from perdure.model.stop import StopReason, StopSignal
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord

START = datetime(2030, 1, 1, tzinfo=UTC)
CALL = ToolCall("look", {"at": "sky"})
OOPS = ErrorRecord("ValueError", "oops")


def ticking():
    """Return a clock that moves by a second at each call."""
    looks = iter(range(10**6))
    return lambda: START + timedelta(seconds=next(looks))


def answer(text: str = "done", **usage: int) -> AgentStep:
    return AgentStep.of([Message.assistant(text)], response=InferenceResponse("stop", Usage(**usage)))


def working(**usage: int) -> AgentStep:
    messages = [Message.assistant("hm", tool_calls=[CALL]), Message.tool(CALL.id, "blue")]
    return AgentStep.of(messages, response=InferenceResponse("tool_calls", Usage(**usage)))


def failing() -> AgentStep:
    return AgentStep.of([Message.assistant("oh")], errors=[OOPS])


def done(state: AgentState, *steps: AgentStep) -> AgentState:
    for step in steps:
        state = state.with_current_step(step).with_current_step_completed()
    return state


def test_a_new_state_has_an_identity_and_no_execution():
    """A new state has its own agent id and times, and no part of a run."""
    with ids.use(clock=lambda: START, ids=iter(["agent-1"]).__next__):
        state = AgentState()
    assert (state.agent_id, state.parent_agent_id) == ("agent-1", None)
    assert (state.created_at, state.updated_at) == (START, START)
    assert (state.execution_count, state.model, state.task, state.execution) == (0, None, None, None)
    assert (list(state.messages), state.metadata, state.context.system_prompt) == ([], {}, "")
    assert (state.context.response_format, AgentState().agent_id != state.agent_id) == (None, True)


def test_between_executions_the_accessors_are_empty():
    """Without an execution every accessor of a run has an empty value, and none raises."""
    state = AgentState()
    assert (state.status, state.execution_duration, state.last_step, state.last_step_type) == (None, None, None, None)
    assert (state.steps, state.step_count, state.stop_reason, state.should_stop) == ((), 0, None, False)
    assert (state.usage, state.errors, state.has_errors) == (Usage(), (), None)
    assert (state.has_final_response, state.final_response, list(state.current_response)) == (False, None, [])


def test_a_definition_gives_the_state_its_start():
    """A state of a definition has its prompt and metadata, and leaves the model to the definition."""
    state = AgentState.of(AgentDefinition("a", system_prompt="Be brief.", model="offline", metadata={"team": "x"}))
    assert (state.context.system_prompt, state.metadata, state.model) == ("Be brief.", {"team": "x"}, None)


def test_messages_transcript_and_store_are_one():
    """The messages are the transcript, under each of its names."""
    state = AgentState().with_messages(Message.user("a"), Message.user("b"))
    assert state.messages is state.transcript is state.store is state.context.transcript
    assert [message.text for message in state.messages] == ["a", "b"]


def test_the_accessors_of_a_run():
    """A run with steps shows its status, steps, usage, errors and answer through the state."""
    with ids.use(clock=lambda: START):
        state = AgentState().with_messages(Message.user("hi")).with_execution_started()
    state = done(state, working(input_tokens=5), answer("blue", input_tokens=7, output_tokens=2))
    with ids.use(clock=lambda: START + timedelta(seconds=3)):
        assert state.execution_duration == 3
    assert (state.status, state.execution_count, state.step_count) == (ExecutionStatus.IN_PROGRESS, 1, 2)
    assert [step.step_type for step in state.steps] == [AgentStepType.TOOL_EXECUTION, AgentStepType.FINAL_RESPONSE]
    assert (state.last_step, state.last_step_type) == (state.steps[-1], AgentStepType.FINAL_RESPONSE)
    assert (state.usage, state.errors, state.has_errors) == (Usage(12, 2), (), False)
    assert (state.has_final_response, state.final_response.text) == (True, "blue")
    assert [message.text for message in state.current_response] == ["blue"]
    ended = state.with_execution(state.execution.ended(ExecutionStatus.COMPLETED))
    assert (ended.status, ended.stop_reason) == (ExecutionStatus.COMPLETED, StopReason.COMPLETED)


def test_errors_of_a_run_are_listed():
    """A step's errors are the state's."""
    state = done(AgentState(), failing())
    assert (state.errors, state.has_errors, state.last_step_type) == ((OOPS,), True, AgentStepType.ERROR)
    assert (state.has_final_response, state.final_response) == (False, None)


def test_there_is_no_final_response_without_a_message():
    """A final step without output has no response."""
    assert done(AgentState(), AgentStep()).final_response is None


def test_the_current_response_is_the_latest_output():
    """During a run, the current response is the output of the step under way, or else of the last one."""
    state = AgentState().with_current_step(working())
    assert [message.text for message in state.current_response] == ["hm", "blue"]
    state = state.with_current_step_completed()
    assert [message.text for message in state.current_response] == ["hm", "blue"]
    assert state.final_response is None
    assert [message.text for message in state.with_current_step(answer()).current_response] == ["done"]


SIGNAL = StopSignal(StopReason.USER_REQUESTED)


@pytest.mark.parametrize(
    ("state", "stops"),
    [
        (AgentState(), False),
        (AgentState().with_execution_started(), True),
        (done(AgentState(), working()), False),
        (done(AgentState(), answer()), True),
        (done(AgentState(), working()).with_stop_signal(SIGNAL), True),
        (done(AgentState(), answer()).with_continuation_requested(), False),
        (done(AgentState(), working()).with_stop_signal(SIGNAL).with_continuation_requested(), False),
    ],
)
def test_a_state_stops_as_its_execution_does(state, stops):
    """should_stop is the execution's answer, and False without an execution."""
    assert state.should_stop is stops


CHANGES = {
    "with_context": lambda s: s.with_context(AgentContext(system_prompt="new")),
    "with_transcript": lambda s: s.with_transcript(Transcript.of([Message.user("new")])),
    "with_adopted": lambda s: s.with_adopted(Transcript.of([Message.user("new")]), Adoption(2)),
    "with_messages": lambda s: s.with_messages(Message.user("new")),
    "with_system_prompt": lambda s: s.with_system_prompt("new"),
    "with_metadata": lambda s: s.with_metadata("new", 1),
    "with_response_format": lambda s: s.with_response_format({"type": "object"}),
    "with_model": lambda s: s.with_model(ModelConfig("new")),
    "with_default_model": lambda s: s.with_default_model(ModelConfig("new")),
    "with_task": lambda s: s.with_task("new"),
    "with_parent_agent": lambda s: s.with_parent_agent("new"),
    "with_execution": lambda s: s.with_execution(ExecutionState.fresh()),
    "with_execution_started": lambda s: s.with_execution_started(),
    "with_spent": lambda s: s.with_spent(Usage(1)),
    "for_next_execution": lambda s: s.for_next_execution(),
    "for_another_session": lambda s: s.for_another_session(),
    "with_stop_signal": lambda s: s.with_stop_signal(SIGNAL),
    "with_continuation_requested": lambda s: s.with_continuation_requested(),
    "with_current_step": lambda s: s.with_current_step(answer()),
    "with_step_output": lambda s: s.with_step_output(answer(), Message.assistant("more")),
    "with_current_step_completed": lambda s: s.with_current_step_completed(),
}


def test_every_change_is_tested():
    """The table of changes below has every method that makes a changed state."""
    verbs = {name for name in dir(AgentState) if name.startswith(("with_", "for_"))}
    assert verbs == set(CHANGES)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_makes_a_new_value_and_moves_updated_at(change):
    """A change leaves the old state unchanged, keeps identity and creation, and moves updated_at."""
    with ids.use(clock=ticking()):
        before = AgentState().with_messages(Message.user("hi")).with_current_step(working())
        kept = before.to_dict()
        after = change(before)
    assert after is not before
    assert after != before
    assert after.updated_at > before.updated_at
    assert (after.created_at, after.agent_id) == (before.created_at, before.agent_id)
    assert before.to_dict() == kept


def test_changes_show_where_they_belong():
    """Each change shows in its accessor."""
    state = AgentState()
    assert state.with_system_prompt("p").context.system_prompt == "p"
    assert state.with_metadata("a", 1).with_metadata("b", 2).with_metadata("a", 3).metadata == {"a": 3, "b": 2}
    assert state.with_response_format({"a": 1}).context.response_format == {"a": 1}
    assert state.with_response_format({"a": 1}).with_response_format(None).context.response_format is None
    assert state.with_model(ModelConfig("m")).model == ModelConfig("m")
    assert state.with_model(ModelConfig("m")).with_model(None).model is None
    assert state.with_task("t").task == "t"
    assert state.with_parent_agent("p").parent_agent_id == "p"
    assert state.with_stop_signal(SIGNAL).stop_reason is StopReason.USER_REQUESTED


def test_each_execution_is_counted():
    """Starting an execution makes a fresh one and counts it; preparing for the next keeps the count and the context."""
    first = AgentState().with_messages(Message.user("hi")).with_execution_started()
    second = first.for_next_execution().with_execution_started()
    assert (first.execution_count, second.execution_count) == (1, 2)
    assert first.execution.execution_id != second.execution.execution_id
    assert first.for_next_execution().execution is None
    assert second.messages == first.messages


def test_chained_changes_stay_in_one_execution():
    """Changes made one on the other share the execution that the first of them made."""
    state = AgentState().with_current_step(working())
    started = state.execution.execution_id
    state = state.with_stop_signal(SIGNAL).with_current_step_completed().with_continuation_requested()
    assert state.execution.execution_id == started


def test_output_messages_are_tagged_with_where_they_come_from():
    """A step's output joins the transcript tagged with step, execution and agent, and keeps its own metadata."""
    step = AgentStep.of([Message.assistant("x", metadata={"lang": "en"})])
    state = AgentState().with_messages(Message.user("hi")).with_current_step(step)
    tags = {"step_id": step.id, "execution_id": state.execution.execution_id, "agent_id": state.agent_id}
    assert state.messages[-1].metadata == {"lang": "en", **tags}
    assert state.messages[0].metadata == {}
    assert step.output_messages[0].metadata == {"lang": "en"}


@pytest.mark.parametrize(("step", "is_trace"), [(working(), True), (failing(), True), (answer(), False)])
def test_only_steps_that_are_not_final_leave_traces(step, is_trace):
    """Messages of tool and error steps are traces; a final response has no such flag."""
    state = AgentState().with_current_step(step)
    assert {message.is_trace for message in state.messages} == {is_trace}
    assert all(("is_trace" in message.metadata) is is_trace for message in state.messages)


def test_a_steps_output_is_the_transcripts_own_messages():
    """The step on the state refers to the messages in the transcript, without copies."""
    state = done(AgentState().with_messages(Message.user("hi")), working())
    (step,) = state.steps
    assert [*step.output_messages] == [*state.messages][1:]
    assert step.output_messages.pieces[0].tape is state.transcript.pieces[0].tape


def test_a_step_that_grows_adds_what_is_new():
    """The same step with more output adds only the new messages."""
    step = AgentStep.of([Message.assistant(tool_calls=[CALL])])
    state = AgentState().with_current_step(step)
    grown = state.execution.current_step.output_messages.append(Message.tool(CALL.id, "blue"))
    state = state.with_current_step(msgspec.structs.replace(step, output_messages=grown))
    assert [message.role for message in state.messages] == ["assistant", "tool"]
    assert state.messages[-1].metadata["step_id"] == step.id
    assert state.execution.current_step.output_messages == state.transcript


def test_output_that_is_handed_over_alone_is_that_of_a_step_that_grows():
    """Both ways of adding a message to a step give the same state."""
    step = AgentStep.of([Message.assistant(tool_calls=[CALL])])
    result = Message.tool(CALL.id, "blue")
    before = AgentState().with_messages(Message.user("hi")).with_current_step(step)
    current = before.execution.current_step
    with ids.use(clock=ticking()):
        whole = before.with_current_step(
            msgspec.structs.replace(step, output_messages=step.output_messages.append(result))
        )
    with ids.use(clock=ticking()):
        alone = before.with_step_output(current, result)
    assert alone == whole
    assert [*alone.execution.current_step.output_messages] == [*alone.messages][1:]


def test_a_steps_calls_are_worked_out_once():
    """A step is asked for its calls many times, and never changes."""
    step = AgentStep.of([Message.assistant(tool_calls=[CALL])])
    assert step.tool_calls == (CALL,)
    assert step.tool_calls is step.tool_calls
    assert msgspec.structs.replace(step, output_messages=AgentStep().output_messages).tool_calls == ()


def test_a_step_that_gains_output_knows_the_calls_in_it():
    """They are not searched again, and equal those in its output."""
    more = ToolCall("look", {}, "more")
    state = AgentState().with_step_output(AgentStep(), Message.assistant("Wait.", tool_calls=[CALL]))
    state = state.with_step_output(state.execution.current_step, Message.tool(CALL.id, "blue"))
    state = state.with_step_output(state.execution.current_step, Message.assistant(tool_calls=[more]))
    step = state.execution.current_step
    assert step.__dict__["tool_calls"] == step.tool_calls == (CALL, more)
    assert AgentStep.of(step.output_messages).tool_calls == step.tool_calls


def test_a_step_that_grows_keeps_to_its_own_messages():
    """Messages that others add to the transcript during a step do not become the step's output."""
    step = AgentStep.of([Message.assistant(tool_calls=[CALL])])
    state = AgentState().with_current_step(step).with_messages(Message.user("hurry"))
    grown = step.output_messages.append(Message.tool(CALL.id, "blue"))
    state = state.with_current_step(msgspec.structs.replace(step, output_messages=grown))
    assert [message.role for message in state.messages] == ["assistant", "user", "tool"]
    assert [message.role for message in state.execution.current_step.output_messages] == ["assistant", "tool"]


def test_a_step_that_grows_outlives_a_trim():
    """A step under way keeps its output when the transcript is cut beneath it."""
    step = AgentStep.of([Message.assistant(tool_calls=[CALL])])
    state = AgentState().with_current_step(step)
    state = state.with_transcript(state.transcript.reset())
    grown = step.output_messages.append(Message.tool(CALL.id, "blue"))
    state = state.with_current_step(msgspec.structs.replace(step, output_messages=grown))
    assert [message.role for message in state.messages] == ["tool"]
    assert [message.role for message in state.execution.current_step.output_messages] == ["assistant", "tool"]


def test_debug_summarises():
    """debug() gives the summary that the documents describe, between runs and in one."""
    assert AgentState().debug() == {
        "status": None,
        "execution_count": 0,
        "has_execution": False,
        "execution_id": None,
        "steps": 0,
        "continuation": None,
        "has_errors": False,
        "errors": (),
        "usage": {
            "input_tokens": 0,
            "output_tokens": 0,
            "cache_read_tokens": 0,
            "cache_write_tokens": 0,
            "reasoning_tokens": 0,
            "cost": 0.0,
            "unpriced_tokens": 0,
        },
    }
    state = done(AgentState().with_execution_started(), answer(input_tokens=150, output_tokens=42))
    summary = state.debug()
    assert (summary["status"], summary["execution_id"]) == (ExecutionStatus.IN_PROGRESS, state.execution.execution_id)
    assert (summary["steps"], summary["has_execution"], summary["execution_count"]) == (1, True, 1)
    assert summary["continuation"] == "No Stop Signals; Continuation Requested: No"
    assert (summary["usage"]["input_tokens"], summary["usage"]["output_tokens"]) == (150, 42)


def test_mappings_refuse_mutation():
    """Metadata and response format cannot be changed in place, nor through the dict they were made from."""
    source = {"a": 1}
    state = AgentState(context=AgentContext(metadata=source, response_format=source)).with_metadata("b", 2)
    source["a"] = 9
    for mapping in (state.metadata, state.context.response_format):
        assert mapping["a"] == 1
        with pytest.raises(TypeError):
            mapping["a"] = 2
        with pytest.raises(TypeError):
            mapping.update(a=2)


def test_fields_cannot_be_assigned():
    """A state is frozen."""
    with pytest.raises(AttributeError):
        AgentState().task = "x"


@given(states())
def test_every_reachable_state_can_be_copied_and_summarised(state):
    """deepcopy and pickle give an equal, independent state, and no accessor of it raises."""
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin == state
        twin.with_messages(Message.user("x"))
        assert twin == state
    state.debug()
    assert state.step_count == len(state.steps)
    assert (state.final_response is not None) <= state.has_final_response
    assert len(list(state.current_response)) == len(state.current_response)
    assert state.should_stop in (True, False)


def test_a_response_format_may_be_given_as_a_type() -> None:
    """A type becomes its JSON schema, whether given to the context or to the state."""
    schema = {"type": "array", "items": {"type": "integer"}}
    assert AgentContext(response_format=list[int]).response_format == schema
    assert AgentState().with_response_format(list[int]).context.response_format == schema
    assert AgentState().with_response_format(schema).context.response_format == schema
    with pytest.raises(ConfigurationError):
        AgentState().with_response_format(5)
