"""Waiting sub-agents of a run that is continued and then ends, or is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    AgentSession,
    AgentStop,
    InvalidData,
    MemoryStore,
    Sessions,
    SessionStage,
    ToolCall,
    tool,
)
from perdure.testing import Delay, ScriptedDriver

BOSS = AgentDefinition("boss", tools=("clerk", "slow", "quit"))
CLERK = AgentDefinition("clerk", system_prompt="clerk", tools=("pay",))
TWO_CLERKS = (ToolCall("clerk", {"prompt": "1"}, "first"), ToolCall("clerk", {"prompt": "2"}, "second"))


class Office:
    """A boss that asks clerks, who ask a person before they pay; a clerk that has paid may answer slowly."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self.calls = calls
        self.is_slow = False
        self.is_busy = asyncio.Event()
        self.paid: list[int] = []
        self.pay_tool = tool(needs_approval=True)(self.pay)
        self.store = MemoryStore()

    def connect(self, **options: Any) -> Sessions:
        tools = [self.pay_tool, tool(idempotent=True)(self.slow), self.quit_tool()]
        driver = ScriptedDriver(self.answer)
        return perdure.connect(
            self.store, driver=driver, tools=tools, subagents=[CLERK], **{"concurrency": "sequential", **options}
        )

    def pay(self, amount: int) -> str:
        """Pay."""
        self.paid.append(amount)
        return "paid"

    async def slow(self) -> str:
        """Take a long time."""
        self.is_busy.set()
        await asyncio.sleep(60 if self.is_slow else 0)
        return "done"

    def quit_tool(self) -> Any:
        @tool(needs_approval=True)
        def quit() -> str:
            """Stop."""
            raise AgentStop("enough")

        return quit

    def answer(self, request: Any) -> Any:
        last = request.messages[-1]
        if request.system_prompt != "clerk":
            return self.calls if last.role == "user" else "All done."
        if last.role == "user":
            return ToolCall("pay", {"amount": int(last.text)})
        if self.is_slow:
            self.is_busy.set()
            return Delay(60, "Never.")
        return "Paid."


async def waiting_in(sessions: Sessions) -> list[str]:
    """Return the clerks' sessions that still wait for a person."""
    clerks = [await sessions.session(info.id) for info in await sessions.list(parent="s")]
    return [each.id for each in clerks if each.state.execution and each.state.execution.pending_calls]


async def test_a_run_that_is_cancelled_ends_children_it_had_not_come_to_again() -> None:
    """Both were approved and the first was at work: otherwise the second could still be approved and pay later."""
    office = Office(TWO_CLERKS)
    async with office.connect() as sessions:
        chat = await sessions.open("s", BOSS)
        assert len((await chat.send("Go.")).pending_calls) == 2
        office.is_slow = True
        run = asyncio.ensure_future(chat.approve())
        await office.is_busy.wait()
        assert await chat.cancel()
        assert (await run).stop_reason == "user_requested"
        assert (await waiting_in(sessions), office.paid) == ([], [1])


async def test_a_decision_that_is_cancelled_at_any_point_leaves_no_child_waiting_alone() -> None:
    """The caller and its clerk either both wait, or neither does."""
    for turns in range(60):
        office = Office(TWO_CLERKS[:1])
        async with office.connect() as sessions:
            chat = await sessions.open("s", BOSS)
            await chat.send("Go.")
            run = asyncio.ensure_future(chat.approve())
            for _ in range(turns):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            execution = (await chat.session()).state.execution
            assert execution is not None
            assert bool(await waiting_in(sessions)) is bool(execution.pending_calls), f"after {turns} turns"


async def test_a_tool_that_stops_the_run_ends_children_behind_it() -> None:
    office = Office((ToolCall("quit", {}, "stop"), TWO_CLERKS[0]))
    async with office.connect() as sessions:
        chat = await sessions.open("s", BOSS)
        await chat.send("Go.")
        assert (await chat.approve(["stop"])).stop_reason == "stop_requested"
        assert await waiting_in(sessions) == []


async def test_a_killed_run_that_is_cancelled_ends_children_it_had_not_come_to() -> None:
    office = Office(TWO_CLERKS)
    async with office.connect(grace=0) as sessions:
        chat = await sessions.open("s", BOSS)
        await chat.send("Go.")
        office.is_slow = True
        run = asyncio.ensure_future(chat.approve())
        await office.is_busy.wait()
    await asyncio.gather(run, return_exceptions=True)
    async with office.connect() as sessions:
        assert await sessions.cancel("s")
        assert (await waiting_in(sessions), office.paid) == ([], [1])


