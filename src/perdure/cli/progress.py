"""A progress bar for what takes more than a second; on stderr, and only where a person looks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

PATIENCE = 1.0
T = TypeVar("T")


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be told how much is done, and of how much; 0 where that is not known."""
    bar = _Bar(label)
    try:
        yield bar.tell if sys.stderr.isatty() else _ignore
    finally:
        bar.close()


async def patiently(label: str, work: Awaitable[T]) -> T:
    """What something comes to; a person is shown that it is under way, if it takes long."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=PATIENCE)
    if not task.done() and sys.stderr.isatty():
        from perdure.cli.terminal import console

        with console(err=True).status(label):
            await asyncio.wait({task})
    return await task


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
