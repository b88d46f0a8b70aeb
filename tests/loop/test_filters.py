"""Input filters: what passes, what the model is warned of, what it never sees."""

from __future__ import annotations

import pytest

from perdure import (
    AgentDefinition,
    EventBus,
    ExecutionStatus,
    LoopEvent,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    Rejected,
    SendMessage,
    SessionRecorder,
    SessionRuntime,
    StopReason,
    StoreError,
    Warned,
    recover,
)
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("guarded")


async def test_a_rejected_input_never_reaches_the_model() -> None:
    """The run is stopped as error_forbade, told as InputRejected, and rejected on record, with the reason."""
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
    """A warning stands behind the input as a system message; plain and async filters both do."""

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
    """Filters behind the one that rejects are not asked."""
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
    """Whichever call of the store is the last, the run that is recovered ends as rejected, too."""
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
    assert 4 < call < 19
