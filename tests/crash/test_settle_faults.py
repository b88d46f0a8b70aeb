"""Settling several calls, here or by a worker, and options for the model: beside a crash, and a hook that raises."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.crash.test_faults import MOST_CALLS, opened, recovered
from tests.crash.test_kill import results_of

from perdure import (
    AgentDefinition,
    AgentSession,
    ExecutionStatus,
    InvalidData,
    LoopFactory,
    MemoryStore,
    ModelOptions,
    ModelRequest,
    SendMessage,
    SessionRuntime,
    SessionStatus,
    SettleToolCalls,
    StoreError,
    ToolCall,
    external_tool,
    tool,
)
from perdure.archive import fsck
from perdure.model.ids import use
from perdure.protocols import SessionStage
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

CALLS = [
    ToolCall("buy", {"what": "cup"}, id="b1"),
    ToolCall("buy", {"what": "boat"}, id="b2"),
    ToolCall("weather", {}, id="w1"),
]
OPTIONS = ModelOptions(temperature=0.25)


class Shop:
    """An agent that asks for three things at once, each to be settled in its own way."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asked_with: list[float | None] = []

    def loops(self) -> LoopFactory:
        @tool(needs_approval=True)
        def buy(what: str) -> str:
            self.done.append(what)
            return f"bought {what}"

        def reply(request: ModelRequest) -> Any:
            self.asked_with.append(request.model.temperature)
            return "Settled." if request.step else CALLS

        return LoopFactory(tools=[buy, external_tool("weather")], driver=ScriptedDriver(reply))

    def settling(self, *, wait: bool) -> SettleToolCalls:
        given: dict[str, Any] = {"approve": ["b1"], "deny": {"b2": "too dear"}, "answers": {"w1": "rain"}}
        return SettleToolCalls(self.loops(), **given, wait=wait)

    async def waiting(self, store: Any) -> AgentSession:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("buyer"))
        return await runtime.execute(session.id, SendMessage("Buy it.", self.loops(), model_options=OPTIONS))

    def check(self, kept: AgentSession, where: str) -> None:
        """Require that everything was settled as it was decided, or nothing was."""
        assert len(self.done) <= 1, f"{where}: an approved call was made twice"
        if kept.version == 2:
            assert (self.done, kept.status) == ([], SessionStatus.SUSPENDED), where
            return
        assert (kept.status, kept.state.messages[-1].text) == (SessionStatus.ACTIVE, "Settled."), where
        assert set(results_of(kept)) == {"b1", "b2", "w1"}, where
        results = {each.call_id: each.text for message in kept.state.messages for each in message.tool_results}
        assert "too dear" in results["b2"]
        assert results["w1"] == "rain"
        assert set(self.asked_with) == {0.25}, f"{where}: the run asked in another way"


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
@pytest.mark.parametrize("wait", [True, False], ids=["here", "left"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_settlement_takes_effect_once_whatever_call_the_crash_strikes(
    tmp_path: Path, kind: str, wait: bool, after: bool
) -> None:
    """All of it or nothing: nobody is asked twice, nothing is made twice, and the run asks the model as before."""
    async with opened(kind, tmp_path) as store:
        for call in range(1, MOST_CALLS):
            clock, shop = FrozenClock(tick=0.0001), Shop()
            with use(clock=clock):
                session = await shop.waiting(store)
                failing = FailingStore(store)
                failing.crash(call=call, after=after)
                with suppress(StoreError):
                    await SessionRuntime(failing).execute(session.id, shop.settling(wait=wait))
                kept = await recovered(store, session.id, shop.loops(), clock)
            shop.check(kept, f"call {call}")
            if not failing.has_crashed:
                assert kept.version == 3
                break
        assert (2 if not wait else 5) < call < MOST_CALLS - 1
        assert (await fsck(store)).problems == ()


@pytest.mark.parametrize("wait", [True, False], ids=["here", "left"])
@pytest.mark.parametrize("verb", ["claim", "save", "load", "append", "find_key", "runs", "read"])
async def test_a_call_of_the_store_that_fails_once_loses_no_settlement(verb: str, wait: bool) -> None:
    """The decision raises an error, or is on record; the same decision again settles it."""
    store, clock, shop = MemoryStore(), FrozenClock(tick=0.0001), Shop()
    failing = FailingStore(store)
    with use(clock=clock):
        session = await shop.waiting(store)
        failing.fail(verb)
        with suppress(StoreError):
            await SessionRuntime(failing).execute(session.id, shop.settling(wait=wait))
        kept = await recovered(store, session.id, shop.loops(), clock)
        if kept.version == 2:
            await SessionRuntime(store).execute(session.id, shop.settling(wait=wait))
            kept = await recovered(store, session.id, shop.loops(), clock)
    shop.check(kept, verb)
    assert kept.version == 3


@pytest.mark.parametrize("wait", [True, False], ids=["here", "left"])
@pytest.mark.parametrize("stage", list(SessionStage))
async def test_a_hook_that_raises_beside_a_settlement(stage: SessionStage, wait: bool) -> None:
    """At any stage, the decision takes effect once, here or when the run is recovered."""
    store, clock, shop = MemoryStore(), FrozenClock(tick=0.0001), Shop()
    strikes = [stage]

    def hook(at: SessionStage, session: AgentSession) -> AgentSession:
        if at in strikes:
            strikes.clear()
            raise RuntimeError("the hook")
        return session

    with use(clock=clock):
        session = await shop.waiting(store)
        with suppress(RuntimeError):
            await SessionRuntime(store, controller=_Hook(hook)).execute(session.id, shop.settling(wait=wait))
        kept = await recovered(store, session.id, shop.loops(), clock)
        if kept.version == 2:
            await SessionRuntime(store).execute(session.id, shop.settling(wait=True))
            kept = await recovered(store, session.id, shop.loops(), clock)
    shop.check(kept, str(stage))
    assert kept.version == 3
    assert kept.state.status is ExecutionStatus.COMPLETED


class _Hook:
    def __init__(self, hook: Any) -> None:
        self._hook = hook

    async def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        kept: AgentSession = self._hook(stage, session)
        return kept


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_run_with_options_is_recovered_with_them(after: bool) -> None:
    """A crash at every call of the store, with a key: the request is answered once, and asked with the same options."""
    for call in range(1, MOST_CALLS):
        store, clock, asked = MemoryStore(), FrozenClock(tick=0.0001), list[float | None]()

        def reply(request: ModelRequest, asked: list[float | None] = asked) -> str:
            asked.append(request.model.temperature)
            return "Yes."

        loops = LoopFactory(driver=ScriptedDriver(reply))
        action = SendMessage("Well?", loops, key="k", model_options=OPTIONS)
        with use(clock=clock):
            session = await SessionRuntime(store).create(AgentDefinition("clerk"))
            failing = FailingStore(store)
            failing.crash(call=call, after=after)
            with suppress(StoreError):
                await SessionRuntime(failing).execute(session.id, action)
            await recovered(store, session.id, loops, clock)
            kept = await SessionRuntime(store).execute(session.id, action)
            with pytest.raises(InvalidData):
                await SessionRuntime(store).execute(session.id, SendMessage("Well?", loops, key="k"))
        assert [m.text for m in kept.state.messages] == ["Well?", "Yes."]
        assert set(asked) == {0.25}
        if not failing.has_crashed:
            break
    assert 3 < call < MOST_CALLS - 1
