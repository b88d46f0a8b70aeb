"""The life of an MCP server: started when it is first needed, shared, and ended with its connection."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.loop.mcp.scene import gone, is_alive, marked, old_served, results, served

import perdure
from perdure import AgentDefinition, ConfigurationError, LoopFactory, MemoryStore, SendMessage, SessionRuntime, ToolCall
from perdure.loop.mcp import link
from perdure.loop.mcp.link import Link
from perdure.loop.mcp.server import McpServer
from perdure.testing import ScriptedDriver

CALL: list[object] = [ToolCall("pid", {}), "done"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of servers that were started, in order."""
    names: list[str] = []
    begin = Link.__init__

    def noted(self: Link, server: McpServer) -> None:
        names.append(server.name)
        begin(self, server)

    monkeypatch.setattr(Link, "__init__", noted)
    return names


def app(*tools: Any, script: list[object] = CALL, url: str = "memory://") -> perdure.Sessions:
    return perdure.connect(url, tools=tools, driver=ScriptedDriver(script))


async def pid_in(chat: perdure.Chat) -> int:
    pid = results(await chat.session())[-1][1]
    assert isinstance(pid, int)
    return pid


async def test_a_server_is_started_when_it_is_needed_and_shared(started: list[str]) -> None:
    """connect() and agents with other tools do not start it; then it starts once for all runs and owners."""

    def own() -> str:
        """Do something else."""
        return "own"

    async with app(served(), own) as sessions:
        assert started == []
        await (await sessions.open("a", AgentDefinition("a", tools=("own",)))).send("Go.")
        await (await sessions.open("b", AgentDefinition("b", tools=()))).send("Go.")
        assert started == []
        chats = [await sessions.open("c"), await sessions.of("ada").open("d"), await sessions.open("e")]
        await asyncio.gather(*(chat.send("Go.") for chat in chats))
        pids = {await pid_in(chat) for chat in chats}
        assert len(pids) == 1
        assert started == ["served"]
    assert not is_alive(*pids)


async def test_a_server_is_gone_after_an_error() -> None:
    """Leaving the connection by an exception ends the server as well."""
    pids: list[int] = []

    async def fail() -> None:
        async with app(served()) as sessions:
            chat = await sessions.open("a")
            await chat.send("Go.")
            pids.append(await pid_in(chat))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        await fail()
    assert not is_alive(*pids)


async def test_a_server_is_gone_though_closing_was_cancelled() -> None:
    """A cancellation waits until the process is gone."""
    sessions = app(served())
    await sessions.__aenter__()
    chat = await sessions.open("a")
    await chat.send("Go.")
    pid = await pid_in(chat)
    closing = asyncio.create_task(sessions.__aexit__(None, None, None))
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not is_alive(pid)


async def test_a_run_under_way_is_ended_before_its_server(tmp_path: Path) -> None:
    """Leaving by an error interrupts the run, cancels its call, and closes the server."""
    ledger = tmp_path / "ledger"
    script: list[object] = [ToolCall("slow", {"seconds": 60}), "done"]
    sessions = app(served(ledger), script=script, url=f"sqlite:///{tmp_path}/s.db")
    await sessions.__aenter__()
    chat = await sessions.open("a")
    sending = asyncio.create_task(chat.send("Go."))
    await marked(ledger, "slow begun")
    await sessions.__aexit__(RuntimeError, None, None)
    with pytest.raises(perdure.RunInterrupted):
        await sending
    await marked(ledger, "slow cancelled")


async def test_closing_does_not_wait_for_a_server_that_is_still_starting() -> None:
    """A server that never answers is ended, and a waiting caller gets an error."""
    silent = perdure.mcp([sys.executable, "-c", "import time; time.sleep(600)"])
    sessions = app(silent)
    async with asyncio.timeout(30):
        await sessions.__aenter__()
        chat = await sessions.open("a")
        sending = asyncio.create_task(chat.send("Go."))
        await asyncio.sleep(0.3)
        await sessions.__aexit__(RuntimeError, None, None)
        with pytest.raises(ConfigurationError, match="closed while its tools were connected to"):
            await sending


