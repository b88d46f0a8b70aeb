"""Workers in processes of their own: their throughput, their latency, and their cost while nothing waits."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, cycle
from pathlib import Path
from typing import Any, NamedTuple

import perdure
from benchmarks.bars import BARS
from benchmarks.harness import Cost, Run, interleaved, ms, rates, timed
from benchmarks.worker_process import Thinking, WorkerProcess, working
from perdure import AgentDefinition, Message, Sessions
from perdure.actions.inbox import QUEUE, item_of
from perdure.model.ids import now
from perdure.protocols import Entry

AGENT = AgentDefinition("bench")
THINKS = 0.02
AT_ONCE = 2
"""The number of runs a worker does at once for the throughput: few, so that a core is not the limit."""
RUNS = 200
FEW, MANY, LOOK = 100, 100_000, 16
RUNNING_FEW, RUNNING = 100, 5_000
CROWD = 64
TIMERS, SPREAD = 1_000, 10.0
IDLE_FOR = 20.0
_TOGETHER = 200
_FETCH = "SELECT id FROM procrastinate_fetch_job_v2(ARRAY(SELECT queue::varchar FROM perdure_dispatcher), NULL)"
_ACCOUNT = """
    SELECT (SELECT sum(xact_commit) FROM pg_stat_database), pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'),
        sum(pg_total_relation_size(relid)), sum(n_tup_upd + n_tup_del),
        coalesce(sum(n_tup_upd + n_tup_del) FILTER (WHERE starts_with(relname, 'procrastinate')), 0)
    FROM pg_stat_user_tables WHERE schemaname = current_schema()
"""
_TEXTS = count(1)
ITEM = Entry(QUEUE, {"id": "0" * 32, "after": 0, **item_of([Message.user("Go on.")])})


@dataclass(frozen=True)
class Place:
    """A store to measure: its address, and the prefix of its bars' keys."""

    url: str
    prefix: str

    def key(self, name: str) -> str:
        return f"workers.{self.prefix}{name}"


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await measure_at(run, lambda name: Place(f"sqlite:///{folder / name}.db", ""))
        await idle(run, Place(f"file://{folder / 'files'}", "files_"))
    try:
        from tests import postgres_server

        from benchmarks.bench_postgres import server
    except ImportError as error:
        for bar in BARS:
            if bar.key.startswith("workers.postgres_"):
                run.skip(bar.key, str(error))
        return
    with server(run) as dsn:
        mark = "&" if "?" in dsn else "?"

        def place(name: str) -> Place:
            return Place(f"{dsn}{mark}schema=bench_workers_{name}", "postgres_")

        try:
            await measure_at(run, place)
            await crowd(run, place("crowd"), place("bare"))
            await ledger(run, place("ledger"))
        finally:
            postgres_server.drop(dsn, ["bench_workers_"])


async def measure_at(run: Run, place: Callable[[str], Place]) -> None:
    """Measure all figures of one kind of store, each in a store of its own."""
    await throughput(run, place("two"))
    await dispatch(run, place("dispatch"))
    await enqueuing(run, place("enqueue"))
    await starts(run, place("start"))
    await timers(run, place("timers"))
    await idle(run, place("idle"))
    await sweep(run, place("sweep"))
    await fetch(run, place("few"), place("many"))


@asynccontextmanager
async def sessions_at(place: Place, number: int) -> AsyncIterator[tuple[Sessions, list[str]]]:
    """Open a store, and create sessions in it. Return their ids too."""
    async with perdure.connect(place.url, driver=Thinking(), compaction=None, live=8) as sessions:
        ids: list[str] = []
        for start in range(0, number, _TOGETHER):
            made = (sessions.runtime.create(AGENT) for _ in range(start, min(start + _TOGETHER, number)))
            ids += [each.id for each in await asyncio.gather(*made)]
        yield sessions, ids


def text() -> str:
    """Return a unique message."""
    return f"{next(_TEXTS)}"


