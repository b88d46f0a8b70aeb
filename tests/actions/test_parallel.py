"""Several answers to one message: each is on record, one is selected, and the session continues from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import loops_of

from perdure import (
    AgentDefinition,
    AgentSession,
    Branch,
    ChangeModel,
    ConfigurationError,
    DriverError,
    ExecutionStatus,
    FewestTokens,
    FileStore,
    First,
    InvalidData,
    Judge,
    LongestAnswer,
    LoopFactory,
    LoopRecord,
    LoopStatus,
    MemoryStore,
    Message,
    ModelConfig,
    ModelReply,
    ModelRequest,
    Rejected,
    ResumeExecution,
    SendMessage,
    SendParallel,
    SessionNotActive,
    SessionRecord,
    SessionRuntime,
    SqliteStore,
    StopReason,
    StoreError,
    SuspendSession,
    ToolCall,
    Usage,
    recover,
    tool,
)
from perdure.model.ids import use
from perdure.model.loop_events import ParallelLoopEnd
from perdure.model.step import InferenceResponse
from perdure.protocols import Appended, Claim, Entry
from perdure.testing import Delay, FailingStore, FrozenClock, ScriptedDriver

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

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
    """Return the answer of each model; the judge finds the answer with the number 1 the best."""
    match request.model.name:
        case "brief":
            return said("Yes.", tokens=2)
        case "long":
            return Delay(0.1, said("Yes, that is quite so.", tokens=20))
        case "slow":
            return Delay(0.2, said("Yes, indeed.", tokens=1))
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
    """Open a session that a parallel evaluation was executed on, and its record."""
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
    """Return the branches in the order of their configs."""
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
            assert loop.continuation_kind.kind == "initial", "it has no parent"


async def test_the_first_answer_stops_the_others(a_store: Any) -> None:
    """Branches that were still under way are aborted on record, with their messages so far."""
    async with evaluated(a_store, First(), ("stuck", "brief")) as (runtime, after, record):
        assert texts(after) == ["Is it?", "Yes."]
        assert selected(record) == [False, True]
        assert [loop.status for loop in in_order(record)] == [LoopStatus.ABORTED, LoopStatus.COMPLETED]
        stopped = await runtime.loop(after.id, in_order(record)[0].loop_id)
        assert stopped.status is LoopStatus.ABORTED
        assert stopped.ended_at is not None


async def test_first_is_the_strategy_if_none_is_named(a_store: Any) -> None:
    """Without a strategy the session continues with the quickest answer."""
    async with evaluated(a_store, None, ("stuck", "brief")) as (_, after, _record):
        assert texts(after) == ["Is it?", "Yes."]


async def test_what_a_judge_has_used_is_on_record(a_store: Any) -> None:
    """Its usage is kept with the group, and counts in the session's total."""
    async with evaluated(a_store, Judge("judge")) as (_, after, record):
        assert after.info.usage == record.total_usage()
        assert [loop.parallel_group.evaluation_usage for loop in record.loops if loop.parallel_group] == [JUDGED] * 3
        assert record.total_usage() == sum((loop.usage for loop in record.loops), start=JUDGED)


async def test_a_failing_branch_takes_no_other_down(a_store: Any) -> None:
    """It is failed on record, with its error; one of the others is selected."""
    async with evaluated(a_store, LongestAnswer(), ("broken", "brief", "long")) as (_, after, record):
        assert texts(after)[-1] == "Yes, that is quite so."
        assert [loop.status.value for loop in in_order(record)] == ["failed", "completed", "completed"]
        assert [error.message for error in in_order(record)[0].errors] == ["It is broken."]


async def test_first_passes_over_a_branch_that_has_failed(a_store: Any) -> None:
    """A failure does not count as an answer, however quick it is."""
    async with evaluated(a_store, First(), ("broken", "slow")) as (_, after, _record):
        assert texts(after)[-1] == "Yes, indeed."


async def test_without_any_answer_the_session_stays_as_it_was(a_store: Any) -> None:
    """DriverError says what went wrong, the claim is released, and the next message can be sent."""
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
    """It raises DriverError; the claim is released, and the branches are on record."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=Judge(judge))
        with pytest.raises(DriverError):
            await runtime.execute(session.id, action)
        assert not await store.is_claimed(session.id)
        assert (await runtime.get_session(session.id)).version == 1
        assert len((await runtime.record(session.id)).loops) == 3


async def test_what_a_judge_has_used_in_vain_is_on_record(a_store: Any) -> None:
    """A judge that names no answer has used tokens: the group's end and the session's total have them."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=Judge("brief"))
        with pytest.raises(DriverError):
            await runtime.execute(session.id, action)
        record = await runtime.record(session.id)
        spent = [loop.parallel_group.evaluation_usage for loop in record.loops if loop.parallel_group]
        assert spent == [Usage(10, 2)] * 3
        assert record.total_usage() == sum((loop.usage for loop in record.loops), start=Usage(10, 2))


