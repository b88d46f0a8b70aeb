"""Errors have an exit code by their kind, say what to do in a line or two, and show no traceback unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import errors
from perdure.cli import changing
from perdure.cli.errors import EXIT_CODES, FAILED, exit_code_of

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def kinds(root: type[Exception] = errors.PerdureError) -> Iterator[type[Exception]]:
    for kind in root.__subclasses__():
        if kind.__module__ == "perdure.errors":
            yield kind
            yield from kinds(kind)


@pytest.mark.parametrize("kind", sorted(kinds(), key=lambda kind: kind.__name__))
def test_every_error_has_an_exit_code(kind: type[Exception]) -> None:
    """None of perdure's own counts as unforeseen."""
    assert exit_code_of(kind.__new__(kind)) != FAILED


def test_the_table_of_exit_codes_is_documented() -> None:
    """Each error stands in the row of its code."""
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for name, code in EXIT_CODES.items():
        assert any(row.startswith(f"| {code} ") and f"`{name}`" in row for row in rows), name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["show", "nobody"], 3, "perdure ls"),
        (["show", "../../etc/passwd"], 2, "is not a session id"),
        (["fork", "s", "../x"], 2, "is not a session id"),
        (["fork", "s", "s"], 4, "exists already"),
        (["show", "s", "--version", "9"], 3, "version 9"),
        (["send", "paused", "hello"], 5, "perdure resume paused"),
        (["send", "s"], 2, "perdure send SESSION"),
        (["send", "s", "hello", "--tools", "none.py"], 9, "--tools"),
        (["send", "s", "hello", "--model", "openai:gpt-5"], 8, "perdure undo s"),
        (["ls", "--store", "nonsense"], 9, "names no store"),
        (["ls", "--store", "mistyped.db"], 9, "There is no store at"),
        (["ls", "--since", "yesterdayish"], 2, "is no time"),
        (["import", "missing.jsonl"], 7, "missing.jsonl"),
        (["purge"], 2, "--older-than"),
        (["purge", "s"], 2, "--yes"),
        (["rewind", "s", "77"], 3, "version 77"),
    ],
)
def test_what_goes_wrong(perdure: Callable[..., Any], arguments: list[str], code: int, said: str) -> None:
    """One or two lines on stderr, none on stdout."""
    perdure("send", "--new", "s", "hello")
    perdure("send", "--new", "paused", "hello")
    perdure("suspend", "paused")
    shown = perdure(*arguments, code=code)
    assert said in shown.err
    assert shown.out == ""
    if code != 2:
        assert len(shown.err.strip().splitlines()) <= 2
    assert "Traceback" not in shown.err


def test_a_traceback_on_request(perdure: Callable[..., Any]) -> None:
    """--debug shows it, before or behind the command; the exit code is the same."""
    for arguments in (["--debug", "show", "nobody"], ["show", "nobody", "--debug"]):
        shown = perdure(*arguments, code=3)
        assert "Traceback" in shown.err
        assert shown.err.strip().splitlines()[-1].startswith("perdure: There is no session")


def test_a_fault_of_perdures_own(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called one, and says how to see more."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(changing, "_carry_out", broken)
    assert "ZeroDivisionError: oh" in (shown := perdure("suspend", "s", code=1).err)
    assert "--debug" in shown


def test_ctrl_c(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted command says so, with the exit code that shells expect."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changing, "_carry_out", interrupted)
    assert perdure("suspend", "s", code=130).err == "perdure: interrupted\n"