async def throughput(run: Run, place: Place) -> None:
    rates: dict[int, list[float]] = {1: [], 2: []}
    async with sessions_at(place, RUNS) as (sessions, ids):
        for _ in range(5):
            for workers, found in rates.items():
                await asyncio.gather(*(sessions.enqueue(each, text()) for each in ids))
                found.append(await rate_of(sessions, place, workers))
    one, two = (statistics.median(found) for found in rates.values())
    run.report(place.key("two"), two / one, f"{two:,.0f} / {one:,.0f} runs a second, {AT_ONCE} at once a process")


async def rate_of(sessions: Sessions, place: Place, workers: int) -> float:
    """Return the runs a second that a number of processes begin while messages wait."""
    async with AsyncExitStack() as stack:
        process = [
            await stack.enter_async_context(WorkerProcess(place.url, think=THINKS, concurrency=AT_ONCE))
            for _ in range(workers)
        ]
        await asyncio.gather(*(each.go() for each in process))
        await until_empty(sessions)
    heard = sorted(at for each in process for at in each.heard.values())
    assert len(heard) == RUNS
    return (len(heard) - 1) / (heard[-1] - heard[0])


async def until_empty(sessions: Sessions) -> None:
    store: Any = sessions.store
    while await store.waiting(1, idle_only=False):  # noqa: ASYNC110  # nothing tells when nothing waits any more
        await asyncio.sleep(0.1)


async def dispatch(run: Run, place: Place) -> None:
    """Compare messages that are left to a worker of this process with the same that are sent. All cost is counted."""
    at_once = 20

    async with sessions_at(place, at_once) as (sessions, ids), working(sessions, concurrency=1):

        async def sent() -> None:
            for each in ids:
                await sessions.send(each, text())

        async def left() -> None:
            queued = [await sessions.enqueue(each, text()) for each in ids]
            assert await queued[-1].reply(timeout=60)  # they are run in their order, one at a time

        await timed(left)
        costs = [(await timed(sent), await timed(left)) for _ in range(15)]
    direct, handed = (Cost(*map(min, zip(*taken, strict=True))) for taken in zip(*costs, strict=True))
    more = Cost(*((one - other) / at_once for one, other in zip(handed, direct, strict=True)))
    detail = f"{ms(handed.wall / at_once)} / {ms(direct.wall / at_once)}, the quickest of 15 rounds"
    run.report(place.key("dispatch"), more.wall * 1000, f"{detail}; processor {ms(more.cpu)} more")


async def enqueuing(run: Run, place: Place) -> None:
    """Compare `enqueue` with the bare `post` of the same item, which is most of it."""
    async with sessions_at(place, 16) as (sessions, ids):
        store: Any = sessions.store
        turns = cycle(ids)
        post, enqueue = await interleaved(
            lambda: store.post(next(turns), ITEM), lambda: sessions.enqueue(next(turns), text()), rounds=200
        )
    run.report(place.key("enqueue"), enqueue.cpu / post.cpu, f"processor {ms(enqueue.cpu)} / {ms(post.cpu)}")


async def crowd(run: Run, place: Place, bare: Place) -> None:
    """Compare the messages left a second on a schema with a table of jobs and one without."""
    from perdure.workers.procrastinate import ProcrastinateDispatcher

    async with sessions_at(place, CROWD * 64) as (with_jobs, ids), sessions_at(bare, CROWD * 64) as (without, others):
        await ProcrastinateDispatcher(with_jobs.store).prepare()
        turns, other_turns = cycle(ids), cycle(others)
        jobs, posts = await rates(
            lambda _: with_jobs.store.post(next(turns), ITEM),  # type: ignore[attr-defined]
            lambda _: without.store.post(next(other_turns), ITEM),  # type: ignore[attr-defined]
            tasks=CROWD,
        )
    detail = f"{jobs.a_second:,.0f} / {posts.a_second:,.0f} a second, {CROWD} at once"
    run.report(place.key("crowd"), jobs.a_second / posts.a_second, detail)


