"""Commands that perdure says to type next work when they are copied literally, in a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from perdure.cli import hints
from perdure.cli.options import Settings

pytestmark = pytest.mark.sample(2)  # make torture runs all

TOOLS = '''
from perdure import tool


@tool(needs_approval=True)
def charge(customer: str, amount: int) -> str:
    """Take money."""
    return f"{customer} has paid {amount}"
'''
CALL = 'call charge {"customer": "Ada", "amount": 12}'
STORE = "sqlite:///my%20store.db"


@pytest.fixture
def tools(home: Path) -> Path:
    """Return a file whose name has to be quoted."""
    path = home / "my tools.py"
    path.write_text(TOOLS)
    return path


def in_a_shell(line: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == code, (line, done.stdout, done.stderr)
    return done


def hinted(text: str, name: str) -> str:
    """Return the command of a name that a text says to type."""
    found = re.search(rf"perdure {name} .*$", text, re.MULTILINE)
    assert found, text
    return found[0]


def test_an_approval(process: Callable[..., Any], tools: Path) -> None:
    """It is for the same store and owner, and names the tools."""
    asked = process(
        *("send", "--new", "s", CALL, "--tools", tools.name, "--store", STORE, "--owner", "ada o'hara"), code=10
    )
    assert "Ada has paid 12" in in_a_shell(hinted(asked.err, "approve")).stdout


def test_a_refusal(process: Callable[..., Any], tools: Path) -> None:
    """It needs no reason, so that the line works as it is."""
    process("send", "--new", "s", CALL, "--tools", tools.name, "--store", STORE, code=10)
    waits = process("send", "s", "hello", "--tools", tools.name, "--store", STORE, code=5)
    in_a_shell(hinted(waits.err, "deny"))
    assert "does not want" in process("show", "s", "--store", STORE).out


def test_a_decision_that_needs_tools(process: Callable[..., Any], tools: Path) -> None:
    """If they were not named this time, the hint shows where they go; each command has a line of its own."""
    process("send", "--new", "s", CALL, "--tools", tools.name, "--store", STORE, code=10)
    waits = process("send", "s", "hello", "--store", STORE, code=5).err.splitlines()
    assert waits[-2:] == [
        f"Type: perdure approve s --store {STORE} --tools FILE.py",
        f"or: perdure deny s --store {STORE} --tools FILE.py",
    ]
    assert "Ada has paid 12" in in_a_shell(hinted(waits[-2], "approve").replace("FILE.py", "'my tools.py'")).stdout


def test_a_session_that_is_there_otherwise(process: Callable[..., Any]) -> None:
    """An import or a copy can replace it once it is erased, as the hint says, in the target store."""
    for store in (STORE, "other.db"):
        process("send", "--new", "s", f"hello {store}", "--store", store)
    process("export", "-o", "all.jsonl", "--store", "other.db")
    for typed in (("import", "all.jsonl", "--store", STORE), ("copy", "other.db", STORE)):
        refused = process(*typed, code=4)
        assert "elete the one" not in refused.err
        hint = hinted(refused.err, "purge")
        assert hint == f"perdure purge s --yes --store {STORE}"
        in_a_shell(hint)
        process(*typed)
        process("purge", "s", "--yes", "--store", STORE)
        process("send", "--new", "s", "hello", "--store", STORE)


def test_a_chat(process: Callable[..., Any], tools: Path) -> None:
    talk = f"perdure chat --tools 'my tools.py' --store {STORE} --model offline"
    left = in_a_shell(f"echo hello | {talk}")
    assert "--model offline --tools 'my tools.py'" in hinted(left.stderr, "chat")
    in_a_shell(hinted(left.stderr, "chat"))
    asked = in_a_shell(f"echo {shlex.quote(CALL)} | {hinted(left.stderr, 'chat')}", code=10)
    assert "Ada has paid 12" in in_a_shell(hinted(asked.stderr, "approve")).stdout


def test_the_files_to_start_from(process: Callable[..., Any]) -> None:
    begun = process("init", "an agent's", "--store", STORE)
    in_a_shell(f"echo hello | {hinted(begun.out, 'chat')}")
    assert len(process("ls", "--store", STORE).lines) == 1


def test_a_store_that_is_not_there(process: Callable[..., Any]) -> None:
    missing = process("ls", "--store", "not here.db", code=9)
    in_a_shell(f"echo hello | {hinted(missing.err, 'chat')}")
    assert len(process("ls", "--store", "not here.db").lines) == 1


def test_an_unknown_session(process: Callable[..., Any]) -> None:
    process("send", "--new", "s", "hello", "--store", STORE)
    missing = process("show", "t", "--store", STORE, code=3)
    assert in_a_shell(hinted(missing.err, "ls")).stdout.startswith("s\t")


def under(settings: Settings) -> click.Context:
    return click.Context(click.Command("perdure"), obj=settings)


def test_a_password_is_not_repeated() -> None:
    """It would be on the screen. The rest of the URL is kept."""
    given = Settings()
    given.store = "postgresql://ada:secret@host:5433/db?schema=x&password=hidden"
    with under(given):
        assert hints.command("ls").endswith("ls --store 'postgresql://ada@host:5433/db?schema=x'")
    given.store = "postgresql:///db?host=/run&application_name=a%20b&password=hidden"
    with under(given):
        assert hints.command("ls").endswith("ls --store 'postgresql:///db?host=/run&application_name=a%20b'")
    given.store = "postgresql://[half:secret@host/db"
    with under(given):
        assert "secret" not in hints.command("ls")


def test_only_what_a_command_takes_is_repeated() -> None:
    """Tools are for commands that run an agent, and the agent is for commands that begin a session."""
    given = Settings()
    given.model, given.agent, given.tools = "offline", ("a.md",), ("x.py", "y.py")
    with under(given):
        assert hints.command("show", "s").endswith(" show s")
        assert hints.command("send", "s", "hi").endswith(" send s hi --model offline --tools x.py --tools y.py")
        assert hints.command("chat", begins=True).endswith("--tools y.py --agent a.md")
        given.agent = ("a.md", "b.md")
        assert hints.command("recover", "s").endswith("--tools y.py --agent a.md --agent b.md")
        assert hints.command("show", "s").endswith(" show s")


def test_a_command_that_the_shell_does_not_find(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called by its path, relative if it is below the working directory."""
    monkeypatch.setenv("PATH", "/nowhere")
    installed = home / "my env" / "bin" / "perdure"
    installed.parent.mkdir(parents=True)
    installed.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert hints.program() == "'my env/bin/perdure'"
    monkeypatch.chdir(installed.parent)
    assert hints.program() == "./perdure"
    monkeypatch.chdir(home)
    monkeypatch.setenv("PATH", str(installed.parent))
    assert hints.program() == "perdure"
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    monkeypatch.setattr(sys, "executable", str(home / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert hints.program() == f"{home / 'python'} -m perdure"
