"""Errors have an exit code by their kind, say what to do in a line or two, and show a traceback only on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import errors
from perdure.cli import changing, moving
from perdure.cli.errors import EXIT_CODES, FAILED, exit_code_of

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def kinds(root: type[Exception] = errors.PerdureError) -> Iterator[type[Exception]]:
    for kind in root.__subclasses__():
        if kind.__module__ == "perdure.errors":
            yield kind
            yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(kinds(), key=lambda kind: kind.__name__))
def test_every_error_has_an_exit_code(kind: type[Exception]) -> None:
    """None of perdure's own errors counts as unforeseen."""
    assert exit_code_of(kind.__new__(kind)) != FAILED


def test_the_table_of_exit_codes_is_documented() -> None:
    """Each error is in the row of its code."""
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for name, code in EXIT_CODES.items():
        assert any(row.startswith(f"| {code} ") and f"`{name}`" in row for row in rows), name


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["show", "nobody"], 3, "perdure ls"),
        (["show", "../../etc/passwd"], 2, "is not a session id"),
        (["show", "nobody at all"], 2, "no session has that name. Type: perdure ls"),
        (["fork", "s", "../x"], 2, "An id is 1 to 200 of the characters A-Z a-z 0-9 . _ -"),
        (["redact", "s", "nobody", "--yes"], 2, "nothing was replaced\n"),
        (["uncompact", "s"], 2, "nothing to show again\n"),
        (["fork", "s", "s"], 4, "exists already"),
        (["show", "s", "--version", "9"], 3, "version 9"),
        (["send", "paused", "hello"], 5, "perdure resume paused"),
        (["send", "hidden", "hello"], 5, "perdure restore hidden"),
        (["send", "s"], 2, "perdure send SESSION"),
        (["send", "s", "hello", "--tools", "none.py"], 9, "--tools"),
        (["send", "s", "hello", "--model", "openai:gpt-5"], 9, "OPENAI_API_KEY is not set"),
        (["send", "keyless", "hello"], 9, "perdure undo keyless"),
        (["send", "s", "hello", "--model", "nonsense"], 9, "--model offline"),
        (["send", "s", "hello", "--model", "nobody:nothing"], 9, "Unknown provider"),
        (["ls", "--store", "nonsense"], 9, "names no store"),
        (["ls", "--store", "mistyped.db"], 9, "No store is at"),
        (["ls", "--since", "yesterdayish"], 2, "is not a time"),
        (["import", "missing.jsonl"], 7, "missing.jsonl"),
        (["purge"], 2, "--older-than"),
        (["purge", "s", "--idle", "1d"], 2, "Name one of these"),
        (["gc", "--owner", "ada"], 9, "without --owner"),
        (["erase", "--of", "ada", "--forget-key", "--yes"], 9, "--keys FILE"),
        (["purge", "s"], 2, "--yes"),
        (["rewind", "s", "77"], 3, "version 77"),
        (["show", "s", "--version", "77"], 3, "perdure versions s"),
        (["ls", "--limit", "0"], 2, "See: perdure ls --help"),
        (["--nonsense"], 2, "See: perdure --help"),
        (["show"], 2, "See: perdure show --help"),
        (["send", "s", " "], 2, "nothing to say"),
        (["inject", "s", ""], 2, "nothing to say"),
        (["ls", "--store", "sqlite:///folder"], 9, "--store file://folder"),
        (["ls", "--store", "file://text"], 9, "--store sqlite:///text"),
        (["copy", "sqlite:///folder"], 9, "is a directory"),
        (["ls", "--store", "sqlite:///text"], 7, "perdure doctor --store sqlite:///text"),
        (["ls", "--store", "postgresql://127.0.0.1:1/none"], 7, "perdure doctor --store"),
        (["init"], 2, "tools.py is there already"),
    ],
)
def test_what_goes_wrong(perdure: Callable[..., Any], home: Path, arguments: list[str], code: int, said: str) -> None:
    """One or two lines go to stderr, none to stdout."""
    (home / "folder").mkdir()
    (home / "text").write_text("This is no database, and long enough to be looked at as one. " * 20)
    (home / "tools.py").touch()
    perdure("send", "--new", "s", "hello")
    perdure("send", "--new", "paused", "hello")
    perdure("suspend", "paused")
    perdure("send", "--new", "keyless", "hello", "--model", "openai:gpt-5", code=9)
    perdure("send", "--new", "hidden", "hello")
    perdure("delete", "hidden")
    shown = perdure(*arguments, code=code)
    assert said in shown.err
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) <= 2
    assert "Traceback" not in shown.err


