"""Hundreds of owners over one connection, a thousand in torture: together they use as much as one owner."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from tests import postgres_server

import perdure
from perdure import PostgresStore, Sessions, SqliteStore
from perdure.protocols import ModelReply, ModelRequest, OnDelta
from perdure.testing import ScriptedDriver

OWNERS = 1_000 if os.environ.get("PERDURE_TORTURE") else 100
SESSIONS = OWNERS // 10
AT_ONCE = 20
LIVE = 32
"""The number of sessions that the connection keeps in memory."""
NOISE = 64
"""The bytes that an owner with one session may take beyond one more session of the same owner."""


def postgres(where: Path) -> PostgresStore:
    named = "&" if "?" in postgres_server.dsn() else "?"
    dsn = f"{postgres_server.dsn()}{named}application_name={postgres_server.schema_of(where)}"
    return PostgresStore(dsn, schema=postgres_server.schema_of(where), cache=LIVE)


STORES: dict[str, Callable[[Path], Any]] = {
    "sqlite": lambda where: SqliteStore(where / "s.db", cache=LIVE),
    "postgres": postgres,
}


class Forgetful:
    """A ScriptedDriver for each call: a shared one would keep every request."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        return await ScriptedDriver(["hello there"]).respond(request, on_delta)


@asynccontextmanager
async def connected(kind: str, where: Path) -> AsyncIterator[Sessions]:
    async with perdure.connect(STORES[kind](where), driver=Forgetful(), live=LIVE) as app:
        yield app


async def use(app: Sessions, owner: str, name: str) -> None:
    """Do what an owner's request does."""
    mine = app.of(owner)
    chat = await mine.open(name)
    assert (await chat.send("hello", key="k")).text == "hello there"
    assert chat.id in {info.id for info in await mine.list(order="updated", limit=AT_ONCE)}


async def use_all(app: Sessions, each: Iterable[tuple[str, str]]) -> None:
    """Serve owners, twenty at once."""
    waiting = iter(each)

    async def one_after_the_other() -> None:
        for owner, name in waiting:
            await use(app, owner, name)

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


class Used(NamedTuple):
    """The resources of the machine and the database that a process uses."""

    files: int
    threads: int
    connections: int
    memory: int


def used(kind: str, where: Path) -> Used:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return Used(files, threading.active_count(), connections(kind, where), tracemalloc.get_traced_memory()[0])


def connections(kind: str, where: Path) -> int:
    """Return how many connections the server has from this process; each SQLite connection is an open file."""
    if kind == "sqlite":
        return sum(os.path.realpath(f"/proc/self/fd/{each}").endswith("s.db") for each in os.listdir("/proc/self/fd"))
    with psycopg.connect(postgres_server.dsn()) as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        found = connection.execute(asked, (postgres_server.schema_of(where),)).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
async def test_many_owners_use_what_one_uses(kind: str, tmp_path: Path) -> None:
    """File handles, threads and database connections are the same, and an owner takes no memory of its own.

    A store notes the places of the last few thousand sessions of all owners: one more session may take that much.
    """
    tracemalloc.start()
    try:
        async with connected(kind, tmp_path) as app:
            await use_all(app, [("ada", f"first-{each}") for each in range(SESSIONS)])  # fills the caches
            before = used(kind, tmp_path)
            await use_all(app, [("ada", f"then-{each}") for each in range(SESSIONS)])
            one = used(kind, tmp_path)
            await use_all(app, [(f"owner-{each}", "order-7") for each in range(OWNERS)])
            many = used(kind, tmp_path)
    finally:
        tracemalloc.stop()
    assert many[:3] == one[:3]
    assert one.connections > 0
    assert (many.memory - one.memory) / OWNERS < max(0.0, one.memory - before.memory) / SESSIONS + NOISE


async def test_what_an_owner_is_given_is_small_and_kept_by_nobody(tmp_path: Path) -> None:
    """A server may make one for every request, or keep one for every user."""
    async with connected("sqlite", tmp_path) as app:
        app.of("ada")
        tracemalloc.start()
        try:
            kept = [app.of(f"owner-{each}") for each in range(OWNERS)]
            held = tracemalloc.get_traced_memory()[0]
            kept.clear()
            gc.collect()
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert held / OWNERS < 512
    assert left / OWNERS < NOISE
