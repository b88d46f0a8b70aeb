"""Promises of procrastinate's dispatcher beyond the contract: where jobs come from, and how lost ones come back."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from procrastinate.manager import JobManager
from procrastinate.schema import SchemaManager
from tests import postgres_server
from tests.stores.test_postgres import schema, sql, store_in
from tests.waiting import until
from tests.workers import dispatching_process

from perdure import ConfigurationError, Entry, MemoryStore, PostgresStore, QueueFull, Sessions, StoreError, connect
from perdure.protocols import Outcome, WorkerOptions
from perdure.stores.postgres import link
from perdure.testing.dispatcher_contract import Model, text_of
from perdure.testing.samples import new_session
from perdure.workers import InboxDispatcher, Worker
from perdure.workers.choosing import dispatcher_of
from perdure.workers.procrastinate import ProcrastinateDispatcher
from perdure.workers.procrastinate import schema as preparing
from perdure.workers.procrastinate.connector import DatabaseConnector
from perdure.workers.procrastinate.database import queue_of
from perdure.workers.procrastinate.jobs import Jobs
from perdure.workers.procrastinate.presence import LOCK_OF_WORKER
from perdure.workers.procrastinate.sweep import Sweep

pytestmark = pytest.mark.sample(2)  # make torture runs all

__all__ = ["schema"]

ITEM = Entry("queue", {"messages": []})
LEASE = 3.0
PATIENCE = 20.0
JOBS = "SELECT queueing_lock, status::text, ceil(priority / 1e7)::integer FROM procrastinate_jobs ORDER BY id"
POSTING = """
import asyncio, sys
sys.modules["procrastinate"] = None  # as where it is not installed
import perdure

async def main():
    async with perdure.connect(perdure.PostgresStore(sys.argv[1], schema=sys.argv[2]), model="offline") as sessions:
        await sessions.enqueue("a", "Hello", key="k")

