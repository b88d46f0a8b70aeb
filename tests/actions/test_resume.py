"""Recovery: it claims first, so that it never continues a run from an outdated state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import loops_of
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    MemoryStore,
    PendingCallsChanged,
    SendMessage,
    SessionBusy,
    SessionRuntime,
    SqliteStore,
    ToolCall,
    tool,
)
from perdure.actions.resume import ResumeExecution
from perdure.model.ids import use
from perdure.protocols import ModelRequest
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

AGENT = AgentDefinition("agent")


class Bank:
    """Counts how often a payment that must not be repeated was begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.pay = tool(name="pay")(self._pay)

    async def _pay(self) -> str:
        self.begun += 1
        await asyncio.sleep(3600)
        return "paid"

    def loops(self) -> Any:
        return loops_of([ToolCall("pay"), "Done."], self.pay)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_two_who_recover_one_run_begin_its_tool_once(kind: str, tmp_path: Path) -> None:
    """B reads a killed run; A takes it over, begins the tool and dies; B continues from A's state."""
    clock, bank = FrozenClock(tick=0.0001), Bank()
    with use(clock=clock):
        async with MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "s.db") as store:
            session = await SessionRuntime(store).create(AGENT)
            await _killed_in_the_model_call(store, session.id)
            clock.advance(3600)
            late = _Late(store)
            second = asyncio.ensure_future(SessionRuntime(late).execute(session.id, ResumeExecution(bank.loops())))
            await late.is_about_to_claim.wait()
            first = asyncio.ensure_future(SessionRuntime(store).execute(session.id, ResumeExecution(bank.loops())))
            await until(lambda: bank.begun)
            clock.advance(3600)  # the first is as good as dead: it does not extend its claim
            late.may_claim.set()
            after = await asyncio.wait_for(second, 30)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert bank.begun == 1
            assert "OutcomeUnknown" in after.state.messages[2].text


class _Late(FailingStore):
    """A store in which a claim takes its time."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.is_about_to_claim, self.may_claim = asyncio.Event(), asyncio.Event()
        self._claim, self.claim = self.claim, self._late_claim

    async def _late_claim(self, *given: Any, **named: Any) -> Any:
        self.is_about_to_claim.set()
        await self.may_claim.wait()
        return await self._claim(*given, **named)


async def _killed_in_the_model_call(store: Any, session_id: str) -> None:
    failing = FailingStore(store)
    failing.fail("append", call=None)
    failing.fail("release", call=None)
    with pytest.raises(Exception, match="told to fail"):
        await SessionRuntime(failing).execute(session_id, SendMessage("Go.", loops_of([ToolCall("pay")], Bank().pay)))


async def test_a_run_that_is_claimed_is_left_alone() -> None:
    """Another process has taken it over already."""
    store = MemoryStore()
    session = await SessionRuntime(store).create(AGENT)
    await store.claim(session.id, version=1, owner="ann")
    with pytest.raises(SessionBusy):
        await SessionRuntime(store).execute(session.id, ResumeExecution(loops_of([])))


async def test_a_recovery_reads_its_run_once() -> None:
    """A recovery reads the run's events once and its messages once, and passes them on."""
    clock, looked = FrozenClock(tick=0.0001), []

    @tool(name="pay", idempotent=True)
    def look() -> str:
        looked.append("up")
        return "seen"

    with use(clock=clock):
        store = MemoryStore()
        session = await SessionRuntime(store).create(AGENT)
        await _killed_in_the_model_call(store, session.id)
        clock.advance(3600)
        counting = FailingStore(store)
        loops = loops_of([ToolCall("pay"), "Done."], look)
        after = await SessionRuntime(counting).execute(session.id, ResumeExecution(loops))
        assert (after.state.messages[-1].text, looked) == ("Done.", ["up"])
        assert (counting.calls["messages"], counting.calls["runs"]) == (1, 0)
        assert counting.calls.total() <= 14


async def test_an_approval_of_a_sub_agents_call_is_used_up_once_the_call_has_started() -> None:
    """Killed again in the call, the sub-agent asks again, and its caller shows that. An old approval is refused."""
    made: list[bool] = []
    is_quick = False

    @tool(on_unknown="ask")
    async def pay() -> str:
        """Pay."""
        made.append(is_quick)
        await asyncio.sleep(0 if is_quick else 60)
        return "paid"

    def respond(request: ModelRequest) -> ToolCall | str:
        if request.step:
            return "Done."
        return ToolCall("pay") if request.system_prompt == "kid" else ToolCall("kid", {"prompt": "Pay."})

    kid = AgentDefinition("kid", description="Pays.", system_prompt="kid", tools=("pay",))
    options: Any = {"driver": ScriptedDriver(respond), "tools": [pay], "subagents": [kid], "grace": 0.0}
    async with MemoryStore() as store:
        async with perdure.connect(store, **options) as app:
            await (await app.open("p", AgentDefinition("boss", tools=("kid",)))).start("Pay.")
            await until(lambda: len(made) == 1)
        shown: Any = ()
        for times in (1, 2):
            async with perdure.connect(store, **options) as app:
                report = await app.recover()
                assert len(made) == times
                assert (report.resumed, len(report.suspended)) == ((), 2)
                if shown:
                    with pytest.raises(PendingCallsChanged):
                        await app.approve("p", shown)
                shown = (await app.view("p")).pending_calls
                assert [leaf.begun for leaf in shown[0].leaves] == [times]
                await app.start_settle("p", approve=shown)
                await until(lambda times=times: len(made) == times + 1)
        is_quick = True
        async with perdure.connect(store, **options) as app:
            await app.recover()
            assert (await app.approve("p")).text == "Done."
    assert made == [False, False, False, True]
