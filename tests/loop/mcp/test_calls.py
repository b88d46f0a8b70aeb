"""Calls of tools on a real MCP server, in a child process over its standard streams."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.loop.mcp.scene import gone, is_alive, marked, old_served, results, served

import perdure
from perdure import AgentDefinition, LoopFactory, ToolCall, ToolContext, ToolExecutionUpdate
from perdure.testing import ScriptedDriver


def calls(*wanted: tuple[str, dict[str, Any]]) -> list[ToolCall]:
    return [ToolCall(name, arguments) for name, arguments in wanted]


async def test_a_server_has_its_tools_called(tmp_path: Path) -> None:
    """Text, structured content, errors, pictures and pages become results; content that cannot be carried is named."""
    script = [
        calls(
            ("add", {"a": 1, "b": 2}),
            ("greet", {}),
            ("weather", {"city": "Oslo"}),
            ("names", {}),
            ("fail", {"reason": "no money"}),
            ("picture", {}),
            ("page", {}),
        ),
        "done",
    ]
    async with perdure.connect("memory://", tools=[served()], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        assert (await chat.send("Go.")).text == "done"
        found = {name: (content, is_error) for name, content, is_error in results(await chat.session())}
    assert found == {
        "add": (3, False),
        "greet": ("Hello, you!", False),
        "weather": ({"city": "Oslo", "degrees": 7}, False),
        "names": (["ada", "bob"], False),
        "fail": ("ToolError: Error executing tool fail: no money", True),
        "picture": ("a dot\n[not shown: an image, image/png, 3,000 bytes]", False),
        "page": ("file:///page.txt:\nthe page", False),
    }


async def test_the_model_is_told_names_descriptions_and_schemas() -> None:
    """A server's name, description and schema of a tool go to the model unchanged."""
    told: dict[str, Any] = {}

    def reply(request: perdure.ModelRequest) -> str:
        told.update({spec.name: (spec.description, spec.parameters) for spec in request.tools})
        return "done"

    async with perdure.connect("memory://", tools=[served(prefix="x_")], driver=ScriptedDriver(reply)) as app:
        await (await app.open("a")).send("Go.")
    description, parameters = told["x_add"]
    assert description == "Add two numbers."
    assert parameters["required"] == ["a", "b"]
    assert parameters["properties"]["a"]["type"] == "integer"


