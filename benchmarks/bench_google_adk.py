"""A turn of Google ADK on perdure beside its own services: a load of the session, and four events appended to it."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Run, interleaved, ms
from benchmarks.others.turns import MESSAGES, Turn

if TYPE_CHECKING:
    from google.adk.sessions import BaseSessionService

NAMES = {"app_name": "bench", "user_id": "ada", "session_id": "3f0d3c5e-93f5-4f5c-8a51-0a5d2b8f7c11"}
SIZES = (1_000, 10_000)
TURNS = 200
KEYS = [f"google_adk.{what}" for what in ("1k", "1k_sqlite", "10k", "10k_sqlite", "bytes", "bytes_sqlite")]


async def measure(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ADK warns of what is new in it
        try:
            from benchmarks.others import with_google_adk  # noqa: F401
        except ImportError as error:
            for key in KEYS:
                run.skip(key, f"{error}; `make bench` installs it")
            return
        for size in SIZES:
            with run.folder() as folder:
                async with services(folder) as made:
                    await times(run, folder, made, size)
        with run.folder() as folder:
            async with services(folder) as made:
                await bytes_of(run, folder, made)


@asynccontextmanager
async def services(folder: Path) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Yield ADK's service for databases, its service for SQLite, and perdure's."""
    from google.adk.sessions import DatabaseSessionService
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    from perdure.adapters.google_adk import PerdureSessionService

    kept = PerdureSessionService(store=f"sqlite:///{folder}/perdure.db")
    theirs = DatabaseSessionService(f"sqlite+aiosqlite:///{folder}/database.db")
    yield theirs, SqliteSessionService(f"{folder}/sqlite.db"), kept
    await theirs.close()
    kept._home.shared.close()


async def times(run: Run, folder: Path, made: tuple[Any, Any, Any], size: int) -> None:
    """Compare the processor's time: the machine's disk counts for as little as it can."""
    numbers = iter(range(1_000_000, 2_000_000))
    await fill(folder, made, size)

    async def turn(service: BaseSessionService) -> None:
        await append(service, await service.get_session(**NAMES), [Turn(next(numbers))])

    rounds = 20 if size <= SIZES[0] else 8
    costs = await interleaved(*(lambda service=service: turn(service) for service in made), rounds=rounds)  # type: ignore[misc]
    database, sqlite, kept = (each.cpu for each in costs)
    name = f"google_adk.{size // 1000}k"
    run.report(name, kept / database, f"{ms(kept)} / {ms(database)}")
    run.report(f"{name}_sqlite", kept / sqlite, f"{ms(kept)} / {ms(sqlite)}")


async def bytes_of(run: Run, folder: Path, made: Sequence[BaseSessionService]) -> None:
    sizes = []
    for service, file in zip(made, ("database.db", "sqlite.db", "perdure.db"), strict=True):
        session = await service.create_session(**NAMES)
        await append(service, session, [Turn(number) for number in range(20)])
        before = settled(service, folder / file)
        await append(service, session, [Turn(number) for number in range(20, 20 + TURNS)])
        sizes.append((settled(service, folder / file) - before) / TURNS)
    database, sqlite, kept = sizes
    run.report("google_adk.bytes", kept / database, f"{kept:.0f} / {database:.0f} bytes")
    run.report("google_adk.bytes_sqlite", kept / sqlite, f"{kept:.0f} / {sqlite:.0f} bytes")


async def fill(folder: Path, made: tuple[Any, Any, Any], size: int) -> None:
    """Give each service a session of so many events, in one commit: 10,000 of them would take minutes."""
    from google.adk.sessions.schemas.v1 import StorageEvent

    from benchmarks.others.with_google_adk import events
    from perdure.adapters.google_adk_events import message_of

    said = [event for number in range(size // MESSAGES) for event in events(Turn(number))]
    database, _, kept = made
    session, *_ = [await service.create_session(**NAMES) for service in made]
    async with database.database_session_factory() as sql:
        sql.add_all([StorageEvent.from_event(session, event) for event in said])
        await sql.commit()
    with closing(sqlite3.connect(folder / "sqlite.db")) as file, file:
        rows = [
            (e.id, *NAMES.values(), e.invocation_id, e.timestamp, e.model_dump_json(exclude_none=True)) for e in said
        ]
        file.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    messages = [message_of(event) for event in said]
    home, key = kept._home, kept.id_of(*NAMES.values())
    await home.run(home.change(key, lambda each: each.with_state(each.state.with_messages(*messages))))


async def append(service: BaseSessionService, session: Any, turns: Sequence[Turn]) -> None:
    from benchmarks.others.with_google_adk import events

    for turn in turns:
        for event in events(turn):
            await service.append_event(session, event)


def settled(service: Any, path: Path) -> int:
    """Return the size of a database, with nothing left in a log beside it."""
    if hasattr(service, "_home"):
        service._home.shared.close()
    return path.stat().st_size
