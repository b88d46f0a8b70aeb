"""The session core on SqliteStore: what a save, a fork and a load cost, and that history does not make them dearer."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks.harness import Figure, interleaved, ms, rate
from perdure import AgentDefinition, AgentSession, ForkSession, Message, SessionRuntime, SqliteStore, TrimTranscript
from perdure.protocols import ActionContext
from perdure.stores.jobs import loading
from perdure.stores.sqlite.erasure import checkpoint
from perdure.stores.sqlite.schema import connect

AGENT = AgentDefinition("bench", system_prompt="Be brief.")
TEXT = "The quick brown fox jumps over the lazy dog. " * 11
ORIGINAL_READ = loading.decoded


def turn() -> list[Message]:
    """Four messages, 2.6 KB as JSON."""
    return [Message.user(TEXT), Message.assistant(TEXT), Message.user(TEXT), Message.assistant(TEXT)]


class Turn:
    """An action that adds one turn."""

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(session.state.with_messages(*turn()))


@asynccontextmanager
async def store_in(folder: Path, name: str = "bench.db", cache: int = 128) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(folder / name, cache=cache) as store:
        yield store


async def filled(runtime: SessionRuntime, messages: int) -> AgentSession:
    """A session that holds so many messages already."""
    session = await runtime.create(AGENT)

    class Fill:
        async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
            texts = [text for _ in range(min(messages, 5000) // 4) for text in turn()]
            return session.with_state(session.state.with_messages(*texts))

    for _ in range(max(1, messages // 5000) if messages >= 4 else 0):
        session = await runtime.execute(session.id, Fill())
    if messages % 4:
        session = await runtime.execute(session.id, TrimTranscript(messages))
    return session


class Saver:
    """Saves one turn after another onto one session."""

    def __init__(self, store: SqliteStore, session: AgentSession) -> None:
        self.store = store
        self.session = session

    async def __call__(self) -> None:
        state = self.session.state.with_messages(*turn())
        self.session = await self.store.save(self.session.with_state(state))


class BareTransaction:
    """The same rows in the same tables, straight through apsw in a one-thread executor: the floor of a save."""

    def __init__(self, path: Path, session: AgentSession) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._db = self._thread.submit(connect, path).result()
        self._id = str(session.id)
        self._head = b"h" * 440

    async def __call__(self) -> None:
        rows = [msgspec.json.encode(message) for message in turn()]
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, rows)

    def _write(self, rows: list[bytes]) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        update = (
            "UPDATE session SET version = version + 1, updated = ?, msg_end = msg_end + 4"
            " WHERE id = ? RETURNING sid, log, version, msg_end"
        )
        sid, log, version, end = db.execute(update, (time.time(), self._id)).fetchone()  # type: ignore[misc]
        numbered = [(log, end - 4 + place, zlib.crc32(row), row) for place, row in enumerate(rows)]
        db.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", numbered)
        db.execute("INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)", (sid, version, 0, self._head))
        db.execute("COMMIT")

    def close(self) -> None:
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()


async def save_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        savers = [Saver(store, await filled(runtime, count)) for count in (0, 10_000, 100_000)]
        bare = BareTransaction(folder / "bench.db", await runtime.create(AGENT))
        empty, some, many, floor = await interleaved(*savers, bare, rounds=300)
        bare.close()
    detail = f"0: {ms(empty)}, 10k: {ms(some)}, 100k: {ms(many)}, bare: {ms(floor)}"
    return [
        Figure("save at 10,000 messages over save at 0", some / empty, 1.2, detail=detail),
        Figure("save at 100,000 messages over save at 0", many / empty, 1.2, detail=detail),
        Figure("save over the same bare transaction", empty / floor, 1.5, detail=detail),
    ]


async def fork_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        short, long = await filled(runtime, 12), await filled(runtime, 100_000)

        async def fork(session: AgentSession) -> None:
            await store.create(await ForkSession().execute_on(session))

        few, many = await interleaved(lambda: fork(short), lambda: fork(long), rounds=200)
        before = await settled_size(store, folder)
        for _ in range(100):
            await fork(long)
        each = (await settled_size(store, folder) - before) / 100
    detail = f"short: {ms(few)}, 100k: {ms(many)}"
    return [
        Figure("fork + create at 100,000 messages over the same at 12", many / few, 1.3, detail=detail),
        Figure("bytes on disk for a fork, mean of 100", each, 1024, unit="bytes", detail="after a checkpoint"),
    ]


async def settled_size(store: SqliteStore, folder: Path) -> int:
    await store._engine.opened.writer.run(checkpoint, alone=True)
    return (folder / "bench.db").stat().st_size


async def execute_figures(folder: Path) -> list[Figure]:
    rows_read = 0

    def counting(*args: object, **kwargs: object) -> list[Message]:
        nonlocal rows_read
        found: list[Message] = ORIGINAL_READ(*args, **kwargs)  # type: ignore[arg-type]
        rows_read += len(found)
        return found

    async with store_in(folder) as store, store_in(folder) as other:
        runtime = SessionRuntime(store)
        short, long = await filled(runtime, 0), await filled(runtime, 100_000)
        few, many = await interleaved(
            lambda: runtime.execute(short.id, Turn()), lambda: runtime.execute(long.id, Turn()), rounds=300
        )
        await SessionRuntime(other).execute(long.id, Turn())
        loading.decoded = counting
        try:
            await runtime.get_session(long.id)
        finally:
            loading.decoded = ORIGINAL_READ
    return [
        Figure("warm execute at 100,000 over 0", many / few, 1.25, detail=f"0: {ms(few)}, 100k: {ms(many)}"),
        Figure("rows read after another writer's turn", rows_read, 4, unit="rows", detail="of 100,000"),
    ]


async def load_figures(folder: Path) -> list[Figure]:
    async with store_in(folder, cache=0) as store:
        runtime = SessionRuntime(store)
        ten_thousand = await filled(runtime, 10_000)
        twelve = await filled(runtime, 12)
        view = await runtime.execute((await filled(runtime, 100_000)).id, TrimTranscript(12))
        decoder = msgspec.json.Decoder(Message)
        thread = ThreadPoolExecutor(1)
        db = thread.submit(connect, folder / "bench.db").result()
        log = ten_thousand.state.transcript.pieces[0].tape.ref.key  # type: ignore[union-attr]

        def plain() -> list[Message]:
            rows = db.execute("SELECT body FROM msg WHERE log = ? ORDER BY pos", (log,))
            return [decoder.decode(body) for (body,) in rows]

        async def select_and_decode() -> None:
            await asyncio.get_running_loop().run_in_executor(thread, plain)

        cold, floor = await interleaved(lambda: store.load(ten_thousand.id), select_and_decode, rounds=30)
        small, cut = await interleaved(lambda: store.load(twelve.id), lambda: store.load(view.id), rounds=200)
        thread.submit(db.close).result()
        thread.shutdown()
    return [
        Figure(
            "cold load of 10,000 over select + msgspec decode", cold / floor, 1.5, detail=f"{ms(cold)} over {ms(floor)}"
        ),
        Figure(
            "cold load of a 12-message view of 100,000 over one of 12",
            cut / small,
            1.5,
            detail=f"{ms(cut)} over {ms(small)}",
        ),
    ]


async def rate_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        runtime = SessionRuntime(store)
        savers = [Saver(store, await runtime.create(AGENT)) for _ in range(64)]

        async def save(number: int) -> int:
            await savers[number]()
            return 1

        ones, crowds = [], []
        for _ in range(3):
            ones.append(await rate(save, 1, seconds=1.5))
            crowds.append(await rate(save, 64, seconds=1.5))
        one, crowd = sorted(ones)[1], sorted(crowds)[1]
    detail = f"1 task: {one:,.0f}/s, 64 tasks: {crowd:,.0f}/s"
    return [
        Figure("64 tasks saving over one task", crowd / one, 3, at_least=True, detail=detail),
        Figure("saves a second with 64 tasks", crowd, 4000, at_least=True, unit="/s", detail=detail),
    ]


async def size_figures(folder: Path) -> list[Figure]:
    async with store_in(folder) as store:
        saver = Saver(store, await SessionRuntime(store).create(AGENT))
        await saver()
        before = await settled_size(store, folder)
        for _ in range(500):
            await saver()
        grown = (await settled_size(store, folder) - before) / 500
    size = sum(len(msgspec.json.encode(message)) for message in turn())
    return [
        Figure("bytes a turn over the JSON of its messages", grown / size, 1.5, detail=f"{grown:,.0f} over {size:,}")
    ]


def import_seconds(statement: str) -> float:
    taken = []
    for _ in range(15):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


async def import_figures(folder: Path) -> list[Figure]:
    bare, ours = import_seconds("pass"), import_seconds("import perdure")
    return [Figure("import perdure beyond bare python", ours - bare, 0.15, unit="s", detail=f"bare: {ms(bare)}")]


PARTS = (
    save_figures,
    fork_figures,
    execute_figures,
    load_figures,
    rate_figures,
    size_figures,
    import_figures,
)


async def figures() -> list[Figure]:
    found: list[Figure] = []
    for part in PARTS:
        folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        try:
            found += await part(folder)
        finally:
            shutil.rmtree(folder)
    return found
