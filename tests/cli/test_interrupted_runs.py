"""A run that was killed in the middle of a tool: commands report it, and the command that they print works once the
user has put the file's name into it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import COMMAND, SLOW
from .terminal_session import CTRL_D, TerminalSession, clean_environment, command
from .test_hints import hinted, in_a_shell

DYING = """
import asyncio, os, signal
import perdure
from perdure.testing import ScriptedDriver


def die(request):
    os.kill(os.getpid(), signal.SIGKILL)


async def main():
    async with perdure.connect("sqlite:///kept.db", model="offline", driver=ScriptedDriver(die)) as sessions:
        await (await sessions.open("q2")).send("hello")


asyncio.run(main())
"""


@pytest.fixture
def store(home: Path) -> str:
    """Return a store with the session q1, whose run was killed while it called a tool."""
    (home / "slow.py").write_text(SLOW)
    arguments = ["send", "--new", "q1", "what is 2 + 3?", "--tools", "slow.py", "--store", "kept.db"]
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while not (home / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    (home / "quick").touch()
    return "kept.db"


@pytest.mark.sample(3)
@pytest.mark.parametrize("looking", [["ls"], ["show", "q1"], ["tag", "q1", "vip"]], ids=lambda words: words[0])
def test_the_hint_says_where_the_tools_go(process: Callable[..., Any], store: str, looking: list[str]) -> None:
    """With the file's name put in, it works as it is."""
    told = process(*looking, "--store", store, code=4 if looking[0] == "tag" else 0)
    hint = hinted(told.err, "recover")
    assert hint == "perdure recover q1 --store kept.db --tools FILE.py"
    assert in_a_shell(hint.replace("FILE.py", "slow.py")).stdout == "resumed\tq1\n"


def test_the_time_that_a_run_lay_dead_is_not_shown_as_its_own(perdure: Callable[..., Any], store: str) -> None:
    dead = 2.0
    time.sleep(dead)
    perdure("recover", "q1", "--store", store, "--tools", "slow.py")
    (run,) = json.loads(perdure("tree", "q1", "--store", store, "--json").out)["children"]
    assert run["seconds"] < dead


def test_tools_that_were_named_are_repeated(perdure: Callable[..., Any], store: str) -> None:
    (Path.cwd() / "other.py").write_text(SLOW.replace("def add", "def subtract"))
    told = perdure("recover", "q1", "--store", store, "--tools", "other.py", code=1)
    assert "perdure recover q1 --store kept.db --tools other.py --tools FILE.py\n" in told.err
    assert "Or end it: perdure cancel q1 --store kept.db\n" in told.err
    assert "tools=[" not in told.err


def test_a_run_that_calls_no_tool_needs_none(process: Callable[..., Any], home: Path) -> None:
    """The hint is whole without it."""
    (home / "die.py").write_text(DYING)
    subprocess.run([sys.executable, "die.py"], check=False, timeout=60)
    told = process("show", "q2", "--store", "kept.db")
    assert hinted(told.err, "recover") == "perdure recover q2 --store kept.db"
    assert in_a_shell(hinted(told.err, "recover")).stdout == "resumed\tq2\n"