async def starts(run: Run, place: Place) -> None:
    """Measure how long after the call of `enqueue` an idle worker of another process calls the model."""
    asked: dict[str, float] = {}
    async with sessions_at(place, 1) as (sessions, [session_id]), WorkerProcess(place.url) as process:
        await process.go()
        for _ in range(40):
            await asyncio.sleep(random.uniform(0.3, 0.6))  # not in step with the worker's looks
            message = text()
            asked[message] = time.monotonic()
            await sessions.enqueue(session_id, message)
        await until_empty(sessions)
    waits = sorted(process.heard[message] - at for message, at in asked.items())
    run.report(place.key("start"), statistics.median(waits) * 1000, f"median of {len(waits)}; longest {ms(waits[-1])}")


async def timers(run: Run, place: Place) -> None:
    """Measure how late timers ring, each in a session and at a time of its own."""
    due: dict[str, float] = {}
    began = time.monotonic()
    async with sessions_at(place, TIMERS) as (sessions, ids), WorkerProcess(place.url) as process:
        await process.go()
        first = now() + timedelta(seconds=5 + 3 * (time.monotonic() - began))  # time enough to set them all
        clock = time.monotonic() - time.time()

        async def leave(number: int, session_id: str) -> None:
            at = first + timedelta(seconds=number * SPREAD / TIMERS)
            due[session_id] = at.timestamp() + clock
            await sessions.enqueue(session_id, session_id, at=at)

        await asyncio.gather(*(leave(number, each) for number, each in enumerate(ids)))
        assert now() < first, "the timers were not set in time"
        await asyncio.sleep(max(due.values()) - time.monotonic() + 2)
        await until_empty(sessions)
    late = sorted(process.rung[each] - at for each, at in due.items())
    assert late[0] >= 0, "a timer has rung too early"
    asked = sorted(process.heard[each] - at for each, at in due.items())
    share = TIMERS * 99 // 100
    detail = f"median {ms(late[TIMERS // 2])}; the model is asked {ms(asked[share])} late"
    run.report(place.key("timers"), late[share], detail)


async def idle(run: Run, place: Place) -> None:
    """Measure the cost of an idle worker, in a store with a long past."""
    is_server = place.prefix == "postgres_"
    async with sessions_at(place, 100) as (sessions, _), WorkerProcess(place.url) as process:
        await process.go()
        await asyncio.sleep(2)
        before, account_before = await process.cpu(), await account(sessions) if is_server else None
        await asyncio.sleep(IDLE_FOR)
        used, account_after = await process.cpu() - before, await account(sessions) if is_server else None
    detail = f"{ms(used)} in {IDLE_FOR:.0f} s"
    if account_before is not None and account_after is not None:
        more = account_after - account_before
        detail += f"; the server {ms(more.seconds)}, {more.commits / IDLE_FOR:.0f} statements a second"
    run.report(place.key("idle"), 100 * used / IDLE_FOR, detail)


async def fetch(run: Run, few: Place, many: Place) -> None:
    """Compare a dispatcher's look when very many sessions wait with one when few do."""
    async with sessions_at(few, FEW) as (small, some), sessions_at(many, MANY) as (large, all_of_them):
        await leave_with(small, some)
        await leave_with(large, all_of_them)

        async def look(sessions: Sessions) -> None:
            assert len(await sessions.store.waiting(LOOK)) == LOOK  # type: ignore[attr-defined]

        short, long = await interleaved(lambda: look(small), lambda: look(large), rounds=200)
        report_fetch(run, few.key("fetch"), short, long)
        if few.prefix == "postgres_":
            await fetch_jobs(run, few, small.store, large.store)


async def fetch_jobs(run: Run, place: Place, small: Any, large: Any) -> None:
    """Do the same with procrastinate, which has a job for each waiting session."""
    from perdure.workers.procrastinate import ProcrastinateDispatcher

    for store in (small, large):
        await ProcrastinateDispatcher(store).prepare()
        await store.link.rows("ANALYZE procrastinate_jobs")  # as a database does by itself after a minute

    async def take(store: Any) -> None:
        ((job,),) = await store.link.rows(_FETCH)
        assert job is not None

    short, long = await interleaved(lambda: take(small), lambda: take(large), rounds=80)
    report_fetch(run, place.key("jobs"), short, long)