async def test_arguments_that_do_not_fit_are_not_sent(tmp_path: Path) -> None:
    """The model gets the error, and the server gets no call."""
    ledger = tmp_path / "ledger"
    script = [ToolCall("charge", {"amount": "much"}), "done"]
    async with perdure.connect("memory://", tools=[served(ledger)], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        ((_, content, is_error),) = results(await chat.session())
    assert is_error
    assert "'much' is not of type 'integer' at $.amount" in content
    assert not ledger.exists()


async def test_progress_is_heard_by_followers() -> None:
    """Each report of the server is an event of the run, before the tool's result."""
    script = [ToolCall("slow", {"seconds": 0.05}), "done"]
    heard: list[Any] = []
    async with perdure.connect("memory://", tools=[served()], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        chat.subscribe(lambda event: heard.append(event) if isinstance(event, ToolExecutionUpdate) else None)
        await chat.send("Go.")
    assert [event.progress["progress"] for event in heard] == list(range(10))
    assert heard[3].progress == {"progress": 3, "total": 10, "message": "step 3"}


async def test_progress_that_cannot_be_told_ends_the_call(tmp_path: Path) -> None:
    """An error of the listener is raised unchanged, since a record may have failed; the server's call is cancelled."""
    ledger = tmp_path / "ledger"
    loops = LoopFactory(tools=[served(ledger)], driver=ScriptedDriver(["done"]))
    agent = AgentDefinition("a")
    await loops.connect_tools(agent)
    tool = loops.tools_of(agent, 0).get("slow")
    assert tool is not None

    async def fail(progress: object) -> None:
        raise OSError("The disk is full.")

    try:
        with pytest.raises(OSError, match="disk is full"):
            await tool.call({"seconds": 60}, ToolContext("c", "e", "a", progress=fail))
        await marked(ledger, "slow cancelled")
    finally:
        await loops.aclose()


async def test_a_cancelled_call_is_cancelled_on_the_server(tmp_path: Path) -> None:
    """The server gets the cancellation, and keeps serving."""
    ledger = tmp_path / "ledger"
    script = [ToolCall("slow", {"seconds": 60}), "done"]
    async with perdure.connect("memory://", tools=[served(ledger)], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        sending = asyncio.create_task(chat.send("Go."))
        await marked(ledger, "slow begun")
        assert await chat.cancel()
        await sending
        await marked(ledger, "slow cancelled")


async def test_a_call_has_its_time(tmp_path: Path) -> None:
    """After `timeout` seconds the model gets an error and the server a cancellation; the server takes the next call."""
    ledger = tmp_path / "ledger"
    script = [ToolCall("pid", {}), ToolCall("slow", {"seconds": 60}), ToolCall("pid", {}), "done"]
    tools = [served(ledger, timeout=0.5)]
    async with perdure.connect("memory://", tools=tools, driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        before, slow, after = results(await chat.session())
        await marked(ledger, "slow cancelled")
    assert (slow[0], slow[2]) == ("slow", True)
    assert slow[1].startswith("OutcomeUnknown: No result within 0.5 s.")
    assert before == after


async def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    """The model gets an unknown outcome; the next call has a new server, and the old process is reaped."""
    ledger = tmp_path / "ledger"
    script = [ToolCall("pid", {}), ToolCall("die", {}), ToolCall("pid", {}), "done"]
    async with perdure.connect("memory://", tools=[served(ledger)], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        (_, first, _), (_, died, is_error), (_, second, _) = results(await chat.session())
    assert is_error
    assert died.startswith("ToolUnavailable: The server 'served' of this tool is not available: Connection closed.")
    assert "Whether the call took effect is unknown" in died
    assert ledger.read_text().splitlines() == ["die"]
    assert first != second
    assert not is_alive(first)
    assert not is_alive(second)


async def test_a_server_that_was_killed_while_nobody_called_is_not_missed() -> None:
    """The next call is made on a new server: it was never sent to the old one."""
    script = [ToolCall("pid", {}), "done"]
    async with perdure.connect("memory://", tools=[served()], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        ((_, first, _),) = results(await chat.session())
        os.kill(first, signal.SIGKILL)
        await gone(first)
        await chat.send("Again.")
        _, (_, second, is_error) = results(await chat.session())
    assert not is_error
    assert first != second


async def test_a_server_sees_the_variables_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the variables in `env`, and not all of this process."""
    monkeypatch.setenv("OURS", "not for servers")
    script = [calls(("secret_of", {"name": "GIVEN"}), ("secret_of", {"name": "OURS"})), "done"]
    tools = [served(env={"GIVEN": "this"}, cwd=tmp_path)]
    async with perdure.connect("memory://", tools=tools, driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        assert sorted(content for _, content, _ in results(await chat.session())) == ["nothing", "this"]


async def test_a_server_of_2025_serves_as_well() -> None:
    """All pages are read, names are adapted for models, and refusals and nonsense become errors."""
    script = [calls(("first", {}), ("second_part", {}), ("refuse", {}), ("nonsense", {})), "done"]
    async with perdure.connect("memory://", tools=[old_served()], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        found = {name: content for name, content, _ in results(await chat.session())}
    assert found["first"] == "first was called"
    assert found["second_part"] == "second.part was called"
    assert found["refuse"] == "ToolError: The MCP server 'old_served' refused the call: I will not (-32602)."
    assert found["nonsense"].startswith("ToolError: The answer of the MCP server 'old_served' cannot be used: ")


@pytest.mark.parametrize("server", [old_served, served])
async def test_a_list_that_changes_is_taken_up_at_the_next_run(server: Any) -> None:
    """A run keeps the tools that it began with; the next one has the new tool."""
    script = [ToolCall("learn", {"name": "french"}), ToolCall("french", {}), "done"]
    async with perdure.connect("memory://", tools=[server()], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        await chat.send("Go.")
        assert results(await chat.session())[-1][1].startswith("UnknownTool: ")
        await chat.send("Again.")
        assert results(await chat.session())[-1][2] is False


async def test_an_agent_is_allowed_and_denied_tools_of_a_server() -> None:
    """`tools` and `tools_deny` of a definition name them as any other tool."""
    offered: list[list[str]] = []

    def reply(request: perdure.ModelRequest) -> str:
        offered.append([spec.name for spec in request.tools])
        return "done"

    async with perdure.connect("memory://", tools=[old_served(prefix="o_")], driver=ScriptedDriver(reply)) as app:
        await (await app.open("a", AgentDefinition("a", tools=("o_first", "o_learn")))).send("Go.")
        await (await app.open("b", AgentDefinition("b", tools_deny=("o_first", "o_second_part")))).send("Go.")
        chat = await app.open("c", AgentDefinition("c", tools=("o_frist",)))
        with pytest.raises(perdure.ConfigurationError, match="No tool is named 'o_frist'"):
            await chat.send("Go.")
    assert offered == [["o_first", "o_learn"], ["o_learn", "o_refuse", "o_nonsense", "o_unlisted_answer"]]


async def test_approved_calls_are_made_once(tmp_path: Path) -> None:
    """A waiting call is not sent; it is sent once a person has approved it."""
    ledger = tmp_path / "ledger"
    tools = [served(ledger, needs_approval={"charge"})]
    script = [calls(("charge", {"amount": 5}), ("note", {"text": "x"})), "done"]
    async with perdure.connect("memory://", tools=tools, driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        reply = await chat.send("Go.")
        assert [call.name for call in reply.pending_calls] == ["charge"]
        assert ledger.read_text().splitlines() == ["note x"]
        assert (await chat.approve(reply.pending_calls)).text == "done"
    assert ledger.read_text().splitlines() == ["note x", "charge 5"]


def test_nothing_of_the_package_is_imported_until_a_server_is_started() -> None:
    """`import perdure` and `perdure.mcp(…)` work without it."""
    code = "import sys, perdure; perdure.mcp('uvx x'); perdure.LoopFactory(tools=[perdure.mcp('http://x')]); "
    code += "sys.exit(' '.join({'mcp', 'anyio', 'httpx2', 'pydantic'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_tells_what_it_does(tmp_path: Path) -> None:
    """`examples/mcp_agent.py` runs without a network and without a key."""
    example = Path(__file__).parents[3] / "examples" / "mcp_agent.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == [
        "look_up says: order 7 is a lamp for 40.",
        "waits for approval: refund {'order': '7'}",
        "refund says: 40 were paid back for order 7.",
    ]
    assert done.stderr == ""