def test_many_are_told_of_at_once(
    perdure: Callable[..., Any], store: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """A list names the first few, so that it costs no more than its page, and says how to continue with all."""
    (home / "die.py").write_text(DYING)
    subprocess.run([sys.executable, "die.py"], check=False, timeout=60)
    monkeypatch.setattr("perdure.cli.looking._TOLD", 1)
    told = perdure("ls", "--store", store).err.splitlines()
    assert told[0].startswith("The last run of q2 was killed.")
    assert told[1:] == [
        "Interrupted as well: 1 more. Continue all of them here: perdure recover --store kept.db --tools FILE.py"
    ]


def test_it_is_told_from_one_that_runs(perdure: Callable[..., Any], store: str) -> None:
    """It is called killed, and not running or active; its usage so far is counted."""
    (run,) = perdure("tree", "q1", "--json", "--store", store).json["children"]
    assert run["status"] == "killed"
    drawn = perdure("tree", "q1", "--store", store).lines
    assert drawn[1].startswith("└── !  what is 2 + 3?")
    assert "killed" in drawn[1]
    assert perdure("ls", "--store", store).out.split("\t")[2] == "killed"
    assert "killed" in perdure("show", "q1", "--store", store).lines[0]
    info = perdure("ls", "--json", "--store", store).json
    assert (info["status"], info["killed"]) == ("active", True)
    used = run["usage"]["input_tokens"]
    assert used > 0
    assert perdure("tree", "q1", "--json", "--store", store).json["usage"]["input_tokens"] == used
    assert perdure("stats", "--json", "--store", store).json["total"]["input_tokens"] == used


def test_cancelling_ends_it_where_it_stood(perdure: Callable[..., Any], store: str) -> None:
    """No process of the run is left that could be asked."""
    assert "ended at that point" in perdure("cancel", "q1", "--store", store).out
    assert perdure("cancel", "q1", "--store", store).out == "q1 is not being run\n"
    assert perdure("ls", "--store", store).out.split("\t")[2] == "active"


def test_a_chat_without_the_tools(home: Path, store: str) -> None:
    """It says how to come back with them, and how to end the run; it says so again for a message, and on leaving."""
    call = command("chat", "-c", "--store", store)
    with TerminalSession(call, cwd=home, env=clean_environment(home)) as terminal:
        terminal.expect("was killed", "could not be recovered", "'add'")
        terminal.expect("chat -s q1 --store kept.db --tools FILE.py\n", "cancel q1 --store kept.db\n", "> ")
        terminal.enter("hello")
        terminal.expect("cannot be recovered", "--tools FILE.py\n", "> ")
        terminal.type(CTRL_D)
        terminal.expect("To come back: ", "chat -s q1 --store kept.db --tools FILE.py\n")
        assert terminal.ends() == 0
    assert "tools=[" not in terminal.text


WITH_A_HELPER = """
import asyncio, os, signal
import perdure
from perdure import AgentDefinition, ToolCall
from perdure.testing import ScriptedDriver


def die(request):
    if request.system_prompt == "kid":
        os.kill(os.getpid(), signal.SIGKILL)
    return ToolCall("kid", {"prompt": "Help."})


async def main():
    kid = AgentDefinition("kid", description="Helps.", system_prompt="kid")
    async with perdure.connect("sqlite:///kept.db", driver=ScriptedDriver(die), subagents=[kid]) as sessions:
        await (await sessions.open("q3", AgentDefinition("boss", tools=("kid",)))).send("hello")


asyncio.run(main())
"""


def test_sub_agents_are_continued_with_their_caller(perdure: Callable[..., Any], home: Path) -> None:
    """Both are listed as killed. The hint names the caller alone, and the program that has the model."""
    (home / "die.py").write_text(WITH_A_HELPER)
    subprocess.run([sys.executable, "die.py"], check=False, timeout=60)
    told = perdure("ls", "--store", "kept.db")
    assert [line.split("\t")[2] for line in told.lines] == ["killed", "killed"]
    assert [line for line in told.err.splitlines() if "was killed" in line] == [
        "The last run of q3 was killed. "
        "Only the program that ran it has its model. Start it again, with connect(…, recover=True)."
    ]


def test_the_call_that_it_was_making_is_named(perdure: Callable[..., Any], store: str) -> None:
    """By the tree as long as nobody knows its outcome, and by show once the run was ended there."""
    assert perdure("tree", "q1", "--json", "--store", store).json["children"][0]["unknown"] == ["add"]
    shown = perdure("show", "q1", "--all", "--store", store)
    assert "no result" not in shown.out  # recovery may still make the call
    perdure("cancel", "q1", "--store", store)
    assert "outcome unknown: add" in perdure("tree", "q1", "--store", store).out
    assert perdure("show", "q1", "--store", store).lines[-1] == (
        "  ✗ no result: the call was interrupted, and may or may not have taken effect"
    )


def test_show_says_where_the_words_of_the_run_are(perdure: Callable[..., Any], store: str) -> None:
    told = perdure("show", "q1", "--store", store).err
    assert "To see what it has said and done: perdure show q1 --all --store kept.db" in told
    perdure("recover", "q1", "--store", store, "--tools", "slow.py")
    assert perdure("tree", "q1", "--json", "--store", store).json["children"][0]["unknown"] == []
    assert "--all" not in perdure("show", "q1", "--store", store).err


KILLED_AFTER_APPROVAL = """
import asyncio, os, signal
import perdure


@perdure.tool(needs_approval=True)
def refund(amount: int) -> str:
    os.kill(os.getpid(), signal.SIGKILL)


async def main():
    async with perdure.connect("sqlite:///kept.db", model="offline", tools=[refund]) as sessions:
        chat = await sessions.open("q3")
        await chat.send("refund(amount=4)")
        await chat.approve()


asyncio.run(main())
"""


def test_a_call_that_was_approved_before_the_kill_no_longer_waits(perdure: Callable[..., Any], home: Path) -> None:
    (home / "die.py").write_text(KILLED_AFTER_APPROVAL)
    subprocess.run([sys.executable, "die.py"], check=False, timeout=60)
    assert perdure("show", "q3", "--store", "kept.db").lines[1].startswith("# waited for approval: refund (")