asyncio.run(main())
"""


@asynccontextmanager
async def prepared(schema: str) -> AsyncIterator[tuple[PostgresStore, ProcrastinateDispatcher]]:
    async with store_in(schema) as store:
        dispatcher = ProcrastinateDispatcher(store)
        await dispatcher.prepare()
        yield store, dispatcher


@asynccontextmanager
async def working(sessions: Sessions, **options: Any) -> AsyncIterator[Worker]:
    """Run a worker for as long as the block."""
    settings = {"concurrency": 4, "lease": LEASE, "drain": PATIENCE, **options}
    async with Worker(sessions, **settings) as worker:
        assert isinstance(worker.dispatcher, ProcrastinateDispatcher)
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await running


class Looking:
    """A dispatcher at work that only looks at its sessions, with a given outcome for each."""

    def __init__(self, says: Callable[[str], Awaitable[Outcome]] | None = None) -> None:
        self.seen: list[str] = []
        self._says = says

    async def __call__(self, session_id: str) -> Outcome:
        self.seen.append(session_id)
        return Outcome.DONE if self._says is None else await self._says(session_id)

    @asynccontextmanager
    async def on(self, dispatcher: ProcrastinateDispatcher, **options: Any) -> AsyncIterator[Looking]:
        stopped = asyncio.Event()
        chosen = WorkerOptions(**{"concurrency": 4, "lease": LEASE, "drain": 0.1, **options})
        work = asyncio.create_task(dispatcher.work(self, chosen, stopped))
        try:
            yield self
        finally:
            stopped.set()
            await work

    async def until(self, *seen: str, most: float = PATIENCE) -> None:
        """Wait until these have been looked at, each as often as it is named."""
        async with asyncio.timeout(most):
            await until(lambda: not Counter(seen) - Counter(self.seen))


class TestJobsComeWithMessages:
    async def test_both_or_neither(self, schema: str) -> None:
        """A transaction that is rolled back leaves no message and no job; one that is committed leaves both."""
        async with prepared(schema) as (store, _), sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            for end, jobs in (("ROLLBACK", []), ("COMMIT", [("it", "todo", 3)])):
                await execute("BEGIN")
                await execute("UPDATE session SET inbox_end = 1, since = 5, priority = 3 WHERE id = 'it'")
                assert await execute(JOBS) == [("it", "todo", 3)]
                await execute(end)
                assert await execute(JOBS) == jobs
                assert await store.has_waiting("it") is bool(jobs)

    async def test_one_job_a_session_as_urgent_as_its_most_urgent_message(self, schema: str) -> None:
        """This holds for any number of messages, from anybody. A refused post makes no job."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            await store.create(new_session("Hello", id="it", owner="ada"))
            for priority in (1, 5, 2):
                await store.post("it", ITEM, priority=priority, most_of_owner=9)
            await dispatcher.wake("it", priority=4)
            with pytest.raises(QueueFull):
                await store.post("it", ITEM, priority=9, most=3)
            assert await execute(JOBS) == [("it", "todo", 5)]
            ((args,),) = await execute("SELECT args FROM procrastinate_jobs")
            assert args == {"session_id": "it"}

    async def test_a_process_without_procrastinate_makes_them(self, schema: str) -> None:
        """It need not even be installed there."""
        async with store_in(schema) as store, connect(store, driver=Model()) as sessions:
            await sessions.open("a")
            async with working(sessions):
                await asyncio.sleep(0.5)
                command = [sys.executable, "-c", POSTING, postgres_server.dsn(), schema]
                await asyncio.to_thread(subprocess.run, command, check=True)
                assert await text_of(await sessions.enqueue("a", "Hello", key="k")) == "re Hello"

    async def test_a_session_that_opens_again_is_looked_at(self, schema: str) -> None:
        """A message in a closed session makes no job until then."""
        async with prepared(schema) as (store, _), sql(schema) as execute:
            session = await store.save((await store.create(new_session("Hello", id="it"))).suspended())
            await store.post("it", ITEM)
            assert await execute(JOBS) == []
            await store.save(session.activated())
            assert await execute(JOBS) == [("it", "todo", 0)]

    async def test_a_message_that_comes_at_the_very_end_is_not_left(self, schema: str) -> None:
        """Its job waits for the present one, and is fetched as soon as that is over."""

        async def slow(_: str) -> Outcome:
            await asyncio.sleep(0.2)
            return Outcome.DONE

        async with prepared(schema) as (store, dispatcher), Looking(slow).on(dispatcher) as looking:
            await store.create(new_session("Hello", id="it"))
            await store.post("it", ITEM)
            await looking.until("it")
            async with sql(schema) as execute:
                await execute("SELECT perdure_wake('it', 0)")
                assert [row[1] for row in await execute(JOBS)] == ["doing", "todo"]
            began = time.monotonic()
            await looking.until("it", "it")
            assert time.monotonic() - began < 0.8  # and not at the next look, a second later

    async def test_an_erased_session_has_none(self, schema: str) -> None:
        """Its id is not kept in the queue."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            for name in ("it", "other"):
                await store.create(new_session("Hello", id=name))
                await store.post(name, ITEM)
            await store.delete("it")
            await dispatcher.wake("it")
            assert await execute(JOBS) == [("other", "todo", 0)]

    async def test_what_waited_before_is_found(self, schema: str) -> None:
        """Messages from before the first use of a dispatcher there are found."""
        async with store_in(schema) as store:
            for name in ("a", "b"):
                await store.create(new_session("Hello", id=name))
            await store.post("b", ITEM, priority=2)
            async with prepared(schema), sql(schema) as execute:
                assert await execute(JOBS) == [("b", "todo", 2)]

    async def test_two_schemas_share_nothing(self, schema: str) -> None:
        """Workers of one are not woken for the other, and do not sweep there."""
        other = f"{schema}_other"
        async with prepared(schema) as (one, first), prepared(other) as (two, second):
            for store in (one, two):
                await store.create(new_session("Hello", id="it"))
            async with Looking().on(first) as looking, Looking().on(second) as there:
                await two.post("it", ITEM)
                await there.until("it")
                await asyncio.sleep(1.2)
                assert looking.seen == []

    async def test_a_schema_with_a_long_name(self, tmp_path: Path) -> None:
        """PostgreSQL's channels have shorter names than schemas may have."""
        base = postgres_server.schema_of(tmp_path)
        long = base + "x" * (48 - len(base))
        assert len({queue_of(long), queue_of(f"{long[:-1]}y"), queue_of(base)}) == 3
        async with prepared(long) as (store, dispatcher), Looking().on(dispatcher) as looking:
            await store.create(new_session("Hello", id="it"))
            await store.post("it", ITEM)
            await looking.until("it")


