"""Tenants: how many runs an owner has at once, over all processes, and the cost of a full owner for others."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

from perdure import connect
from perdure.protocols import Outcome, WorkerOptions
from perdure.workers import InboxDispatcher, Worker

PROCESS = Path(__file__).parent / "tenant_process.py"
PATIENCE = 60.0


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db" if request.param == "sqlite" else postgres_server.url_of(tmp_path)


@asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROCESS), *arguments, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), PATIENCE)


@pytest.mark.sample(2)
async def test_two_processes_keep_to_the_limit_of_an_owner_and_are_fair(url: str, tmp_path: Path) -> None:
    """An owner with forty sessions has never more than two runs at once; two others are answered among the first."""
    notes = tmp_path / "notes"
    async with connect(url, model="offline") as sessions:
        store: Any = sessions.store
        for owner, many in (("ann", 40), ("ben", 2), ("eve", 1)):
            for number in range(many):
                await sessions.of(owner).open(f"{owner}-{number}")
                asked = await sessions.of(owner).enqueue(f"{owner}-{number}", f"{owner} {number}")
        async with worker_process(url, str(notes), "2"), worker_process(url, str(notes), "2"):
            assert await asked.reply(timeout=PATIENCE) is not None
            async with asyncio.timeout(PATIENCE):
                while await store.waiting(1, idle_only=False) or await store.running():  # noqa: ASYNC110  # of others
                    await asyncio.sleep(0.05)
    lines = [line.split() for line in notes.read_text().splitlines()]
    now, most = Counter[str](), Counter[str]()
    for sign, who, _ in sorted(lines, key=lambda line: float(line[2])):
        now[who] += 1 if sign == "+" else -1
        most[who] = max(most[who], now[who])
    assert most["ann"] == 2
    assert most["ben"] <= 2
    begun = [who for sign, who, _ in sorted(lines, key=lambda line: float(line[2])) if sign == "+"]
    assert Counter(begun) == {"ann": 40, "ben": 2, "eve": 1}
    assert begun.index("eve") < 10
    assert begun.index("ben") < 10


async def test_a_full_owner_is_tried_once_a_second_and_not_by_each_session(tmp_path: Path) -> None:
    """This holds however many of its sessions wait; another owner's are begun meanwhile, each once."""
    async with connect(f"sqlite:///{tmp_path}/s.db", model="offline") as sessions:
        for owner, many in (("ann", 200), ("ben", 3)):
            for number in range(many):
                await sessions.of(owner).open(f"{owner}-{number}")
                await sessions.of(owner).enqueue(f"{owner}-{number}", "Hello")
        store: Any = sessions.store
        owners = {each.session_id: each.owner for each in await store.waiting(1000)}
        dispatcher, tried, stopped = InboxDispatcher(store), Counter[str](), asyncio.Event()

        async def advance(session_id: str) -> Outcome:
            owner = owners[session_id]
            tried[owner] += 1
            if owner == "ben":
                await asyncio.sleep(5.0)
            return Outcome.OWNER_BUSY if owner == "ann" else Outcome.DONE

        work = asyncio.create_task(dispatcher.work(advance, WorkerOptions(drain=0.0, per_owner=4), stopped))
        await asyncio.sleep(1.6)
        stopped.set()
        await work
        assert tried["ben"] == 3
        assert 2 <= tried["ann"] <= 8  # up to four at first: no worker knows yet that it is full


async def test_a_worker_keeps_to_the_limit_of_its_connection(tmp_path: Path) -> None:
    """This holds unless the worker has a limit of its own."""
    async with connect(f"sqlite:///{tmp_path}/s.db", model="offline", per_owner=3) as sessions:
        assert Worker(sessions).options.per_owner == 3
        assert Worker(sessions, per_owner=1).options.per_owner == 1
        assert Worker(sessions, per_owner=None).options.per_owner is None
