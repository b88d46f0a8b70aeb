"""`perdure replay`: stored sessions as regression tests, by a table and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import COMMAND

TOOLS = '''
from perdure import tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
WRONG = TOOLS.replace("a + b", "a + b + 1")
HANGING = '''
import asyncio
from pathlib import Path
from perdure import tool

@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    Path("begun").touch()
    await asyncio.sleep(60)
    return a + b
'''


@pytest.fixture
def stored(perdure: Callable[..., Any], home: Path) -> Callable[..., Any]:
    """Return the command, in a directory with two sessions of the offline model and a file of tools."""
    (home / "tools.py").write_text(TOOLS)
    (home / "wrong.py").write_text(WRONG)
    perdure("send", "--new", "sum", "add(a=19, b=21)", "--tools", "tools.py")
    perdure("send", "sum", "What is 3 * 4?")
    perdure("send", "--new", "talk", "Hello there.")
    perdure("tag", "talk", "regression")
    return perdure


def test_the_same_session_is_the_same(stored: Callable[..., Any]) -> None:
    """Its own model, asked again, says the same: every step is shown, and the exit code is 0."""
    said = stored("replay", "sum", "--tools", "tools.py")
    assert said.lines[0] == "session sum: 3 of 3 steps are the same"
    assert said.lines[1:] == [
        *("turn 1: add(a=19, b=21)", "  step 0: same", "  step 1: same"),
        *("turn 2: What is 3 * 4?", "  step 0: same"),
    ]
    assert stored("ls", "--json").out.count("\n") == 2


def test_what_is_different_is_shown_and_told_by_the_exit_code(stored: Callable[..., Any]) -> None:
    """With other tools and the recorded answers, the output names the changed result, and the code is 1."""
    said = stored("replay", "sum", "--model", "recorded", "--tools", "live", "--tools", "wrong.py", code=1)
    assert "~ step 0: changed" in said.lines
    assert "        result: 40 → 41" in said.lines
    stored("replay", "sum", "--model", "recorded", "--tools", "live", "--tools", "wrong.py", "--fail-on", "answers")
    stored(
        "replay", "sum", "--model", "recorded", "--tools", "live", "--tools", "wrong.py", "--fail-on", "results", code=1
    )


def test_many_sessions_make_a_table(stored: Callable[..., Any]) -> None:
    """Each has a line, in a pipe with tabs; --tag and others choose them."""
    rows = [line.split("\t") for line in stored("replay", "--all", "--jobs", "2").lines]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("talk", "1", "1", "same"),
        ("sum", "3", "3", "same"),
    ]
    assert stored("replay", "--tag", "regression").lines[0] == "session talk: 1 of 1 steps are the same"
    assert len(stored("replay", "--last", "1").lines) == 3


def test_files_need_no_store(stored: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported sessions are kept in a repository and replayed from there."""
    stored("export", "-o", "all.jsonl")
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{home}/nowhere.db")
    rows = stored("replay", "all.jsonl").lines
    assert [row.split("\t")[-1] for row in rows] == ["same", "same"]
    assert not (home / "nowhere.db").exists()


def test_a_session_that_cannot_be_replayed_stops_no_other(stored: Callable[..., Any], home: Path) -> None:
    """It is reported, the others are replayed, and the code is 2."""
    (home / "broken.jsonl").write_text("{}\n")
    said = stored("replay", "sum", "nobody", "broken.jsonl", "talk", code=2)
    told = {row.split("\t")[0]: row.split("\t")[-1] for row in said.lines}
    assert (told["sum"], told["talk"]) == ("same", "same")
    assert told["nobody"].startswith("error: No session")
    for name in ("nosuch.jsonl", "there/nosuch"):
        assert f"No file {name} exists" in stored("replay", name, code=3).err
    for session in ("sum", "talk"):
        stored("rename", session, "both/of")
    assert "2 sessions have the name 'both/of'" in stored("replay", "both/of", code=2).err
    assert told["broken.jsonl"].startswith("error: ")
    assert "4 sessions: 0 different, 2 with an error." in said.err


def test_damage_is_an_error_of_that_session_alone(stored: Callable[..., Any], home: Path) -> None:
    """A session whose stored bytes were changed is named, with exit code 2."""
    stored("export", "-o", "all.jsonl")
    stored("import", "all.jsonl", "--store", f"file://{home}/files")
    (log,) = Path(home, "files").glob("talk.jsonl")
    raw = bytearray(log.read_bytes())
    raw[raw.index(b"Hello there")] ^= 1
    log.write_bytes(raw)
    said = stored("replay", "sum", "talk", "--store", f"file://{home}/files", code=2)
    told = {row.split("\t")[0]: row.split("\t")[-1] for row in said.lines}
    assert told["sum"] == "same"
    assert told["talk"].startswith("error: ")


