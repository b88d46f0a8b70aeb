"""A run of a session: it can be cancelled from inside and outside, excludes others, and is never half saved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import Heard, HeldDriver, loops_of
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    AgentSession,
    ClaimLost,
    Entry,
    EventBus,
    ExecutionStatus,
    Interceptor,
    InvalidData,
    LoopFactory,
    MemoryStore,
    Message,
    MessageEnd,
    ModelConfig,
    ResumeExecution,
    RunInterrupted,
    SendMessage,
    SessionConflict,
    SessionRuntime,
    SessionSaved,
    SessionStage,
    SqliteStore,
    StopReason,
    StoreError,
    ToolCall,
    recover,
    tool,
)
from perdure.model.record import LoopStatus
from perdure.protocols import Terms
from perdure.testing import FailingStore
from perdure.testing.scripted import Delay, ScriptedDriver

AGENT = AgentDefinition("agent")
LOOK = "perdure.actions.inbox.LOOK_EVERY"


@pytest.fixture(params=["memory", "sqlite"])
def a_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "sessions.db")


class Hanging:
    """A tool that hangs until it is cancelled."""

    def __init__(self) -> None:
        self.is_called = asyncio.Event()
        self.was_cancelled = False
        self.tool = tool(name="hang")(self.hang)

    async def hang(self) -> None:
        self.is_called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def texts(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


async def cancelled(task: asyncio.Task[Any], *, times: int = 1) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
async def test_a_model_call_can_be_cancelled(a_store: Any, times: int) -> None:
    """task.cancel() saves a version stopped at the user's request, and raises CancelledError in the caller."""
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        driver = HeldDriver(["never"])
        task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
        await driver.is_asked.wait()
        await cancelled(task, times=times)
        after = await runtime.get_session(session.id)
        assert (after.version, texts(after)) == (2, ["Hi"])
        assert (after.state.status, after.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)
        assert [entry.kind for entry in await store.read(session.id)][-1] == "agent_end"
        assert not await store.is_claimed(session.id)


async def has_returned_one(store: Any, session_id: str) -> bool:
    return any(entry.kind == "tool_execution_end" for entry in await store.read(session_id))