async def test_a_server_that_cannot_be_started_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    """Nothing is said or kept; once the server can be started, the same connection works."""
    program = tmp_path / "server.py"
    program.write_text("import sys; sys.exit('no license')")
    async with app(
        perdure.mcp([sys.executable, program], name="late"), script=[ToolCall("first", {}), "ok"]
    ) as sessions:
        chat = await sessions.open("a")
        with pytest.raises(ConfigurationError, match=r"'late' .* cannot be reached: .* It wrote: no license\. Check"):
            await chat.send("Go.")
        assert (await chat.session()).version == 1
        program.write_text((Path(__file__).parent / "old_served.py").read_text())
        assert (await chat.send("Go.")).text == "ok"


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is ended, and the error says how long the wait was."""
    monkeypatch.setattr("perdure.loop.mcp.link._START_SECONDS", 0.5)
    silent = perdure.mcp([sys.executable, "-c", "import time; time.sleep(600)"], timeout=None)
    async with app(silent) as sessions:
        chat = await sessions.open("a")
        with pytest.raises(ConfigurationError, match=r"it did not answer within 0.5 s"):
            await chat.send("Go.")


async def test_a_list_that_was_cut_short_is_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that is cancelled while the tools are listed leaves the listing to the next one."""
    begun, list_all = asyncio.Event(), link._all_tools

    async def slowly(client: Any) -> Any:
        begun.set()
        await asyncio.sleep(60)

    async with app(old_served(), script=[ToolCall("first", {}), "ok"]) as sessions:
        chat = await sessions.open("a")
        monkeypatch.setattr(link, "_all_tools", slowly)
        sending = asyncio.create_task(chat.send("Go."))
        await begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        monkeypatch.setattr(link, "_all_tools", list_all)
        await chat.send("Go.")
        assert results(await chat.session()) == [("first", "first was called", False)]


async def test_what_a_server_says_of_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has it line by line, without the secrets that the server was given; the terminal has nothing."""
    caplog.set_level("DEBUG", "perdure.mcp")
    says = "import os, sys; print('my key is', os.environ['KEY'], file=sys.stderr); sys.exit(1)"
    async with app(perdure.mcp([sys.executable, "-c", says], name="x", env={"KEY": "hush-hush"})) as sessions:
        with pytest.raises(ConfigurationError, match=r"It wrote: my key is …\. Check"):
            await (await sessions.open("a")).send("Go.")
    assert caplog.messages == ["x: my key is …"]


async def test_one_description_serves_several_connections() -> None:
    """Each has a server of its own, and closing one leaves the other alone."""
    server = served()
    async with app(server) as first:
        one = await first.open("a")
        await one.send("Go.")
        async with app(server) as second:
            other = await second.open("a")
            await other.send("Go.")
            here, there = await pid_in(one), await pid_in(other)
        assert not is_alive(there)
        await one.send("Again.")
        assert await pid_in(one) == here


async def test_a_connection_that_is_opened_again_starts_its_server_again() -> None:
    """A closed connection can be opened again."""
    sessions = app(old_served(), script=[ToolCall("first", {}), "ok"])
    for _ in range(2):
        async with sessions:
            chat = await sessions.open()
            await chat.send("Go.")
            assert results(await chat.session()) == [("first", "first was called", False)]


def test_a_factory_outlives_its_event_loop() -> None:
    """A server whose loop has ended is not used again, and the next loop starts another."""
    loops = LoopFactory(tools=[old_served()], driver=ScriptedDriver([ToolCall("first", {}), "ok"]))

    async def once() -> str:
        runtime = SessionRuntime(MemoryStore())
        session = await runtime.create(AgentDefinition("a"))
        after = await runtime.execute(session.id, SendMessage("Go.", loops))
        assert results(after) == [("first", "first was called", False)]
        return "once"

    assert [asyncio.run(once()), asyncio.run(once())] == ["once", "once"]
    asyncio.run(loops.aclose())


def test_it_works_without_await() -> None:
    """`connect_blocking` has the server in its own loop, and ends it."""
    with perdure.connect_blocking("memory://", tools=[served()], driver=ScriptedDriver(CALL)) as sessions:
        chat = sessions.open("a")
        chat.send("Go.")
        pid = results(chat.session())[-1][1]
        assert is_alive(pid)
    assert not is_alive(pid)


@pytest.mark.parametrize("second", [{}, {"prefix": "b_"}])
async def test_two_servers_with_the_same_names(second: dict[str, str]) -> None:
    """They are refused before the run begins, and the error says how to fix it; with a prefix both serve."""
    script: list[object] = [[ToolCall("first", {}), ToolCall("b_first", {})], "ok"]
    async with app(old_served(name="a"), old_served(name="b", **second), script=script) as sessions:
        chat = await sessions.open("a")
        if second:
            await chat.send("Go.")
            assert {name for name, _, is_error in results(await chat.session()) if not is_error} == {"first", "b_first"}
        else:
            with pytest.raises(
                ConfigurationError, match=r"A tool of <mcp b> and one of <mcp a> are both named 'first'. "
            ):
                await chat.send("Go.")
            assert (await chat.session()).version == 1


async def test_a_server_that_is_killed_leaves_no_zombie() -> None:
    """The process is reaped at once, not when the connection is left."""
    async with app(served()) as sessions:
        chat = await sessions.open("a")
        await chat.send("Go.")
        pid = await pid_in(chat)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)


async def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, whichever of its modules is imported first."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("mcp", "mcp_types")]
    for name in ("mcp", "mcp_types", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    async with app(old_served()) as sessions:
        with pytest.raises(ConfigurationError, match=r"need the package mcp.*pip install 'perdure\[mcp\]'"):
            await (await sessions.open("a")).send("Go.")
