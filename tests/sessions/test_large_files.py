"""A large image on every store: kept once, sent when it is shown, and gone when it is erased."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests import postgres_server
from tests.sessions.test_attaching import Seeing

import perdure
from perdure import Media
from perdure.stores.engine import Select

SIZE = 5_000_000
FORKS = 100 if os.environ.get("PERDURE_TORTURE") else 25
IMAGE = b"\x89PNG\r\n\x1a\n" + random.Random(7).randbytes(SIZE)
MIDDLE = IMAGE[SIZE // 2 : SIZE // 2 + 64]
"""A piece of the image that would be left if it had not been erased."""

STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda where: perdure.MemoryStore(),
    "sqlite": lambda where: perdure.SqliteStore(where / "sessions.db"),
    "files": lambda where: perdure.FileStore(where / "sessions"),
    "postgres": lambda where: perdure.PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where)),
}


@pytest.fixture(params=[*STORES])
def opened(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    """A way to open a store in a directory."""
    return STORES[request.param]


def on_disk(store: Any, where: Path) -> int:
    """Return how many bytes a store takes: in files, in a database's schema, or in bodies in memory."""
    if isinstance(store, perdure.PostgresStore):
        schema = postgres_server.schema_of(where)
        sizes = (
            "SELECT coalesce(sum(pg_total_relation_size(pg_class.oid)), 0) FROM pg_class"
            " JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = %s AND relkind = 'r'"
        )
        with psycopg.connect(postgres_server.dsn()) as connection:
            row = connection.execute(sizes, (schema,)).fetchone()
            assert row is not None
            return int(row[0])
    if isinstance(store, perdure.MemoryStore):
        bodies = (store._engine._tables.tables[name].find({}) for name in ("msg", "blob", "head", "value"))  # type: ignore[attr-defined]
        return sum(len(row["body"]) for rows in bodies for row in rows)
    for file in where.glob("*.db"):  # the content of the log is on its way into the file, and would count twice
        connection = apsw.Connection(str(file))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
    return sum(path.stat().st_size for path in where.rglob("*") if path.is_file())


def is_left(store: Any, where: Path) -> bool:
    """Return True if any file of a store has a piece of the image."""
    return any(MIDDLE in path.read_bytes() for path in where.rglob("*") if path.is_file())


async def kept(store: Any) -> list[str]:
    def job() -> Any:
        return [key for (key,) in (yield Select("blob", ("hash",)))]

    found: list[str] = await store._engine.run(job)
    return found


@pytest.mark.sample(2)
async def test_it_is_kept_once_sent_when_shown_and_gone_when_erased(
    opened: Callable[[Path], Any], tmp_path: Path
) -> None:
    """The image is sent twice, forked 100 times, compacted, exported, imported and erased."""
    here, there, model = tmp_path / "here", tmp_path / "there", Seeing()
    here.mkdir()
    there.mkdir()
    async with perdure.connect(opened(here), driver=model) as sessions:
        chat = await sessions.open("it")
        await chat.send("What is this?", Media("image/png", data=IMAGE, name="a.png"), key="k")
        await chat.send("What is this?", Media("image/png", data=IMAGE, name="a.png"), key="k")
        await chat.send("And this?", Media("image/png", data=IMAGE))
        forks = [await chat.fork(f"fork-{number}") for number in range(FORKS)]
        await forks[0].send("Still there?")
        await chat.compact(compact_strategy="observation_mask", keep_last=0)
        await chat.send("So?")
        assert [[len(file) for file in files] for files in model.seen] == [
            *([len(IMAGE)], [len(IMAGE)] * 2),
            *([len(IMAGE)] * 2, []),
        ]
        assert on_disk(sessions.store, here) < 1.4 * SIZE
        exported = tmp_path / "export.jsonl"
        await sessions.export(exported)
        # Once, and in base64.
        assert exported.stat().st_size < 1.6 * SIZE
        async with perdure.connect(opened(there), driver=model) as others:
            await others.import_(exported)
            await others.import_(exported)
            assert on_disk(others.store, there) < 1.4 * SIZE
            await (await others.open(f"fork-{FORKS - 1}")).send("Is it here?")
            assert model.seen[-1] == [IMAGE, IMAGE]
            assert [*await others.store.check()] == []  # type: ignore[attr-defined]
        await sessions.erase("it")
        for fork in forks[:-1]:
            await sessions.erase(fork.id)
        assert len(await kept(sessions.store)) == 1
        await forks[-1].send("And now?")
        assert model.seen[-1] == [IMAGE, IMAGE]
        await sessions.erase(forks[-1].id)
        assert await kept(sessions.store) == []
        assert [*await sessions.store.check()] == []  # type: ignore[attr-defined]
        assert not is_left(sessions.store, here)
    assert not is_left(None, here)


async def test_an_owner_who_is_erased_takes_the_files_along(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    """Files that other owners have sent too are kept."""
    async with perdure.connect(opened(tmp_path), driver=Seeing()) as sessions:
        for owner, body in (("ada", IMAGE), ("ada", IMAGE[1:]), ("bob", IMAGE[1:])):
            chat = await sessions.of(owner).open()
            await chat.send("Look", Media("image/png", data=body))
        assert len(await kept(sessions.store)) == 2
        await sessions.of("ada").erase_owner()
        assert len(await kept(sessions.store)) == 1
        assert [*await sessions.store.check()] == []  # type: ignore[attr-defined]
        await sessions.erase_owner("bob")
        assert await kept(sessions.store) == []


async def test_redacted_and_cleared_up(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    """A redacted image is in no file any more; clearing up leaves what is shown."""
    async with perdure.connect(opened(tmp_path), driver=Seeing()) as sessions:
        chat = await sessions.open("it")
        await chat.send("Look", Media("image/png", data=IMAGE))
        fork = await chat.fork("fork")
        await sessions.gc()
        assert len(await kept(sessions.store)) == 1
        (said,) = [message for message in await chat.history() if message.role == "user"]
        await fork.redact([said.id])
        assert await kept(sessions.store) == []
        assert not is_left(sessions.store, tmp_path)
        assert [*await sessions.store.check()] == []  # type: ignore[attr-defined]
    assert not is_left(None, tmp_path)
