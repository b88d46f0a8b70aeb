"""A connection that recovers in the background: nobody waits for it, and leaving cuts no answer off."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.test_follow import HALF, all_of
from tests.waiting import until

import perdure
from perdure import (
    AgentSession,
    ConfigurationError,
    InvalidData,
    MemoryStore,
    PendingCallsChanged,
    SessionBusy,
    SessionStage,
    SqliteStore,
    tool,
)
from perdure.protocols import SessionStore
from perdure.testing import Chunks, Delay, FailingStore, ScriptedDriver


async def left_behind(store: Any, *names: str, **options: Any) -> None:
    """Leave sessions whose runs were interrupted."""
    async with perdure.connect(store, driver=ScriptedDriver(lambda _: HALF), grace=0.0, **options) as app:
        for name in names:
            await (await app.open(name)).start("Tell me.")


async def activity(app: perdure.Sessions, name: str) -> str:
    return (await app.view(name)).activity


async def test_nobody_waits_for_it() -> None:
    """The connection opens at once, and following a killed run gives its answer."""
    slow = Chunks(["The ", Delay(0.3, "end.")])
    async with MemoryStore() as store:
        await left_behind(store, "a", "b")
        started = asyncio.get_running_loop().time()
        async with perdure.connect(store, driver=ScriptedDriver(lambda _: slow), recover=True) as app:
            assert asyncio.get_running_loop().time() - started < 0.25
            chunks = [await all_of(app.follow(name)) for name in ("a", "b")]
            assert [each[-1].reply.text for each in chunks] == ["The end.", "The end."]


async def test_leaving_cuts_no_answer_off(tmp_path: Path) -> None:
    """A run that is being recovered has its grace, then waits for the next process; others are not begun."""
    store = SqliteStore(tmp_path / "sessions.db")
    async with store:
        await left_behind(store, "a", "b")
        driver = ScriptedDriver(lambda _: HALF)
        async with perdure.connect(store, driver=driver, grace=0.0, recover=True) as app:
            await until(lambda: _is_asked(driver))
        assert len(driver.requests) == 1
        async with perdure.connect(store, driver=ScriptedDriver(lambda _: "The end.")) as app:
            assert [await activity(app, name) for name in ("a", "b")] == ["killed", "killed"]
            assert len((await app.recover()).resumed) == 2


async def _is_asked(driver: ScriptedDriver) -> bool:
    return bool(driver.requests)


async def test_it_looks_again() -> None:
    """A claim of another machine's process lapses only after its lease."""
    answers = ScriptedDriver(["Done."])
    async with MemoryStore() as store, perdure.connect(store, driver=answers, recover=True, lease=0.1) as app:
        await app.open("s")
        await left_behind(store, "later")
        await until(lambda: _is_idle(app, "later"))
        assert (await app.session("later")).state.messages[-1].text == "Done."


async def test_a_follower_that_meets_a_killed_run_has_it_recovered_at_once() -> None:
    """The follower does not wait for the next look, which comes after a lease."""
    answers = ScriptedDriver(["Done."])
    async with MemoryStore() as store, perdure.connect(store, driver=answers, recover=True, lease=60) as app:
        await app.open("s")
        await left_behind(store, "later")
        async with asyncio.timeout(5):
            assert (await all_of(app.follow("later")))[-1].reply.text == "Done."


async def _is(app: perdure.Sessions, name: str, expected: str) -> bool:
    return await activity(app, name) == expected


async def _is_idle(app: perdure.Sessions, name: str) -> bool:
    return await _is(app, name, "idle")


