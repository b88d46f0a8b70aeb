"""A call that waits because its outcome is unknown says so to the person who decides."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import perdure
from perdure import (
    AgentState,
    Blocked,
    DriverError,
    Interceptor,
    MemoryStore,
    RunFailed,
    SqliteStore,
    StoreError,
    ToolCall,
    tool,
)
from perdure.cli.chat_view import described_in_full
from perdure.model.ids import use
from perdure.model.value import FrozenDict
from perdure.sessions.family_tree import tree_of
from perdure.sessions.json_forms import of_calls
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

WARNING = "outcome unknown: it may have been done already (begun 20"


class Payment:
    """A payment whose first attempt is cut off by a crash, beside a call that needs an approval."""

    def __init__(self, store: Any) -> None:
        self.failing = FailingStore(store)
        self.paid = 0
        self.pay = tool(name="pay", on_unknown="ask")(self._pay)
        self.ship = tool(name="ship", needs_approval=True)(lambda: "shipped")

    def _pay(self) -> str:
        self.paid += 1
        if self.paid == 1:
            self.failing.crash(call=1)
        return "paid"

    def options(self) -> dict[str, Any]:
        wants = [ToolCall("pay", {}, "pay-1"), ToolCall("ship", {}, "ship-1")]
        return {"tools": [self.pay, self.ship], "driver": ScriptedDriver([wants, "Done."])}

    async def crashed(self) -> None:
        clock = FrozenClock()
        with use(clock=clock):
            doomed = perdure.connect(self.failing, **self.options())
            await doomed.__aenter__()
            chat = await doomed.open("s")
            with pytest.raises(StoreError):
                await chat.send("Pay.")
            with suppress(StoreError):
                await doomed.__aexit__(None, None, None)


async def test_a_call_that_may_have_been_done_says_so_until_it_is_decided() -> None:
    """A first request beside it does not. A decision about another call keeps the warning."""
    kept = MemoryStore()
    payment = Payment(kept)
    await payment.crashed()
    async with perdure.connect(kept, **payment.options()) as app:
        await app.recover()
        chat = await app.open("s")
        pay, ship = (await chat.view()).pending_calls
        assert (pay.outcome_unknown, ship.outcome_unknown) == (True, False)
        assert pay.begun_at is not None
        assert ship.begun_at is None
        assert pay.warning.startswith(WARNING)
        assert ship.warning == ""
        assert WARNING in described_in_full(pay)
        assert [each["outcome_unknown"] for each in of_calls([pay, ship])] == [True, False]
        (left,) = (await chat.deny("not now", [ship])).pending_calls
        assert (left.outcome_unknown, left.begun_at) == (True, pay.begun_at)
        assert (await chat.approve([left])).text == "Done."
        assert payment.paid == 2


def test_the_command_line_warns_of_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"

    async def crash_and_recover() -> None:
        payment = Payment(SqliteStore(tmp_path / "s.db"))
        await payment.crashed()
        async with perdure.connect(url, **payment.options()) as app:
            await app.recover()

    def told(*words: str) -> str:
        made = subprocess.run(
            [sys.executable, "-m", "perdure", *words, "--store", url], capture_output=True, text=True, timeout=60
        )
        return made.stdout + made.stderr

    asyncio.run(crash_and_recover())
    assert WARNING in told("show", "s")
    assert WARNING in told("deny", "s", "--no-wait", "--reason", "no")


class Release:
    """A process that dies in an idempotent call, and the next release of its code, which recovers the run."""

    def __init__(self, *, needs_approval: bool = False) -> None:
        self.kept = MemoryStore()
        self.failing = FailingStore(self.kept)
        self.sent: list[str] = []
        self.script = ScriptedDriver([ToolCall("send", {"order": "A-7"}, "send-1"), "Done."])
        self.first = tool(name="send", idempotent=True, needs_approval=needs_approval)(self._send)

    def _send(self, order: str) -> str:
        self.sent.append(order)
        if len(self.sent) == 1:
            self.failing.crash(call=1)
        return "sent"

    async def crashed(self) -> None:
        with use(clock=FrozenClock()):
            doomed = perdure.connect(self.failing, tools=[self.first], driver=self.script)
            await doomed.__aenter__()
            chat = await doomed.open("s")
            with suppress(StoreError):
                if (await chat.send("Send it.")).pending_calls:
                    await chat.approve()
            with suppress(StoreError):
                await doomed.__aexit__(None, None, None)
        assert self.sent == ["A-7"]

    def next(self, changed: Any, **options: Any) -> Any:
        return perdure.connect(self.kept, tools=[changed], driver=self.script, **options)

    @property
    def told(self) -> str:
        return str(self.script.requests[-1].messages[-1].text)


async def test_a_call_whose_arguments_no_longer_fit_is_told_as_unknown() -> None:
    """Told only that they do not fit, the model would make the call with others: a second time."""

    def send(order: str, express: bool) -> str:
        return f"sent {order} {express}"

    release = Release()
    await release.crashed()
    async with release.next(tool(idempotent=True)(send)) as app:
        await app.recover()
    assert release.told.startswith("OutcomeUnknown: This call was interrupted and its outcome is unknown")
    assert "It was not made again (InvalidArguments: The arguments do not fit send: " in release.told
    assert release.told.endswith("Check before you repeat it.")


async def test_a_call_that_is_blocked_after_it_was_begun_is_told_as_unknown() -> None:
    class Night(Interceptor):
        def before_tool_use(self, call: ToolCall, state: Any) -> Any:
            return Blocked("orders are sent by day")

    release = Release()
    await release.crashed()
    async with release.next(release.first, interceptors=[Night()]) as app:
        await app.recover()
    assert release.told.startswith("OutcomeUnknown: ")
    assert "(Blocked: This call was not made: orders are sent by day)" in release.told
    assert release.sent == ["A-7"]


async def test_a_call_is_not_made_again_without_the_approval_that_its_tool_needs_by_now() -> None:
    """The tool needed none when the call was begun, so nobody has been asked."""
    release = Release()
    await release.crashed()
    async with release.next(tool(name="send", idempotent=True, needs_approval=True)(release._send)) as app:
        assert (await app.recover()).suspended == ("s",)
        chat = await app.open("s")
        (call,) = (await chat.view()).pending_calls
        assert call.outcome_unknown
        assert release.sent == ["A-7"]
        assert (await chat.approve([call])).text == "Done."
    assert release.sent == ["A-7", "A-7"]


async def test_a_call_that_was_approved_is_made_again_without_a_second_approval() -> None:
    """It is idempotent, and a person has agreed to its effect."""
    release = Release(needs_approval=True)
    await release.crashed()
    async with release.next(release.first) as app:
        assert (await app.recover()).resumed == ("s",)
    assert release.sent == ["A-7", "A-7"]


class _Changed(Interceptor):
    """A rule of the next release, which changes the calls of the model."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def before_tool_use(self, call: ToolCall, state: AgentState) -> ToolCall:
        return replace(call, **self._changes)