def test_a_traceback_on_request(perdure: Callable[..., Any]) -> None:
    """--debug shows it, before or after the command; the exit code is the same."""
    for arguments in (["--debug", "show", "nobody"], ["show", "nobody", "--debug"]):
        shown = perdure(*arguments, code=3)
        assert "Traceback" in shown.err
        assert "\nperdure: No session" in shown.err


def test_a_store_that_nobody_named_is_named_where_a_session_is_missing(perdure: Callable[..., Any], home: Path) -> None:
    """The session is often in another store, whose --store was forgotten."""
    assert "No store was named, so this is sqlite:////" in perdure("show", "nobody", code=3).err
    perdure("send", "--new", "s", "Hello", "--store", "kept.db")
    assert "No store was named" not in perdure("show", "nobody", "--store", "kept.db", code=3).err


def test_a_fault_of_perdures_own(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message calls it a fault, and says how to see more."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(changing, "on_session", broken)
    assert "ZeroDivisionError: oh" in (shown := perdure("suspend", "s", code=1).err)
    assert "--debug" in shown


def test_ctrl_c(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted command says so, with the exit code that shells expect."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changing, "on_session", interrupted)
    assert perdure("suspend", "s", code=130).err == "perdure: interrupted\n"


def test_a_missing_key_takes_nothing_from_the_session(perdure: Callable[..., Any]) -> None:
    """The message is kept, the advice is two lines, and the printed command takes the message back."""
    perdure("send", "--new", "s", "hello", "--model", "openai:gpt-5", code=9)
    before = perdure("show", "s", "--json").json["messages"]
    shown = perdure("send", "s", "and now?", code=9)
    assert "ModelConfig" not in shown.err
    assert perdure("show", "s", "--json").json["messages"][-1]["role"] == "user"
    perdure(*shown.err.strip().rpartition("perdure ")[2].split())
    assert perdure("show", "s", "--json").json["messages"] == before


def test_an_agent_of_another_name(perdure: Callable[..., Any], home: Path) -> None:
    """The advice speaks of options, not of Python."""
    (home / "other.md").write_text("---\nlabel: Another\n---\n\nBe brief.\n")
    perdure("send", "--new", "s", "hello")
    shown = perdure("send", "s", "hello", "--agent", "other.md", code=4)
    assert "Leave --agent out" in shown.err
    assert "ChangeDefinition" not in shown.err


def test_the_newest_where_there_is_none(perdure: Callable[..., Any]) -> None:
    """The error says how to begin, and not that a session of that name is missing."""
    assert "No session exists yet. Begin one: perdure chat" in perdure("show", "@", code=3).err


def test_stdin_that_is_no_text(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "hello")
    assert "UTF-8" in perdure("send", "s", "-", stdin=b"\xff\xfe", code=2).err
    assert len(perdure("show", "s", "--json").json["messages"]) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["export", "-o", "out.jsonl"], "No file was written."),
        (["export"], "incomplete"),
        (["import", "in.jsonl"], "Repeat the command"),
        (["copy", "sqlite:///other.db"], "Repeat the command"),
    ],
)
def test_ctrl_c_in_the_middle_of_a_move(
    perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    """The command says what was done; repeated, it continues."""
    for number in range(3):
        perdure("send", "--new", f"s{number}", "hello")
    perdure("export", "-o", "in.jsonl")
    target = [] if arguments[0] != "import" else ["--store", "new.db"]
    with monkeypatch.context() as patched:
        patched.setattr(moving, "progress", _interrupted_after_one)
        stopped = perdure(*arguments, *target, code=130)
    assert told in stopped.err
    assert not (home / "out.jsonl").exists()
    perdure(*arguments, *target)


@contextmanager
def _interrupted_after_one(label: str) -> Iterator[Callable[[int, int], None]]:
    def tell(done: int, total: int) -> None:
        if done >= 1:
            raise KeyboardInterrupt

    yield tell


def test_a_store_that_may_not_be_written(
    perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint says so because of the file system's answer about the store's place, not because of anybody's words."""
    (home / "text.db").write_text("This is no database, and long enough to be looked at as one. " * 20)
    assert "perdure doctor" in perdure("ls", "--store", "text.db", code=7).err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "Copy it to where you may write" in perdure("ls", "--store", "text.db", code=7).err


def test_no_hint_is_chosen_by_words() -> None:
    """The command line checks the types of errors, and never searches their texts."""
    searched = re.compile(r"""in str\(\w*error\w*\)|str\(\w*error\w*\)\.(partition|startswith|split\()""")
    for path in sorted(Path(changing.__file__).parent.glob("*.py")):
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if searched.search(line)]
        assert [line for line in found if '" ".join' not in line and "' '.join" not in line] == [], path.name
