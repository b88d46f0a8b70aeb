"""The face on SqliteStore: what a compaction writes, and that what it covers costs nothing afterwards, at any depth."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import perdure
from benchmarks.bench_core import settled_size
from benchmarks.harness import Figure, interleaved, ms
from perdure import Chat, InjectMessage, Message, Sessions, SqliteStore
from perdure.testing import ScriptedDriver

TEXT = "The quick brown fox jumps over the lazy dog. " * 5
SUMMARY = "They spoke of a fox and a dog. " * 10
BATCH = 5_000
DEEP = 500


async def filled(sessions: Sessions, messages: int) -> Chat:
    """A session that holds so many messages already."""
    chat = await sessions.open()
    for start in range(0, messages, BATCH):
        many = (Message.user(TEXT) for _ in range(min(BATCH, messages - start)))
        await sessions.execute(chat.id, InjectMessage(*many))
    return chat


def face(folder: Path) -> tuple[SqliteStore, Sessions]:
    store = SqliteStore(folder / "bench.db")
    driver = ScriptedDriver(lambda request: SUMMARY if "<conversation>" in request.messages[-1].text else "yes")
    return store, perdure.connect(store, driver=driver, compaction=None)


async def size_figures(folder: Path) -> list[Figure]:
    store, sessions = face(folder)
    found: list[Figure] = []
    async with sessions:
        for messages in (100, 100_000):
            chats = [await filled(sessions, messages)]
            chats += [await chats[0].fork() for _ in range(9)]
            sizes = [await settled_size(store, folder)]
            for chat in chats:
                await chat.compact(compact_strategy="llm", keep_last=12)
            sizes.append(await settled_size(store, folder))
            for chat in chats:
                await chat.uncompact()
            sizes.append(await settled_size(store, folder))
            for verb, before, after in zip(("compact", "uncompact"), sizes, sizes[1:], strict=False):
                bound = 4096 + (len(SUMMARY) if verb == "compact" else 0)
                name = f"bytes on disk for {verb} at {messages:,} messages, mean of 10"
                found.append(Figure(name, (after - before) / 10, bound, unit="bytes", detail="after a checkpoint"))
    return found


async def cold_figures(folder: Path) -> list[Figure]:
    _, sessions = face(folder)
    async with sessions:
        long, short = await filled(sessions, 100_000), await filled(sessions, 12)
        await long.compact(compact_strategy="llm", keep_last=11)
        assert await long.length() == await short.length() == 12

        async def cold(origin: Chat) -> None:
            await origin.close()
            await (await sessions.open(origin.id)).send("And now?")

        many, few = await interleaved(lambda: cold(long), lambda: cold(short), rounds=40)
    detail = f"100k: {ms(many)}, 12: {ms(few)}"
    return [Figure("cold open + send after 100,000 became 12, over 12", many / few, 1.5, detail=detail)]


async def deepened(chat: Chat, levels: int) -> Chat:
    """The session after so many compactions, each of which covers the one before."""
    for _ in range(levels):
        await chat.inject({"role": "user", "content": TEXT})
        await chat.compact(compact_strategy="truncate", keep_last=4)
    return chat


async def nested_figures(folder: Path) -> list[Figure]:
    store, sessions = face(folder)
    async with sessions:
        shallow, deep = [await deepened(await filled(sessions, 12), levels) for levels in (1, DEEP)]
        sizes: list[int] = []
        for _ in range(50):  # more than it takes until a block stands apart
            await deep.inject({"role": "user", "content": TEXT})
            before = await settled_size(store, folder)
            await deep.compact(compact_strategy="truncate", keep_last=4)
            sizes.append(await settled_size(store, folder) - before)
        over, under = await interleaved(lambda: _say(deep), lambda: _say(shallow), rounds=200)
        again, once = await interleaved(lambda: _compact(deep), lambda: _compact(shallow))
    mean = sum(sizes) / len(sizes)
    name = f"bytes on disk for compact over {DEEP} compactions, mean of 50"
    return [
        Figure(name, mean, 4096 + 256, unit="bytes", detail="after a checkpoint, its one line and its record included"),
        Figure(f"inject over {DEEP} compactions, over 1", over / under, 1.3, detail=f"{ms(over)}, {ms(under)}"),
        Figure(f"compact + uncompact over {DEEP}, over 1", again / once, 1.3, detail=f"{ms(again)}, {ms(once)}"),
    ]


async def _say(chat: Chat) -> None:
    await chat.inject({"role": "user", "content": "And another thing."})


async def _compact(chat: Chat) -> None:
    await chat.compact(compact_strategy="truncate", keep_last=4)
    await chat.uncompact()


async def figures() -> list[Figure]:
    found: list[Figure] = []
    for part in (size_figures, cold_figures, nested_figures):
        folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        try:
            found += await part(folder)
        finally:
            shutil.rmtree(folder)
    return found
