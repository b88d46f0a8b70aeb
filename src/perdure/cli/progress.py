"""A progress bar for what takes more than a second; on stderr, and only where a person looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1.0


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be told how much is done, and of how much; 0 where that is not known."""
    bar = _Bar(label)
    try:
        yield bar.tell if sys.stderr.isatty() else _ignore
    finally:
        bar.close()


def _ignore(done: int, total: int) -> None:
    """Nobody looks."""


class _Bar:
    def __init__(self, label: str) -> None:
        self._label = label
        self._began = time.monotonic()
        self._shown: Any = None
        self._task: Any = None

    def tell(self, done: int, total: int) -> None:
        if self._shown is None and time.monotonic() - self._began < PATIENCE:
            return
        if self._shown is None:
            self._show()
        self._shown.update(self._task, completed=done, total=total or None)

    def _show(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from perdure.cli.terminal import console

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=console(err=True), transient=True)
        self._shown.start()
        self._task = self._shown.add_task(self._label)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