class TestPreparing:
    async def test_a_store_needs_none_of_it(self, schema: str) -> None:
        """Before a dispatcher is used, nothing of procrastinate's is there."""
        asked = "SELECT count(*) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = %s"
        async with store_in(schema) as store, sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            await store.post("it", ITEM)
            like = f"{asked} AND relname LIKE 'procrastinate%%'"
            assert await execute(like, schema) == [(0,)]
            await ProcrastinateDispatcher(store).prepare()
            assert (await execute(like, schema))[0][0] > 0

    async def test_it_is_done_once_whoever_comes(self, schema: str) -> None:
        """Several may do it at the same time, while others post; for those that come later nothing is left to do."""
        async with store_in(schema) as store, sql(schema) as execute:
            names = [f"s{number}" for number in range(8)]
            for name in names:
                await store.create(new_session("Hello", id=name))
            others = [ProcrastinateDispatcher(store) for _ in range(4)]
            await asyncio.gather(*(each.prepare() for each in others), *(store.post(name, ITEM) for name in names))
            before = await execute("SELECT oid FROM pg_class WHERE relname LIKE 'procrastinate%' ORDER BY oid")
            await ProcrastinateDispatcher(store).prepare()
            assert before == await execute("SELECT oid FROM pg_class WHERE relname LIKE 'procrastinate%' ORDER BY oid")
            assert sorted(row[0] for row in await execute(JOBS)) == names
            noted = await execute("SELECT procrastinate, number FROM perdure_dispatcher")
            assert noted == [(preparing.migrations()[-1].stem, preparing.NUMBER)]

    async def test_older_tables_are_upgraded_by_procrastinates_own_migrations(self, schema: str) -> None:
        """They go from the release that made them to the installed one."""
        async with store_in(schema) as store, sql(schema) as execute:
            await execute(preparing._TABLE)
            old = [script for script in preparing.migrations() if script.stem < "03.03"]
            for script in old:
                await execute(script.read_text())
            noted = "INSERT INTO perdure_dispatcher (procrastinate, number, queue) VALUES (%s, 0, %s)"
            await execute(noted, old[-1].stem, queue_of(schema))
            dispatcher = ProcrastinateDispatcher(store)
            async with Looking().on(dispatcher) as looking:
                await store.create(new_session("Hello", id="it"))
                await until(lambda: _has(execute, "SELECT 1 FROM perdure_dispatcher WHERE number = 1"))
                await store.post("it", ITEM)
                await looking.until("it")
            assert await execute("SELECT procrastinate FROM perdure_dispatcher") == [(preparing.migrations()[-1].stem,)]

    async def test_each_migration_is_applied_once_and_noted(
        self, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A migration that fails leaves those before it in place."""
        shutil.copytree(SchemaManager.get_migrations_path(), tmp_path / "migrations")
        async with prepared(schema) as (store, _), sql(schema) as execute:
            monkeypatch.setattr(SchemaManager, "get_migrations_path", lambda: str(tmp_path / "migrations"))
            (tmp_path / "migrations" / "98.00.00_01_pre.sql").write_text("CREATE TABLE newer (it int)")
            (tmp_path / "migrations" / "98.00.00_50_post.sql").write_text("INSERT INTO nowhere VALUES (1)")
            with pytest.raises(StoreError, match="nowhere"):
                await ProcrastinateDispatcher(store).prepare()
            assert await execute("SELECT procrastinate FROM perdure_dispatcher") == [("98.00.00_01_pre",)]
            (tmp_path / "migrations" / "98.00.00_50_post.sql").write_text("INSERT INTO newer VALUES (1)")
            for _ in range(2):
                await ProcrastinateDispatcher(store).prepare()
            assert await execute("SELECT it FROM newer") == [(1,)]

    @pytest.mark.parametrize(
        ("column", "value", "error"),
        [("procrastinate", "99.00.00_01_pre", ConfigurationError), ("number", preparing.NUMBER + 1, StoreError)],
    )
    async def test_what_a_newer_release_has_made_is_left_alone(
        self, schema: str, column: str, value: object, error: type[Exception]
    ) -> None:
        """The error says what to upgrade."""
        async with prepared(schema) as (store, _), sql(schema) as execute:
            await execute(f"UPDATE perdure_dispatcher SET {column} = %s", value)
            with pytest.raises(error, match="Upgrade"):
                await ProcrastinateDispatcher(store).prepare()

    async def test_anothers_tables_are_left_alone(self, schema: str) -> None:
        """An application that uses procrastinate in the same schema gets an error that says to part them."""
        async with store_in(schema) as store, sql(schema) as execute:
            await execute(SchemaManager.get_schema())
            with pytest.raises(ConfigurationError, match="schema of its own"):
                await ProcrastinateDispatcher(store).prepare()
            assert await execute(
                "SELECT count(*) FROM pg_class WHERE relname = 'perdure_dispatcher'"
                " AND relnamespace = %s::regnamespace",
                schema,
            ) == [(0,)]

    async def test_the_store_has_its_dispatcher(self, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is procrastinate's on PostgreSQL if that is installed, and that of inboxes elsewhere."""
        async with store_in(schema) as store, MemoryStore() as memory:
            assert isinstance(dispatcher_of(store), ProcrastinateDispatcher)
            assert isinstance(dispatcher_of(memory), InboxDispatcher)
            with pytest.raises(ConfigurationError, match="MemoryStore"):
                ProcrastinateDispatcher(memory)
            monkeypatch.setattr("perdure.workers.choosing.find_spec", lambda name: None)
            assert isinstance(dispatcher_of(store), InboxDispatcher)

    @pytest.mark.parametrize(("found", "said"), [(None, "Install it"), ("3.7.2", "3.8 or newer")])
    def test_what_to_install(self, found: str | None, said: str) -> None:
        """If procrastinate is missing or too old, the error says so."""
        code = f"""
import importlib.metadata as metadata

def version(name):
    if {found!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {found!r}

metadata.version = version
try:
    import perdure.workers.procrastinate
except Exception as error:
    print(type(error).__name__, error)
"""
        told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert told.startswith("ConfigurationError")
        assert said in told


class TestLostJobs:
    @pytest.mark.parametrize(("how", "most"), [(signal.SIGKILL, 2.5), (signal.SIGSTOP, LEASE + 2)])
    async def test_a_worker_that_dies_before_it_claims(self, schema: str, how: signal.Signals, most: float) -> None:
        """A killed worker is noticed at once, a stopped one after a lease. Another is handed its session."""
        async with prepared(schema) as (store, dispatcher):
            await store.create(new_session("Hello", id="it"))
            with _process(schema) as process:
                await store.post("it", ITEM)
                assert await asyncio.to_thread(process.stdout.readline) == "it\n"
                async with Looking().on(dispatcher) as looking:
                    await asyncio.sleep(1.5)
                    assert looking.seen == []  # while it is alive
                    process.send_signal(how)
                    began = time.monotonic()
                    await looking.until("it")
                    assert time.monotonic() - began < most

    @pytest.mark.parametrize("kind", ["no lock", "no heartbeat", "no worker"])
    async def test_jobs_of_dead_workers_are_given_back(self, schema: str, kind: str) -> None:
        """A living worker's jobs stay its own."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute, sql(schema) as holding:
            await _fetched_by_others(store, execute, holding, kind)
            async with Looking().on(dispatcher) as looking:
                await looking.until("dead", most=LEASE - 0.5)
                await asyncio.sleep(0.5)
                assert looking.seen == ["dead"]
                assert await execute(JOBS) == [("alive", "doing", 0)]

    async def test_a_second_job_of_the_session_is_enough(self, schema: str) -> None:
        """procrastinate itself would fail to put back the first."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute, sql(schema) as holding:
            await _fetched_by_others(store, execute, holding, "no lock")
            await execute("SELECT perdure_wake('dead', 7)")
            async with Looking().on(dispatcher) as looking:
                await looking.until("dead")
                await until(lambda: _is(execute, JOBS, [("alive", "doing", 0)]))
                assert looking.seen == ["dead"]

    async def test_a_job_that_was_wrongly_finished_comes_back(self, schema: str) -> None:
        """It comes back within a lease of its message; so does the job of an owner with seats."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            for name, owner in (("a", None), ("b", "ada")):
                await store.create(new_session("Hello", id=name, owner=owner))
                await store.post(name, ITEM, priority=4)
            await execute("DELETE FROM procrastinate_jobs")
            began = time.monotonic()
            async with Looking(self._taking(execute)).on(dispatcher, per_owner=2) as looking:
                await looking.until("a", "b")
                assert LEASE - 1 < time.monotonic() - began < LEASE + 2
                assert sorted(looking.seen) == ["a", "b"]

    @staticmethod
    def _taking(execute: Callable[..., Awaitable[Any]]) -> Callable[[str], Awaitable[Outcome]]:
        async def take(session_id: str) -> Outcome:
            await execute("UPDATE session SET taken = inbox_end WHERE id = %s", session_id)
            return Outcome.DONE

        return take

    async def test_many_that_wait_are_looked_through_in_parts(
        self, schema: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sweep costs the same however many wait, and reaches all of them in the end."""
        from perdure.workers.procrastinate import sweep as sweeping

        text = sweeping._FORGOTTEN.replace("LIMIT 1000", "LIMIT 2").replace("WHEN 1000", "WHEN 2")
        monkeypatch.setattr(sweeping, "_FORGOTTEN", text)
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            names = [f"s{number}" for number in range(5)]
            for name in names:
                await store.create(new_session("Hello", id=name))
                await store.post(name, ITEM)
            await execute("DELETE FROM procrastinate_jobs")
            await execute("UPDATE session SET since = since - 60")
            async with Looking(self._taking(execute)).on(dispatcher) as looking:
                await looking.until(*names)

    async def test_a_fetch_whose_answer_was_lost(self, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The living worker does not know of the job, and gives it back."""
        fetch, lost = JobManager.fetch_job, []

        async def losing(self: JobManager, *args: Any, **how: Any) -> Any:
            job = await fetch(self, *args, **how)
            if job is not None and not lost:
                lost.append(job.id)
                return None
            return job

        monkeypatch.setattr(JobManager, "fetch_job", losing)
        async with prepared(schema) as (store, dispatcher), Looking().on(dispatcher) as looking:
            await store.create(new_session("Hello", id="it"))
            await store.post("it", ITEM)
            await looking.until("it", most=3)
            assert len(lost) == 1

    async def test_a_job_is_ended_only_by_the_worker_that_has_it(self, schema: str) -> None:
        """A job that another has got meanwhile, because its worker was stopped, is not touched."""

        async def slow(_: str) -> Outcome:
            await asyncio.sleep(0.3)
            return Outcome.DONE

        async with prepared(schema) as (store, dispatcher), sql(schema) as execute, sql(schema) as holding:
            await _fetched_by_others(store, execute, holding, "no lock")
            async with Looking(slow).on(dispatcher) as looking:
                await looking.until("dead")
                ((alive,),) = await execute("SELECT worker_id FROM procrastinate_jobs WHERE queueing_lock = 'alive'")
                await execute("UPDATE procrastinate_jobs SET worker_id = %s WHERE queueing_lock = 'dead'", alive)
                await asyncio.sleep(0.6)
                assert sorted(await execute(JOBS)) == [("alive", "doing", 0), ("dead", "doing", 0)]

    async def test_one_worker_sweeps_at_a_time(self, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any number of workers sweep no more often than one alone."""
        swept, stalled = [], Sweep._stalled

        async def counting(self: Sweep) -> None:
            swept.append(self)
            await stalled(self)

        monkeypatch.setattr(Sweep, "_stalled", counting)
        async with prepared(schema) as (_, each), Looking().on(each), Looking().on(each), Looking().on(each):
            await asyncio.sleep(2)
        assert 2 <= len(swept) <= 2 / (LEASE / 6 * 0.9) + 1


async def _fetched_by_others(store: Any, execute: Any, holding: Any, kind: str) -> None:
    """Leave two fetched jobs: `alive` of a worker that holds its lock, `dead` of one that has died."""
    for name in ("alive", "dead"):
        await store.create(new_session("Hello", id=name))
        await execute("SELECT perdure_wake(%s, 0)", name)
        ((worker,),) = await execute("SELECT * FROM procrastinate_register_worker_v1()")
        await execute("SELECT id FROM procrastinate_fetch_job_v2(NULL, %s)", worker)
        if name == "alive" or kind == "no heartbeat":
            lock = LOCK_OF_WORKER.replace("%(queue)s", "queue").format(worker=int(worker))
            await holding(f"SELECT pg_advisory_lock({lock}) FROM perdure_dispatcher")
    late = "UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 minute' WHERE id = %s"
    keep = "UPDATE procrastinate_workers SET last_heartbeat = now() + interval '1 hour' WHERE id <> %s"
    await execute(keep, worker)
    if kind == "no heartbeat":
        await execute(late, worker)
    if kind == "no worker":
        await execute("DELETE FROM procrastinate_workers WHERE id = %s", worker)


async def _has(execute: Any, query: str) -> bool:
    with suppress(psycopg.Error):
        return bool(await execute(query))
    return False


async def _is(execute: Any, query: str, rows: list[Any]) -> bool:
    return bool(await execute(query) == rows)


class _process:
    """Run a worker in a process of its own."""

    def __init__(self, schema: str) -> None:
        self._command = [sys.executable, dispatching_process.__file__, postgres_server.dsn(), schema, str(LEASE)]

    def __enter__(self) -> Any:
        self._running = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        return self._running

    def __exit__(self, *_: object) -> None:
        self._running.kill()
        self._running.communicate()


class TestOutcomes:
    async def test_busy_is_not_a_try_and_a_failure_is(self, schema: str) -> None:
        """A busy session is looked at again in a second; one that fails, less and less often."""
        answers = {"busy": [Outcome.BUSY, Outcome.BUSY, Outcome.DONE], "failed": [Outcome.FAILED, Outcome.FAILED]}

        async def says(session_id: str) -> Outcome:
            if session_id == "raised":
                raise RuntimeError("as a mistake in the code would")
            return answers[session_id].pop(0) if answers[session_id] else Outcome.DONE

        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            for name in ("busy", "failed", "raised"):
                await store.create(new_session("Hello", id=name))
                await dispatcher.wake(name)
            async with Looking(says).on(dispatcher) as looking:
                began = time.monotonic()
                await looking.until("busy", "busy", "failed", "failed", "raised", "raised")
                assert 0.9 < time.monotonic() - began < 2.5
                tries = "SELECT queueing_lock, attempts FROM procrastinate_jobs WHERE status = 'todo' ORDER BY 1"
                await until(lambda: _is(execute, tries, [("busy", 0), ("failed", 2), ("raised", 2)]))
                await looking.until("busy", "busy", "busy", "failed", "failed", "failed")
                await until(lambda: _is(execute, "SELECT queueing_lock FROM procrastinate_jobs", [("raised",)]))

    async def test_finished_jobs_do_not_pile_up(self, schema: str) -> None:
        """Neither do procrastinate's notes of them."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            async with Looking().on(dispatcher) as looking:
                for count in range(1, 4):
                    await dispatcher.wake("it")
                    await looking.until(*["it"] * count)
                    await until(lambda: _is(execute, JOBS, []))
            assert await execute("SELECT count(*) FROM procrastinate_events") == [(0,)]
            assert await execute("SELECT count(*) FROM procrastinate_workers") == [(0,)]

    @pytest.mark.parametrize("how", ["stopped", "cancelled"])
    async def test_what_is_let_go_of_is_not_ended(self, schema: str, how: str) -> None:
        """The run continues until the worker hands it over; another can then fetch its job at once."""
        ended = asyncio.Event()

        async def slow(_: str) -> Outcome:
            await asyncio.sleep(1.0)
            ended.set()
            return Outcome.DONE

        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            await dispatcher.wake("it")
            looking, stopped = Looking(slow), asyncio.Event()
            drain = 0.1 if how == "stopped" else PATIENCE
            options = WorkerOptions(lease=LEASE, drain=drain)
            work = asyncio.create_task(dispatcher.work(looking, options, stopped))
            await looking.until("it")
            if how == "stopped":
                stopped.set()
                await work
            else:
                work.cancel()
                await asyncio.wait({work})
                assert work.cancelled()
            assert not ended.is_set()
            assert await execute(JOBS) == [("it", "todo", 0)]
            assert await execute("SELECT attempts FROM procrastinate_jobs") == [(0,)]
            await asyncio.wait_for(ended.wait(), 2)

    async def test_an_owners_jobs_have_seats(self, schema: str) -> None:
        """No more of them are fetched than its share, so that none is fetched in vain; others' are not delayed."""
        now, most = Counter[str](), Counter[str]()

        async def says(session_id: str) -> Outcome:
            owner = session_id[0]
            now[owner] += 1
            most[owner] = max(most[owner], now[owner])
            await asyncio.sleep(0.05)
            now[owner] -= 1
            return Outcome.DONE

        async with prepared(schema) as (store, dispatcher), Looking(says).on(dispatcher, per_owner=2) as looking:
            names = [f"{owner}{number}" for owner, many in (("a", 12), ("b", 2)) for number in range(many)]
            await until(lambda: _per_owner(schema, 2))
            for name in names:
                await store.create(new_session("Hello", id=name, owner=name[0]))
                await store.post(name, ITEM)
            await looking.until(*names)
            assert sorted(looking.seen) == sorted(names)  # none of them twice, as a busy one would be
        assert most["a"] == 2


async def _per_owner(schema: str, seats: int) -> bool:
    async with sql(schema) as execute:
        return await _is(execute, "SELECT per_owner FROM perdure_dispatcher", [(seats,)])


class TestLoss:
    async def test_procrastinate_is_started_again(self, schema: str, caplog: pytest.LogCaptureFixture) -> None:
        """It may have given up, for example because somebody has removed its worker from the table."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            async with Looking().on(dispatcher) as looking:
                await until(lambda: _has(execute, "DELETE FROM procrastinate_workers RETURNING 1"))
                with caplog.at_level(logging.WARNING, "perdure.workers"):
                    await store.post("it", ITEM)
                    await looking.until("it")
        assert "is started again" in caplog.text

    async def test_a_lost_connection_is_made_again(self, schema: str) -> None:
        """The listening connection is too: it hears of later messages."""
        async with prepared(schema) as (store, dispatcher), sql(schema) as execute:
            await store.create(new_session("Hello", id="it"))
            async with Looking().on(dispatcher) as looking:
                listens = "application_name = %s AND query LIKE 'LISTEN%%'"
                name = f"perdure {schema}"[:63]
                seen = f"SELECT count(*) FROM pg_stat_activity WHERE {listens}"
                await until(lambda: _is(lambda query: execute(query, name), seen, [(1,)]))
                await execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listens}", name)
                await asyncio.sleep(0.5)
                await until(lambda: _is(lambda query: execute(query, name), seen, [(1,)]))
                await store.post("it", ITEM)
                await looking.until("it", most=0.8)

    async def test_a_restart_of_the_server(self, own_server: Any) -> None:
        """In the middle of the work: each message is answered once, and nothing is left over."""
        model = Model(thinks=0.1)
        async with PostgresStore(own_server.get_uri()) as store, connect(store, driver=model) as sessions:
            names = [f"s{number}" for number in range(12)]
            for name in names:
                await sessions.open(name)
            asked = [await sessions.enqueue(name, f"{name} {n}") for n in range(3) for name in names]
            async with working(sessions, lease=6.0), working(sessions, lease=6.0):
                await until(lambda: len(model.heard) >= 10)
                await asyncio.to_thread(own_server.stop)
                await asyncio.sleep(0.5)
                await asyncio.to_thread(own_server.start)
                for each in asked:
                    assert await text_of(each)
                later = await sessions.enqueue("s0", "Still there?")
                assert await text_of(later) == "re Still there?"
            assert Counter(model.heard) == Counter(
                [f"{name} {n}" for n in range(3) for name in names] + [model.heard[-1]]
            )
            assert await store.link.rows("SELECT id FROM procrastinate_jobs") == []


@pytest.fixture
def own_server() -> Iterator[Any]:
    """A server that this test may restart."""
    home = Path(tempfile.mkdtemp(prefix="perdure-restarted-")) / "data"
    server = postgres_server.start(home, settings="fsync = off\n")
    yield server
    server.cleanup()
    shutil.rmtree(home.parent, ignore_errors=True)


class TestCosts:
    @pytest.mark.parametrize("kind", ["of many sessions", "behind one"])
    async def test_a_fetch_reads_no_more_where_more_wait(self, schema: str, kind: str) -> None:
        """It uses the index on the lock: 10,000 jobs cost no more than 100."""
        lock = "'s' || n" if kind == "of many sessions" else "CASE WHEN n < 3 THEN 's' || n ELSE 'same' END"
        async with prepared(schema) as (store, _), sql(schema) as execute:
            read = {}
            for first, last in ((1, 100), (101, 10_000)):
                await execute(_FILL.format(lock=lock), queue_of(schema), first, last)
                read[last] = await _pages_of_a_fetch(store.link, queue_of(schema))
            assert read[10_000] <= 1.5 * read[100], read

    async def test_a_queue_that_was_empty_when_it_was_analyzed(self, schema: str) -> None:
        """Most are empty when the server analyzes them: a sweep does so again once many wait."""
        known = "SELECT 1 FROM pg_class WHERE oid = 'procrastinate_jobs'::regclass AND reltuples > 4000"
        async with prepared(schema) as (store, _), sql(schema) as execute:
            queue = queue_of(schema)
            await execute(_FILL.format(lock="'s' || n"), queue, 1, 5_000)
            await execute("DELETE FROM procrastinate_jobs")
            await execute("ANALYZE procrastinate_jobs")
            await execute(_FILL.format(lock="'s' || n"), queue, 1, 5_000)
            before = await _pages_of_a_fetch(store.link, queue)
            jobs = Jobs(DatabaseConnector(store.link), store.link, worker_id=0)
            sweep = Sweep(store.link, queue, jobs, LEASE, 0.0)

            async def is_known() -> bool:
                await sweep()
                return bool(await execute(known))

            await until(is_known)
            assert await _pages_of_a_fetch(store.link, queue) < before / 10

    async def test_a_worker_that_has_nothing_to_do_costs_little(self, schema: str) -> None:
        """It takes at most 1 % of a core."""
        async with prepared(schema) as (_, dispatcher), Looking().on(dispatcher, lease=20.0):
            await asyncio.sleep(1)
            began = time.process_time()
            await asyncio.sleep(3)
            assert time.process_time() - began < 0.03


_FILL = (
    "INSERT INTO procrastinate_jobs (queue_name, task_name, lock, queueing_lock)"
    " SELECT %s, 'perdure.advance', {lock}, 's' || n FROM generate_series(%s::int, %s::int) AS n"
)


async def _pages_of_a_fetch(database: link.Link, queue: str) -> int:
    """Return how many pages a fetch reads, with the plans of the store's own connections. The fetch is undone."""
    asked = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM procrastinate_fetch_job_v2(%s, NULL)"

    async def explain(connection: Any) -> int:
        pages = 0
        for _ in range(3):  # the first reads the catalog
            async with connection.transaction(force_rollback=True):
                ((told,),) = await (await connection.execute(asked, ([queue],))).fetchall()
                plan = told[0]["Plan"]
                pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return pages

    return await database.read(explain)
