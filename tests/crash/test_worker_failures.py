"""Processes that die at one known moment: the outcome of a message, a model call, a tool call, a run handed over."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests.crash.addresses import store_at
from tests.crash.test_worker_controls import IN_TIME, ended_well, noted, task_of
from tests.crash.worker_chaos import Line, Stage, all_done, ledger_of, stage, verdict

from perdure.actions.parking import deaths
from perdure.run_journal import HANDED_OVER

pytestmark = pytest.mark.sample(2)  # make torture runs all

KINDS = ("sqlite", "postgres")


def calls_of(on: Stage, what: str) -> list[str]:
    return [line.which for line in ledger_of(on.task) if line.what == what]


async def test_one_who_is_killed_before_the_commit_leaves_nothing(tmp_path: Path) -> None:
    """Neither the message nor its job is there; sent again, the message is left once."""
    async with stage(task_of("postgres", tmp_path, dispatcher="procrastinate")) as on:
        await on.start("work")
        poster = await on.start("post", breaks=["stays_before_a_commit"])
        assert poster.process.stdout is not None
        assert await poster.process.stdout.readline() == b"written\n"
        poster.signal(signal.SIGKILL)
        await poster.end()
        async with store_at(on.task.address) as store:
            assert await store.waiting(idle_only=False) == []
            jobs = await store.link.rows("SELECT count(*) FROM procrastinate_jobs")
            assert [*jobs[0]] == [0]
        assert await (await on.start("post")).end() == 0
        assert await ended_well(on, IN_TIME) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_one_who_is_killed_after_the_commit_has_left_a_message(tmp_path: Path, kind: str) -> None:
    """It is answered. Sending it again under the same key changes nothing."""
    async with stage(task_of(kind, tmp_path)) as on:
        poster = await on.start("post", breaks=["dies_after_a_post"])
        assert await poster.end() == -signal.SIGKILL
        await on.start("work")
        assert await ended_well(on, IN_TIME) == []
        assert await (await on.start("post")).end() == 0
        assert await ended_well(on, IN_TIME) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_killed_in_a_model_call(tmp_path: Path, kind: str) -> None:
    """Another worker asks the model again; completed calls are not made again."""
    async with stage(task_of(kind, tmp_path)) as on:
        mortal = await on.start("work", slow_step=1)
        await on.start("post")
        await noted(on, "end")
        await asyncio.sleep(0.3)
        await on.kill(mortal)
        await on.start("work")
        assert await ended_well(on, IN_TIME) == []
        assert calls_of(on, "begin") == calls_of(on, "end") == ["s0/0/0", "s0/0/1"]


@pytest.mark.parametrize("is_idempotent", [False, True])
async def test_one_that_is_killed_in_a_tool(tmp_path: Path, is_idempotent: bool) -> None:
    """Nobody knows the call's outcome: it is made again only if its tool says that this does no harm."""
    async with stage(task_of("sqlite", tmp_path, works=30.0, idempotent=is_idempotent)) as on:
        mortal = await on.start("work")
        await on.start("post")
        await noted(on, "begin")
        await on.kill(mortal)
        await on.start("work", works=0.01)
        assert await all_done(on.task, IN_TIME)
        assert calls_of(on, "begin") == ["s0/0/0"] * (1 + is_idempotent) + ["s0/0/1"]
        async with store_at(on.task.address) as store:
            session = await store.load("s0")
        results = [result for message in session.state.messages for result in message.tool_results]
        assert [result.is_error for result in results] == [not is_idempotent, False]
        assert is_idempotent or "unknown" in str(results[0].content)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_asked_to_end_hands_over(tmp_path: Path, kind: str) -> None:
    """No run is ended, the record says that nobody died, and another continues at once after the last step."""
    async with stage(task_of(kind, tmp_path, options={"lease": 30.0, "drain": 0.2})) as on:
        leaving = await on.start("work", slow_step=1)
        await on.start("post")
        await noted(on, "end")
        await asyncio.sleep(0.3)
        on.workers.remove(leaving)
        leaving.signal(signal.SIGTERM)
        assert await leaving.end() == 0
        async with store_at(on.task.address) as store:
            assert [(each.session_id, each.lapsed) for each in await store.running()] == [("s0", True)]
            record = await store.read("s0")
            assert record[-1].kind == HANDED_OVER
            assert "agent_end" not in [entry.kind for entry in record]
            assert await deaths(store, "s0") == 0
        await on.start("work")
        assert await ended_well(on, 10.0) == []  # far less than the lease
        assert calls_of(on, "begin") == ["s0/0/0", "s0/0/1"]


async def test_one_that_has_time_to_end_ends_its_runs(tmp_path: Path) -> None:
    """It takes nothing else then: the next message of the same session is left to others."""
    async with stage(task_of("sqlite", tmp_path, messages=2, thinks=0.5, options={"drain": 30.0})) as on:
        leaving = await on.start("work")
        await on.start("post")
        await noted(on, "end")
        on.workers.remove(leaving)
        leaving.signal(signal.SIGTERM)
        assert await leaving.end() == 0
        assert [line.what for line in runs_in(on)] == ["start", "over"]
        await on.start("work")
        assert await ended_well(on, IN_TIME) == []
        assert (await verdict(on.task)) == []


def runs_in(on: Stage) -> list[Line]:
    return [line for line in ledger_of(on.task) if line.what in ("start", "over")]
