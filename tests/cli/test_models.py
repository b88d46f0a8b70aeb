"""A command asks the session's own model. Asserted on the wire, with the real command in its own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.loop.drivers import wire
from tests.loop.drivers.loopback import Loopback, Stream

from .conftest import COMMAND
from .terminal_session import TerminalSession, clean_environment, command

pytestmark = pytest.mark.sample(2)  # make torture runs all

USAGE = {"prompt_tokens": 1, "completion_tokens": 1}
HELLO = Stream(wire.chat({"role": "assistant", "content": "Hello."}, usage=USAGE))
ADD = '''
import os
from pathlib import Path
from perdure import tool

@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if not Path("quick").exists():
        os.kill(os.getpid(), 9)
    return a + b
'''
CLERK = "---\nname: clerk\ndescription: Pays.\ntools: [pay]\n---\n\nPay what you are told to.\n"
PAY = '''
import os
from pathlib import Path
from perdure import tool

@tool(idempotent=True)
def pay(amount: int) -> str:
    """Pay."""
    if not Path("quick").exists():
        os.kill(os.getpid(), 9)
    return f"paid {amount}"
'''


def calling(name: str, arguments: str) -> Stream:
    return Stream(wire.chat(*wire.chat_calls(("call_1", name, [arguments])), finish="tool_calls"))


@asynccontextmanager
async def providing(monkeypatch: pytest.MonkeyPatch, *replies: Stream) -> AsyncIterator[Loopback]:
    """Run a server in place of OpenAI's; no model is a default."""
    monkeypatch.delenv("PERDURE_MODEL")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-loopback-0123456789")
    async with Loopback(*replies) as server:
        yield server


def agent(home: Path, server: Loopback, name: str = "bot") -> str:
    model = f"model:\n  name: openai:gpt-5\n  base_url: {server.url}/v1\n"
    (home / f"{name}.md").write_text(f"---\nname: {name}\n{model}---\n\nBe brief.\n")
    return f"{name}.md"


def asked(server: Loopback) -> list[str]:
    return [request.body["model"] for request in server.requests]


