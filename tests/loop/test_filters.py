"""Input filters: they pass an input, warn the model of it, or keep it from the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    ConfigurationError,
    EventBus,
    ExecutionStatus,
    InputRefused,
    LoopEvent,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    Rejected,
    RunFailed,
    SendMessage,
    SessionRecorder,
    SessionRuntime,
    StopReason,
    StoreError,
    ToolCall,
    Warned,
    recover,
)
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("guarded")


async def test_a_rejected_input_never_reaches_the_model() -> None:
    """The run is stopped as error_forbade, reported as InputRejected, and rejected on record, with the reason."""
    bus, recorder, driver = EventBus(), SessionRecorder(), ScriptedDriver(["no"])
    bus.subscribe(LoopEvent, recorder.on_event)
    filters = [lambda messages: Rejected("no numbers, please") if "4711" in messages[-1].text else None]
    runtime = SessionRuntime(MemoryStore(), events=bus)
    session = await runtime.create(AGENT)
    loops = LoopFactory(driver=driver, events=bus, input_filters=filters)
    session = await runtime.execute(session.id, SendMessage("My number is 4711", loops))
    assert driver.requests == []
    assert (session.state.status, session.state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.ERROR_FORBADE)
    (loop,) = recorder.checkpoint()[0].loops
    assert (loop.status, loop.rejection) == (LoopStatus.REJECTED, "no numbers, please")
    (header,) = (await runtime.record(session.id)).loops
    assert (header.status, header.rejection) == (LoopStatus.REJECTED, "no numbers, please")


async def test_the_model_is_warned_of_an_input() -> None:
    """A warning follows the input as a system message, from plain and async filters."""

    async def beware(messages: object) -> Warned:
        return Warned("The user may be lying.")

    driver = ScriptedDriver(["I see."])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    loops = LoopFactory(driver=driver, input_filters=[lambda messages: None, beware])
    session = await runtime.execute(session.id, SendMessage("I am the king", loops))
    assert session.state.status is ExecutionStatus.COMPLETED
    assert [(message.role, message.text) for message in driver.requests[0].messages] == [
        ("user", "I am the king"),
        ("system", "The user may be lying."),
    ]


async def test_the_first_rejection_has_the_last_word() -> None:
    """Filters behind the one that rejects are not called."""
    asked: list[str] = []
    filters = [lambda messages: Rejected("first"), lambda messages: asked.append("second")]
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    loops = LoopFactory(driver=ScriptedDriver(["no"]), input_filters=filters)
    session = await runtime.execute(session.id, SendMessage("hello", loops))
    assert asked == []
    assert session.state.execution is not None
    assert session.state.execution.continuation.stop_signals[0].message == "first"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_rejected_input_does_not_reach_the_model_after_a_crash(after: bool) -> None:
    """Whichever call of the store is the last, the recovered run also ends as rejected."""
    for call in range(1, 20):
        store, clock, driver = MemoryStore(), FrozenClock(tick=0.001), ScriptedDriver(["no"])
        loops = LoopFactory(driver=driver, input_filters=[lambda messages: Rejected("no numbers")])
        failing = FailingStore(store)
        with use(clock=clock):
            session = await SessionRuntime(store).create(AGENT)
            failing.crash(call=call, after=after)
            try:
                await SessionRuntime(failing).execute(session.id, SendMessage("4711", loops))
            except StoreError:
                clock.advance(60)
                await recover(SessionRuntime(store), loops)
            assert driver.requests == []
            loops_on_record = (await SessionRuntime(store).record(session.id)).loops
            assert [(each.status, each.rejection) for each in loops_on_record] in (
                [],
                [(LoopStatus.REJECTED, "no numbers")],
            )
        if not failing.has_crashed:
            break
    assert loops_on_record
    assert 3 < call < 19


def no_numbers(messages: Any) -> Rejected | None:
    return Rejected("no numbers, please") if "4711" in messages[-1].text else None


async def test_a_rejected_input_is_not_shown_with_the_next_message() -> None:
    """The view is the one before it, `send` raises, and history and record keep the message."""
    driver = ScriptedDriver(lambda request: "Hello.")
    async with perdure.connect("memory://", driver=driver, input_filters=[no_numbers]) as sessions:
        chat = await sessions.open("s")
        await chat.send("Hi")
        with pytest.raises(InputRefused, match="no numbers, please"):
            await chat.send("My number is 4711")
        assert [message.text for message in (await chat.session()).state.messages] == ["Hi", "Hello."]
        await chat.send("Never mind.")
        assert [message.text for message in driver.requests[-1].messages] == ["Hi", "Hello.", "Never mind."]
        said = [message.text for message in await chat.history()]
        assert said == ["Hi", "Hello.", "My number is 4711", "Never mind.", "Hello."]
        assert [loop.status for loop in (await chat.record()).loops][1] is LoopStatus.REJECTED


@pytest.mark.parametrize("verdict", [True, "no", False, 0], ids=repr)
async def test_a_filter_that_answers_something_else_lets_nothing_pass(verdict: Any) -> None:
    """It is an error before the model is asked, and the unjudged input is not shown later either."""
    filters: list[Any] = [lambda messages: verdict]
    driver = ScriptedDriver(lambda request: "Hello.")
    async with perdure.connect("memory://", driver=driver, input_filters=filters) as sessions:
        chat = await sessions.open("s")
        with pytest.raises(RunFailed, match=ConfigurationError.__name__):
            await chat.send("Hi")
        assert (driver.requests, list((await chat.session()).state.messages)) == ([], [])


@pytest.mark.parametrize("text", ["My number is 4711", "My name is Ada"])
async def test_what_steers_a_run_passes_the_filters(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected message is on record and never shown; any other is accepted, and the model warned of it."""
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 0.005)
    may_go_on, is_in = asyncio.Event(), asyncio.Event()

    async def pause() -> str:
        """Wait."""
        is_in.set()
        await may_go_on.wait()
        return "rested"

    def warns(messages: Any) -> Warned | None:
        return Warned("Beware.") if "name" in messages[-1].text else None

    driver = ScriptedDriver(lambda request: ToolCall("pause") if request.step == 0 else "Done.")
    filters = [no_numbers, warns]
    async with perdure.connect("memory://", driver=driver, tools=[pause], input_filters=filters) as sessions:
        chat = await sessions.open("s")
        run = asyncio.ensure_future(chat.send("Work."))
        await is_in.wait()
        await chat.send(text, when_busy="steer")
        await asyncio.sleep(0.05)
        may_go_on.set()
        assert (await run).text == "Done."
        shown = [message.text for message in driver.requests[-1].messages]
        assert shown[3:] == ([] if "4711" in text else [text, "Beware."])
        assert text in [message.text for message in await chat.history()]
        assert await sessions.store.read("s", inbox=True) == []  # type: ignore[attr-defined]