async def sweep(run: Run, place: Place) -> None:
    """Compare a look for killed runs when very many run with one when few do, for each run."""
    async with sessions_at(place, RUNNING) as (sessions, ids):
        store: Any = sessions.store
        costs = []
        for number in (RUNNING_FEW, RUNNING):
            free = ids[: number - (RUNNING_FEW if costs else 0)]
            del ids[: len(free)]
            for start in range(0, len(free), _TOGETHER):
                held = (store.claim(each, version=1, owner="bench", lease=900) for each in free[start:][:_TOGETHER])
                await asyncio.gather(*held)
            costs += await interleaved(store.lapsed, rounds=20)
    few, many = costs
    detail = f"{ms(many.cpu)} at {RUNNING:,} / {ms(few.cpu)} at {RUNNING_FEW:,}; {ms(many.wall)} on the clock"
    run.report(place.key("sweep"), many.cpu * 1000, detail)


def report_fetch(run: Run, key: str, short: Cost, long: Cost) -> None:
    cpu = f"processor of the client {ms(long.cpu)} / {ms(short.cpu)}"
    run.report(key, long.wall / short.wall, f"{ms(long.wall)} / {ms(short.wall)}; {cpu}")


async def leave_with(sessions: Sessions, ids: list[str]) -> None:
    """Post a message to each of many sessions."""
    store: Any = sessions.store
    for start in range(0, len(ids), _TOGETHER):
        await asyncio.gather(*(store.post(each, ITEM) for each in ids[start : start + _TOGETHER]))


class Account(NamedTuple):
    """A PostgreSQL server's work since it was started, for one schema if the counter is that fine."""

    commits: float
    logged: float
    """Bytes of its write-ahead log."""
    stored: float
    """Bytes of the schema's tables and indexes."""
    dead: float
    """Rows that were updated or deleted, whose old versions a vacuum has to remove."""
    dead_jobs: float
    """The same in procrastinate's tables."""
    seconds: float
    """Of the processor, in all its processes."""

    def __sub__(self, other: Account) -> Account:
        return Account(*(late - early for late, early in zip(self, other, strict=True)))


async def ledger(run: Run, place: Place) -> None:
    """Count what a run costs a PostgreSQL server, from `enqueue` to its answer."""
    runs = 5 * RUNS
    async with sessions_at(place, RUNS) as (sessions, ids), WorkerProcess(place.url) as process:
        await process.go()
        await asyncio.gather(*(sessions.enqueue(each, text()) for each in ids))  # it warms the server up
        await until_empty(sessions)
        before, cpu = await account(sessions), await process.cpu()
        for _ in range(runs // RUNS):
            await asyncio.gather(*(sessions.enqueue(each, text()) for each in ids))
            await until_empty(sessions)
        await asyncio.sleep(1.5)  # the server counts with delay
        each, cpu = Account(*(more / runs for more in await account(sessions) - before)), await process.cpu() - cpu
    run.report(place.key("commits"), each.commits, "statements that only read are among them")
    run.report(place.key("wal"), each.logged, "with the full pages that it writes after a checkpoint")
    run.report(place.key("bytes"), each.stored, "tables and indexes, before any vacuum; a run has two short messages")
    run.report(place.key("dead"), each.dead, f"{each.dead_jobs:.1f} of them in the tables of jobs")
    run.report(place.key("server"), each.seconds * 1000, f"that of the worker: {ms(cpu / runs)}")


async def account(sessions: Sessions) -> Account:
    link = sessions.store.link  # type: ignore[attr-defined]
    ((*told,),) = await link.rows(_ACCOUNT)
    pids = [pid for (pid,) in await link.rows("SELECT pid FROM pg_stat_activity")]
    return Account(*map(float, told), sum(map(seconds_of, pids)))


def seconds_of(pid: int) -> float:
    """Return the processor time of a process of this machine; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
