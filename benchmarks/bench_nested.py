"""Compactions of compactions, hundreds deep: the cost of each for moving, checking and redacting such a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import perdure
from benchmarks.harness import Cost, Run, median, ms, timed
from benchmarks.setting import checkpoint
from perdure import AgentDefinition, Message, Sessions, SqliteStore
from perdure.archive import fsck
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("bench")
FEW = 20
ROUNDS = 2


def connected(path: Path) -> Sessions:
    return perdure.connect(SqliteStore(path), driver=ScriptedDriver(["yes"]), compaction=None)


async def measure(run: Run) -> None:
    many = run.size(200, 4_000)
    with run.folder() as folder:
        messages = {levels: await nested(folder / f"{levels}.db", levels) for levels in (FEW, many)}
        samples: dict[tuple[str, int], list[Cost]] = {}
        for _ in range(ROUNDS):
            for levels, message_id in messages.items():
                for verb, cost in (await costs(folder, levels, message_id)).items():
                    samples.setdefault((verb, levels), []).append(cost)
    for verb in ("dump", "restore", "check", "redact"):
        small, large = median(samples[verb, FEW]), median(samples[verb, many])
        least, most = small.cpu / FEW, large.cpu / many
        detail = f"processor {ms(most)} a level of {many:,} / {ms(least)} of {FEW}; {ms(large.wall)} on the clock"
        run.report(f"nested.{verb}", most / least, detail)


async def nested(path: Path, levels: int) -> str:
    """Make a session with compactions, each of which covers the one before; return the id of its first message."""
    async with connected(path) as sessions:
        chat = await sessions.open("nested", agent=AGENT)
        first = Message.user("the first of all")
        await chat.inject(first)
        for number in range(5):
            await chat.inject(Message.user(f"said {number}"))
        for number in range(levels):
            await chat.inject(Message.user(f"said on level {number}"))
            await chat.compact(compact_strategy="truncate", keep_last=4)
    checkpoint(path)
    return first.id


async def costs(folder: Path, levels: int, message_id: str) -> dict[str, Cost]:
    """Carry everything out once, on a copy."""
    copy, file, restored = (folder / name for name in ("copy.db", "dumped.jsonl", "restored.db"))
    shutil.copyfile(folder / f"{levels}.db", copy)
    found = {}
    async with connected(copy) as sessions, connected(restored) as others:

        async def check() -> None:
            assert not (await fsck(sessions.store)).problems

        async def redact() -> None:
            assert await sessions.redact("nested", [message_id]) == 1

        found["dump"] = await timed(lambda: sessions.export(file))
        found["restore"] = await timed(lambda: others.import_(file))
        found["check"] = await timed(check)
        found["redact"] = await timed(redact)
    for left in (*left_of(copy), *left_of(restored), file):
        left.unlink()
    return found


def left_of(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}*"))