async def test_what_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It stops no other recovery, and a store that fails once stops none either."""

    @tool
    def gone() -> str:
        """Be gone."""
        return "never"

    store = FailingStore(MemoryStore())
    async with store:
        await left_behind(store, "fine")
        agent = perdure.AgentDefinition("needy", tools=("gone",))
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), tools=[gone], grace=0.0) as app:
            await (await app.open("needy", agent)).start("Tell me.")
        store.fail("lapsed")
        with caplog.at_level(logging.WARNING, "perdure.recovery"):
            answers = ScriptedDriver(["Done."])
            async with perdure.connect(store, driver=answers, recover=True, lease=0.05) as app:
                await until(lambda: _is_idle(app, "fine"))
                await asyncio.sleep(0.2)
                await until(lambda: _is(app, "needy", "killed"))  # it is claimed for a moment at each try
    assert [record.levelname for record in caplog.records if record.name == "perdure.recovery"] == ["WARNING", "ERROR"]
    assert "needy could not be recovered" in caplog.text


async def test_an_owner_recovers_nobody_elses() -> None:
    async with MemoryStore() as store:
        for owner in ("ada", "bob"):
            await left_behind(store, "s", owner=owner)
        async with perdure.connect(store, driver=ScriptedDriver(["Done."]), owner="ada", recover=True) as app:
            await until(lambda: _is_idle(app, "s"))
        async with perdure.connect(store, driver=ScriptedDriver([])) as app:
            assert await activity(app.of("bob"), "s") == "killed"
            with pytest.raises(SessionBusy):
                await app.of("bob").rename("s", "x")


async def test_two_processes_recover_a_run_once(tmp_path: Path) -> None:
    driver = ScriptedDriver(lambda _: Delay(0.1, "Done."))
    async with SqliteStore(tmp_path / "sessions.db") as store, SqliteStore(tmp_path / "sessions.db") as other:
        await left_behind(store, "a", "b", "c")
        async with (
            perdure.connect(store, driver=driver, recover=True) as app,
            perdure.connect(other, driver=driver, recover=True),
        ):
            for name in ("a", "b", "c"):
                await until(lambda name=name: _is_idle(app, name))
        assert len(driver.requests) == 3


def test_recovering_without_await(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    with perdure.connect_blocking(url, driver=ScriptedDriver([HALF]), grace=0.0) as app:
        app.open("s").start("Tell me.")
    with perdure.connect_blocking(url, driver=ScriptedDriver(["Done."]), recover=True) as app:
        assert [chunk.reply for chunk in app.follow("s")][-1].text == "Done."


async def test_what_cannot_be_recovered_from_is_refused() -> None:
    with pytest.raises(InvalidData):
        perdure.connect("memory://", recover="yes")  # type: ignore[arg-type]
    store = MemoryStore()
    names = [name for name in vars(SessionStore) if not name.startswith("_")]
    bare: Any = type("Bare", (), {name: staticmethod(getattr(store, name)) for name in names})()
    with pytest.raises(ConfigurationError, match="no journal"):
        perdure.connect(bare, recover=True)


class Refusing:
    """A controller that raises an error of its own for one session."""

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        if stage is SessionStage.AFTER_ACTION and session.id == "b":
            raise ValueError("not this one")
        return session


async def test_a_hook_that_raises_stops_no_other_recovery() -> None:
    """Its session's run is left and the others continue, in the background and in `recover()`."""
    async with MemoryStore() as store:
        await left_behind(store, "a", "b", "c")
        driver = ScriptedDriver(lambda _: "The end.")
        async with perdure.connect(store, driver=driver, controller=Refusing()) as app:
            report = await app.recover()
            assert (set(report.resumed), [each for each, _ in report.failed]) == ({"a", "c"}, ["b"])
            assert "A hook raised ValueError: not this one." in report.errors[0].what
            assert isinstance(report.errors[0].__cause__, ValueError)
        await left_behind(store, "d")
        async with perdure.connect(store, driver=driver, controller=Refusing(), recover=True) as app:
            await until(lambda: _is_done(app, "d"))


async def _is_done(app: perdure.Sessions, name: str) -> bool:
    return await activity(app, name) == "idle"


def paid(_: Any) -> Any:
    """Answer slowly, so that a recovery lasts."""
    return Delay(0.2, "Done.")


@pytest.mark.parametrize("pause", [0.0, 0.1])
async def test_a_message_waits_for_the_recovery_of_its_own_connection(pause: float) -> None:
    """The program of the landing page gets its answer after a crash, at its first restart."""
    async with MemoryStore() as store:
        await left_behind(store, "s")
        driver = ScriptedDriver(paid)
        async with perdure.connect(store, driver=driver, recover=True, grace=0.0) as app:
            chat = await app.open("s")
            await asyncio.sleep(pause)
            first, second = await asyncio.gather(chat.send("Hello."), _streamed(chat), return_exceptions=True)
            assert {type(first), type(second)} in ({perdure.Reply}, {perdure.Reply, SessionBusy})
            said = [message.text for message in await chat.history() if message.role == "assistant"]
            assert said.count("Done.") == len(driver.requests)
        assert said.count("Done.") >= 2


async def _streamed(chat: perdure.Chat) -> Any:
    return (await all_of(chat.stream("And you?")))[-1].reply


async def test_a_message_is_started_after_the_recovery() -> None:
    async with MemoryStore() as store:
        await left_behind(store, "s")
        async with perdure.connect(store, driver=ScriptedDriver(paid), recover=True) as app:
            chat = await app.open("s")
            await until(lambda: _is(app, "s", "running"))
            assert (await (await chat.start("Hello.")).result()).text == "Done."
            queued = await chat.enqueue("Later.")
            assert (await chat.send("Now.", when_busy="queue")).queued
            assert queued.key


