"""Commands that run an agent, or reach one that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import COMMAND, SLOW

TOOLS = '''
import time
from pathlib import Path
from perdure import tool

@tool(needs_approval=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{a}+{b}\\n")
    return a + b
'''


@pytest.fixture
def tools(home: Path) -> str:
    (home / "tools.py").write_text(TOOLS)
    return "tools.py"


def test_a_message_and_its_answer(perdure: Callable[..., Any]) -> None:
    """The answer goes to stdout, the new session's id to stderr."""
    shown = perdure("send", "--new", "what is 19 * 21?")
    assert "399" in shown.out
    session = shown.err.split()[-1]
    assert perdure("ls").out.startswith(session)
    assert "5" in perdure("send", session[:35], "-", stdin="what is 2 + 3?").out


def test_a_new_session_does_not_take_an_id_that_is_there(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "hello")
    perdure("send", "--new", "s", "hello", code=2)
    perdure("send", "t", "hello", code=3)
    assert len(perdure("ls").lines) == 1


def test_a_reply_as_json(perdure: Callable[..., Any]) -> None:
    reply = perdure("send", "--new", "s", "what is 2 + 3?", "--json").json
    assert (reply["session"], reply["version"], reply["pending_calls"]) == ("s", 2, [])
    assert reply["usage"]["input_tokens"] > 0


def test_an_image_goes_with_a_message(perdure: Callable[..., Any], home: Path) -> None:
    """It may be any number of files, each by its path; the output shows each by its name and size."""
    (home / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(9_992))
    (home / "b.txt").write_text("hello")
    perdure("send", "--new", "s", "what is this?", "-a", "a.png", "--attach", home / "b.txt")
    perdure("send", "s", "and this?", "-a", "a.png", "--key", "k", "--json")
    shown = perdure("show", "s").out
    assert "[image a.png, 10.0 KB]" in shown
    assert "[file b.txt, 5 bytes]" in shown
    assert "no problems" in perdure("fsck").out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.png", "The file none.png does not exist."),
        (".", "is a directory"),
        ("empty.png", "there is nothing in it"),
        ("what", "its type is not known"),
        ("https://a.example/what", "cannot be told from its address"),
    ],
)
def test_a_file_that_cannot_be_sent(perdure: Callable[..., Any], home: Path, name: str, said: str) -> None:
    """Nothing is begun, and the error says what is wrong."""
    (home / "empty.png").touch()
    (home / "what").write_bytes(b"\0\xff")
    told = " ".join(perdure("send", "--new", "hi", "-a", name, code=2).err.split())
    assert said.lower() in told.lower()
    assert "'-a'" in told
    assert perdure("ls").lines == []


def test_a_file_that_is_too_large(perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.sessions.attaching.MOST_BYTES", 5_000_000)
    (home / "large.txt").write_bytes(b"x" * 5_000_001)
    assert "more than the 5 MB" in perdure("send", "--new", "hi", "-a", "large.txt", code=2).err


def test_a_key_sends_once(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "hello", "--key", "k")
    perdure("send", "s", "hello", "--key", "k")
    assert len(perdure("show", "s", "--json").json["messages"]) == 2


def test_approval(perdure: Callable[..., Any], tools: str, home: Path) -> None:
    """A run that waits prints how to continue, and has an exit code of its own."""
    shown = perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, code=10)
    assert "perdure approve s" in shown.err
    assert not (home / "ledger").exists()
    pending = perdure("show", "s", "--json").json["pending_calls"]
    assert pending[0]["arguments"] == {"a": 2, "b": 3}
    assert "5" in perdure("approve", "s", "--call", pending[0]["id"], "--tools", tools).out
    assert (home / "ledger").read_text() == "2+3\n"


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_a_decision_is_left_to_a_worker(perdure: Callable[..., Any], tools: str, home: Path, verb: str) -> None:
    """Nothing is run and no tools are needed. Until a worker comes, every command says that it is decided."""
    perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, code=10)
    told = perdure(verb, "s", "--no-wait").err
    assert "Decided. A worker continues the run" in told
    assert not (home / "ledger").exists()
    shown = perdure("show", "s")
    assert ("  left  " in shown.lines[0], "decided on" in shown.out, "killed" in shown.out) == (True, True, False)
    assert perdure("show", "s", "--json").json["interrupted"] == "left"
    assert "1970" not in perdure("events", "s").out  # the entry that hands the run over tells no time
    assert perdure("ls").out.split("\t")[2] == "left"
    assert "  left  " in perdure("tree", "s").lines[1]
    assert perdure("tree", "s", "--json").json["children"][0]["status"] == "left"
    queue = perdure("queue", "--json").json
    assert (queue["held"], queue["running"][0]["handed_over"], queue["running"][0]["expires"]) == ([], True, None)
    for second in ("approve", "deny"):
        assert "somebody has decided already" in perdure(second, "s", "--no-wait", code=5).err
    perdure("recover", "s", "--tools", tools)
    assert (home / "ledger").exists() == (verb == "approve")
    assert perdure("ls").out.split("\t")[2] == "active"


