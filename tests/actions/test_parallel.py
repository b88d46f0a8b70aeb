"""Several answers to one message: each on record, one selected, and the session goes on from that one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import loops_of

from perdure import (
    AgentDefinition,
    AgentSession,
    Branch,
    ConfigurationError,
    DriverError,
    FewestTokens,
    FileStore,
    First,
    InvalidData,
    Judge,
    LongestAnswer,
    LoopRecord,
    LoopStatus,
    MemoryStore,
    Message,
    ModelConfig,
    ModelReply,
    ModelRequest,
    ResumeExecution,
    SendMessage,
    SendParallel,
    SessionNotActive,
    SessionRecord,
    SessionRuntime,
    SqliteStore,
    SuspendSession,
    ToolCall,
    Usage,
    tool,
)
from perdure.model.step import InferenceResponse
from perdure.testing import Delay, ScriptedDriver

AGENT = AgentDefinition("agent", model="own", system_prompt="Be kind.")
CONFIGS = ("brief", "long", "slow")
JUDGED = Usage(input_tokens=100, output_tokens=1)


@pytest.fixture(params=["memory", "sqlite", "file"])
def a_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SqliteStore(tmp_path / "sessions.db")
    return FileStore(tmp_path / "sessions")


def said(text: str, *, tokens: int = 5) -> ModelReply:
    return ModelReply(Message.assistant(text), InferenceResponse("stop", Usage(input_tokens=10, output_tokens=tokens)))


def replies(request: ModelRequest) -> Any:
    """What each model says; the judge finds the answer with the number 1 the best."""
    match request.model.name:
        case "brief":
            return said("Yes.", tokens=2)
        case "long":
            return Delay(0.01, said("Yes, that is quite so.", tokens=20))
        case "slow":
            return Delay(0.02, said("Yes, indeed.", tokens=1))
        case "stuck":
            return Delay(60, "never")
        case "broken":
            return DriverError("It is broken.")
        case "judge":
            return ModelReply(Message.assistant("Number 1."), InferenceResponse("stop", JUDGED))
    return f"own: {request.messages[-1].text}"


@asynccontextmanager
async def evaluated(
    a_store: Any, strategy: Any, configs: Sequence[Any] = CONFIGS, *tools: Any
) -> AsyncIterator[tuple[SessionRuntime, AgentSession, SessionRecord]]:
    """A session that a parallel evaluation was executed on, and its record."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        action = SendParallel("Is it?", loops_of(replies, *tools), configs=configs, strategy=strategy)
        after = await runtime.execute(session.id, action)
        assert after.version == 2
        assert not await store.is_claimed(session.id)
        yield runtime, after, await runtime.record(session.id)