@pytest.mark.parametrize("how", ["task", "inbox"])
async def test_a_tool_can_be_cancelled(a_store: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run keeps the call and the other results; after a cancel through the inbox the caller gets the session."""
    monkeypatch.setattr(LOOK, 0.01)
    hanging = Hanging()
    add = tool(name="add")(lambda: 5)
    script = ScriptedDriver([[ToolCall("add"), ToolCall("hang")], "never"])
    async with a_store as store:
        runtime = SessionRuntime(store)
        session = await runtime.create(AGENT)
        task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(script, add, hanging.tool))))
        await hanging.is_called.wait()
        await until(partial(has_returned_one, store, session.id))
        if how == "task":
            await cancelled(task)
        else:
            await store.post(session.id, Entry("cancel"))
            assert (await task).state.stop_reason is StopReason.USER_REQUESTED
        after = await runtime.get_session(session.id)
        assert (hanging.was_cancelled, after.state.status) == (True, ExecutionStatus.STOPPED)
        assert texts(after) == ["Hi", "", "5"]
        assert (after.state.step_count, not await store.is_claimed(session.id)) == (1, True)
        assert await store.read(session.id, inbox=True) == []
        again = await runtime.execute(session.id, SendMessage("Again", loops_of(["Hello."])))
        assert texts(again)[-2:] == ["Again", "Hello."]


async def test_a_model_call_can_be_cancelled_through_the_inbox() -> None:
    """Any process can do so: the next look into the inbox ends the run as stopped."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    driver = HeldDriver(["never"])
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
    await driver.is_asked.wait()
    await store.post(session.id, Entry("cancel"))
    after = await task
    assert (after.state.status, after.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)


async def test_a_wish_to_cancel_is_for_the_run_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that came too late for the last run does not end the next."""
    monkeypatch.setattr(LOOK, 0.005)
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    await store.post(session.id, Entry("cancel"))
    after = await runtime.execute(session.id, SendMessage("Hi", loops_of([Delay(0.03, "Hello.")])))
    assert (after.state.status, texts(after)) == (ExecutionStatus.COMPLETED, ["Hi", "Hello."])


async def test_a_cancelled_run_does_not_lose_what_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages posted before the request to cancel are sent after it, the late steering ones too."""
    monkeypatch.setattr(LOOK, 0.01)
    store, heard, bus = MemoryStore(), Heard(), EventBus()
    bus.wiretap(heard.emit)
    runtime = SessionRuntime(store, events=bus)
    session = await runtime.create(AGENT)
    driver = HeldDriver(lambda request: f"Re: {request.messages[-1].text}")
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
    await driver.is_asked.wait()
    await runtime.execute(session.id, SendMessage("A", loops_of([]), when_busy="queue"))
    await runtime.execute(session.id, SendMessage("B", loops_of([]), when_busy="steer"))
    await store.post(session.id, Entry("cancel"))
    await heard.event_of(SessionSaved, 2)
    driver.may_answer.set()
    await task
    await runtime.idle()
    assert texts(await runtime.get_session(session.id)) == ["Hi", "A", "Re: A", "B", "Re: B"]
    assert await store.read(session.id, inbox=True) == []


async def test_a_run_that_has_not_begun_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled before its first event: no version, no claim, nothing on record."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    is_asked = asyncio.Event()

    async def hang(*given: Any, **named: Any) -> Any:
        is_asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(store, "find_key", hang)
        task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."]), key="once")))
        await is_asked.wait()
        await cancelled(task)
    assert (await runtime.get_session(session.id)).version == 1
    assert (await store.read(session.id), await store.is_claimed(session.id)) == ([], False)


@pytest.mark.parametrize("verb", ["claim", "append"])
async def test_a_write_under_way_is_seen_through(verb: str, tmp_path: Path) -> None:
    """If it is cancelled while the store writes, it releases the claim, and the write counts once."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await _cancel_during(verb, store)


async def _cancel_during(verb: str, store: SqliteStore) -> None:
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    write, is_writing = getattr(store, verb), asyncio.Event()

    async def slow(*given: Any, **named: Any) -> Any:
        done = await write(*given, **named)
        is_writing.set()
        await asyncio.sleep(0.02)
        return done

    setattr(store, verb, slow)
    add = tool(name="add")(lambda: 5)
    driver = ScriptedDriver([ToolCall("add"), "Done."])
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver, add))))
    await is_writing.wait()
    await cancelled(task)
    after = await runtime.get_session(session.id)
    assert (after.version, after.state.stop_reason) == (2, StopReason.USER_REQUESTED)
    assert texts(after)[0] == "Hi"
    assert not await store.is_claimed(session.id)
    logged = await store.messages(*(await store.log_of(session.id))[:1], 0, (await store.log_of(session.id))[1])
    assert len({message.id for message in logged}) == len(logged)


async def test_a_cancellation_between_two_steps_ends_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a steering message is being delivered the run is between steps, and still ends in good order."""
    monkeypatch.setattr(LOOK, 0.005)
    store, heard = MemoryStore(), Heard()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    is_told = asyncio.Event()

    async def hang(event: object) -> None:
        heard.append(event)
        if isinstance(event, MessageEnd) and event.message.text == "Left!":
            is_told.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(heard, "emit", hang)
    rest = tool(name="rest")(lambda: __import__("time").sleep(0.03))
    loops = loops_of([ToolCall("rest"), "Done."], rest, events=heard)
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops)))
    await asyncio.sleep(0.005)
    await runtime.execute(session.id, SendMessage("Left!", loops_of([]), when_busy="steer"))
    await is_told.wait()
    await cancelled(task)
    after = await runtime.get_session(session.id)
    assert (after.state.stop_reason, texts(after)[-1]) == (StopReason.USER_REQUESTED, "Left!")