def test_an_approval_prints_what_it_approves(perdure: Callable[..., Any], tools: str, home: Path) -> None:
    """A digest is accepted as well; a call that was shown differently is refused, and nothing is made."""
    perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, code=10)
    (call,) = perdure("show", "s", "--json").json["pending_calls"]
    told = perdure("approve", "s", "--call", "0" * 64, "--tools", tools, code=2).err
    assert "look at the pending calls again" in told
    assert not (home / "ledger").exists()
    told = perdure("approve", "s", "--call", call["digest"], "--tools", tools).err
    assert told.splitlines()[0] == "Approving:"
    assert call["id"] in told
    assert (home / "ledger").read_text() == "2+3\n"


def test_denial(perdure: Callable[..., Any], tools: str, home: Path) -> None:
    perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, "--json", code=10)
    perdure("deny", "s", "not today", "--tools", tools)
    assert "not today" in perdure("show", "s").out
    assert not (home / "ledger").exists()


def test_a_denial_has_one_reason(perdure: Callable[..., Any], tools: str) -> None:
    """It is given after the session or with --reason."""
    perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, code=10)
    assert "once" in perdure("deny", "s", "no", "--reason", "never", "--tools", tools, code=2).err
    perdure("deny", "s", "--reason", "not today", "--tools", tools)
    assert "not today" in perdure("show", "s").out


def test_nothing_to_decide(perdure: Callable[..., Any]) -> None:
    """The error has no name that only Python knows."""
    perdure("send", "--new", "s", "hello")
    for verb in ("approve", "deny"):
        assert perdure(verb, "s", code=5).err == "perdure: No tool call of session 's' waits for a decision.\n"


def test_an_approval_without_the_tool(perdure: Callable[..., Any], tools: str, home: Path) -> None:
    """Nothing is changed, and the error says where to name the tool."""
    perdure("send", "--new", "s", "what is 2 + 3?", "--tools", tools, code=10)
    told = perdure("approve", "s", code=9).err
    assert told.splitlines()[-1] == "Name the Python file that has it: --tools FILE.py"
    assert "tools=[" not in told
    assert "5" in perdure("approve", "s", "--tools", tools).out


def test_a_killed_run_is_recovered(perdure: Callable[..., Any], home: Path) -> None:
    """Anybody can type `recover`, with the same tools."""
    (home / "slow.py").write_text(SLOW)
    arguments = ["send", "--new", "s", "what is 2 + 3?", "--tools", "slow.py"]
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _await_file(home / "begun")
    assert "perdure cancel s" in perdure("send", "s", "hello", code=4).err
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    (home / "quick").touch()
    assert perdure("recover", "--tools", "slow.py", "--json").json["resumed"] == ["s"]
    assert "5" in perdure("show", "s", "--last", "1").out
    assert perdure("recover").out == "no run was killed\n"