async def test_a_definition_is_asked_by_the_model_that_it_names(a_store: Any) -> None:
    """The session's model does not matter; a definition that names no model uses the session's."""
    asked: list[str] = []

    def reply(request: ModelRequest) -> Any:
        asked.append(request.model.name)
        return "Hello."

    configs = [AgentDefinition("one", model="first"), AgentDefinition("two"), "third"]
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent", model="own"))
        await runtime.execute(session.id, ChangeModel("override"))
        action = SendParallel("Hi", loops_of(reply), configs=configs, strategy=LongestAnswer())
        after = await runtime.execute(session.id, action)
        assert sorted(asked) == ["first", "override", "third"]
        assert after.state.model is not None
        assert after.state.model.name == "override"


@pytest.mark.parametrize("answer", [lambda branches: branches[0], lambda branches: True, lambda branches: 7])
async def test_a_function_that_chooses_no_branch_is_told(a_store: Any, answer: Any) -> None:
    """A branch, a bool and a number too many are ConfigurationError that says what to return."""
    with pytest.raises(ConfigurationError, match="Return the `index`"):
        async with evaluated(a_store, answer):
            raise AssertionError("it was evaluated")


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_evaluation_gives_its_claim_back(a_store: Any, times: int) -> None:
    """It leaves no new version and no claim; the branches that were under way are aborted on record."""
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
    """A model replaces the session's model; a definition also replaces its prompt and tools."""
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
    """The session continues with its own, whatever the selected branch ran with."""
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
    """Each has its messages, turns, events and group, also after the session has continued."""
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
    """A message posted while the branches run is answered once one of them is selected."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["slow", "long"], strategy=_after_a_message(runtime))
        await runtime.execute(session.id, action)
        await runtime.idle()
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
    """ResumeExecution finds nothing to continue, and leaves the session unchanged."""
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
    """Without a runtime nothing is recorded, and the selected branch comes back."""
    session = await SessionRuntime(MemoryStore()).create(AGENT)
    action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=LongestAnswer())
    assert texts(await action.execute_on(session)) == ["Is it?", "Yes, that is quite so."]


LOOK = "perdure.actions.inbox.LOOK_EVERY"


async def asked_times(driver: ScriptedDriver, times: int) -> None:
    """Return once a driver has been asked that number of times."""
    async with asyncio.timeout(30):
        while len(driver.requests) < times:  # noqa: ASYNC110 (a driver does not tell that it was asked)
            await asyncio.sleep(0.001)


async def test_an_evaluation_can_be_cancelled_through_the_inbox(a_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process can do so: the branches are aborted; the session keeps the message, stopped, as with SendMessage."""
    monkeypatch.setattr(LOOK, 0.01)
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["stuck", "stuck"], strategy=LongestAnswer())
        task = asyncio.create_task(runtime.execute(session.id, action))
        await asked_times(driver, 2)
        await store.post(session.id, Entry("cancel"))
        after = await asyncio.wait_for(task, 10)
        assert (after.version, texts(after)) == (2, ["Is it?"])
        assert (after.state.status, after.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)
        record = await runtime.record(session.id)
        assert [loop.status for loop in record.loops] == [LoopStatus.ABORTED, LoopStatus.ABORTED]
        assert selected(record) == [True, False]
        assert not await store.is_claimed(session.id)
        assert await store.read(session.id, inbox=True) == []
        assert await runtime.execute(session.id, ResumeExecution(loops_of(replies))) == after
        went_on = await runtime.execute(session.id, SendMessage("Hi", loops_of(replies)))
        assert texts(went_on) == ["Is it?", "Hi", "own: Hi"]


class Together(MemoryStore):
    """Delays the report that a branch's end is on record until the ends of two are."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Barrier(2)

    async def append(self, claim: Claim, **new: Any) -> Appended:
        appended = await super().append(claim, **new)
        if new.get("log") and any(entry.kind == "agent_end" for entry in new["entries"]):
            await self._ended.wait()
        return appended


async def test_the_quickest_branch_is_first_also_when_both_are_on_record_at_once() -> None:
    """A busy store writes them so: the order is that of their ends, not of the configs."""
    async with Together() as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        after = await runtime.execute(session.id, SendParallel("Is it?", loops_of(replies), configs=["long", "brief"]))
        assert texts(after) == ["Is it?", "Yes."]


async def test_a_cancelled_judge_leaves_the_first_answer(a_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches had ended by then; the session continues from the quickest."""
    monkeypatch.setattr(LOOK, 0.01)
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["long", "brief"], strategy=Judge("stuck"))
        task = asyncio.create_task(runtime.execute(session.id, action))
        await asked_times(driver, 3)
        await store.post(session.id, Entry("cancel"))
        assert texts(await asyncio.wait_for(task, 10)) == ["Is it?", "Yes."]


