"""A page of a list of sessions, by every filter: in a large store as in one of 1,000."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any

from benchmarks.harness import Cost, Run, interleaved, ms
from perdure import AgentDefinition, AgentSession, AgentSessionInfo, AgentState, Message, SessionId, SqliteStore
from perdure.model import ids
from perdure.model.lineage import SpawnRef

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
    "owner_tag": {"owner": "common", "tag": "odd"},
    "owner_created": {"owner": "common", "created_before": BEGINNING + timedelta(seconds=2 * RARE)},
    "common_tag": {"tag": "common", "owner": "rare"},
    "no_owner": {"owner": None},
    "top_level": {"top_level": True},
    "updated_before": {"updated_before": BEGINNING + timedelta(seconds=RARE)},
    "metadata": {"metadata": {"customer": "rare"}},
    "owner_metadata": {"metadata": {"plan": "common"}, "owner": "rare"},
}
"""The matching sessions are few and were created first: a scan that begins with the newest sessions finds them last."""


def session(number: int) -> AgentSession:
    """Return a session. The filters match the first sixty, or the hundred and twenty behind them."""
    is_rare = number < RARE
    tags = ("rare", "common") if is_rare else ("odd", "common") if number < 2 * RARE else ("common",)
    at, is_spawned = created_at(number), number >= 3 * RARE
    agent = AgentDefinition("rare" if is_rare else "common")
    info = AgentSessionInfo(
        SessionId(f"s-{number}"),
        agent.name,
        created_at=at,
        updated_at=at,
        owner="rare" if is_rare else None if 2 * RARE <= number < 3 * RARE else "common",
        spawn_ref=SpawnRef("s-0", "run", f"call-{number}", "ask") if is_spawned else None,
        tags=tags,
        parent_id=SessionId("s-0") if 0 < number < RARE else None,
    )
    state = AgentState.of(agent).with_metadata("plan", "common")
    state = state.with_metadata("customer", "rare" if is_rare else "common")
    said = state.with_messages(Message.user(f"Where is order {number}?"), Message.assistant("It was sent."))
    made = AgentSession(info, agent, said).with_indexed(("customer", "plan"))
    return made.suspended() if is_rare else made


async def measure(run: Run) -> None:
    many = run.size(40_000, 1_000_000)
    with run.folder() as folder:
        async with SqliteStore(folder / "few.db", cache=0) as few, SqliteStore(folder / "many.db", cache=0) as large:
            # Processor time: all cost is spent here, and other load on the machine does not count.
            found = await compared(few, large, many, attrgetter("cpu"))
    for key, (value, detail) in found["created"].items():
        run.report(f"lists.{key}", value, detail)
    report_worst(run, "lists.order", found["updated"])
    report_worst(run, "lists.previews", found["previews"])
    try:
        from benchmarks.bench_postgres import schema_of, server
    except ImportError as error:
        for key in ("", "_order", "_previews", "_metadata"):
            run.skip(f"lists.postgres{key}", str(error))
        return
    with server(run) as dsn:
        async with schema_of(dsn, "bench_few") as few, schema_of(dsn, "bench_many") as large:
            found = await compared(few, large, many, attrgetter("wall"))
    report_worst(run, "lists.postgres", found["created"])
    report_worst(run, "lists.postgres_order", found["updated"])
    report_worst(run, "lists.postgres_previews", found["previews"])
    by_metadata = {f"{key} by {order}": found[order][key] for order in ("created", "updated") for key in _METADATA}
    report_worst(run, "lists.postgres_metadata", by_metadata)


_METADATA = ("metadata", "owner_metadata")
Found = dict[str, tuple[float, str]]


def report_worst(run: Run, key: str, found: Found) -> None:
    worst = max(found, key=found.__getitem__)
    run.report(key, found[worst][0], f"the worst of all filters, {worst}: {found[worst][1]}")


async def compared(few: Any, large: Any, many: int, seconds: Callable[[Cost], float]) -> dict[str, Found]:
    """Return, for each order and filter, the cost of a page in a large store over that in a small one."""
    await fill(few, FEW)
    await fill(large, many)
    found: dict[str, Found] = {"created": {}, "updated": {}, "previews": {}}

    async def measure(kind: str, key: str, page: Callable[..., Any], **filters: Any) -> None:
        sides = partial(page, few, **filters), partial(page, large, **filters)
        small, long = map(seconds, await interleaved(*sides, rounds=40))
        found[kind][key] = (long / small, f"{ms(long)} at {many:,} / {ms(small)} at {FEW:,}")

    for order in ("created", "updated"):
        for key, filters in FILTERS.items():
            assert await few.list(**filters, order=order), key
            await measure(order, key, headers, **filters, order=order)
        await measure("previews", f"by {order}", previews, order=order, limit=30)
    return found


async def headers(store: Any, **filters: Any) -> None:
    await store.list(**filters)


async def previews(store: Any, **filters: Any) -> None:
    """Read a page as `sessions.list` does."""
    page = await store.list(**filters)
    found = await store.previews([info.id for info in page])
    assert len(found) == 30


async def fill(store: Any, count: int) -> None:
    for start in range(0, count, TOGETHER):
        await asyncio.gather(*(create(store, number) for number in range(start, min(start + TOGETHER, count))))


async def create(store: Any, number: int) -> None:
    """Create a session, one a second: a store in use is not filled within a minute."""
    with ids.use(clock=lambda: created_at(number)):
        await store.create(session(number))


def created_at(number: int) -> datetime:
    return BEGINNING + timedelta(seconds=number)
