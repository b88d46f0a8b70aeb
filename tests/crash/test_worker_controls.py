"""Each protection of workers' work is removed: the verdict of `worker_chaos` has to notice it.

With the protection every scene ends well, so it alone makes the difference.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.crash.addresses import address_of
from tests.crash.test_workers import IS_TORTURE
from tests.crash.worker_breaks import slow_posts
from tests.crash.worker_chaos import Stage, all_done, ledger_of, stage, verdict
from tests.crash.worker_process import AGENT, Ledger, Task, sessions_of
from tests.waiting import until

from perdure.protocols import Outcome
from perdure.stores.postgres import inbox, waiting
from perdure.workers import advance

pytestmark = pytest.mark.sample(3)  # make torture runs all

LEASE = 1.0
IN_TIME = 60.0
"""Seconds within which everything has to be done; far more than it takes, on a busy machine too."""
TOO_LONG = LEASE + 2.5
"""Seconds after which broken work has not been done."""


def task_of(kind: str, where: Path, **more: Any) -> Task:
    options = {"lease": LEASE, "concurrency": 4, "drain": 0.3, "tries": 100}
    given = {"sessions": ["s0"], "messages": 1, "thinks": 0.05, "works": 0.05, "options": options, **more}
    return Task(address=address_of(kind, where), ledger=str(where / "ledger"), **given)


async def noted(on: Stage, what: str, times: int = 1) -> None:
    """Wait until the ledger has an entry."""
    async with asyncio.timeout(30):
        await until(lambda: sum(line.what == what for line in ledger_of(on.task)) >= times)


async def ended_well(on: Stage, patience: float) -> list[str]:
    """Return what is wrong once nothing is left to do, or the time is over."""
    await all_done(on.task, patience)
    return await verdict(on.task)


# The chaos plays it whole; here it is left to torture.
WHOLE = () if IS_TORTURE else pytest.mark.skip("make torture plays it")


def breaking(name: str) -> Any:
    """Play a scene as it should be, and with something broken."""
    return pytest.mark.parametrize("breaks", [pytest.param([], id="whole", marks=WHOLE), pytest.param([name], id=name)])


def patience(breaks: list[str]) -> float:
    return TOO_LONG if breaks else IN_TIME


@breaking("without_sweep")
async def test_the_sweep_finds_runs_of_web_processes_that_have_died(tmp_path: Path, breaks: list[str]) -> None:
    """No inbox has a message there, and nobody has a job."""
    async with stage(task_of("sqlite", tmp_path)) as on:
        web = await on.start("send", thinks=30.0)
        await noted(on, "start")
        web.signal(signal.SIGKILL)
        await web.end()
        await on.start("work", breaks=breaks)
        wrong = await ended_well(on, patience(breaks))
        assert wrong == [] if not breaks else "a claim is left on s0" in wrong


@breaking("without_sweep")
async def test_the_sweep_gives_back_the_jobs_of_workers_that_have_died(tmp_path: Path, breaks: list[str]) -> None:
    """procrastinate itself would leave them where they are."""
    async with stage(task_of("postgres", tmp_path, dispatcher="procrastinate")) as on:
        mortal = await on.start("work", thinks=30.0)
        assert await (await on.start("post")).end() == 0
        await noted(on, "start")
        await on.kill(mortal)
        await on.start("work", breaks=breaks)
        wrong = await ended_well(on, patience(breaks))
        assert wrong == [] if not breaks else "something waits in s0" in wrong


@pytest.mark.parametrize("is_locked", [True, False], ids=["whole", "without the lock"])
async def test_the_last_look_waits_for_a_post_that_is_under_way(
    tmp_path: Path, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A post may find that a worker is looking at the session, and wake nobody."""
    task = task_of("postgres", tmp_path)
    if not is_locked:
        monkeypatch.setattr(waiting, "_LAST_LOOK", waiting._LAST_LOOK.replace("FOR SHARE", ""))
    for method in ("_post_counted", "post"):  # the change below is undone after the test
        monkeypatch.setattr(inbox.Inbox, method, getattr(inbox.Inbox, method))
    slow_posts(1.0)
    async with sessions_of(task, Ledger(task.ledger, "here")) as sessions:
        await sessions.open("s0", AGENT)
        posting = asyncio.create_task(sessions.enqueue("s0", "s0 0"))
        async with await psycopg.AsyncConnection.connect(task.address.partition("@")[2], autocommit=True) as watching:
            await until(lambda: _is_sleeping(watching, task.address.partition("@")[0]))
        assert await advance(sessions, "s0") is Outcome.DONE  # to the sender, an answer is still to come
        await posting
    wrong = await verdict(task)
    assert wrong == [] if is_locked else "something waits in s0" in wrong


async def _is_sleeping(connection: psycopg.AsyncConnection[Any], schema: str) -> bool:
    asked = """
        SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE query LIKE 'SELECT pg_sleep%%' AND relation = (%s || '.session')::regclass
    """
    return (await (await connection.execute(asked, (schema,))).fetchone() or (0,))[0] > 0