def failing(error: Exception) -> Callable[..., Any]:
    async def fail(*given: Any, **named: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", [SessionConflict("s", 1, 2), StoreError("disk full"), ClaimLost("s", 1)])
async def test_a_save_that_fails_leaves_the_run_to_be_recovered(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised and the version has not moved. Recovery saves the answer without asking the model again."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", failing(error))
        with pytest.raises(type(error)):
            await runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."])))
    assert (await runtime.get_session(session.id)).version == 1
    with pytest.raises(RunInterrupted):
        await runtime.execute(session.id, SendMessage("Again", loops_of(["Never."])))
    driver = ScriptedDriver(["Never."])
    assert (await recover(runtime, loops_of(driver))).resumed == (session.id,)
    assert (texts(await runtime.get_session(session.id)), driver.requests) == (["Hi", "Hello."], [])
    after = await runtime.execute(session.id, SendMessage("Again", loops_of(["Hello again."])))
    assert texts(after) == ["Hi", "Hello.", "Again", "Hello again."]


@pytest.mark.parametrize("stage", [SessionStage.AFTER_ACTION, SessionStage.BEFORE_SAVE])
async def test_a_hook_that_refuses_a_run_does_not_drop_it(stage: SessionStage) -> None:
    """The run is recovered once the hook lets it pass; no completed tool is called again."""
    called: list[int] = []
    refuses = Refuses(stage)
    runtime = SessionRuntime(MemoryStore(), controller=refuses)
    session = await runtime.create(AGENT)
    charge = tool(name="charge")(lambda: called.append(1))
    loops = loops_of([ToolCall("charge"), "Charged."], charge)
    refuses.is_on = True
    with pytest.raises(InvalidData, match="not today"):
        await runtime.execute(session.id, SendMessage("Hi", loops))
    refuses.is_on = False
    assert (await recover(runtime, loops)).resumed == (session.id,)
    after = await runtime.get_session(session.id)
    assert (texts(after)[-1], called, after.version) == ("Charged.", [1], 2)
    assert {loop.status for loop in (await runtime.record(session.id)).loops} == {LoopStatus.COMPLETED}


async def test_a_run_that_no_hook_lets_pass_can_be_given_up() -> None:
    """cancel() ends it on record as it is; the session is free at its last version."""
    refuses = Refuses(SessionStage.BEFORE_SAVE)
    store = MemoryStore()
    runtime = SessionRuntime(store, controller=refuses)
    session = await runtime.create(AGENT)
    refuses.is_on = True
    with pytest.raises(InvalidData, match="not today"):
        await runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."])))
    with pytest.raises(InvalidData, match="not today"):
        await runtime.execute(session.id, ResumeExecution(loops_of([]), give_up=True))
    assert not await store.is_interrupted(session.id)
    assert {loop.status for loop in (await runtime.record(session.id)).loops} == {LoopStatus.COMPLETED}
    refuses.is_on = False
    assert texts(await runtime.execute(session.id, SendMessage("Again", loops_of(["Yes."])))) == ["Again", "Yes."]


class Refuses:
    """A controller that raises at a stage while it is on."""

    def __init__(self, stage: SessionStage) -> None:
        self._stage = stage
        self.is_on = False

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        if self.is_on and stage is self._stage:
            raise InvalidData("$", "not today")
        return session


@pytest.mark.parametrize("after", [False, True], ids=["lost", "written all the same"])
async def test_an_append_that_fails_once_repeats_nothing(after: bool) -> None:
    """Repeated under its key, a request that a store error ended is continued: no tool is called twice.

    If the start of a call was written although the store raised, its outcome is unknown: it is not called.
    """
    for call in range(1, 8):
        called: list[int] = []
        store = FailingStore(MemoryStore())
        charge = tool(name="charge")(lambda number: called.append(number))  # noqa: B023 (called in this round)
        script = [ToolCall("charge", {"number": 1}), ToolCall("charge", {"number": 2}), "Done."]
        async with perdure.connect(store, tools=[charge], driver=ScriptedDriver(script)) as sessions:
            chat = await sessions.open("s")
            store.fail("append", call=call, after=after)
            try:
                reply = await chat.send("Go.", key="k")
            except StoreError:
                reply = await chat.send("Go.", key="k")
            assert reply.text == "Done."
            assert called == [1, 2] or (after and called in ([1], [2]))
            assert [loop.status for loop in (await chat.record()).loops] == [LoopStatus.COMPLETED]


@pytest.mark.parametrize("error", [StoreError("disk full"), ClaimLost("s", 1)])
async def test_a_store_that_fails_during_a_run_ends_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error from the record is raised, not made into a failed run; nothing is saved, and no tool is called."""
    called: list[int] = []
    store = MemoryStore()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    monkeypatch.setattr(store, "append", failing(error))
    charge = tool(name="charge")(lambda: called.append(1))
    with pytest.raises(type(error)):
        await runtime.execute(session.id, SendMessage("Hi", loops_of([ToolCall("charge"), "Done."], charge)))
    assert ((await runtime.get_session(session.id)).version, called) == (1, [])
    assert not await store.is_claimed(session.id)


async def test_a_run_that_loses_its_claim_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot hold its session any longer stops at once, in the middle of a model call."""
    monkeypatch.setattr(LOOK, 0.005)
    store = MemoryStore()
    runtime = SessionRuntime(store, terms=Terms(lease=0.01))
    session = await runtime.create(AGENT)
    driver = HeldDriver(["never"])
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
    await driver.is_asked.wait()
    monkeypatch.setattr(store, "heartbeat", failing(ClaimLost("s", 1)))
    with pytest.raises(ClaimLost):
        await task


async def test_an_inbox_that_cannot_be_read_for_a_while_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look finds the items posted in that time."""
    monkeypatch.setattr(LOOK, 0.002)
    store = FailingStore(MemoryStore())
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    driver = HeldDriver(["never"])
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
    await driver.is_asked.wait()
    store.fail("read")
    await store.post(session.id, Entry("cancel"))
    assert (await task).state.stop_reason is StopReason.USER_REQUESTED


async def test_a_silent_run_keeps_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats keep others out, however long the model thinks."""
    monkeypatch.setattr(LOOK, 0.005)
    store = MemoryStore()
    runtime = SessionRuntime(store, terms=Terms(lease=0.03))
    session = await runtime.create(AGENT)
    driver = HeldDriver(["Hello."])
    beat, beats = store.heartbeat, asyncio.Semaphore(0)

    async def counted(claim: Any) -> None:
        await beat(claim)
        beats.release()

    monkeypatch.setattr(store, "heartbeat", counted)
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver))))
    for _ in range(3):
        await beats.acquire()
    driver.may_answer.set()
    assert (await task).version == 2