def texts(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


def selected(record: SessionRecord) -> list[bool]:
    return [loop.parallel_group.is_selected for loop in in_order(record)]


def in_order(record: SessionRecord) -> Sequence[LoopRecord]:
    """The branches in the order of their configs."""
    return record.parallel_siblings(record.loops[0].loop_id)


async def choose_last(branches: Sequence[Branch]) -> int:
    return branches[-1].index


@pytest.mark.parametrize(
    ("strategy", "index"),
    [
        pytest.param(FewestTokens(), 2, id="fewest tokens"),
        pytest.param(LongestAnswer(), 1, id="longest answer"),
        pytest.param(Judge("judge"), 1, id="judge"),
        pytest.param(lambda branches: branches[0].index, 0, id="function"),
        pytest.param(choose_last, 2, id="async function"),
    ],
)
async def test_a_strategy_selects_among_all_answers(a_store: Any, strategy: Any, index: int) -> None:
    """Every branch runs to its end and is on record; exactly the one that was chosen is selected."""
    answers = ("Yes.", "Yes, that is quite so.", "Yes, indeed.")
    async with evaluated(a_store, strategy) as (_, after, record):
        assert texts(after) == ["Is it?", answers[index]]
        assert selected(record) == [each == index for each in range(3)]
        assert {loop.status for loop in record.loops} == {LoopStatus.COMPLETED}
        for loop in in_order(record):
            assert loop.parallel_group is not None
            assert loop.parallel_group.selected_config_index == index
            assert loop.parallel_group.selected_loop_id == in_order(record)[index].loop_id
            assert loop.continuation_kind.kind == "branch"


async def test_the_first_answer_stops_the_others(a_store: Any) -> None:
    """Those that were still under way are aborted on record, with what they had."""
    async with evaluated(a_store, First(), ("stuck", "brief")) as (runtime, after, record):
        assert texts(after) == ["Is it?", "Yes."]
        assert selected(record) == [False, True]
        assert [loop.status for loop in in_order(record)] == [LoopStatus.ABORTED, LoopStatus.COMPLETED]
        stopped = await runtime.loop(after.id, in_order(record)[0].loop_id)
        assert stopped.status is LoopStatus.ABORTED
        assert stopped.ended_at is not None


async def test_first_is_the_strategy_if_none_is_named(a_store: Any) -> None:
    """Without a strategy the quickest answer goes on."""
    async with evaluated(a_store, None, ("stuck", "brief")) as (_, after, _record):
        assert texts(after) == ["Is it?", "Yes."]


async def test_what_a_judge_has_used_is_on_record(a_store: Any) -> None:
    """Its usage stands with the group, and counts in the session's total."""
    async with evaluated(a_store, Judge("judge")) as (_, _after, record):
        assert [loop.parallel_group.evaluation_usage for loop in record.loops if loop.parallel_group] == [JUDGED] * 3
        assert record.total_usage() == sum((loop.usage for loop in record.loops), start=JUDGED)


async def test_a_failing_branch_takes_no_other_down(a_store: Any) -> None:
    """It is failed on record, with its error; the others are selected among."""
    async with evaluated(a_store, LongestAnswer(), ("broken", "brief", "long")) as (_, after, record):
        assert texts(after)[-1] == "Yes, that is quite so."
        assert [loop.status.value for loop in in_order(record)] == ["failed", "completed", "completed"]
        assert [error.message for error in in_order(record)[0].errors] == ["It is broken."]


async def test_first_passes_over_a_branch_that_has_failed(a_store: Any) -> None:
    """A failure is no answer, however quick it is."""
    async with evaluated(a_store, First(), ("broken", "slow")) as (_, after, _record):
        assert texts(after)[-1] == "Yes, indeed."


async def test_without_any_answer_the_session_stays_as_it_was(a_store: Any) -> None:
    """DriverError says what went wrong, the claim is given back, and the next message can be sent."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        loops = loops_of(replies)
        with pytest.raises(DriverError, match=r"None of the 2 branches .* It is broken"):
            await runtime.execute(session.id, SendParallel("Is it?", loops, configs=["broken", "broken"]))
        assert not await store.is_claimed(session.id)
        record = await runtime.record(session.id)
        assert [loop.status.value for loop in record.loops] == ["failed", "failed"]
        assert selected(record) == [False, False]
        assert texts(await runtime.execute(session.id, SendMessage("Hi", loops))) == ["Hi", "own: Hi"]


@pytest.mark.parametrize("judge", ["broken", "brief"])
async def test_a_judge_that_names_no_answer_leaves_the_session_as_it_was(a_store: Any, judge: str) -> None:
    """DriverError; the claim is given back, and the branches are on record."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=Judge(judge))
        with pytest.raises(DriverError):
            await runtime.execute(session.id, action)
        assert not await store.is_claimed(session.id)
        assert (await runtime.get_session(session.id)).version == 1
        assert len((await runtime.record(session.id)).loops) == 3


async def test_a_function_that_chooses_no_branch_is_told(a_store: Any) -> None:
    """ConfigurationError; the claim is given back."""
    with pytest.raises(ConfigurationError, match="chose branch 7"):
        async with evaluated(a_store, lambda branches: 7):
            raise AssertionError("it was evaluated")


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_evaluation_gives_its_claim_back(a_store: Any, times: int) -> None:
    """No version, no claim; the branches that were under way are aborted on record."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["stuck", "stuck"])
        task = asyncio.create_task(runtime.execute(session.id, action))
        async with asyncio.timeout(30):
            while len(driver.requests) < 2:  # noqa: ASYNC110 (a driver does not tell that it was asked)
                await asyncio.sleep(0.001)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await store.is_claimed(session.id)
        assert (await runtime.get_session(session.id)).version == 1
        record = await runtime.record(session.id)
        assert [loop.status for loop in record.loops] == [LoopStatus.ABORTED, LoopStatus.ABORTED]


async def test_a_config_is_a_name_a_model_or_a_definition(a_store: Any) -> None:
    """A model stands in for the session's model; a definition for its prompt and tools, too."""
    asked: list[ModelRequest] = []

    def reply(request: ModelRequest) -> Any:
        asked.append(request)
        return f"{request.model.name} at your service"

    look = tool(name="look")(lambda: "a cup")
    other = AgentDefinition("other", model="third", system_prompt="Be brief.", tools=("look",))
    configs = ["first", ModelConfig("second", temperature=0.5), other]
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent", model="own", system_prompt="Be kind.", tools=()))
        action = SendParallel("Hi", loops_of(reply, look), configs=configs, strategy=LongestAnswer())
        after = await runtime.execute(session.id, action)
        by_model = {request.model.name: request for request in asked}
        assert set(by_model) == {"first", "second", "third"}
        assert by_model["second"].model.temperature == 0.5
        prompts = {name: request.system_prompt for name, request in by_model.items()}
        assert prompts == {"first": "Be kind.", "second": "Be kind.", "third": "Be brief."}
        assert [spec.name for spec in by_model["third"].tools] == ["look"]
        assert [spec.name for spec in by_model["first"].tools] == []
        assert after.definition == session.definition
        record = await runtime.record(session.id)
        assert [loop.config.model for loop in in_order(record) if loop.config] == ["first", "second", "third"]


async def test_the_sessions_own_model_and_prompt_stay(a_store: Any) -> None:
    """Whatever the selected branch ran with, the session goes on with its own."""
    other = AgentDefinition("other", model="long", system_prompt="Be brief.")
    async with evaluated(a_store, LongestAnswer(), ("brief", other)) as (runtime, after, _record):
        assert texts(after)[-1] == "Yes, that is quite so."
        fresh = await runtime.create(AGENT)
        assert after.state.model == fresh.state.model
        assert after.state.context.system_prompt == "Be kind."
        assert after.definition == AGENT


async def test_the_next_message_goes_on_from_the_selected_branch(a_store: Any) -> None:
    """The model is shown the selected answer, and the new loop's parent is the selected loop."""
    async with evaluated(a_store, LongestAnswer()) as (runtime, after, record):
        driver = ScriptedDriver(["Gladly."])
        went_on = await runtime.execute(after.id, SendMessage("Thanks", loops_of(driver)))
        assert texts(went_on) == ["Is it?", "Yes, that is quite so.", "Thanks", "Gladly."]
        assert [message.text for message in driver.requests[0].messages] == texts(went_on)[:3]
        newest = (await runtime.record(after.id)).loops[-1]
        assert newest.parent_loop_id == in_order(record)[1].loop_id


async def test_branches_that_were_not_selected_stay_readable(a_store: Any) -> None:
    """Each has its messages, turns, events and group, also after the session has gone on."""
    async with evaluated(a_store, LongestAnswer()) as (runtime, after, record):
        await runtime.execute(after.id, SendMessage("Thanks", loops_of(["Gladly."])))
        for loop, answer in zip(in_order(record), ("Yes.", "Yes, that is quite so.", "Yes, indeed."), strict=True):
            whole = await runtime.loop(after.id, loop.loop_id)
            assert [message.text for message in whole.messages][-1] == answer
            assert len(whole.turns) == 1
            assert whole.parallel_group == loop.parallel_group


async def test_branches_use_tools_side_by_side(a_store: Any) -> None:
    """A call and its result belong to the branch that made it."""

    @tool
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return number * 2

    def reply(request: ModelRequest) -> Any:
        number = {"a": 1, "b": 2}[request.model.name]
        return ToolCall("double", {"number": number}) if request.step == 0 else f"It is {request.messages[-1].text}!"

    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent", tools=("double",)))
        action = SendParallel("Go", loops_of(reply, double), configs=["a", "b"], strategy=lambda branches: 1)
        after = await runtime.execute(session.id, action)
        record = await runtime.record(session.id)
        results = [
            [each.result for turn in whole.turns for each in turn.tool_executions]
            for whole in [await runtime.loop(session.id, loop.loop_id) for loop in in_order(record)]
        ]
        assert results == [[2], [4]]
        assert [result.text for m in after.state.messages for result in m.tool_results] == ["4"]


async def test_a_message_that_was_queued_meanwhile_is_sent_afterwards(a_store: Any) -> None:
    """Posted while the branches run, it is answered once one of them is selected."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["slow", "long"], strategy=_after_a_message(runtime))
        await runtime.execute(session.id, action)
        after = await runtime.get_session(session.id)
        assert texts(after)[-2:] == ["And now?", "own: And now?"]
        assert await store.read(session.id, inbox=True) == []


def _after_a_message(runtime: SessionRuntime) -> Any:
    """A strategy that, while the session is claimed, sends it another message."""

    async def choose(branches: Sequence[Branch]) -> int:
        (info,) = await runtime.list_sessions()
        await runtime.execute(info.id, SendMessage("And now?", loops_of([]), when_busy="queue"))
        return 0

    return choose


async def test_an_evaluation_that_was_saved_is_not_resumed(a_store: Any) -> None:
    """ResumeExecution finds nothing to go on with, and leaves the session as it is."""
    async with evaluated(a_store, FewestTokens()) as (runtime, after, _record):
        assert await runtime.execute(after.id, ResumeExecution(loops_of(replies))) == after


async def test_it_needs_an_active_session(a_store: Any) -> None:
    """A suspended one is refused before any model is called."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        await runtime.execute(session.id, SuspendSession())
        driver = ScriptedDriver([])
        with pytest.raises(SessionNotActive):
            await runtime.execute(session.id, SendParallel("Hi", loops_of(driver), configs=["a", "b"]))
        assert driver.requests == []


@pytest.mark.parametrize("configs", [(), ("one",), "two"])
def test_it_compares_at_least_two_configs(configs: Any) -> None:
    """One, none, or a text that is taken for several is an error at once."""
    with pytest.raises(InvalidData, match="at least two"):
        SendParallel("Hi", loops_of([]), configs=configs)


async def test_it_runs_without_a_store_too() -> None:
    """Outside of a runtime nothing is recorded, and the selected branch comes back."""
    session = await SessionRuntime(MemoryStore()).create(AGENT)
    action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=LongestAnswer())
    assert texts(await action.execute_on(session)) == ["Is it?", "Yes, that is quite so."]
