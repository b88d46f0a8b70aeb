"""Tools that need a context, on the command line: a function of the tools file makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import perdure as library
from perdure.testing import ScriptedDriver

TOOLS = '''
from dataclasses import dataclass
from perdure import ToolContext, tool

@dataclass
class User:
    name: str

@tool
def who(caller: ToolContext[User]) -> str:
    """Tell who is asking."""
    return f"it is {caller.context.name}"

@tool(needs_approval=True)
def refund(caller: ToolContext[User], order: int) -> str:
    """Refund an order."""
    return f"refunded {order} to {caller.context.name}"
'''
CONTEXT = """
async def context(session, data):
    return User(f"{session.info.owner}, {data}")
"""
KILLING = """    import os
    if not os.path.exists("quick"):
        os._exit(9)
    return f"it is"""
STORE = "sqlite:///s.db"


@pytest.fixture
def tools(home: Path) -> str:
    (home / "tools.py").write_text(TOOLS + CONTEXT)
    return "tools.py"


def test_a_message_is_sent_with_the_context_that_the_file_makes(perdure: Callable[..., Any], tools: str) -> None:
    """The function gets the session, and no data, since nobody has left any."""
    said = perdure("send", "--new", "s", "call who {}", "--tools", tools, "--owner", "ada").out
    assert "it is ada, None" in said
    chatted = perdure("chat", "--tools", tools, stdin="call who {}\n/quit\n").out
    assert "it is None, None" in chatted


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_a_decision_makes_the_context_of_what_the_sender_left(
    perdure: Callable[..., Any], tools: str, verb: str
) -> None:
    """A program has sent the message, and a person decides in a shell."""

    async def sent() -> None:
        driver = ScriptedDriver([library.ToolCall("refund", {"order": 7})])
        spec = spec_from_file_location("app_tools", tools)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        options: dict[str, Any] = {"tools": [module.refund], "driver": driver}
        async with library.connect(STORE, **options) as sessions:
            chat = await sessions.open("s")
            await chat.send("Refund.", context=module.User("ada"), context_data={"user": "ada"})

    asyncio.run(sent())
    done = perdure(verb, "s", "--tools", tools, "--model", "offline", "--store", STORE)
    shown = perdure("show", "s", "--store", STORE).out
    assert done.code == 0
    assert ("refunded 7 to None, {'user': 'ada'}" in shown) == (verb == "approve")


def test_without_the_function_it_is_said_how_to_write_it(perdure: Callable[..., Any], home: Path) -> None:
    """The error uses the words of the command line, and nothing was sent."""
    (home / "tools.py").write_text(TOOLS)
    perdure("send", "--new", "s", "hello")
    refused = perdure("send", "s", "call who {}", "--tools", "tools.py", code=9).err
    assert "The tool 'who' of session 's' needs a context" in refused
    assert "def context(session, data)" in refused
    assert "connect(" not in refused
    assert len(perdure("show", "s", "--json").json["messages"]) == 2


def test_a_function_that_fails_is_told_of(perdure: Callable[..., Any], home: Path) -> None:
    (home / "tools.py").write_text(TOOLS + "def context(session, data):\n    return User(data['user'])\n")
    refused = perdure("send", "--new", "s", "call who {}", "--tools", "tools.py", code=9).err
    assert "failed for session 's': TypeError" in refused
    assert "Correct the function context(session, data)" in refused
    assert "connect(" not in refused


def test_two_files_cannot_both_make_it(perdure: Callable[..., Any], home: Path, tools: str) -> None:
    (home / "more.py").write_text("def context(session, data):\n    return None\n")
    both = ("--tools", tools, "--tools", "more.py")
    assert "Both tools.py and more.py have a function context()" in perdure("send", "--new", "x", *both, code=9).err
    assert "it is None" in perdure("send", "--new", "call who {}", "--tools", tools).out


def test_the_function_is_a_tool_only_if_it_is_marked(perdure: Callable[..., Any], home: Path) -> None:
    """A docstring does not make it a tool, as it does other functions."""
    plain = 'def context(session, data):\n    """Make a context."""\n\ndef now() -> str:\n    """Tell the time."""\n'
    (home / "tools.py").write_text(plain + '    return "noon"\n')
    assert "noon" in perdure("send", "--new", "call now {}", "--tools", "tools.py").out
    assert "noon" not in perdure("send", "--new", "call context {}", "--tools", "tools.py").out
    marked = 'from perdure import tool\n\n@tool\ndef context() -> str:\n    """Tell more."""\n    return "marked"\n'
    (home / "tools.py").write_text(marked)
    assert "marked" in perdure("send", "--new", "call context {}", "--tools", "tools.py").out


def test_a_killed_run_is_recovered_with_it(
    perdure: Callable[..., Any], process: Callable[..., Any], home: Path
) -> None:
    """Without it, `recover` says how to write it, and the run waits."""
    once = TOOLS.replace("@tool\n", "@tool(idempotent=True)\n").replace('    return f"it is', KILLING)
    (home / "tools.py").write_text(once + CONTEXT)
    process("send", "--new", "s", "call who {}", "--tools", "tools.py", code=9)
    (home / "quick").touch()
    (home / "tools.py").write_text(once)
    left = perdure("recover", "s", "--tools", "tools.py", code=1)
    assert "def context(session, data)" in left.err
    (home / "tools.py").write_text(once + CONTEXT)
    assert "resumed" in perdure("recover", "s", "--tools", "tools.py").out
    assert "it is None, None" in perdure("show", "s").out


def test_a_worker_makes_the_context(perdure: Callable[..., Any], process: Callable[..., Any], tools: str) -> None:
    """The sender of the message is gone, so only the function of its file can make it."""
    perdure("send", "--new", "s", "call who {}", "--no-wait", "--model", "offline")
    process("worker", "--tools", tools, "--only", "s")  # a worker ends the process that it is called in
    assert "it is None, None" in perdure("show", "s").out