async def test_an_interceptors_error_before_the_first_step_is_a_run_on_record() -> None:
    """The message is kept with a failed run, though no model was ever asked."""

    class Broken(Interceptor):
        def before_execution(self, state: Any) -> Any:
            raise KeyError("bug")

    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    after = await runtime.execute(session.id, SendMessage("Hi", loops_of([], interceptors=[Broken()])))
    assert (after.state.status, texts(after)) == (ExecutionStatus.FAILED, ["Hi"])


async def test_cancelling_while_a_controller_works_gives_the_claim_back() -> None:
    """A run whose caller is gone before its result is saved does not keep others out until its lease ends."""
    reached = asyncio.Event()

    class Slow:
        async def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
            if stage is SessionStage.BEFORE_SAVE and session.version:
                reached.set()
                await asyncio.sleep(60)
            return session

    store = MemoryStore()
    session = await SessionRuntime(store).create(AgentDefinition("helper"))
    runtime = SessionRuntime(store, controller=Slow())
    task = asyncio.create_task(
        runtime.execute(session.id, SendMessage("Hello", LoopFactory(driver=ScriptedDriver(["Hi"]))))
    )
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await store.is_claimed(session.id)


class Deaf(MemoryStore):
    """A store that can lose a cancellation, as a driver that uses `asyncio.wait_for` can."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.lost += 1
        return await super().read(*args, **kwargs)


async def test_a_run_ends_though_its_store_loses_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch on the inbox is cancelled when the run is over; if that gets lost, it ends by itself."""
    monkeypatch.setattr(LOOK, 0.0)
    store = Deaf()
    runtime = SessionRuntime(store)
    session = await runtime.create(AGENT)
    async with asyncio.timeout(30):
        after = await runtime.execute(session.id, SendMessage("Go.", loops_of(ScriptedDriver([Delay(0.12, "done")]))))
    assert texts(after) == ["Go.", "done"]
    assert store.lost > 0