async def test_a_filter_that_fails_advises_nothing_that_takes_back_what_was_said_before() -> None:
    """The message is not in the view, so undo() would take back the one before it."""

    def fails(messages: Any) -> None:
        if "4711" in messages[-1].text:
            raise ValueError("no table of numbers")

    async with perdure.connect("memory://", driver=ScriptedDriver(["Hello."]), input_filters=[fails]) as sessions:
        chat = await sessions.open()
        await chat.send("Good morning.")
        with pytest.raises(RunFailed, match="send it again once that is mended") as failure:
            await chat.send("My number is 4711.")
        assert "undo" not in str(failure.value)
        assert [message.text for message in (await chat.session()).state.messages] == ["Good morning.", "Hello."]


async def test_an_input_that_was_not_judged_before_a_crash_is_judged_after_it() -> None:
    """The claim comes first, with the input on record; recovery asks a filter that had not answered."""
    is_asked = asyncio.Event()

    async def ponders(messages: Any) -> None:
        is_asked.set()
        await asyncio.sleep(60)

    store = MemoryStore()
    async with perdure.connect(store, driver=ScriptedDriver(["no"]), input_filters=[ponders], grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s")).send("4711"))
        await is_asked.wait()
    await asyncio.gather(run, return_exceptions=True)
    driver = ScriptedDriver(["no"])
    async with perdure.connect(store, driver=driver, input_filters=[no_numbers]) as sessions:
        assert (await sessions.recover()).resumed == ("s",)
        assert (driver.requests, list((await sessions.session("s")).state.messages)) == ([], [])


async def test_an_input_is_judged_however_often_its_recovery_is_killed() -> None:
    """A recovery that is killed during a filter leaves a start on record, which does not count as a verdict."""
    asked: list[int] = []

    async def ponders(messages: Any) -> None:
        asked.append(1)
        await asyncio.sleep(60)

    store = MemoryStore()
    for attempt in range(2):
        async with perdure.connect(store, driver=ScriptedDriver(["no"]), input_filters=[ponders], grace=0) as sessions:
            chat = await sessions.open("s")
            run = asyncio.ensure_future(chat.recover() if attempt else chat.send("4711"))
            await until(lambda attempt=attempt: len(asked) == attempt + 1)  # type: ignore[misc]
        await asyncio.gather(run, return_exceptions=True)
    driver = ScriptedDriver(["no"])
    async with perdure.connect(store, driver=driver, input_filters=[no_numbers]) as sessions:
        assert (await sessions.recover()).resumed == ("s",)
        assert (driver.requests, list((await sessions.session("s")).state.messages)) == ([], [])
        assert [loop.status for loop in (await sessions.record("s")).loops] == ["rejected"]
