"""Where a person types: with history and completion where the standard library's readline is there, else without."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_KEPT = 2_000


class Prompt:
    """Reads lines from a terminal."""

    def __init__(self, history: Path, words: Iterable[str], *, colour: bool) -> None:
        self._history = history
        self._words = tuple(words)
        self._sign = "\001\x1b[1;32m\002> \001\x1b[0m\002" if colour else "> "
        self._interrupted = False
        self._readline = _readline()
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self) -> str | None:
        """What was typed; None to leave: Ctrl-D, or Ctrl-C twice. A line that ends with \\ goes on."""
        lines: list[str] = []
        while True:
            try:
                typed = input("… " if lines else self._sign)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                if self._interrupted:
                    return None
                self._interrupted = True
                print("Ctrl-C again or Ctrl-D leaves.")
                lines.clear()
                continue
            self._interrupted = False
            lines.append(typed.removesuffix("\\"))
            if not typed.endswith("\\"):
                return self._remembered("\n".join(lines))

    def ask(self, question: str) -> str | None:
        """The answer to a question, which is not kept in the history; None if it was left open."""
        try:
            return input(question).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _remembered(self, typed: str) -> str:
        if self._readline is not None and typed.strip():
            self._readline.add_history(typed.replace("\n", " "))
            with suppress(OSError, AttributeError):  # else the line is in this chat's history, and not in the next's
                self._readline.append_history_file(1, str(self._history))
        return typed

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._completed)
        readline.parse_and_bind("tab: complete")
        try:
            _make_private(self._history)
            readline.read_history_file(str(self._history))
        except OSError:  # no home to write to, or a file of another kind: there is no history, and chat works
            return
        readline.set_history_length(_KEPT)

    def _completed(self, beginning: str, place: int) -> str | None:
        found = [word for word in self._words if beginning.startswith("/") and word.startswith(beginning)]
        return found[place] if place < len(found) else None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python built without it
        return None
    return readline


def _make_private(path: Path) -> None:
    """A file that nobody else can read: what was typed may be a secret."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
