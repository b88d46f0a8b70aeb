"""A fork, and loads from the file: messages that they do not show cost nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.harness import Run, interleaved, ms
from benchmarks.setting import filled, settled_size
from perdure import AgentSession, ForkSession, Message, SessionRuntime, SqliteStore, TrimTranscript
from perdure.stores.sqlite.schema import connect


async def measure(run: Run) -> None:
    with run.folder() as folder:
        path = folder / "bench.db"
        async with SqliteStore(path, cache=0) as store:
            runtime = SessionRuntime(store)
            short, middle, long = [await filled(runtime, count) for count in (12, 10_000, 100_000)]
            await forks(run, store, path, short, long)
            await loads(run, store, path, middle)
            cut = await runtime.execute(long.id, TrimTranscript(12))
            small, view = await interleaved(lambda: store.load(short.id), lambda: store.load(cut.id), rounds=100)
            run.report("fork.view", view.wall / small.wall, f"{ms(view.wall)} / {ms(small.wall)}")


async def forks(run: Run, store: SqliteStore, path: Path, short: AgentSession, long: AgentSession) -> None:
    async def fork(session: AgentSession) -> None:
        await store.create(await ForkSession().execute_on(session))

    few, many = await interleaved(lambda: fork(short), lambda: fork(long), rounds=100)
    run.report("fork.100k", many.wall / few.wall, f"{ms(many.wall)} / {ms(few.wall)}")
    before = settled_size(path)
    for _ in range(400):
        await fork(long)
    run.report("fork.bytes", (settled_size(path) - before) / 400, "mean of 400")


async def loads(run: Run, store: SqliteStore, path: Path, session: AgentSession) -> None:
    """Compare a load with the least code that reads the same messages: one statement and a decoder, in a thread."""
    decoder = msgspec.json.Decoder(Message)
    thread = ThreadPoolExecutor(1)
    db = thread.submit(connect, path).result()
    log = session.state.transcript.pieces[0].tape.ref.key  # type: ignore[union-attr]  # a session that is stored

    def plain() -> int:
        rows = db.execute("SELECT body FROM msg WHERE log = ? ORDER BY pos", (log,))
        return len([decoder.decode(body) for (body,) in rows])

    async def select_and_decode() -> None:
        assert await asyncio.get_running_loop().run_in_executor(thread, plain) == len(session.state.transcript)

    cold, floor = await interleaved(lambda: store.load(session.id), select_and_decode, rounds=30)
    thread.submit(db.close).result()
    thread.shutdown()
    run.report("fork.load", cold.wall / floor.wall, f"{ms(cold.wall)} / {ms(floor.wall)}")
