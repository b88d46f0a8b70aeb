"""The README's promises that can be run: its output, its command, its lines for frameworks and for a model."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .loop.drivers import wire
from .loop.drivers.loopback import Loopback, Stream

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START, OUTPUT = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)[:2]
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "status": "completed"}


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters without `store=` use the store of the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{tmp_path}/store.db")


def typed(*command: str, env: dict[str, str] | None = None) -> str:
    """Run a command of this Python as a user types it. Return its output."""
    found = {**os.environ, **(env or {})}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=found)
    assert done.returncode == 0, done.stderr
    return done.stdout


def line_for(framework: str) -> str:
    """Return the code in the row of a framework."""
    (code,) = re.findall(rf"^\| \[{framework}\]\(.*?\) \| `(.+)` \|$", README, re.MULTILINE)
    return str(code)


def evaluated(framework: str, **names: Any) -> Any:
    """Return the value of the row's code with these names, awaited if the code awaits."""
    code = line_for(framework)
    if not code.startswith("await "):
        return eval(code, names)
    waiting: Coroutine[Any, Any, Any] = eval(code.removeprefix("await "), names)
    return asyncio.run(awaited(waiting))


async def awaited(waiting: Coroutine[Any, Any, Any]) -> Any:
    return await waiting


def test_it_can_be_read_in_one_go() -> None:
    """It has fewer than 150 lines, and five rows of comparison."""
    assert len(README.splitlines()) < 150
    section = README.partition("## Compared with")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| (?!\|)\w", section, re.MULTILINE)) == 5


def test_the_quick_start_prints_what_is_shown() -> None:
    """The program is run as a file, and the command below it draws that run."""
    Path("quick.py").write_text(QUICK_START, encoding="utf-8")
    assert typed("quick.py") == OUTPUT
    (command,) = re.findall(r"`perdure (tree .*?)`", README)
    assert "What is 2 + 3?" in typed("-m", "perdure", *shlex.split(command))


def said(text: str) -> Stream:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    return Stream(wire.responses(item))


async def test_the_line_for_a_real_model_asks_that_model(tmp_path: Path) -> None:
    """With the key set and the model named, the quick start calls the tool that the provider's model requests."""
    pytest.importorskip("pydantic_ai")
    (told,) = re.findall(r"# For a real model: (.*)", QUICK_START)
    (model,) = re.findall(r'model="(.*?)"', told)
    (key,) = re.findall(r"set (\w+),", told)
    (tmp_path / "quick.py").write_text(QUICK_START.replace('model="offline"', f'model="{model}"'), encoding="utf-8")
    call = Stream(wire.responses({**CALL, "arguments": '{"a": 2, "b": 3}'}))
    async with Loopback(call, said("It is 5."), said("It is 14.")) as server:
        env = {key: "sk-not-a-key", "OPENAI_BASE_URL": f"{server.url}/v1"}
        printed = await asyncio.to_thread(typed, "quick.py", env=env)
        assert server.requests[1].body["input"][-1]["output"] == "5"  # from the tool
        assert {request.body["model"] for request in server.requests} == {model.partition(":")[2]}
    assert printed.splitlines()[:2] == ["It is 5.", "It is 14."]


def test_the_line_for_the_openai_agents_sdk() -> None:
    """A run of the SDK is kept in a session."""
    agents = pytest.importorskip("agents")
    from perdure.adapters.openai_agents import PerdureSession

    from .adapters.openai_process import Scripted

    agent = agents.Agent("helper", model=Scripted(lambda items: f"{len(items)} items"))
    names = {"Runner": agents.Runner, "agent": agent, "PerdureSession": PerdureSession}
    outputs = [evaluated("OpenAI Agents SDK", **names).final_output for _ in range(2)]
    assert outputs == ["1 items", "3 items"]