async def test_a_key_that_is_being_recovered_is_answered_once() -> None:
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), grace=0.0) as app:
            await (await app.open("s")).start("Pay.", key="k")
        driver = ScriptedDriver(paid)
        async with perdure.connect(store, driver=driver, recover=True) as app:
            await until(lambda: _is(app, "s", "running"))
            replies = await asyncio.gather(*(app.send("s", "Pay.", key="k") for _ in range(4)))
        assert [reply.text for reply in replies] == ["Done."] * 4
        assert len(driver.requests) == 1


async def test_a_message_that_waits_may_be_cancelled() -> None:
    """The recovery continues, and the message is not sent."""
    async with MemoryStore() as store:
        await left_behind(store, "s")
        async with perdure.connect(store, driver=ScriptedDriver(paid), recover=True) as app:
            await until(lambda: _is(app, "s", "running"))
            sending = asyncio.create_task(app.send("s", "Hello."))
            await asyncio.sleep(0.05)
            sending.cancel()
            await asyncio.wait({sending})
            await until(lambda: _is_idle(app, "s"))
            assert [message.text for message in (await app.session("s")).state.messages] == ["Tell me.", "Done."]


async def test_a_message_waits_for_no_recovery_of_others(tmp_path: Path) -> None:
    """A run that another process recovers raises SessionBusy, whatever this connection recovers."""
    async with SqliteStore(tmp_path / "s.db") as store, SqliteStore(tmp_path / "s.db") as other:
        await left_behind(store, "s")
        driver = ScriptedDriver(lambda _: Delay(1.0, "Done."))
        async with perdure.connect(other, driver=driver, recover=True, grace=0.0) as app:
            await until(lambda: _is(app, "s", "running"))
            async with perdure.connect(store, driver=driver, recover=True) as here:
                with pytest.raises(SessionBusy, match="is being run"):
                    await here.send("s", "Hello.")


async def test_a_fork_does_not_wait_for_the_recovery_of_its_parent() -> None:
    """A fork has a parent but no caller: its own recovery begins at once, and a message to it raises SessionBusy."""
    driver = ScriptedDriver(lambda request: Delay(30.0 if request.messages[-1].text == "Tell me." else 0.1, "Done."))
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=ScriptedDriver(lambda _: HALF), grace=0.0) as app:
            chat = await app.open("s")
            killed, busy = await chat.fork(), await chat.fork()
            await chat.start("Tell me.")
            await killed.start("Tell me more.")
        async with perdure.connect(store, driver=driver, recover=True, grace=0.0) as app:
            await until(lambda: _is(app, "s", "running"))
            async with asyncio.timeout(5):
                assert (await app.send(killed.id, "Hello.")).text == "Done."
                run = await app.start(busy.id, "Hello.")
                with pytest.raises(SessionBusy, match="is being run"):
                    await app.send(busy.id, "And you?")
                assert (await run.result()).text == "Done."
            assert await activity(app, "s") == "running"


@tool(needs_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


async def test_a_message_after_a_recovery_that_waits_for_a_person() -> None:
    """It raises the same error as without recover=True, and a decision continues the run."""
    agent = perdure.AgentDefinition("payer", tools=("pay",))
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), tools=[pay], grace=0.0) as app:
            await (await app.open("s", agent)).start("Pay.")
        driver = ScriptedDriver([Delay(0.1, perdure.ToolCall("pay")), Delay(0.1, "Done.")])
        async with perdure.connect(store, driver=driver, tools=[pay], recover=True) as app:
            await until(lambda: _is(app, "s", "running"))
            with pytest.raises(perdure.SessionNotActive):
                await app.send("s", "Hello.")
            assert (await app.approve("s")).text == "Done."


async def test_a_decision_waits_for_the_recovery_of_one_that_was_left() -> None:
    """By then no call waits for a decision, and an error says so."""
    agent = perdure.AgentDefinition("payer", tools=("pay",))
    driver = ScriptedDriver([perdure.ToolCall("pay"), Delay(0.2, "Done.")])
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=driver, tools=[pay]) as app:
            chat = await app.open("s", agent)
            await chat.send("Pay.")
            await chat.approve(wait=False)
        async with perdure.connect(store, driver=driver, tools=[pay], recover=True) as app:
            await until(lambda: _is(app, "s", "running"))
            with pytest.raises(PendingCallsChanged):
                await app.deny("s", "no")
            assert (await app.send("s", "Hello.")).pending_calls