@pytest.mark.parametrize("changes", [{"arguments": FrozenDict({"order": "B-999"})}, {"name": "refund"}], ids=str)
async def test_another_call_than_the_approved_one_waits(changes: dict[str, Any]) -> None:
    """A person has approved the call of the model, and not what an interceptor makes of it since."""
    release, refunds = Release(needs_approval=True), list[str]()
    refund = tool(name="refund", idempotent=True, needs_approval=True)(lambda order: refunds.append(order))
    await release.crashed()
    tools = {"tools": [release.first, refund], "interceptors": [_Changed(**changes)]}
    async with perdure.connect(release.kept, driver=release.script, **tools) as app:
        assert (await app.recover()).suspended == ("s",)
    assert (release.sent, refunds) == (["A-7"], [])


async def _never() -> None:
    await asyncio.sleep(30)


async def test_the_tree_marks_a_run_with_an_unknown_outcome() -> None:
    """A tool that may not be repeated has reached its time-out."""
    pay = tool(name="pay", timeout=0.01)(_never)
    script = ScriptedDriver([ToolCall("pay"), "I could not make sure."])
    async with perdure.connect("memory://", tools=[pay], driver=script) as app:
        await (await app.open("s")).send("Pay.")
        (run,) = (await tree_of(app, "s", limit=10)).children
    assert (run.status, run.unknown) == ("completed", ("pay",))
    assert run.to_json()["unknown"] == ["pay"]


async def test_the_tree_says_that_a_run_continues_another() -> None:
    replies = iter([ToolCall("pay"), DriverError("down"), "Paid."])
    script = ScriptedDriver(lambda request: next(replies))
    async with perdure.connect("memory://", tools=[tool(name="pay")(lambda: "paid")], driver=script) as app:
        chat = await app.open("s")
        with pytest.raises(RunFailed):
            await chat.send("Pay.")
        await chat.retry()
        titles = [run.title for run in (await tree_of(app, "s", limit=10)).children]
    assert titles == ["Pay.", "continues the run before"]