async def test_a_cancelled_evaluation_does_not_lose_what_was_posted(
    a_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued messages, and those that were to steer, are sent in order once the branches are stopped."""
    monkeypatch.setattr(LOOK, 0.01)
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        action = SendParallel("Is it?", loops_of(driver), configs=["stuck", "stuck"])
        task = asyncio.create_task(runtime.execute(session.id, action))
        await asked_times(driver, 2)
        await runtime.execute(session.id, SendMessage("A", loops_of([]), when_busy="queue"))
        await runtime.execute(session.id, SendMessage("B", loops_of([]), when_busy="steer"))
        await store.post(session.id, Entry("cancel"))
        await asyncio.wait_for(task, 10)
        await runtime.idle()
        after = await runtime.get_session(session.id)
        assert texts(after) == ["Is it?", "A", "own: A", "B", "own: B"]
        assert await store.read(session.id, inbox=True) == []


async def test_a_steering_message_waits_for_the_selection(a_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single branch cannot be steered: the message is answered once one of them is selected."""
    monkeypatch.setattr(LOOK, 0.001)

    def reply(request: ModelRequest) -> Any:
        return Delay(0.5, "So.") if request.model.name in ("a", "b") else replies(request)

    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(reply)
        action = SendParallel("Is it?", loops_of(driver), configs=["a", "b"], strategy=LongestAnswer())
        task = asyncio.create_task(runtime.execute(session.id, action))
        await asked_times(driver, 2)
        await runtime.execute(session.id, SendMessage("Quick!", loops_of([]), when_busy="steer"))
        await task
        await runtime.idle()
        assert texts(await runtime.get_session(session.id)) == ["Is it?", "So.", "Quick!", "own: Quick!"]
        assert await store.read(session.id, inbox=True) == []


async def test_a_wish_to_cancel_an_earlier_run_is_not_for_the_evaluation(
    a_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request from before its start ends nothing."""
    monkeypatch.setattr(LOOK, 0.001)
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        await store.post(session.id, Entry("cancel"))
        action = SendParallel("Is it?", loops_of(replies), configs=CONFIGS, strategy=LongestAnswer())
        assert texts(await runtime.execute(session.id, action))[-1] == "Yes, that is quite so."
        assert await store.read(session.id, inbox=True) == []


async def test_calls_that_need_approval_are_refused_in_a_branch(a_store: Any) -> None:
    """A branch cannot ask a person: the model is told so and continues, and the refusal is on record."""
    made: list[int] = []
    pay = tool(name="pay", needs_approval=lambda arguments: arguments["amount"] > 10)(made_by(made))

    def reply(request: ModelRequest) -> Any:
        amount = {"much": 50, "little": 5}[request.model.name]
        return ToolCall("pay", {"amount": amount}) if request.step == 0 else f"{request.model.name}!"

    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent", tools=("pay",)))
        action = SendParallel("Pay", loops_of(reply, pay), configs=["much", "little"], strategy=LongestAnswer())
        after = await runtime.execute(session.id, action)
        assert (after.status.value, made) == ("active", [5])
        record = await runtime.record(session.id)
        assert [loop.status.value for loop in in_order(record)] == ["completed", "completed"]
        whole = await runtime.loop(session.id, in_order(record)[0].loop_id)
        (refused,) = (each for turn in whole.turns for each in turn.tool_executions)
        assert refused.error is not None
        assert "needs a person's approval, which nobody can be asked about" in refused.error.message


def made_by(made: list[int]) -> Any:
    def pay(amount: int) -> str:
        made.append(amount)
        return "paid"

    return pay


async def test_a_sub_agent_that_waits_for_approval_ends_in_a_branch(a_store: Any) -> None:
    """Its call is an error with the reason, its session is ended, and its usage is charged."""
    made: list[int] = []
    pay = tool(name="pay", needs_approval=True)(made_by(made))
    helper = AgentDefinition("helper", system_prompt="helper", tools=("pay",))

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "helper":
            return ToolCall("pay", {"amount": 1})
        if request.step == 0 and request.model.name == "asks":
            return ToolCall("helper", {"prompt": "Pay."})
        return f"{request.model.name} is done: {request.messages[-1].text}"

    loops = LoopFactory(driver=ScriptedDriver(reply), tools=[pay], subagents=[helper])
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent", tools=("helper",)))
        action = SendParallel("Go", loops, configs=["asks", "b"], strategy=LongestAnswer())
        after = await runtime.execute(session.id, action)
        assert "ApprovalImpossible: Agent helper needs a person's approval (pay)" in texts(after)[-1]
        (info,) = await runtime.list_sessions(parent=session.id)
        child = await runtime.get_session(info.id)
        assert (child.status.value, child.state.status, made) == ("failed", ExecutionStatus.STOPPED, [])
        assert after.state.steps[0].tool_executions[0].usage == child.state.usage
        assert child.state.usage.total_tokens > 0


@pytest.mark.parametrize("how", ["failed", "cancelled", "unjudged"])
async def test_an_evaluation_that_was_given_up_is_not_resumed(a_store: Any, how: str) -> None:
    """The record says that no branch was selected: ResumeExecution changes nothing, and calls no model."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = ScriptedDriver(replies)
        models = {"failed": "broken", "cancelled": "stuck", "unjudged": "brief"}
        strategy = Judge("broken") if how == "unjudged" else LongestAnswer()
        action = SendParallel("Is it?", loops_of(driver), configs=[models[how]] * 2, strategy=strategy)
        task = asyncio.create_task(runtime.execute(session.id, action))
        if how == "cancelled":
            await asked_times(driver, 2)
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else DriverError):
            await task
        asked = len(driver.requests)
        after = await runtime.execute(session.id, ResumeExecution(loops_of(driver)))
        assert (after.version, len(driver.requests)) == (1, asked)
        last = [event async for event in runtime.events(session.id)][-1]
        assert isinstance(last, ParallelLoopEnd)
        assert (last.selected_loop_id, last.selected_config_index) == (None, None)
        assert selected(await runtime.record(session.id)) == [False, False]
        assert texts(await runtime.execute(session.id, SendMessage("Hi", loops_of(replies)))) == ["Hi", "own: Hi"]


async def test_a_branch_begins_as_other_loops_do(a_store: Any) -> None:
    """It begins with the message it answers, which is stored once for all branches and read back with each."""
    async with evaluated(a_store, LongestAnswer()) as (runtime, after, record):
        for loop in record.loops:
            whole = await runtime.loop(after.id, loop.loop_id)
            assert [message.role for message in whole.messages] == ["user", "assistant"]
            assert whole.messages[0] == after.state.messages[0]
            log, stop = await runtime.journal.log_of(after.id, loop.loop_id)  # type: ignore[union-attr]
            assert [m.role for m in await runtime.journal.messages(log, 0, stop)] == ["assistant"]  # type: ignore[union-attr]


async def test_branches_of_a_later_message_are_branches_of_the_last_loop(a_store: Any) -> None:
    """They have a parent, and differ by the number of their config."""
    async with evaluated(a_store, First()) as (runtime, after, _):
        parent = after.state.execution.execution_id  # type: ignore[union-attr]
        await runtime.execute(after.id, SendParallel("And?", loops_of(replies), configs=["a", "b"]))
        branches = (await runtime.record(after.id)).children_of(parent)
        assert [(loop.continuation_kind.kind, loop.continuation_kind.tag) for loop in branches] == [
            ("branch", "0"),
            ("branch", "1"),
        ]


async def test_the_events_of_a_group_name_session_and_agent(a_store: Any) -> None:
    """They do so also when they are read back."""
    async with evaluated(a_store, First()) as (runtime, after, _):
        told = [event async for event in runtime.events(after.id)]
        assert {event.agent_id for event in told} == {after.state.agent_id}
        assert {event.session_id for event in told} == {after.id}


async def test_input_filters_hold_for_branches_too(a_store: Any) -> None:
    """No model is shown a message that a filter refuses."""
    driver = ScriptedDriver(replies)
    loops = LoopFactory(driver=driver, input_filters=[lambda messages: Rejected("not that")])
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        with pytest.raises(DriverError):
            await runtime.execute(session.id, SendParallel("Is it?", loops, configs=["a", "b"]))
        assert driver.requests == []
        record = await runtime.record(session.id)
        assert [loop.status for loop in record.loops] == [LoopStatus.REJECTED, LoopStatus.REJECTED]


async def test_a_group_that_was_given_up_as_its_process_died_leaves_no_claim() -> None:
    """Killed between the end on record and the release: recovery has nothing to continue, and clears the claim."""
    clock, store = FrozenClock(tick=0.001), MemoryStore()
    with use(clock=clock):
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        release, store.release = store.release, _nothing  # type: ignore[method-assign]
        with pytest.raises(DriverError):
            await runtime.execute(session.id, SendParallel("Is it?", loops_of(replies), configs=["broken", "broken"]))
        store.release = release  # type: ignore[method-assign]
        clock.advance(3600)
        assert await store.lapsed() == [session.id]
        await recover(runtime, loops_of(replies))
        assert await store.lapsed() == []
        assert (await runtime.get_session(session.id)).version == 1


async def _nothing(*given: Any, **named: Any) -> None:
    return None


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_the_first_answer_is_the_first_after_a_crash_too(after: bool) -> None:
    """Answers are on record in the order they came; a function that chose is gone by then."""
    for call in range(1, 30):
        store, clock = MemoryStore(), FrozenClock(tick=0.001)
        failing = FailingStore(store)
        with use(clock=clock):
            session = await SessionRuntime(store).create(AGENT)
            failing.crash(call=call, after=after)
            action = SendParallel(
                "Is it?", loops_of(replies), configs=["long", "brief"], strategy=lambda got: got[0].index
            )
            try:
                await SessionRuntime(failing).execute(session.id, action)
            except StoreError:
                clock.advance(60)
                await recover(SessionRuntime(store), loops_of(replies))
            kept = await SessionRuntime(store).get_session(session.id)
        assert texts(kept) in ([], ["Is it?", "Yes."])
        if not failing.has_crashed:
            break
    assert texts(kept)
    assert 6 < call < 29


@pytest.mark.parametrize("after", [False, True], ids=["lost", "written all the same"])
async def test_an_append_that_fails_once_repeats_no_call_of_a_branch(after: bool) -> None:
    """A branch's calls are written even as the store fails: recovery makes no call twice."""
    for call in range(1, 8):
        called: list[str] = []

        @tool
        async def charge(who: str) -> str:
            called.append(who)  # noqa: B023 (called in this round)
            return who

        def reply(request: ModelRequest) -> Any:
            return ToolCall("charge", {"who": request.model.name}) if request.step == 0 else "Done."

        store = FailingStore(MemoryStore())
        runtime, loops = SessionRuntime(store), loops_of(reply, charge)
        session = await runtime.create(AgentDefinition("agent", tools=("charge",)))
        store.fail("append", call=call, after=after)
        action = SendParallel("Go", loops, configs=["a", "b"], strategy=lambda branches: branches[0].index)
        try:
            await runtime.execute(session.id, action)
        except StoreError:
            await recover(runtime, loops)
        record = await runtime.record(session.id)
        assert all(loop.status is not LoopStatus.RUNNING for loop in record.loops)
        assert sorted(called) == await callers_with_an_outcome(runtime, record)


async def callers_with_an_outcome(runtime: SessionRuntime, record: SessionRecord) -> list[str]:
    """Return the callers whose calls are on record with an outcome."""
    loops = [await runtime.loop(record.session_id, loop.loop_id) for loop in record.loops]
    executions = (each for loop in loops for turn in loop.turns for each in turn.tool_executions)
    return sorted(str(each.result) for each in executions if each.error is None)


async def test_an_evaluation_in_which_something_was_redacted_is_resumed(a_store: Any) -> None:
    """The redaction's entry lies between those of the group, and hides neither it nor its selection."""
    clock, seen = FrozenClock(tick=0.001), 0
    async with a_store as store:
        for call in range(1, 30):
            failing = FailingStore(store)
            with use(clock=clock):
                session = await SessionRuntime(store).create(AGENT)
                failing.crash(call=call, after=True)
                with suppress(StoreError):
                    action = SendParallel(
                        "Is it?", loops_of(replies), configs=["brief", "long"], strategy=LongestAnswer()
                    )
                    await SessionRuntime(failing).execute(session.id, action)
                log, end = await store.log_of(session.id)
                if end == 0:
                    continue
                seen += 1
                (asked,) = await store.messages(log, 0, 1)
                for _ in range(2):  # the second time there is nothing to be resumed
                    clock.advance(60)
                    await store.redact(session.id, [asked.id])
                    await recover(SessionRuntime(store), loops_of(replies), session_id=session.id)
                kept = await SessionRuntime(store).get_session(session.id)
                assert texts(kept) == ["[redacted]", "Yes, that is quite so."]
                assert selected(await SessionRuntime(store).record(session.id)) == [False, True]
            if not failing.has_crashed:
                break
    assert seen > 4