@pytest.mark.parametrize("verb", ["send", "chat"])
def test_a_run_that_reaches_its_budget_says_so(home: Path, verb: str) -> None:
    """An answer that never came is not shown as an empty one."""
    (home / "add.py").write_text(SLOW)
    (home / "quick").touch()
    (home / "brief.md").write_text("---\nmodel: offline\nbudget:\n  max_steps: 1\n---\nBe brief.\n")
    words = ["send", "--new", "-"] if verb == "send" else ["chat"]
    told = subprocess.run(
        [*COMMAND, *words, "--agent", "brief.md", "--tools", "add.py"],
        input="what is 2 + 3?\n",
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert "stopped before its answer was complete: steps_limit_reached." in told.stderr


def test_a_run_is_cancelled_from_elsewhere(perdure: Callable[..., Any], home: Path) -> None:
    """It ends by itself, and the text so far is kept."""
    (home / "slow.py").write_text(SLOW)
    arguments = ["send", "--new", "s", "what is 2 + 3?", "--tools", "slow.py"]
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_file(home / "begun")
        assert perdure("cancel", "s").out == "s is asked to stop\n"
        _await_end_of_run(perdure)
    finally:
        running.kill()
        running.wait()
    assert "what is 2 + 3?" in perdure("show", "s").out
    assert "stopped: user_requested" in perdure("tree", "s").out


@pytest.mark.parametrize("when_busy", ["queue", "steer"])
def test_a_message_is_left_with_a_run(perdure: Callable[..., Any], home: Path, when_busy: str) -> None:
    """The output says so, and how to see the answer; an earlier answer of the session is not taken for one."""
    (home / "slow.py").write_text(SLOW.replace("    if not", "    while not").replace("sleep(60)", "sleep(0.05)"))
    perdure("send", "--new", "s", "hello")
    arguments = ["send", "s", "what is 2 + 3?", "--tools", "slow.py"]
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_file(home / "begun")
        left = perdure("send", "s", "what is 19 * 21?", "--when-busy", when_busy)
        reply = perdure("send", "s", "My name is Ada.", "--when-busy", when_busy, "--json").json
        (home / "quick").touch()
        running.wait(60)
    finally:
        running.kill()
        running.wait()
    assert left.out == ""
    assert "under way in s" in left.err
    assert "perdure events s --follow" in left.err
    assert (reply["queued"], reply["text"], reply["stop_reason"]) == (True, "", None)
    assert "399" in perdure("show", "s").out or when_busy == "steer"
    assert "My name is Ada." in perdure("show", "s").out


def test_a_message_to_a_session_at_rest_is_answered(perdure: Callable[..., Any]) -> None:
    """This holds with `queue` and with `steer`; a repeated message is answered as before."""
    perdure("send", "--new", "s", "hello")
    for _ in range(2):
        shown = perdure("send", "s", "what is 19 * 21?", "--when-busy", "queue", "--key", "k", "--json").json
        assert ("399" in shown["text"], shown["queued"]) == (True, False)
    assert "399" in perdure("send", "s", "what is 19 * 21?", "--when-busy", "steer").out


def _await_file(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


def _await_end_of_run(perdure: Callable[..., Any]) -> None:
    until = time.monotonic() + 30
    while "agent_end" not in perdure("events", "s", "--last", "1").out:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_nothing_to_cancel(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "hello")
    assert perdure("cancel", "s").out == "s is not being run\n"


def test_a_message_without_a_run(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "hello")
    assert perdure("inject", "s", "-", "--role", "system", stdin="Be kind.").out == "messages shown: 3\n"
    assert perdure("show", "s", "--json").json["messages"][-1]["role"] == "system"


OUTSIDE = """
import perdure

weather = perdure.external_tool("weather", "Look outside.", {"type": "object"})
"""


@pytest.fixture
def outside(home: Path) -> str:
    """Return a file with a tool that is called outside."""
    (home / "outside.py").write_text(OUTSIDE)
    return "outside.py"


def test_an_answer_from_outside(perdure: Callable[..., Any], outside: str) -> None:
    """The output says how to hand it in; a wrong answer changes nothing."""
    waits = perdure("send", "--new", "s", 'weather(city="Oslo")', "--tools", outside, code=10)
    (call,) = perdure("show", "s", "--json").json["pending_calls"]
    assert "answers from outside" in waits.err
    assert f"perdure answer s {call['id']} JSON" in waits.err
    assert "perdure approve" not in waits.err
    assert "not JSON" in perdure("answer", "s", call["id"], "rain", "--tools", outside, code=2).err
    assert "one of them" in perdure("answer", "s", call["id"], "--tools", outside, code=2).err
    assert "does not wait" in perdure("answer", "s", "another", "1", "--tools", outside, code=2).err
    told = perdure("answer", "s", call["id"], '{"rain": true}', "--tools", outside)
    assert "rain" in told.out
    assert "rain" in perdure("show", "s", "--all").out


def test_an_answer_is_left_to_a_worker(perdure: Callable[..., Any], outside: str) -> None:
    perdure("send", "--new", "s", 'weather(city="Oslo")', "--tools", outside, code=10)
    (call,) = perdure("show", "s", "--json").json["pending_calls"]
    assert "Decided." in perdure("answer", "s", call["digest"], "--error", "no network", "--no-wait").err
    perdure("recover", "s", "--tools", outside)
    assert "no network" in perdure("show", "s", "--all").out
