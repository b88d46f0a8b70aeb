"""`perdure acp`: the SDK's own client talks to a real process, as an editor does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from acp import PROTOCOL_VERSION, RequestError, image_block, resource_link_block, spawn_agent_process, text_block
from acp.client import ClientSideConnection
from acp.schema import (
    AllowedOutcome,
    DeniedOutcome,
    McpServerStdio,
    RequestPermissionResponse,
    SseMcpServer,
    ToolCallProgress,
    ToolCallStart,
)
from tests.waiting import until

import perdure
from perdure.cli.acp_updates import replayed
from perdure.model.message import Message, ToolCall
from perdure.testing import Chunks, Delay, ScriptedDriver

pytestmark = pytest.mark.sample(2)  # make torture runs all

TOOLS = '''
import os, sys, time
import perdure

@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    print("this is not the protocol")
    os.system("echo neither is this")
    return f"order {order} is refunded"

@perdure.tool(on_unknown="rerun")
def nap(seconds: float, mark: str) -> str:
    """Wait; the second time not at all."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        time.sleep(seconds)
    return "rested"
'''
SERVER = '''
from mcp.server import MCPServer

server = MCPServer("orders", log_level="ERROR")

@server.tool()
def look_up(order: str) -> str:
    """Tell what an order is of."""
    return f"order {order} is a lamp"

