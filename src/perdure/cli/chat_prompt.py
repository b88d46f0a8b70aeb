"""The prompt that a person types at. It has history and completion if Python has the module readline."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_KEPT = 2_000


class Prompt:
    """A prompt that reads lines from a terminal."""

    def __init__(self, history: Path, words: Iterable[str], *, colour: bool) -> None:
        self._history = history
        self._words = tuple(words)
        # \001 and \002 tell readline that what is between them has no width, or it would misplace the cursor.
        self._sign = "\001\x1b[1;32m\002> \001\x1b[0m\002" if colour else "> "
        self._interrupted = False
        self._readline = _readline()
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self) -> str | None:
        """Return the typed text. Return None after Ctrl-D, or Ctrl-C twice. A line that ends with \\ continues."""
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
        """Return the answer to a question, or None if it was left open. It is not put into the history."""
        try:
            return input(question).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _remembered(self, typed: str) -> str:
        if self._readline is not None and typed.strip():
            self._readline.add_history(typed.replace("\n", " "))
            with suppress(OSError, AttributeError):  # then only this chat's history has the line, not the file
                self._readline.append_history_file(1, str(self._history))
        return typed

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)  # or answers to questions would be remembered too
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._completed)
        readline.parse_and_bind("tab: complete")
        try:
            _make_private(self._history)
            readline.read_history_file(str(self._history))
        except OSError:  # without a home to write to, or with a file of another kind, chat works without history
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
    """Make a file that only this user can read: the typed lines may contain secrets."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(handle, 0o600)  # the mode above counts only for a new file
    finally:
        os.close(handle)
