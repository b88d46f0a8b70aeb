"""The bytes that a compaction writes, and the later cost of covered messages, at any depth."""

from __future__ import annotations

from pathlib import Path

import perdure
from benchmarks.harness import Run, interleaved, ms
from benchmarks.others.turns import TEXT
from benchmarks.setting import AGENT, filled, settled_size
from perdure import Chat, Message, Sessions, SqliteStore
from perdure.testing import ScriptedDriver

SUMMARY = "They spoke of a fox and a dog. " * 10
DEEP = 500


def connected(path: Path) -> Sessions:
    driver = ScriptedDriver(lambda request: SUMMARY if "<conversation>" in request.messages[-1].text else "yes")
    return perdure.connect(SqliteStore(path), driver=driver, compaction=None)


async def measure(run: Run) -> None:
    for part in (covering, nesting):
        with run.folder() as folder:
            async with connected(folder / "bench.db") as sessions:
                await part(run, folder / "bench.db", sessions)


async def covering(run: Run, path: Path, sessions: Sessions) -> None:
    long, short = [await sessions.open((await filled(sessions.runtime, count)).id) for count in (100_000, 12)]
    chats = [long, *[await long.fork() for _ in range(9)]]
    before = settled_size(path)
    for chat in chats:
        await chat.compact(compact_strategy="llm", keep_last=11)
    run.report("compaction.bytes", (settled_size(path) - before) / 10, f"mean of 10; {len(SUMMARY)} are the summary")

    async def cold(chat: Chat) -> None:
        await chat.close()
        await (await sessions.open(chat.id)).send("And now?")

    many, few = await interleaved(lambda: cold(long), lambda: cold(short), rounds=40)
    run.report("compaction.cold", many.wall / few.wall, f"{ms(many.wall)} / {ms(few.wall)}")


async def nesting(run: Run, path: Path, sessions: Sessions) -> None:
    shallow, deep = [await deepened(sessions, levels) for levels in (1, DEEP)]
    over, under = await interleaved(lambda: say(deep), lambda: say(shallow), rounds=150)
    run.report("compaction.say", over.wall / under.wall, f"{ms(over.wall)} / {ms(under.wall)}")
    again, once = await interleaved(lambda: compact(deep), lambda: compact(shallow), rounds=40)
    run.report("compaction.nested", again.wall / once.wall, f"{ms(again.wall)} / {ms(once.wall)}")
    sizes = []
    for _ in range(50):  # enough for a block to be stored apart
        await say(deep)
        before = settled_size(path)
        await deep.compact(compact_strategy="truncate", keep_last=4)
        sizes.append(settled_size(path) - before)
    run.report("compaction.nested_bytes", sum(sizes) / len(sizes), "mean of 50")


async def deepened(sessions: Sessions, levels: int) -> Chat:
    """Make a session with that number of compactions, each of which covers the one before."""
    chat = await sessions.open((await filled(sessions.runtime, 12)).id, agent=AGENT)
    for _ in range(levels):
        await chat.inject(Message.user(TEXT))
        await chat.compact(compact_strategy="truncate", keep_last=4)
    return chat


async def say(chat: Chat) -> None:
    await chat.inject(Message.user("And another thing."))


async def compact(chat: Chat) -> None:
    await chat.compact(compact_strategy="truncate", keep_last=4)
    await chat.uncompact()
