"""A session whose run was killed: no change drops the run. It is recovered, or ended in its present state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure import (
    AgentDefinition,
    ApproveToolCalls,
    ConfigurationError,
    ExecutionStatus,
    FileStore,
    InjectMessage,
    LoopFactory,
    LoopStatus,
    MemoryStore,
    ResumeExecution,
    RunInterrupted,
    SendMessage,
    SendParallel,
    SessionRuntime,
    SqliteStore,
    StopReason,
    StoreError,
    ToolCall,
    WriteMetadata,
    connect,
    recover,
    tool,
)
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("agent")
STORES: dict[str, Any] = {
    "memory": lambda path: MemoryStore(),
    "sqlite": lambda path: SqliteStore(path / "sessions.db"),
    "file": lambda path: FileStore(path / "sessions"),
}
charged: list[str] = []


@tool
def charge(name: str) -> str:
    """Take money, once."""
    charged.append(name)
    return f"{name} has paid"


def loops(*, tools: Any = (charge,)) -> LoopFactory:
    return LoopFactory(tools=tools, driver=ScriptedDriver([ToolCall("charge", {"name": "Ada"}), "Done."]))


async def killed(store: Any, action: Any, call: int) -> str:
    """Leave a session whose process died at a store call during a run, and whose claim has lapsed."""
    session = await SessionRuntime(store).create(AGENT)
    failing = FailingStore(store)
    failing.crash(call=call, after=True)
    with pytest.raises(StoreError):
        await SessionRuntime(failing).execute(session.id, action)
    return session.id


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> Any:
    charged.clear()
    return STORES[request.param]


async def in_the_middle(store: Any, clock: FrozenClock) -> str:
    """Leave a session whose run was killed after its tool's result."""
    session_id = await killed(store, SendMessage("Charge Ada", loops()), call=4)
    clock.advance(60)
    assert charged == ["Ada"]
    assert await store.is_interrupted(session_id)
    return session_id


async def test_no_change_drops_it(kind: Any, tmp_path: Path) -> None:
    """Nothing is changed until the run is recovered, and then nothing of it is missing."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with kind(tmp_path) as store:
            session_id = await in_the_middle(store, clock)
            runtime = SessionRuntime(store)
            for action in (WriteMetadata("k", 1), InjectMessage("hi"), SendMessage("And now?", loops())):
                with pytest.raises(RunInterrupted, match="recover"):
                    await runtime.execute(session_id, action)
            assert (await runtime.get_session(session_id)).version == 1
            await recover(runtime, loops())
            assert charged == ["Ada"]
            session = await runtime.execute(session_id, WriteMetadata("k", 1))
            assert [message.text for message in session.state.messages][-1] == "Done."


async def test_a_message_is_sent_when_it_has_been_recovered(kind: Any, tmp_path: Path) -> None:
    """The sender of a message need not know that a process died."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with connect(kind(tmp_path), tools=[charge], driver=ScriptedDriver(["Hi.", "Done."])) as sessions:
            session_id = await in_the_middle(sessions.store, clock)
            assert (await sessions.send(session_id, "And now?")).text == "Hi."
            texts = [message.text for message in await sessions.history(session_id)]
            assert texts[0] == "Charge Ada"
            assert texts[-3:] == ["Done.", "And now?", "Hi."]
            assert charged == ["Ada"]


async def test_it_can_be_ended_where_it_stands(kind: Any, tmp_path: Path) -> None:
    """Its messages so far are kept, and the session continues."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with connect(kind(tmp_path), driver=ScriptedDriver(["Fine."])) as sessions:
            session_id = await in_the_middle(sessions.store, clock)
            assert await sessions.cancel(session_id)
            assert not await sessions.cancel(session_id)
            state = (await sessions.session(session_id)).state
            assert (state.status, state.stop_reason) == (ExecutionStatus.STOPPED, StopReason.USER_REQUESTED)
            assert [message.role for message in state.messages] == ["user", "assistant", "tool"]
            assert [loop.status for loop in (await sessions.record(session_id)).loops] == [LoopStatus.COMPLETED]
            assert (await sessions.send(session_id, "And now?")).text == "Fine."


async def test_a_run_that_was_approved_and_killed_goes_on(kind: Any, tmp_path: Path) -> None:
    """Its version still waits for the approval, but a message needs no second approval."""

    @tool(needs_approval=True, name="charge")
    def ask_first(name: str) -> str:
        return f"charged {name}"

    def reply(request: Any) -> Any:
        match request.messages[-1].text:
            case "Charge Ada":
                return ToolCall("charge", {"name": "Ada"})
            case "And now?":
                return "Hi."
        return "Done."

    driver = ScriptedDriver(reply)
    factory = LoopFactory(tools=[ask_first], driver=driver)
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with connect(kind(tmp_path), tools=[ask_first], driver=driver) as sessions:
            chat = await sessions.open("s", AGENT)
            assert (await chat.send("Charge Ada")).pending_calls
            failing = FailingStore(sessions.store)
            for verb in ("append", "save", "release"):
                failing.fail(verb, call=None)
            with pytest.raises(StoreError):
                await SessionRuntime(failing).execute("s", ApproveToolCalls(factory))
            clock.advance(60)
            assert await sessions.store.is_interrupted("s")
            with pytest.raises(RunInterrupted):
                await sessions.uncompact("s")
            assert (await chat.send("And now?")).text == "Hi."
            assert [message.text for message in await chat.history()][-3:] == ["Done.", "And now?", "Hi."]


async def test_a_group_can_be_given_up(kind: Any, tmp_path: Path) -> None:
    """No branch is selected, and the session is as it was."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with kind(tmp_path) as store:
            action = SendParallel("Go", loops(), configs=[AGENT, AGENT])
            session_id = await killed(store, action, call=4)
            clock.advance(60)
            runtime = SessionRuntime(store)
            session = await runtime.execute(session_id, ResumeExecution(loops(), give_up=True))
            assert session.version == 1
            assert (await runtime.execute(session_id, WriteMetadata("k", 1))).version == 2
            assert not (await recover(runtime, loops())).resumed


async def test_a_call_that_was_begun_is_not_recovered_without_its_tool(kind: Any, tmp_path: Path) -> None:
    """Nobody knows the call's outcome, so it waits for a process that has the tool."""
    with use(clock=(clock := FrozenClock(tick=0.0001))):
        async with kind(tmp_path) as store:
            session_id = await killed(store, SendMessage("Charge Ada", loops()), call=3)
            clock.advance(60)
            runtime = SessionRuntime(store)
            report = await recover(runtime, loops(tools=()))
            assert [each for each, _ in report.failed] == [session_id]
            assert "charge" in report.failed[0][1]
            with pytest.raises(ConfigurationError, match="charge"):
                await runtime.execute(session_id, ResumeExecution(loops(tools=())))
            assert (await recover(runtime, loops())).resumed == (session_id,)
