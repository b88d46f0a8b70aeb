"""`runtime.execute` on a cached session: a turn costs its own size, and only another writer's turn is read again."""

from __future__ import annotations

from benchmarks.harness import Run, interleaved, ms
from benchmarks.setting import AddTurn, filled
from perdure import Message, SessionRuntime, SqliteStore
from perdure.stores.jobs import loading


async def measure(run: Run) -> None:
    with run.folder() as folder:
        async with SqliteStore(folder / "bench.db") as store, SqliteStore(folder / "bench.db") as other:
            runtime = SessionRuntime(store)
            short, long = [(await filled(runtime, count)).id for count in (0, 100_000)]
            few, many = await interleaved(
                lambda: runtime.execute(short, AddTurn()), lambda: runtime.execute(long, AddTurn()), rounds=200
            )
            run.report("execute.100k", many.wall / few.wall, f"{ms(many.wall)} / {ms(few.wall)}")
            await SessionRuntime(other).execute(long, AddTurn())
            run.report("execute.rows", await rows_read(runtime, long))


async def rows_read(runtime: SessionRuntime, session_id: str) -> int:
    """Count the messages that a load decodes."""
    original, count = loading.decoded, 0

    def counting(*args: object, **kwargs: object) -> list[Message]:
        nonlocal count
        found: list[Message] = original(*args, **kwargs)  # type: ignore[arg-type]
        count += len(found)
        return found

    loading.decoded = counting
    try:
        await runtime.get_session(session_id)
    finally:
        loading.decoded = original
    return count
