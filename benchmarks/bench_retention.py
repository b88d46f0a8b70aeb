"""Retention: a round without a match beside a page of a list, and a round that erases beside single erasures."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from benchmarks.bench_lists import BEGINNING, FEW, TOGETHER, created_at
from benchmarks.harness import Run, interleaved, ms
from perdure import (
    AgentDefinition,
    AgentSession,
    AgentSessionInfo,
    AgentState,
    Message,
    Retention,
    RetentionPolicy,
    SessionId,
    Sessions,
    SqliteStore,
    connect,
)
from perdure.model import ids
from perdure.sessions.rounds import Round

AGENT = AgentDefinition("clerk")
AGES = RetentionPolicy(default=Retention(idle=timedelta(days=900), age=timedelta(days=2000)))
ERASED_AT_ONCE = 20


async def measure(run: Run) -> None:
    many = run.size(100_000, 1_000_000)
    with run.folder() as folder:
        async with (
            connect(SqliteStore(folder / "few.db", cache=0)) as few,
            connect(SqliteStore(folder / "many.db", cache=0)) as large,
        ):
            for app, size in ((few, FEW), (large, many)):
                await fill(app.store, size)
            end = created_at(many)
            await finds_nothing(run, few, large, AGES, end, "nothing")
            grown = RetentionPolicy(default=Retention(versions=3))
            await finds_nothing(run, few, large, grown, end, "versions")
            await erases(run, large)


async def finds_nothing(run: Run, few: Sessions, large: Sessions, policy: RetentionPolicy, at: Any, key: str) -> None:
    """Compare a round in a large store with one in a small one, and with a page of a list in the same."""

    async def look(app: Sessions) -> None:
        report = await Round(app, policy, at, since=at - timedelta(seconds=1)).carry_out()
        assert (report.sessions, report.pruned) == (0, ())

    sides = partial(look, few), partial(look, large), partial(page, large)
    small, long, listed = await interleaved(*sides, rounds=40)
    run.report(f"retention.{key}", long.cpu / small.cpu, f"{ms(long.cpu)} / {ms(small.cpu)} at {FEW:,}")
    run.report(f"retention.{key}_page", long.cpu / listed.cpu, f"{ms(long.cpu)} / {ms(listed.cpu)}")


async def erases(run: Run, app: Sessions) -> None:
    """Erase the oldest sessions by rounds, and as many others by their ids."""
    store: Any = app.store
    ends, others = count(ERASED_AT_ONCE, ERASED_AT_ONCE), count(FEW, ERASED_AT_ONCE)

    async def by_rules() -> None:
        at = created_at(next(ends)) - timedelta(seconds=0.5) + timedelta(days=1)
        report = await Round(app, RetentionPolicy(default=Retention(idle=timedelta(days=1))), at).carry_out()
        assert report.sessions == ERASED_AT_ONCE, report

    async def by_ids() -> None:
        first = next(others)
        await store.delete_many([f"s-{number}" for number in range(first, first + ERASED_AT_ONCE)])

    rules, ids_ = await interleaved(by_rules, by_ids, rounds=15, warm_up=2)
    run.report("retention.erase", rules.cpu / ids_.cpu, f"{ms(rules.cpu)} / {ms(ids_.cpu)} for {ERASED_AT_ONCE}")


async def page(app: Sessions) -> None:
    assert len(await app.store.list(order="updated", limit=50)) == 50


async def fill(store: Any, size: int) -> None:
    for start in range(0, size, TOGETHER):
        await asyncio.gather(*(create(store, number) for number in range(start, min(start + TOGETHER, size))))


async def create(store: Any, number: int) -> None:
    with ids.use(clock=lambda: created_at(number)):
        at = BEGINNING + timedelta(seconds=number)
        info = AgentSessionInfo(SessionId(f"s-{number}"), AGENT.name, created_at=at, updated_at=at)
        said = AgentState.of(AGENT).with_messages(Message.user(f"Where is order {number}?"), Message.assistant("Sent."))
        await store.create(AgentSession(info, AGENT, said))
