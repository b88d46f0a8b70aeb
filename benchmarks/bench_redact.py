"""The cost of `connect(redact=…)` with the default set for a message of 1 KB and its answer of 1 KB, on SQLite."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import perdure
from benchmarks.harness import Run, Side, interleaved
from perdure import SqliteStore, redactors
from perdure.testing import ScriptedDriver

PROSE = "The quick brown fox jumps over the lazy dog, 12 times a day, and rests. "
ROUNDS = 400


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await sends(run, folder)


async def sends(run: Run, folder: Path) -> None:
    """Send the same to two files in turn, one with redactors. Every text is new, so none is cached."""
    numbers = count()

    def text() -> str:
        return (f"No. {next(numbers)}: " + PROSE * 15)[:1024]

    driver = ScriptedDriver(lambda _: text())
    plain = perdure.connect(SqliteStore(folder / "plain.db"), driver=driver)
    redacted = perdure.connect(SqliteStore(folder / "redacted.db"), driver=driver, redact=redactors.DEFAULT)
    async with plain as one, redacted as other:
        chats = [await one.open("chat"), await other.open("chat")]
        sides: list[Side] = [lambda chat=chat: chat.send(text()) for chat in chats]  # type: ignore[misc]  # bound now
        usual, with_redactors = await interleaved(*sides, rounds=ROUNDS, warm_up=20)
    detail = f"{usual.wall * 1000:.2f} and {with_redactors.wall * 1000:.2f} ms; processor time "
    detail += f"{usual.cpu * 1000:.2f} and {with_redactors.cpu * 1000:.2f} ms"
    run.report("redact.send", with_redactors.wall / usual.wall, detail)