@pytest.mark.parametrize("concurrency", ["sequential", "parallel"])
async def test_a_tool_that_tidies_up_does_not_swallow_a_cancellation(
    concurrency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns as if nothing had happened; its result is kept, and the run still ends."""
    monkeypatch.setattr(LOOK, 0.005)
    is_called = asyncio.Event()

    @tool(name="work")
    async def work() -> str:
        is_called.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "tidied up"
        return "never"

    driver = ScriptedDriver([[ToolCall("work"), ToolCall("work")], "never"])
    async with perdure.connect("memory://", driver=driver, tools=[work], concurrency=concurrency) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Go."))
        await is_called.wait()
        await chat.cancel()
        reply = await asyncio.wait_for(run, 5)
        assert (reply.stop_reason, len(driver.requests)) == (StopReason.USER_REQUESTED, 1)
        if concurrency == "sequential":
            assert "tidied up" in [message.text for message in reply.session.state.messages]


async def test_a_compaction_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process can do so; the session is unchanged, and free."""
    monkeypatch.setattr(LOOK, 0.005)
    is_called = asyncio.Event()

    async def summarise(messages: Any) -> str:
        is_called.set()
        await asyncio.sleep(3600)
        return "never"

    async with perdure.connect("memory://", driver=ScriptedDriver(lambda request: "Yes.")) as sessions:
        chat = await sessions.open("s")
        for number in range(4):
            await chat.send(f"{number}")
        options: Any = {"compact_strategy": "llm", "compress_callback": summarise, "keep_last": 2}
        compaction = asyncio.ensure_future(chat.compact(**options))
        await is_called.wait()
        assert await chat.cancel()
        assert await asyncio.wait_for(compaction, 5) == 8
        assert (await chat.send("Still there?")).text == "Yes."


@pytest.mark.parametrize("callback", ["compress_callback", "mask_callback", "custom_compactor"])
@pytest.mark.parametrize("within", ["a manual compaction", "a run"])
async def test_a_cancelled_compaction_is_not_made_whatever_its_callback_returns(
    monkeypatch: pytest.MonkeyPatch, within: str, callback: str
) -> None:
    """A callback that tidies up and returns has swallowed the cancellation: nothing is covered, and a run stops."""
    monkeypatch.setattr(LOOK, 0.005)
    is_called = asyncio.Event()

    async def tidies_up(given: Any) -> Any:
        is_called.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return [Message.user("too late")] if callback == "custom_compactor" else "too late"

    options: Any = {callback: tidies_up, "keep_last": 2}
    async with perdure.connect(
        "memory://",
        driver=ScriptedDriver(lambda request: "Yes."),
        model=ModelConfig("test:model", context_window=2_000),
        compaction=perdure.AutoCompaction(**options),
    ) as sessions:
        chat = await sessions.open("s")
        calls = Message("assistant", (ToolCall("look", id="a"), ToolCall("look", id="b")))
        found = [Message.tool("a", "x" * 4_000), Message.tool("b", "x" * 4_000)]  # a mask would be asked for twice
        said = [Message.user("x" * 4_000), calls, *found, *(["Yes."] * 4)]
        await sessions.execute("s", perdure.InjectMessage(*said))
        work: Any = asyncio.ensure_future(chat.send("Go.") if within == "a run" else chat.compact(**options))
        await is_called.wait()
        assert await chat.cancel()
        answer = await asyncio.wait_for(work, 5)
        after = await sessions.runtime.get_session("s")
        assert list(after.state.transcript.blocks()) == []
        assert (answer.stop_reason if within == "a run" else answer) in (StopReason.USER_REQUESTED, len(said))


async def test_a_cancelled_compaction_is_not_made_whatever_its_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes the cancellation for its own, and answers, does not keep the compaction."""
    monkeypatch.setattr(LOOK, 0.005)
    is_asked = asyncio.Event()

    class Stubborn(ScriptedDriver):
        async def respond(self, request: Any, on_delta: Any) -> Any:
            is_asked.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            return await super().respond(request, on_delta)

    async with perdure.connect("memory://", driver=Stubborn(lambda request: "sum")) as sessions:
        chat = await sessions.open("s")
        await sessions.execute("s", perdure.InjectMessage(*(["Yes."] * 4)))
        compaction = asyncio.ensure_future(chat.compact(compact_strategy="llm", keep_last=2))
        await is_asked.wait()
        assert await chat.cancel()
        assert await asyncio.wait_for(compaction, 5) == 4


async def test_a_subscriber_that_is_cancelled_fails_alone() -> None:
    """Something it waited for was cancelled; the run continues."""

    async def gives_up(event: object) -> None:
        raise asyncio.CancelledError

    bus = EventBus()
    bus.wiretap(gives_up)
    async with perdure.connect("memory://", driver=ScriptedDriver(["Hello."]), events=bus) as sessions:
        assert (await (await sessions.open("s")).send("Hi")).text == "Hello."


async def test_nobody_hears_of_a_run_before_its_session_is_claimed() -> None:
    """A refused send leaves no running loop in a recorder, and no run for a stream to bind to."""
    heard, bus = Heard(), EventBus()
    bus.wiretap(heard.emit)
    driver = HeldDriver(["Hello."])
    runtime = SessionRuntime(MemoryStore(), events=bus)
    session = await runtime.create(AGENT)
    task = asyncio.create_task(runtime.execute(session.id, SendMessage("Hi", loops_of(driver, events=bus))))
    await driver.is_asked.wait()
    before = len(heard)
    with pytest.raises(perdure.SessionBusy):
        await runtime.execute(session.id, SendMessage("No", loops_of(["never"], events=bus)))
    assert [type(event).__name__ for event in heard[before:]] == ["SessionLoaded"]
    driver.may_answer.set()
    await task
    assert heard.names.count("AgentStart") == 1


async def test_a_stream_after_a_killed_run_has_its_own_text(tmp_path: Path) -> None:
    """The killed run is recovered first; only the answer to the new message is streamed."""
    url = f"sqlite:///{tmp_path}/s.db"
    async with perdure.connect(url, driver=HeldDriver(["never"]), grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("First."))
        await sessions.loops._driver.is_asked.wait()  # type: ignore[union-attr]
    await asyncio.gather(run, return_exceptions=True)
    driver = ScriptedDriver(lambda request: f"Re: {request.messages[-1].text}")
    async with perdure.connect(url, driver=driver) as sessions:
        chat = await sessions.open("s")
        assert "".join([chunk async for chunk in chat.stream("Second.")]) == "Re: Second."
        assert texts(await chat.session()) == ["First.", "Re: First.", "Second.", "Re: Second."]


async def test_an_outcome_whose_write_failed_is_not_overtaken_by_the_next() -> None:
    """Two tools end while the store fails: both outcomes are on record when the run is left."""
    store = FailingStore(MemoryStore())
    made: list[str] = []

    async def first() -> str:
        """The first."""
        made.append("first")
        return "first result"

    async def second() -> str:
        """The second, which ends while the outcome of the first is being written."""
        await asyncio.sleep(0.02)
        made.append("second")
        return "second result"

    script = [[ToolCall("first"), ToolCall("second")], "Done."]
    async with perdure.connect(store, driver=ScriptedDriver(script), tools=[first, second]) as sessions:
        chat = await sessions.open("s")
        store.delay("append", 0.05, call=2)
        store.fail("append", call=2)
        with pytest.raises(StoreError):
            await chat.send("Go.", key="k")
        assert (await chat.send("Go.", key="k")).text == "Done."
        said = [message.text for message in (await chat.session()).state.messages if message.role == "tool"]
    assert (sorted(said), made) == (["first result", "second result"], ["first", "second"])


@pytest.mark.parametrize("verb", ["claim", "append", "save"])
async def test_a_killed_run_is_not_forgotten_when_its_cancellation_fails(verb: str) -> None:
    """The store's own error is raised. Until the run has ended on record, recovery finds it."""
    store = FailingStore(MemoryStore())
    driver = HeldDriver(["never"])
    async with perdure.connect(store, driver=driver, grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("Go."))
        await driver.is_asked.wait()
    await asyncio.gather(run, return_exceptions=True)
    async with perdure.connect(store, driver=ScriptedDriver(["Done."])) as sessions:
        store.fail(verb)
        with pytest.raises(StoreError):
            await sessions.cancel("s")
        store.heal()
        (loop,) = (await sessions.record("s")).loops
        assert loop.status.is_over is not await store.is_interrupted("s")
        await sessions.cancel("s")
        (loop,) = (await sessions.record("s")).loops
        assert loop.status is LoopStatus.COMPLETED