server.run()
'''


class Editor:
    """The client's side of an editor: it keeps what it is sent, and answers questions as its test says."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.asked: list[Any] = []
        self.answer: Callable[[], Any] = lambda: AllowedOutcome(outcome="selected", option_id="allow")

    def on_connect(self, conn: Any) -> None:
        pass

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.told.append(update)

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **_: Any) -> Any:
        self.asked.append(tool_call)
        return RequestPermissionResponse(outcome=self.answer())

    def text(self, kind: str = "agent_message_chunk") -> str:
        return "".join(each.content.text for each in self.told if each.session_update == kind)

    def calls(self) -> list[tuple[str, str | None]]:
        """Return the updates about calls."""
        kinds = ("tool_call", "tool_call_update")
        return [(each.session_update, each.status) for each in self.told if each.session_update in kinds]


class Desk:
    """An editor with an agent's process."""

    def __init__(self, agent: ClientSideConnection, process: Any, editor: Editor, path: Path) -> None:
        self.agent = agent
        self.process = process
        self.editor = editor
        self.cwd = str(path)

    async def new(self, **more: Any) -> str:
        return str((await self.agent.new_session(cwd=self.cwd, **{"mcp_servers": [], **more})).session_id)

    async def say(self, session: str, text: str) -> str:
        return str((await self.agent.prompt(session_id=session, prompt=[text_block(text)])).stop_reason)


@asynccontextmanager
async def editing(path: Path, *options: str) -> AsyncIterator[Desk]:
    (path / "tools.py").write_text(TOOLS)
    words = ["-m", "perdure", "acp", "--store", f"sqlite:///{path}/a.db", "--model", "offline", *options]
    words += ["--tools", str(path / "tools.py")]
    editor = Editor()
    async with spawn_agent_process(
        editor,
        sys.executable,
        *words,
        env=dict(os.environ),
        use_unstable_protocol=True,
        transport_kwargs={"shutdown_timeout": 30.0},
    ) as (agent, process):
        made = await agent.initialize(protocol_version=PROTOCOL_VERSION)
        assert made.agent_capabilities.load_session
        yield Desk(agent, process, editor, path)


async def test_a_prompt_is_answered_as_it_comes(tmp_path: Path) -> None:
    """Text, links and images are accepted; the session is in the store."""
    async with editing(tmp_path) as desk:
        session = await desk.new()
        png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
        prompt = [
            text_block("hello there "),
            resource_link_block("a.py", "file:///a.py"),
            image_block(png, "image/png"),
        ]
        done = await desk.agent.prompt(session_id=session, prompt=prompt)
        assert done.stop_reason == "end_turn"
        assert done.usage.total_tokens > 0
        assert "hello there [a.py](file:///a.py)" in desk.editor.text()
        listed = await desk.agent.list_sessions(cwd=desk.cwd)
        assert [(each.session_id, each.cwd) for each in listed.sessions] == [(session, desk.cwd)]
        assert (await desk.agent.list_sessions(cwd="/nowhere")).sessions == []
        await _fork_is_loaded(desk, session)
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
        assert [each.role for each in (await sessions.session(session)).state.messages] == ["user", "assistant"]


async def _fork_is_loaded(desk: Desk, session: str) -> None:
    """Fork a session, say something there, close it, and load it again."""
    forked = (await desk.agent.fork_session(cwd=desk.cwd, session_id=session)).session_id
    await desk.agent.resume_session(cwd=desk.cwd, session_id=forked)
    await desk.say(forked, "bye")
    await desk.agent.close_session(session_id=forked)
    desk.editor.told.clear()
    await desk.agent.load_session(cwd=desk.cwd, session_id=forked, mcp_servers=[])
    assert desk.editor.text("user_message_chunk").startswith("hello there")
    assert desk.editor.text("user_message_chunk").endswith("bye")


async def test_a_call_needs_permission(tmp_path: Path) -> None:
    """A question that is cancelled is asked again by the next prompt, also of another process.

    The output of tools and their processes does not get between the lines of the protocol.
    """
    async with editing(tmp_path) as desk:
        session = await desk.new()
        assert await desk.say(session, "refund(order=7)") == "end_turn"
        assert [each.title for each in desk.editor.asked] == ['refund({"order":7})']
        assert desk.editor.calls() == [
            ("tool_call", "pending"),
            ("tool_call_update", "in_progress"),
            ("tool_call_update", "completed"),
        ]
        assert "order 7 is refunded" in desk.editor.text()
        desk.editor.answer = lambda: AllowedOutcome(outcome="selected", option_id="reject")
        await desk.say(session, "refund(order=8)")
        assert desk.editor.calls()[-1] == ("tool_call_update", "failed")
        assert "order 8 is refunded" not in desk.editor.text()
        desk.editor.answer = lambda: DeniedOutcome(outcome="cancelled")
        assert await desk.say(session, "refund(order=9)") == "cancelled"
    async with editing(tmp_path) as desk:
        await desk.agent.load_session(cwd=desk.cwd, session_id=session, mcp_servers=[])
        assert desk.editor.calls()[-1] == ("tool_call", "pending")
        assert await desk.say(session, "thanks") == "end_turn"
        assert len(desk.editor.asked) == 1
        assert "order 9 is refunded" in desk.editor.text()
        assert "thanks" in desk.editor.text()


async def test_a_prompt_is_cancelled(tmp_path: Path) -> None:
    async with editing(tmp_path) as desk:
        session = await desk.new()
        call = f'call nap {{"seconds": 20, "mark": "{tmp_path}/mark"}}'
        asking = asyncio.ensure_future(desk.say(session, call))
        await until(lambda: ("tool_call_update", "in_progress") in desk.editor.calls())
        assert (await _error(desk.say(session, "and now?"))).code == -32602
        await desk.agent.cancel(session_id=session)
        assert await asyncio.wait_for(asking, 10) == "cancelled"
        desk.process.kill()  # the tool still sleeps in its thread


async def test_a_prompt_that_waits_is_cancelled_without_the_run_before_it(tmp_path: Path) -> None:
    """The run that another process has begun continues; the prompt is stopped once its turn comes."""
    async with editing(tmp_path) as desk:
        session = await desk.new()
        driver = ScriptedDriver([Chunks(["It takes ", Delay(2, "time.")]), "unused"])
        async with perdure.connect(f"sqlite:///{tmp_path}/a.db", driver=driver) as sessions:
            run = await sessions.start(session, "take your time")
            asking = asyncio.ensure_future(desk.say(session, f'call nap {{"seconds": 20, "mark": "{tmp_path}/mark"}}'))
            journal = sessions.runtime.journal
            assert journal is not None
            async with asyncio.timeout(10):
                while not await journal.read(run.session_id, inbox=True):  # noqa: ASYNC110  # another process posts it
                    await asyncio.sleep(0.01)
            await desk.agent.cancel(session_id=session)
            assert (await run.result()).text == "It takes time."
            assert await asyncio.wait_for(asking, 15) == "cancelled"


@pytest.mark.sample(1)
def test_a_call_that_was_stopped_does_not_look_as_if_it_went_on() -> None:
    """In a conversation that is loaded again, a stopped call is failed; one whose result can still come is pending."""
    stopped, last = ToolCall("nap", id="stopped"), ToolCall("nap", id="last")
    said = [Message.user("nap"), Message.assistant(stopped), Message.user("again"), Message.assistant(last)]
    for is_over, expected in (
        (False, {"stopped": "failed", "last": "pending"}),
        (True, dict.fromkeys(("stopped", "last"), "failed")),
    ):
        told = [each for each in replayed(said, is_over=is_over) if isinstance(each, ToolCallStart | ToolCallProgress)]
        assert {each.tool_call_id: each.status for each in told} == expected


async def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """The next process shows the conversation, and ends the killed run before it answers the next prompt."""
    async with editing(tmp_path) as desk:
        session = await desk.new()
        await desk.say(session, "remember the parrot")
        call = f'call nap {{"seconds": 60, "mark": "{tmp_path}/mark"}}'
        asking = asyncio.ensure_future(desk.say(session, call))
        await until(lambda: ("tool_call_update", "in_progress") in desk.editor.calls())
        desk.process.kill()
        await desk.process.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with editing(tmp_path) as desk:
        await desk.agent.load_session(cwd=f"{desk.cwd}/other", session_id=session, mcp_servers=[])
        assert desk.editor.text("user_message_chunk").startswith("remember the parrotcall nap")
        assert desk.editor.calls() == [("tool_call", "pending")]
        assert await desk.say(session, "and now?") == "end_turn"
        assert desk.editor.calls()[-1] == ("tool_call_update", "completed")
        assert "nap returned rested." in desk.editor.text()
        assert "and now?" in desk.editor.text()


async def test_what_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    """This holds for missing sessions, another owner's sessions, a mode, and a server of an unknown kind."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", owner="ada") as sessions:
        hers = (await sessions.open()).id
    async with editing(tmp_path, "--owner", "bob") as desk:
        theirs = await _error(desk.agent.load_session(cwd=desk.cwd, session_id=hers, mcp_servers=[]))
        none = await _error(desk.agent.load_session(cwd=desk.cwd, session_id=f"x{hers[1:]}", mcp_servers=[]))
        assert (theirs.code, none.code) == (-32002, -32002)
        assert str(theirs).replace(hers, "") == str(none).replace(f"x{hers[1:]}", "")
        session = await desk.new()
        assert (await _error(desk.agent.set_session_mode(session_id=session, mode_id="plan"))).code == -32601
        assert (await _error(desk.agent.new_session(cwd="here", mcp_servers=[]))).code == -32602
        server = SseMcpServer(type="sse", name="s", url="http://127.0.0.1:1", headers=[])
        assert (await _error(desk.new(mcp_servers=[server]))).code == -32602
        assert len((await desk.agent.list_sessions()).sessions) == 1


async def test_a_graph_answers_in_its_thread(tmp_path: Path) -> None:
    """In a thread of LangGraph perdure's own agent would answer, so the prompt is refused."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
        await sessions.open("thread", agent=perdure.AgentDefinition("langgraph"))
        await sessions.execute("thread", perdure.WriteMetadata("langgraph", {"id": "c-1", "version": 1}))
    async with editing(tmp_path) as desk:
        await desk.agent.load_session(cwd=desk.cwd, session_id="thread", mcp_servers=[])
        assert "its graph answers" in str(await _error(desk.say("thread", "Hello")))


async def _error(asked: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await asked
    return raised.value


async def test_an_editor_brings_tools_along(tmp_path: Path) -> None:
    """An MCP server that the editor names is used in the session for which it is named."""
    (tmp_path / "orders.py").write_text(SERVER)
    server = McpServerStdio(name="orders", command=sys.executable, args=[str(tmp_path / "orders.py")], env=[])
    async with editing(tmp_path) as desk:
        session = await desk.new(mcp_servers=[server])
        await desk.say(session, 'call look_up {"order": "7"}')
        assert "order 7 is a lamp" in desk.editor.text()


def test_a_person_is_told_who_starts_it(tmp_path: Path) -> None:
    """Without the package that it needs, the error says how to install it."""
    blocked = "import sys; sys.modules['acp'] = None; from perdure.cli.main import main; main()"
    words = [sys.executable, "-c", blocked, "acp", "--store", f"sqlite:///{tmp_path}/a.db"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 9
    assert "pip install 'perdure[acp]'" in done.stderr
    assert done.stdout == ""
