"""Output to the terminal. Stored content is never trusted: all of it goes through `safe`, `line` or `print_json`.

Work that takes more than a second shows a progress bar, on stderr, and only if that is a terminal."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
PATIENCE = 1.0
"""Seconds that pass before a person is shown that something is under way."""
# Control characters except newline and tab, C1, DEL, marks that change the direction of text, line separators, and
# surrogates.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FLEXED = 12
"""The width to which a column of free text is shortened before other columns are left out."""
_STATUS_STYLES = {
    "active": "green",
    "completed": "green",
    "running": "cyan",
    "suspended": "yellow",
    "pending": "yellow",
    "waiting": "yellow",
    "aborted": "yellow",
    "rejected": "yellow",
    "failed": "red",
    "killed": "red",
    "handed over": "yellow",
    "left": "yellow",
    "parked": "red",
    "delayed": "dim",
    "deleted": "dim",
}


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def safe(text: str) -> str:
    """Return a text that cannot steer a terminal: each dangerous character is written as an escape such as `\\x1b`."""
    return _UNSAFE.sub(_escaped, text.replace("\r", ""))


def line(text: object, width: int | None = None) -> str:
    """Return a text on one line, shortened to a width."""
    flat = safe(" ".join(str(text).split()))
    return flat if width is None or len(flat) <= width else flat[: width - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 message`, `2,000 messages`, `3 branches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def price(usage: Mapping[str, Any]) -> str:
    """Return the cost. It ends with + if the price of some tokens is unknown, and is ? if no price is known."""
    if not usage["unpriced_tokens"]:
        return f"${usage['cost']:.4f}"
    return f"${usage['cost']:.4f}+" if usage["cost"] else "?"


def is_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int | None:
    """Return the width of the terminal. Return None in a pipe, where nothing is shortened."""
    import shutil  # imported late, as is rich below: `perdure --help` must be quick

    return shutil.get_terminal_size().columns if is_terminal() else None


def console(*, err: bool = False) -> Console:
    """Return a console of rich that prints texts as they are. It respects NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    # Without markup and emoji codes: stored text such as "[red]" or ":bomb:" has to be shown as it is.
    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=not stream.isatty())


def styled(text: object, style: str) -> Any:
    """Return a text for a console, on one line and in a style."""
    from rich.text import Text

    return Text(line(text), style=style)


def status_style(status: str) -> str:
    return _STATUS_STYLES.get(status, "")


def say(text: str = "") -> None:
    """Print plain text, made safe."""
    click.echo(safe(text))


def note(text: str) -> None:
    """Print a remark for a person on stderr, apart from the output."""
    click.echo(safe(text), err=True)


@contextmanager
def told_of_interruption(text: str) -> Iterator[None]:
    """Print what became of the work if it is stopped with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        note(text)
        raise


def print_json(value: Any) -> None:
    """Print one JSON document on a line of its own."""
    click.echo(json_line(value))


def json_line(value: Any) -> str:
    """Return a JSON document on one line. Characters that could steer a terminal are escaped, as JSON allows."""
    # A stream that lacks a character would write an escape of Python's, which is not JSON: see `_fit` in main.
    ascii_only = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
    text = written(value, ensure_ascii=ascii_only)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}" if found[0] != "\n" else "\n", text)


def written(value: Any, *, ensure_ascii: bool = False) -> str:
    """Return a value as JSON. Types that JSON does not have are converted."""
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_plain)


def print_length(session_id: str, count: int, as_json: bool) -> None:
    """Print how many messages a session shows."""
    if as_json:
        print_json({"session": session_id, "messages": count})
    else:
        say(f"messages shown: {count}")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Iterable) else str(value)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
    flexible: Sequence[str] = (),
) -> None:
    """Print rows as a table in a terminal. In a pipe, print a line for each, with tabs between fields and no header.

    If the terminal is too narrow, `flexible` columns are shortened, and then `spare` ones left out, each in the given
    order. The first column is always whole.
    """
    if not is_terminal():
        for row in rows:
            click.echo("\t".join(line(field) for field in row))
        return
    from rich.table import Table

    cells = {name: [line(row[place]) for row in rows] for place, name in enumerate(columns)}
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    widths = _fitting(cells, width() or 80, spare, flexible)
    for place, (name, wide) in enumerate(widths.items()):
        justify = "right" if name in right else "left"
        table.add_column(line(name, wide), justify=justify, no_wrap=True, overflow="fold" if place == 0 else "ellipsis")  # type: ignore[arg-type]  # one of its words
    for place in range(len(rows)):
        fields = ((cells[name][place], wide) for name, wide in widths.items())
        table.add_row(*(styled(line(field, wide), status_style(field)) for field, wide in fields))
    console().print(table)


def _fitting(
    cells: dict[str, list[str]], room: int, spare: Sequence[str], flexible: Sequence[str]
) -> dict[str, int | None]:
    """Return the columns that fit, each with its width. The first is never shortened, so its width is None."""
    from rich.cells import cell_len

    wide = {name: max(len(name), *map(cell_len, column), 0) for name, column in cells.items()}
    first = next(iter(cells))
    wide = {name: size for name, size in wide.items() if name == first or any(cells[name])}  # nothing to show

    def excess() -> int:
        return sum(wide.values()) + 2 * (len(wide) - 1) - room

    for name in flexible:
        if excess() > 0 and wide.get(name, 0) > _FLEXED:
            wide[name] = max(_FLEXED, wide[name] - excess())
    for name in spare:
        if excess() > 0:
            wide.pop(name, None)
    return {name: None if name == first else size for name, size in wide.items()}


def age(moment: datetime) -> str:
    """Return how long ago a time was. In a pipe, return the time itself."""
    if not is_terminal():
        return moment.isoformat(timespec="seconds")
    from perdure.model.ids import now

    # Never negative: the clock of the machine that wrote the time may be ahead of this one.
    seconds = max(0, int((now() - moment).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def to_come(moment: datetime) -> str:
    """Return how soon a time comes. In a pipe, return the time itself."""
    if not is_terminal():
        return moment.isoformat(timespec="seconds")
    from perdure.model.ids import now

    seconds = round((moment - now()).total_seconds())
    if seconds <= 0:
        return "due"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:  # with fewer than two of a unit, rounding would be off by too much
            return f"in {round(seconds / length)} {unit}"
    return f"in {seconds} s"


def at_time(moment: datetime) -> str:
    """Return a time with its offset. If it has passed, add that the work is done at once."""
    from perdure.model.ids import now

    passed = ", which has passed: it is done at once" if moment <= now() else ""
    return moment.isoformat(timespec="seconds") + passed


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of work while the block lasts.

    The block gets a function, which takes the amount done and the whole amount, or 0 if that is unknown.
    """
    bar = _Bar(label)
    try:
        yield bar.tell if sys.stderr.isatty() else _ignore
    finally:
        bar.close()


async def patiently(label: str, work: Awaitable[T]) -> T:
    """Return the result of work. If it takes long, show a person that it is under way."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=PATIENCE)
    if not task.done() and sys.stderr.isatty():
        with console(err=True).status(label):
            await asyncio.wait({task})
    return await task


def _ignore(done: int, total: int) -> None:
    """Show nothing: stderr is not a terminal."""


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

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=console(err=True), transient=True)
        self._shown.start()
        self._task = self._shown.add_task(self._label)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
