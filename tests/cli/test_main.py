"""The command itself: its help, its imports, its pipes and its terminal."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import __version__
from perdure.cli.main import COMMANDS

from .conftest import COMMAND

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

# Other authors write these; their own tests run them.
OWN = [name for name in COMMANDS if name not in ("chat", "tour")]


def in_a_terminal(*arguments: str, env: dict[str, str] | None = None) -> str:
    """Return the output of the command in a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=follower, stdout=follower, stderr=follower, env=os.environ | (env or {})
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not piece:
            break
        shown += piece
    assert process.wait(60) == 0, shown
    os.close(leader)
    return shown.decode().replace("\r\n", "\n")


def test_help_names_every_command(perdure: Callable[..., Any]) -> None:
    """Each has a line, in sections."""
    shown = perdure("--help").out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert "Talk:" in shown


@pytest.mark.parametrize("name", OWN)
def test_every_command_has_help(perdure: Callable[..., Any], name: str) -> None:
    """It shows the usage, what the command does, and its options."""
    shown = perdure(name, "--help").out
    assert shown.startswith(f"Usage: perdure {name}")
    assert "--help" in shown


def test_help_imports_nothing_that_it_does_not_need() -> None:
    """This makes it quick."""
    code = (
        "import sys\nfrom perdure.cli.main import cli\ncli(['--help'], standalone_mode=False)\n"
        "heavy = [name for name in ('rich', 'msgspec', 'apsw', 'asyncio', 'perdure.sessions', 'yaml') "
        "if name in sys.modules]\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_the_version(perdure: Callable[..., Any]) -> None:
    """It is the package's."""
    assert perdure("--version").out == f"perdure {__version__}\n"


def test_a_mistyped_command(perdure: Callable[..., Any]) -> None:
    """The error names the one that was meant."""
    assert "Did you mean 'search'?" in perdure("serch", code=2).err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves(process: Callable[..., Any], options: list[str], unbuffered: str) -> None:
    """`perdure … | head` ends quietly, with the exit code of a broken pipe, after many lines or a single one."""
    process("send", "--new", "long", "hello")
    for _ in range(2):
        process("inject", "long", "word\n" * 20_000)
    child = subprocess.Popen(
        [*COMMAND, "show", "long", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(100)
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) == 141
    assert err == b""


def test_ctrl_c_while_a_shell_completes(home: Path) -> None:
    """Completing an id may wait for a store; Ctrl-C then shows no traceback in the middle of the line."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/db"
        words = {
            "_PERDURE_COMPLETE": "bash_complete",
            "COMP_WORDS": f"perdure show --store {store} x",
            "COMP_CWORD": "4",
        }
        child = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | words)
        connection, _ = silent.accept()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        connection.close()
    assert (child.returncode, out, err) == (130, b"", b"")


def test_a_pipe_that_knows_few_characters(perdure: Callable[..., Any], process: Callable[..., Any]) -> None:
    """Other characters are written as escapes, and JSON stays JSON."""
    env = {"PYTHONIOENCODING": "iso8859-2", "PYTHONUTF8": "0"}
    perdure("send", "--new", "s", "big 🎈")
    assert "big \\U0001f388" in process("show", "s", env=env).out
    assert process("show", "s", "--json", env=env).json["messages"][0]["parts"][0]["text"] == "big 🎈"


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eback"


@pytest.fixture
def evil(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", EVIL)
    perdure("rename", "s", EVIL)
    perdure("tag", "s", EVIL)


@pytest.mark.parametrize("command", ["show s", "show s --all", "ls", "tree s", "events s", "search owned", "diff s s"])
@pytest.mark.parametrize("json", ["", " --json"])
def test_no_escape_sequence_reaches_a_pipe(perdure: Callable[..., Any], evil: None, command: str, json: str) -> None:
    """None comes from messages, names, tags or titles, as text or as JSON."""
    shown = perdure(*(command + ("" if "--all" in command else json)).split()).out
    assert shown
    assert not any(character in shown for character in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("command", ["show s", "ls", "tree s"])
def test_no_escape_sequence_reaches_a_terminal(evil: None, command: str) -> None:
    """The only styles are perdure's own."""
    shown = in_a_terminal(*command.split(), env={"TERM": "xterm"})
    assert "owned" in shown or command == "ls"
    assert not any(sequence in shown for sequence in ("\x1b]0", "\x07", "\x1b[2J", "\x9b", "\u202e"))


def test_no_colour_where_none_is_wanted(evil: None) -> None:
    """NO_COLOR is respected."""
    assert "\x1b[3" in in_a_terminal("tree", "s", env={"TERM": "xterm-256color"})
    assert "\x1b[3" not in in_a_terminal("tree", "s", env={"TERM": "xterm-256color", "NO_COLOR": "1"})


def test_json_gives_back_what_was_said(perdure: Callable[..., Any], evil: None) -> None:
    assert perdure("show", "s", "--json").json["messages"][0]["parts"][0]["text"] == EVIL


def test_a_terminal_gets_a_head_and_a_pipe_does_not(process: Callable[..., Any]) -> None:
    """Tables are for people, tab-separated lines for programs."""
    process("send", "--new", "s", "hello")
    assert "SESSION" in in_a_terminal("ls")
    assert process("ls").out.split("\t")[:4] == ["s", "assistant", "active", "2"]
    assert "1 session, 2 messages" in in_a_terminal("fsck")
    assert "AGENT" in in_a_terminal("stats")


def test_the_package_runs_as_a_module(home: Path) -> None:
    """`python -m perdure` is the command too."""
    done = subprocess.run([sys.executable, "-m", "perdure", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("perdure ")


@pytest.mark.parametrize("columns", ["40", "80"])
def test_ids_are_not_cut_in_a_narrow_terminal(process: Callable[..., Any], columns: str) -> None:
    """Columns that do not fit are left out, and no line is longer than the terminal is wide."""
    session = process("send", "--new", "hello").err.split()[-1]
    process("rename", session, "a name that is longer than any terminal is wide " * 3)
    shown = in_a_terminal("ls", env={"COLUMNS": columns, "NO_COLOR": "1", "TERM": "dumb"}).splitlines()
    assert shown[1].startswith(f"{session[-4:]} ")
    assert max(map(len, shown)) <= int(columns)
