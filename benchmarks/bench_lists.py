"""A page of a list of sessions, by every filter: in a large store as in one of 1,000."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any

from benchmarks.harness import Cost, Run, interleaved, ms
from perdure import AgentDefinition, AgentSession, AgentSessionInfo, AgentState, SessionId, SqliteStore

FEW, RARE = 1_000, 60
BEGINNING = datetime(2025, 1, 1, tzinfo=UTC)
TOGETHER = 500
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "agent": {"agent": "rare"},
    "owner": {"owner": "rare"},
    "tag": {"tag": "rare"},
    "parent": {"parent": "s-0"},
    "status": {"status": "suspended"},
    "created_before": {"created_before": BEGINNING + timedelta(seconds=RARE)},
    "created_after": {"created_after": BEGINNING + timedelta(seconds=FEW - RARE)},
    "owner_tag": {"owner": "rare", "tag": "rare"},
    "owner_created": {"owner": "common", "created_before": BEGINNING + timedelta(seconds=2 * RARE)},
    "common_tag": {"tag": "common", "owner": "rare"},
}
"""What is asked for is rare and was created first: whatever goes through the newest sessions first finds it last."""


def session(number: int) -> AgentSession:
    """Return a session, one a second. The first sixty are those that filters ask for."""
    is_rare = number < RARE
    at = BEGINNING + timedelta(seconds=number)
    agent = AgentDefinition("rare" if is_rare else "common")
    info = AgentSessionInfo(
        SessionId(f"s-{number}"),
        agent.name,
        created_at=at,
        updated_at=at,
        owner="rare" if is_rare else "common",
        tags=("rare", "common") if is_rare else ("common",),
        parent_id=SessionId("s-0") if 0 < number < RARE else None,
    )
    made = AgentSession(info, agent, AgentState.of(agent))
    return made.suspended() if is_rare else made


async def measure(run: Run) -> None:
    many = run.size(40_000, 1_000_000)
    with run.folder() as folder:
        async with SqliteStore(folder / "few.db", cache=0) as few, SqliteStore(folder / "many.db", cache=0) as large:
            # Of the processor's time: it all is spent here, and what else the machine does counts for nothing.
            for key, (value, detail) in (await compared(few, large, many, attrgetter("cpu"))).items():
                run.report(f"lists.{key}", value, detail)
    try:
        from benchmarks.bench_postgres import schema_of, server
    except ImportError as error:
        run.skip("lists.postgres", str(error))
        return
    with server(run) as dsn:
        async with schema_of(dsn, "bench_few") as few, schema_of(dsn, "bench_many") as large:
            found = await compared(few, large, many, attrgetter("wall"))
    worst = max(found, key=found.__getitem__)
    run.report("lists.postgres", found[worst][0], f"the worst of all filters, {worst}: {found[worst][1]}")


async def compared(few: Any, large: Any, many: int, seconds: Callable[[Cost], float]) -> dict[str, tuple[float, str]]:
    """Return, for each filter, what a page costs in a large store over what it costs in a small one."""
    early, later = await fill(few, FEW), await fill(large, many)
    asked = {key: (filters, filters) for key, filters in FILTERS.items()}
    asked["updated_before"] = ({"updated_before": early}, {"updated_before": later})
    found = {}
    for key, (of_few, of_many) in asked.items():
        assert await few.list(**of_few), key
        sides = partial(few.list, **of_few), partial(large.list, **of_many)
        small, long = map(seconds, await interleaved(*sides, rounds=40))
        found[key] = (long / small, f"{ms(long)} at {many:,} / {ms(small)} at {FEW:,}")
    return found


async def fill(store: Any, count: int) -> datetime:
    """Create so many sessions; return the moment when the rare ones had been created."""
    await create(store, range(RARE))
    moment = datetime.now(UTC)
    for start in range(RARE, count, TOGETHER):
        await create(store, range(start, min(start + TOGETHER, count)))
    return moment


async def create(store: Any, numbers: range) -> None:
    await asyncio.gather(*(store.create(session(number)) for number in numbers))