def test_json_is_one_document_for_each_session(stored: Callable[..., Any]) -> None:
    """It has every step of both sides, and the broken rules."""
    one, two = stored(
        "replay", "--all", "--system-prompt", "Be kind.", "--fail-on", "tokens=0.1", "--json", code=1
    ).json_lines
    assert (one["session"], one["same"], one["broken"]) == ("talk", True, ["tokens=0.1"])
    (call,) = two["turns"][0]["steps"][0]["calls"]
    assert call["recorded"] == call["replayed"] == {"name": "add", "arguments": {"a": 19, "b": 21}, "result": 40}


def test_an_agent_and_a_prompt_are_tried(stored: Callable[..., Any], home: Path) -> None:
    """--agent gives the session another definition, with that definition's tools."""
    (home / "poet.md").write_text("---\nname: poet\nmodel: offline\ntools: []\n---\nRhyme.\n")
    said = stored("replay", "sum", "--agent", "poet.md", "--tools", "tools.py", code=1)
    assert any(line.startswith("~ step 0: changed") for line in said.lines)
    assert "    - call missing: add(a=19, b=21)" in said.lines


def test_what_is_kept_has_a_tag(stored: Callable[..., Any]) -> None:
    """--keep writes the replayed session into the store; without it nothing is written."""
    stored("replay", "sum", "--keep")
    kept = stored("ls", "--tag", "replay", "--json").json_lines
    assert len(kept) == 2
    assert len(stored("ls", "--json").json_lines) == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Name the sessions"),
        (["sum", "--all"], "Name the sessions"),
        (["sum", "--fail-on", "words"], "a rule is any"),
        (["sum", "--tools", "live", "--tools", "recorded"], "recorded or live"),
        (["--tag", "nobody-has-this"], "nothing was replayed"),
        (["sum", "--max-time", "soon"], "not a time span"),
    ],
)
def test_wrong_options_are_usage_errors(stored: Callable[..., Any], arguments: list[str], told: str) -> None:
    """The code is 2, and the error says what to write."""
    assert told in stored("replay", *arguments, code=2).err


def test_tools_that_are_not_here_are_named(stored: Callable[..., Any]) -> None:
    """Without their file the model sees their names only, which may be why it answers differently."""
    assert stored("replay", "sum").lines[1] == (
        "  note: Only the names of these tools are known here, so that the model was shown no more: add."
    )


def test_live_tools_that_are_not_here_are_named(stored: Callable[..., Any]) -> None:
    """The difference then comes from the command, not from the model or the tools."""
    assert "  note: These tools are not known here, so their calls were not made: add." in (
        stored("replay", "sum", "--tools", "live", code=1).lines
    )


def test_a_budget_ends_a_replay(stored: Callable[..., Any]) -> None:
    """Turns that are not begun are reported as left out."""
    said = stored("replay", "sum", "--max-time", "0s", code=2)
    assert "left out" in said.out
    assert "the budget of the replay was used up before" in said.out


def test_terminals_are_not_steered(stored: Callable[..., Any]) -> None:
    """Text that could steer a terminal is shown in writing."""
    stored("send", "--new", "evil", "\x1b[2Jred")
    said = stored("replay", "evil")
    assert "\x1b" not in said.out
    assert "\\x1b[2Jred" in said.out


def test_ctrl_c_ends_it(stored: Callable[..., Any], home: Path) -> None:
    """The command ends with 130 while a tool works; the store is unchanged."""
    (home / "hanging.py").write_text(HANGING)
    before = stored("show", "sum", "--json").out
    options = ["--model", "recorded", "--tools", "live", "--tools", "hanging.py"]
    process = subprocess.Popen([*COMMAND, "replay", "sum", *options], stderr=subprocess.PIPE, env=dict(os.environ))
    until = time.monotonic() + 30
    while not (home / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"perdure: interrupted\n")
    assert stored("show", "sum", "--json").out == before


def test_a_model_that_cannot_be_asked_is_an_error(stored: Callable[..., Any]) -> None:
    """Nothing is known about its answers, so they are not called different."""
    said = stored("replay", "sum", "--model", "openai:gpt-5", "--fail-on", "calls", code=2)
    assert "sum: error: its model could not be asked: " in said.err