@breaking("without_epochs")
async def test_the_epoch_keeps_out_one_that_was_stopped_and_woken(tmp_path: Path, breaks: list[str]) -> None:
    """While another worker continues its run, it writes the outcome of its call."""
    async with stage(task_of("sqlite", tmp_path, works=0.5)) as on:
        stopped = await on.start("work", breaks=breaks)
        await on.start("post")
        await noted(on, "begin")
        stopped.signal(signal.SIGSTOP)
        await on.start("work", thinks=1.0)
        await noted(on, "start", 2)
        stopped.signal(signal.SIGCONT)
        wrong = await ended_well(on, IN_TIME)
        assert bool(wrong) is bool(breaks), wrong
        assert not breaks or any("two have written the record" in each or "was made 2 times" in each for each in wrong)


WITHOUT_LOCK = """
    CREATE OR REPLACE FUNCTION perdure_lock(session_id text, owner text, per_owner integer) RETURNS text
    LANGUAGE sql IMMUTABLE AS $$ SELECT NULL::text $$
"""
WITHOUT_TRIGGER = "DROP TRIGGER perdure_wakes ON waiting"


async def in_database(task: Task, statement: str) -> None:
    """Change rows in the schema of a task."""
    schema, _, dsn = task.address.partition("@")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"SET search_path = {schema}".encode())
        await connection.execute(statement.encode())


@pytest.mark.parametrize(
    ("has_lock", "has_claims"),
    [
        pytest.param(True, True, id="whole", marks=WHOLE),
        pytest.param(True, False, id="no claims", marks=WHOLE),
        pytest.param(False, True, id="no lock"),
        pytest.param(False, False, id="neither"),
    ],
)
async def test_a_job_s_lock_and_the_claim(tmp_path: Path, has_lock: bool, has_claims: bool) -> None:
    """The lock keeps workers from looking at one session at once, the claim from running it. One of them is enough."""
    task = task_of("postgres", tmp_path, dispatcher="procrastinate", messages=2, thinks=0.4, works=0.2)
    async with stage(task) as on:
        await on.start_workers(2, breaks=[] if has_claims else ["without_claims"])
        if not has_lock:
            await in_database(task, WITHOUT_LOCK)
        async with sessions_of(task, Ledger(task.ledger, "here")) as sessions:
            await sessions.open("s0", AGENT)
            await sessions.enqueue("s0", "s0 0")
            await noted(on, "begin")
            await sessions.enqueue("s0", "s0 1", priority=5)  # it makes another job while the first is done
        is_safe = has_lock or has_claims
        wrong = await ended_well(on, IN_TIME if is_safe else TOO_LONG + 5.0)
    assert (most_looks(on) == 1) is has_lock
    assert bool(wrong) is not is_safe, wrong


def most_looks(on: Stage) -> int:
    """Return the largest number of workers that have looked at one session at once."""
    now, most = Counter[str](), 0
    for line in ledger_of(on.task):
        if line.what in ("look", "looked"):
            now[line.session_id] += 1 if line.what == "look" else -1
            most = max(most, now[line.session_id])
    return most


@pytest.mark.parametrize("has_sweep", [True, False], ids=["sweep", "no sweep"])
@pytest.mark.parametrize("is_one_commit", [True, False], ids=["one commit", "two commits"])
async def test_a_message_and_its_job_come_in_one_commit(tmp_path: Path, is_one_commit: bool, has_sweep: bool) -> None:
    """Of two commits the second may not come; then only the sweep finds the message."""
    task = task_of("postgres", tmp_path, dispatcher="procrastinate")
    async with stage(task) as on:
        await on.start("work", breaks=[] if has_sweep else ["without_sweep"])
        if not is_one_commit:
            await in_database(task, WITHOUT_TRIGGER)
        poster = await on.start("post", breaks=["dies_after_a_post"])
        assert await poster.end() == -signal.SIGKILL
        is_lost = not (is_one_commit or has_sweep)
        wrong = await ended_well(on, TOO_LONG if is_lost else IN_TIME)
    assert wrong == [] if not is_lost else "something waits in s0" in wrong


async def test_the_verdict_finds_what_was_lost_or_came_twice(tmp_path: Path) -> None:
    """It finds a missing message, one that was sent twice, calls that were made twice, and calls without a result."""
    task = task_of("sqlite", tmp_path, messages=2)
    ledger = Ledger(task.ledger, "here")
    async with sessions_of(task, ledger) as sessions:
        chat = await sessions.open("s0", AGENT)
        await chat.send("s0 1")
        await chat.send("s0 1")
    wrong = "\n".join(await verdict(task))
    for each in ("'s0 0' was asked 0 times", "'s0 1' was asked 2 times", "call s0/0/0 has no result"):
        assert each in wrong
    assert "call s0/1/0 was made 2 times" in wrong


async def test_the_verdict_finds_a_wrong_order_and_further_versions(tmp_path: Path) -> None:
    """All messages are there, once each, but in another order."""
    task = task_of("sqlite", tmp_path, messages=2)
    async with sessions_of(task, Ledger(task.ledger, "here")) as sessions:
        chat = await sessions.open("s0", AGENT)
        await chat.send("s0 1")
        await chat.rename("another version")
        await chat.send("s0 0")
    wrong = "\n".join(await verdict(task))
    assert "asked out of order" in wrong
    assert "its versions are [4, 3, 2, 1]" in wrong
    assert "calls were made out of order" in wrong