async def said(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Return the command's output, while the server of this process answers it."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == code, (process.returncode, out.decode(), err.decode())
    return out.decode(), err.decode()


async def test_a_killed_run_is_recovered_by_the_command_that_is_hinted(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """It asks the model that was killed in its answer, and the tree credits that one."""
    (home / "tools.py").write_text(ADD)
    async with providing(monkeypatch, calling("add", '{"a": 2, "b": 3}'), HELLO) as server:
        file = agent(home, server)
        await said("send", "--new", "s", "What is 2 + 3?", "--agent", file, "--tools", "tools.py", code=-9)
        (home / "quick").touch()
        _, told = await said("show", "s")
        assert "perdure recover s --tools FILE.py" in told
        await said("recover", "s", "--tools", "tools.py")
        assert asked(server) == ["gpt-5", "gpt-5"]
        out, _ = await said("tree", "s", "--json")
    assert [run["model"] for run in json.loads(out)["children"]] == ["gpt-5"]


def test_a_session_keeps_what_model_names(perdure: Callable[..., Any], home: Path) -> None:
    """It is kept whatever a config file or the environment names for new sessions later."""
    perdure("send", "--new", "s", "hello", "--model", "offline")
    (home / "perdure.toml").write_text('model = "openai:gpt-5"')
    assert perdure("show", "s", "--json").json["model"] == "offline"
    assert perdure("send", "s", "hello", "--json").json["version"] == 3
    assert perdure("show", "s", "--json").json["model"] == "offline"


def test_naming_another_changes_it_on_record(perdure: Callable[..., Any]) -> None:
    """The change has a version of its own; the next command need not name the model."""
    perdure("send", "--new", "s", "hello", "--model", "openai:none", code=9)
    assert perdure("show", "s", "--json").json["version"] == 2
    perdure("send", "s", "hello", "--model", "offline")
    assert perdure("show", "s", "--json").json["version"] == 4
    assert perdure("show", "s", "--json").json["model"] == "offline"
    perdure("send", "s", "hello")


def test_a_model_that_cannot_be_asked_is_not_changed_to(perdure: Callable[..., Any]) -> None:
    """The error says what is missing, and the session is unchanged."""
    perdure("send", "--new", "s", "hello")
    assert "openai:none" in perdure("send", "s", "hello", "--model", "openai:none", code=9).err
    shown = perdure("show", "s", "--json").json
    assert (shown["version"], shown["model"]) == (2, "offline")


WAITING = """
from perdure import ToolContext, tool

@tool
def who(caller: ToolContext[str]) -> str:
    "Tell who asks."
    return caller.context

@tool(needs_approval=True)
def refund(order: int) -> str:
    "Refund an order."
    return "refunded"
"""


def test_a_decision_that_is_refused_does_not_change_the_model(perdure: Callable[..., Any], home: Path) -> None:
    """The run that waits keeps the model that it began with."""
    (home / "refund.py").write_text(WAITING)
    (home / "plain.py").write_text("from perdure import tool\n\n@tool(" + WAITING.partition("@tool(")[2])
    perdure("send", "--new", "s", 'call refund {"order": 7}', "--tools", "plain.py", code=10)
    before = perdure("show", "s", "--json").json
    for words in (("approve", "s"), ("deny", "s", "no")):
        refused = perdure(*words, "--tools", "refund.py", "--model", "openai:none", code=9)
        assert "needs a context" in refused.err
    assert perdure("show", "s", "--json").json == before
    assert "refunded" in perdure("approve", "s", "--tools", "plain.py").out


@pytest.mark.parametrize("words", [("send", "--new", "s", "hello"), ("chat",)])
def test_without_a_model_no_session_is_begun(
    perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The error says what to type, and nothing is kept."""
    monkeypatch.delenv("PERDURE_MODEL")
    refused = perdure(*words, code=9, stdin="hello\n").err
    assert "--model openai:gpt-5" in refused
    assert "--model offline" in refused
    assert "connect(" not in refused
    assert perdure("ls").out == ""


def test_for_a_model_that_there_is_not_no_session_is_begun(perdure: Callable[..., Any]) -> None:
    """A session with another model is not changed either. The error names the option."""
    for words in (("send", "--new", "s", "hello"), ("chat",)):
        refused = perdure(*words, "--model", "nope:x", code=9, stdin="hello\n").err
        assert "Unknown provider: nope." in refused
        assert "--model openai:gpt-5" in refused
    assert perdure("ls").out == ""
    perdure("send", "--new", "s", "hello")
    perdure("send", "s", "hello", "--model", "gpt-5", code=9)
    shown = perdure("show", "s", "--json").json
    assert (shown["version"], shown["model"]) == (2, "offline")


def test_a_chat_without_a_model_offers_the_built_in_one(home: Path) -> None:
    """It offers it in words before the session is begun; it is stored like any other model."""
    environment = clean_environment(home, PERDURE_MODEL="")
    with TerminalSession(command("chat"), cwd=home, env=environment) as terminal:
        terminal.expect("No model is named", "Begin a session with it?")
        terminal.enter("y")
        terminal.expect("> ")
        terminal.enter("/model")
        terminal.expect("The model is offline.")
    with TerminalSession(command("chat"), cwd=home, env=environment) as terminal:
        terminal.expect("Begin a session with it?")
        terminal.enter("n")
        terminal.expect("--model openai:gpt-5")


def test_a_missing_extra_is_told_whole(
    perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """The error has the command that installs it."""

    def missing() -> Any:
        from perdure.errors import ConfigurationError

        raise ConfigurationError("Asking needs packages (no pydantic_ai). Install them: pip install 'perdure[llm]'.")

    monkeypatch.setattr("perdure.loop.drivers.provider._import", missing)
    assert "pip install 'perdure[llm]'" in perdure("send", "--new", "s", "hi", "--model", "openai:gpt-5", code=9).err


def test_a_missing_key_is_told_without_python(perdure: Callable[..., Any]) -> None:
    """The error names the variable, without advice for Python."""
    refused = perdure("send", "--new", "s", "hi", "--model", "openai:gpt-5", code=9).err
    assert "OPENAI_API_KEY is not set. Set it." in refused
    assert "ModelConfig(" not in refused


async def test_a_missing_sub_agent_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Tools cannot help there; --agent takes several files, and a hint repeats them."""
    (home / "tools.py").write_text(PAY)
    (home / "clerk.md").write_text(CLERK)
    replies = [calling("clerk", '{"prompt": "Pay 5."}'), calling("pay", '{"amount": 5}'), HELLO, HELLO]
    async with providing(monkeypatch, *replies) as server:
        file = agent(home, server)
        given = ("--agent", file, "--agent", "clerk.md", "--tools", "tools.py")
        await said("send", "--new", "s", "Pay.", *given, code=-9)
        (home / "quick").touch()
        _, told = await said("recover", "s", "--tools", "tools.py", code=1)
        assert "recover s --tools tools.py --agent FILE" in told
        _, told = await said("send", "s", "Pay.", *given[2:], code=4)
        assert "belongs to the agent" in told
        await said("recover", "--tools", "tools.py", "--agent", "clerk.md")
        assert asked(server) == ["gpt-5"] * 4


@pytest.mark.parametrize(
    ("words", "name", "by", "problem"),
    [
        ((), None, None, "--model offline"),
        (("--model", "offline"), "offline", "--model", None),
        (("--model", "openai:gpt-5"), "openai:gpt-5", "--model", "OPENAI_API_KEY is not set"),
        (("--agent", "bot.md"), "openai:gpt-6", "the agent bot", "OPENAI_API_KEY is not set"),
        (("--agent", "bot.md", "--model", "offline"), "offline", "--model", None),
    ],
)
def test_the_doctor_tells_of_the_model_that_would_be_asked(
    perdure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
    words: tuple[str, ...],
    name: str | None,
    by: str | None,
    problem: str | None,
) -> None:
    """It names the model of a new session, and the reason if it cannot be asked."""
    monkeypatch.delenv("PERDURE_MODEL")
    (home / "bot.md").write_text("---\nname: bot\nmodel: openai:gpt-6\n---\n\nBe brief.\n")
    found = perdure("doctor", "--json", *words).json["model"]
    assert (found["name"], found["chosen_by"]) == (name, by)
    assert (problem or "") in (found["problem"] or "")
    assert bool(problem) == bool(found["problem"])
    shown = perdure("doctor", *words)
    assert f"model     {name or 'none'}" in shown.out
    assert (problem or "") in shown.err


def test_a_summary_is_written_by_the_model_that_is_named(perdure: Callable[..., Any]) -> None:
    """It is used this one time: the session keeps its own."""
    perdure("send", "--new", "s", "hello")
    perdure("compact", "s", "--keep-last", 0, "--strategy", "llm", "--model", "openai:none", code=9)
    assert perdure("show", "s", "--json").json["model"] == "offline"