async def test_a_message_after_a_recovery_that_fails_says_why() -> None:
    @tool
    def gone() -> str:
        """Be gone."""
        return "never"

    agent = perdure.AgentDefinition("needy", tools=("gone",))
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), tools=[gone], grace=0.0) as app:
            await (await app.open("needy", agent)).start("Tell me.")
        async with perdure.connect(store, driver=ScriptedDriver(["Done."]), recover=True) as app:
            for _ in range(2):
                with pytest.raises(ConfigurationError, match="cannot be recovered"):
                    await app.send("needy", "Hello.")


async def test_a_message_that_waits_when_its_connection_is_left() -> None:
    """It is not sent, and the run waits for the next process."""
    async with MemoryStore() as store:
        await left_behind(store, "s")
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), recover=True, grace=0.0) as app:
            await until(lambda: _is(app, "s", "running"))
            sending = asyncio.create_task(app.send("s", "Hello."))
            await asyncio.sleep(0.05)
        with pytest.raises((SessionBusy, ConfigurationError)):
            await sending
        async with perdure.connect(store, driver=ScriptedDriver(["Done."])) as app:
            assert await activity(app, "s") == "killed"
            await app.recover()
            assert [message.text for message in (await app.session("s")).state.messages] == ["Tell me.", "Done."]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3])
async def test_a_message_waits_for_the_recovery_of_sub_agents(pause: float) -> None:
    """A caller and its sub-agent were both killed: a message to the caller recovers each of them once."""
    kid = perdure.AgentDefinition("kid", description="A helper.", system_prompt="kid")

    def respond(request: Any) -> Any:
        if request.system_prompt == "kid":
            return Delay(0.2, "helped")
        return Delay(0.1, "Done.") if request.step else perdure.ToolCall("kid", {"prompt": "Help."})

    def killed(request: Any) -> Any:
        return HALF if request.system_prompt == "kid" else respond(request)

    async with MemoryStore() as store:
        async with perdure.connect(store, driver=(first := ScriptedDriver(killed)), subagents=[kid], grace=0.0) as app:
            await (await app.open("s", perdure.AgentDefinition("boss", tools=("kid",)))).start("Go.")
            await until(lambda: len(first.requests) == 2)
        driver = ScriptedDriver(respond)
        async with perdure.connect(store, driver=driver, subagents=[kid], recover=True) as app:
            chat = await app.open("s")
            await asyncio.sleep(pause)
            assert (await chat.send("Hello.")).text == "Done."
        assert len([each for each in driver.requests if each.system_prompt == "kid"]) == 2  # one for each message


async def test_a_tool_of_a_run_that_is_recovered_does_not_wait_for_itself() -> None:
    said: list[str] = []

    @tool
    async def ask() -> str:
        """Send a message to the own session."""
        try:
            await apps[-1].send("s", "Hello?")
        except SessionBusy as error:
            said.append(error.what)
        return "asked"

    agent = perdure.AgentDefinition("asker", tools=("ask",))
    apps: list[perdure.Sessions] = []
    async with MemoryStore() as store:
        async with perdure.connect(store, driver=ScriptedDriver([HALF]), tools=[ask], grace=0.0) as app:
            await (await app.open("s", agent)).start("Go.")
        driver = ScriptedDriver([perdure.ToolCall("ask"), "Done."])
        async with perdure.connect(store, driver=driver, tools=[ask], recover=True) as app:
            apps.append(app)
            await until(lambda: _is_idle(app, "s"))
    assert len(said) == 1


def test_a_message_waits_for_the_recovery_without_await(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    with perdure.connect_blocking(url, driver=ScriptedDriver([HALF]), grace=0.0) as app:
        app.open("s").start("Tell me.")
    with perdure.connect_blocking(url, driver=ScriptedDriver(paid), recover=True) as app:
        chat = app.open("s")
        while chat.view().activity != "running":
            pass
        assert chat.send("Hello.").text == "Done."
        assert [message.text for message in chat.history()] == ["Tell me.", "Done.", "Hello.", "Done."]


async def test_what_was_recovered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has recoveries in the background, and those by the next message."""
    async with MemoryStore() as store:
        await left_behind(store, "a", "b")
        with caplog.at_level(logging.INFO, "perdure.recovery"):
            async with perdure.connect(store, driver=ScriptedDriver(["Done."]), recover=True) as app:
                await until(lambda: _is_idle(app, "a"))
                await app.send("b", "Hello.")
        told = [record.getMessage() for record in caplog.records]
        assert sorted(told) == [f"the run of session {name} was continued, and has ended" for name in ("a", "b")]