def test_the_line_for_langgraph() -> None:
    """A graph remembers its thread."""
    graphs = pytest.importorskip("langgraph.graph")
    from perdure.adapters.langgraph import PerdureSaver

    def answer(state: Any) -> dict[str, Any]:
        return {"messages": [("ai", f"{len(state['messages'])} messages")]}

    builder = graphs.StateGraph(graphs.MessagesState).add_node("answer", answer).add_edge(graphs.START, "answer")
    graph = evaluated("LangGraph", builder=builder, PerdureSaver=PerdureSaver)
    asked = partial(graph.invoke, {"messages": [("user", "Hi")]}, {"configurable": {"thread_id": "t-1"}})
    assert [asked()["messages"][-1].text for _ in range(2)] == ["1 messages", "3 messages"]


def test_the_line_for_google_adk() -> None:
    """A runner of ADK finds the session that the service keeps."""
    pytest.importorskip("google.adk")
    from google.adk.runners import Runner

    from perdure.adapters.google_adk import PerdureSessionService

    from .adapters import adk_process

    agent = adk_process.LlmAgent(name="a", model=adk_process.Scripted(model="scripted"), tools=[adk_process.look_up])
    runner = evaluated("Google ADK", Runner=Runner, agent=agent, PerdureSessionService=PerdureSessionService)

    async def asked() -> str:
        service = runner.session_service
        await service.create_session(app_name="a", user_id="ada", session_id="s-1")
        content = adk_process.types.Content(role="user", parts=[adk_process.types.Part(text="question 1")])
        said = [event async for event in runner.run_async(user_id="ada", session_id="s-1", new_message=content)]
        kept = await service.get_session(app_name="a", user_id="ada", session_id="s-1")
        assert kept is not None
        assert kept.events[-1].id == said[-1].id
        return said[-1].content.parts[0].text

    assert asyncio.run(asked()) == "answer 1"


def test_the_line_for_the_claude_agent_sdk() -> None:
    """The options accept the store, as Claude's own command line would get it."""
    sdk = pytest.importorskip("claude_agent_sdk")
    from perdure.adapters.claude_agent_sdk import PerdureSessionStore

    made = evaluated(
        "Claude Agent SDK", ClaudeAgentOptions=sdk.ClaudeAgentOptions, PerdureSessionStore=PerdureSessionStore
    )
    key = {"project_key": "p", "session_id": "6f1c2d3e-0000-4000-8000-000000000001"}
    entry = {"type": "user", "uuid": "6f1c2d3e-0000-4000-8000-000000000002", "sessionId": key["session_id"]}
    said = {**entry, "message": {"role": "user", "content": "Hi"}}

    async def kept() -> Any:
        await made.session_store.append(key, [said])
        return await made.session_store.load(key)

    assert [each["uuid"] for each in asyncio.run(kept())] == [entry["uuid"]]


def test_the_line_for_pydantic_ai() -> None:
    """A result is saved, and loaded by its conversation."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.models.test import TestModel

    from perdure.adapters.pydantic_ai import PerdureConversationStore

    agent = pydantic_ai.Agent(TestModel())
    result = asyncio.run(agent.run("Hi", conversation=Conversation(conversation_id="chat-1")))
    evaluated("Pydantic AI", PerdureConversationStore=PerdureConversationStore, result=result)
    loaded = asyncio.run(PerdureConversationStore().load("chat-1"))
    assert loaded is not None
    assert len(loaded.messages) == 2


def test_the_line_for_strands() -> None:
    """A new agent of Strands continues where the last one was."""
    strands = pytest.importorskip("strands")
    from perdure.adapters.strands import PerdureSessionManager

    from .adapters.strands_process import ScriptedModel

    def continued(text: str) -> int:
        agent = partial(strands.Agent, model=ScriptedModel([text]), callback_handler=None)
        made = evaluated("Strands", Agent=agent, PerdureSessionManager=PerdureSessionManager)
        made("Hi")
        return len(made.messages)

    assert [continued("One."), continued("Two.")] == [2, 4]
