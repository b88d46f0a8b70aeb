"""The face on SqliteStore: what a compaction writes, and that what it covers costs nothing afterwards."""

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


async def figures() -> list[Figure]:
    found: list[Figure] = []
    for part in (size_figures, cold_figures):
        folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        try:
            found += await part(folder)
        finally:
            shutil.rmtree(folder)
    return found