async def test_a_recovery_that_is_cancelled_ends_a_killed_child_it_had_not_come_to() -> None:
    """Both clerks were killed at work; the recovery has resumed only the first one."""
    office = Office(TWO_CLERKS)
    async with office.connect(grace=0, concurrency="parallel") as sessions:
        chat = await sessions.open("s", BOSS)
        await chat.send("Go.")
        office.is_slow = True
        run = asyncio.ensure_future(chat.approve())
        await until(lambda: len(office.paid) == 2)
        await office.is_busy.wait()
        await asyncio.sleep(0.05)
    await asyncio.gather(run, return_exceptions=True)
    office.is_busy.clear()
    async with office.connect() as sessions:
        recovery = asyncio.ensure_future(sessions.recover("s"))
        await office.is_busy.wait()
        assert await sessions.cancel("s")
        assert (await recovery).resumed == ("s",)
        assert (await waiting_in(sessions), list(await office.store.lapsed())) == ([], [])
        (loop,) = (await sessions.record("s")).loops
        assert loop.stop_reason == "user_requested"


async def test_leaving_a_connection_leaves_children_waiting() -> None:
    """The run is only interrupted: recovered, it waits with its clerk, and a person may still approve the payment."""
    office = Office((TWO_CLERKS[0], ToolCall("slow", {}, "slow")))
    office.is_slow = True
    async with office.connect(grace=0) as sessions:
        run = asyncio.ensure_future((await sessions.open("s", BOSS)).send("Go."))
        await office.is_busy.wait()
        await until(lambda: waiting_in(sessions))
    await asyncio.gather(run, return_exceptions=True)
    office.is_slow = False
    async with office.connect() as sessions:
        assert (await sessions.recover()).suspended == ("s",)
        assert (await sessions.approve("s")).text == "All done."
    assert office.paid == [1]


@pytest.mark.parametrize("decide", ["approve", "deny"])
async def test_a_decision_is_not_about_what_a_recovered_run_wants(decide: str) -> None:
    """The decision is refused, because nobody has seen the new call; the error has the calls that wait now."""
    paid: list[int] = []
    is_busy, store = asyncio.Event(), MemoryStore()

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    def dies(request: Any) -> Any:
        if request.step == 0:
            return ToolCall("pay", {"amount": 5})
        is_busy.set()
        return Delay(60, "Never.")

    async with perdure.connect(store, driver=ScriptedDriver(dies), tools=[pay], grace=0) as sessions:
        chat = await sessions.open("s")
        await chat.send("Go.")
        run = asyncio.ensure_future(chat.approve())
        await is_busy.wait()
    await asyncio.gather(run, return_exceptions=True)
    driver = ScriptedDriver(["", ToolCall("pay", {"amount": 5000}), "Done."])
    async with perdure.connect(store, driver=driver, tools=[pay]) as sessions:
        with pytest.raises(perdure.PendingCallsChanged, match="5000"):
            await (sessions.approve("s") if decide == "approve" else sessions.deny("s", "No."))
        assert paid == [5]
        assert (await sessions.approve("s")).text == "Done."
    assert paid == [5, 5000]


async def test_an_approval_that_comes_second_is_not_about_what_is_wanted_next() -> None:
    """Two people agree to 5; when the second decision arrives, the run wants 5,000."""
    paid: list[int] = []

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    store = perdure.testing.FailingStore(MemoryStore())
    script = [ToolCall("pay", {"amount": 5}), ToolCall("pay", {"amount": 5000}), "Done."]
    async with perdure.connect(store, driver=ScriptedDriver(script), tools=[pay]) as sessions:
        chat = await sessions.open("s")
        await chat.send("Go.")
        store.delay("claim", 0.1)
        late = asyncio.ensure_future(chat.approve())
        await asyncio.sleep(0.02)
        await chat.approve()
        with pytest.raises(perdure.PendingCallsChanged, match="5000"):
            await late
    assert paid == [5]


class RefusesChildren:
    """A controller that, while it is on, lets no run of a sub-agent be saved."""

    is_on = False

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        is_run = session.info.spawn_ref is not None and session.state.execution is not None
        if self.is_on and is_run and stage is SessionStage.BEFORE_SAVE:
            raise InvalidData("$", "not today")
        return session


async def test_a_child_whose_end_cannot_be_saved_has_not_ended() -> None:
    """Its caller, which could not be cancelled either, would otherwise start it again: nothing is done twice."""
    office, refuses = Office(TWO_CLERKS[:1]), RefusesChildren()
    refuses.is_on = True
    office.pay_tool = tool(office.pay)
    async with office.connect(controller=refuses) as sessions:
        chat = await sessions.open("s", BOSS)
        with pytest.raises(InvalidData, match="not today"):
            await chat.send("Go.")
        with pytest.raises(InvalidData, match="not today"):
            await chat.cancel()
        refuses.is_on = False
        await sessions.recover()
        assert office.paid == [1]
        assert (await chat.history())[-1].text == "All done."
        (clerk,) = await sessions.list(parent="s")
        assert len((await sessions.record(clerk.id)).loops) == 1
