"""Repair writes again what follows from what is stored, says what it did, and touches nothing that was said."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests import stories
from tests.stores.test_check import IN_SEARCH_INDEX, IN_SQLITE, Damage, assert_named, execute, of
from tests.stories import opened

from perdure import ConfigurationError, MemoryStore, SqliteStore
from perdure.archive import fsck, repair
from perdure.model.ids import use
from perdure.stores.jobs.repairing import REPAIRED
from perdure.testing import FrozenClock

BODIES = (
    "SELECT 'm', log, pos, crc, body FROM msg UNION ALL SELECT 'h', sid, version, crc, body FROM head ORDER BY 1, 2, 3"
)
# What follows from versions, messages and rows. All else is left to a backup, to `gc`, or to somebody who knows.
FOLLOWS = (
    *(
        "evt_end = evt_end - 1",
        "expires =",
        "status =",
        "agent =",
        "owner = 'eve'",
        "parent =",
        "created =",
        "updated =",
    ),
    *("INTO tag", "FROM tag", "UPDATE tag", "FROM uses", "INTO uses", "INTO ref", "UPDATE ref", "DELETE FROM ref"),
    *("since = NULL", "sqlite_sequence", "DROP INDEX"),
)


def is_left(damage: Damage) -> bool:
    return not any(each in damage.done for each in FOLLOWS) or damage.done.startswith(
        ("DELETE FROM value", "UPDATE token")
    )


REPAIRED_IN_SQLITE = [each for each in IN_SQLITE if not is_left(each)]
LEFT_IN_SQLITE = [each for each in IN_SQLITE if is_left(each)]


def bodies(path: Path) -> list[Any]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(BODIES).fetchall()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a store in which a good deal has happened, told once."""
    where = tmp_path_factory.mktemp("original")

    async def tell() -> None:
        clock = FrozenClock(tick=0.001)
        with use(clock=clock):
            async with opened("sqlite", where) as store:
                await stories.tell(store, clock)
                await store.search("it")

    asyncio.run(tell())
    return where


def placed(original: Path, where: Path) -> Path:
    shutil.copytree(original, where, dirs_exist_ok=True)
    return where / "sessions.db"


@pytest.mark.sample(6)
@pytest.mark.parametrize("damage", REPAIRED_IN_SQLITE, ids=lambda damage: str(damage.done)[:90])
async def test_what_follows_from_versions_is_repaired(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """It is found before, a dry run changes nothing, the next check is clean, and the session's record tells of it."""
    path = placed(original, tmp_path)
    execute(path, damage.done)
    said = bodies(path)
    async with SqliteStore(path) as store:
        assert_named(await fsck(store), damage)
        dry = await repair(store, dry_run=True)
        assert dry.repaired
        assert (await fsck(store)).problems == dry.found
        report = await repair(store)
        assert report.left == ()
        # One repair may do for two: a fork of a fork has its notes by the other.
        assert {each.where for each in report.repaired} - {"the search index"} <= {each.where for each in dry.repaired}
        for session_id in {each.session_id for each in report.repaired if each.session_id}:
            entries = [each for each in await store.read(session_id) if each.kind == REPAIRED]
            if not any(each.where == "its tags in lists" for each in report.repaired):
                assert entries[-1].body["repaired"]
        assert (await repair(store)).repaired == ()
    assert bodies(path) == said


@pytest.mark.sample(8)
@pytest.mark.parametrize("damage", LEFT_IN_SQLITE, ids=lambda damage: str(damage.done)[:90])
async def test_what_would_have_to_be_guessed_is_left(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """It is reported with what helps, no body is changed, and nothing is wrong that was not wrong before."""
    path = placed(original, tmp_path)
    execute(path, damage.done.format(erasures="value = -1 WHERE key = 'erasures'"))
    said = bodies(path)
    async with SqliteStore(path) as store:
        before = await fsck(store)
        report = await repair(store)
        assert report.left
        assert {(each.session_id, each.where) for each in report.left} <= {
            (each.session_id, each.where) for each in before.problems
        }
        assert all(len(each.repair) > 30 for each in report.left)
    assert bodies(path) == said


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", IN_SEARCH_INDEX, ids=lambda damage: damage.done[:60])
async def test_a_search_index_is_made_anew(
    original: Path,
    tmp_path: Path,
    damage: Damage,
) -> None:
    """It finds again what is there."""
    path = placed(original, tmp_path)
    execute(tmp_path / "sessions.db-search", damage.done)
    async with SqliteStore(path) as store:
        report = await repair(store)
        assert {each.where for each in report.repaired} == {"the search index"}
        assert report.left == ()
        assert await store.search("it")


async def test_flipped_bits_in_indexes_are_repaired(original: Path, tmp_path: Path) -> None:
    """Of an index all is made anew. Where SQLite cannot even clear it, that is reported."""
    rounds = 100 if os.environ.get("PERDURE_TORTURE") else 4
    path = placed(original, tmp_path / "original")
    pages = index_pages(path)
    rng, mended, found = random.Random(17), 0, 0
    for number in range(rounds):
        where = tmp_path / str(number)
        shutil.copytree(path.parent, where)
        flip(where / path.name, rng, pages)
        async with SqliteStore(where / path.name) as store:
            before = await fsck(store)
            if before.problems:
                found += 1
                report = await repair(store)
                mended += report.is_sound
                assert report.is_sound or all(each.repair for each in report.left)
                if report.is_sound:
                    assert (await fsck(store)).is_sound
        shutil.rmtree(where)
    assert found
    assert mended >= found * 0.6, (mended, found)


def index_pages(path: Path) -> list[int]:
    """Return the numbers of all leaves of indexes that follow from tables."""
    connection = apsw.Connection(str(path))
    sql = (
        "SELECT pageno FROM dbstat JOIN sqlite_schema AS of ON of.name = dbstat.name"
        " WHERE of.type = 'index' AND dbstat.pagetype = 'leaf'"
    )
    try:
        return [number for (number,) in connection.execute(sql)]
    finally:
        connection.close()


def flip(path: Path, rng: random.Random, pages: list[int]) -> None:
    """Flip a bit in what a page holds; the unused middle of it would not matter."""
    raw = bytearray(path.read_bytes())
    page = rng.choice(pages)
    start = (page - 1) * 4096
    content = int.from_bytes(raw[start + 5 : start + 7], "big") or 65536
    if content < 4096:
        raw[start + rng.randrange(content, 4096)] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


IN_POSTGRES = (
    Damage("UPDATE session SET owner = 'eve' WHERE id = 'talk'", "talk", "column owner"),
    Damage(f"DELETE FROM uses WHERE sid = {of('talk')}", "talk", "a version names it"),
    Damage(f"DELETE FROM ref WHERE child = {of('a-fork')}", "a-fork", "that is not noted"),
    Damage("DELETE FROM claimed", "killed", "its claim: it is not noted"),
    Damage("DELETE FROM waiting", "talk", "what waits in its inbox"),
    Damage("UPDATE tag SET agent = 'eve' WHERE tag = 'vip'", "talk", "its tags in lists"),
    Damage("DELETE FROM word; DELETE FROM unindexed", None, "the search index of log"),
    Damage(f"UPDATE head SET hashes = ARRAY[]::text[] WHERE sid = {of('talk')}", "talk", "what is fetched along"),
    Damage("SELECT setval(pg_get_serial_sequence('session', 'sid'), 1)", None, "the sequence of session"),
)


async def test_a_postgres_schema_is_repaired(tmp_path: Path) -> None:
    """Tables that say again what others say, one after the other: found, written again, and clean after."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("postgres", tmp_path) as store:
            await stories.tell(store, clock)
            await store.search("it")
    async with opened("postgres", tmp_path) as store:
        several = 1 if os.environ.get("PERDURE_TORTURE") else len(IN_POSTGRES)
        for start in range(0, len(IN_POSTGRES), several):
            damages = IN_POSTGRES[start : start + several]
            for statement in ";".join(damage.done for damage in damages).split(";"):
                await store.link.rows(statement)
            report = await repair(store)
            for damage in damages:
                told = [f"{each.where}: {each.what}" for each in report.found if each.session_id == damage.session]
                assert any(damage.said in each for each in told), (damage, report.found)
            assert report.left == (), damages
        assert [each.kind for each in await store.read("talk")].count(REPAIRED) >= 1
        assert await store.search("it")


async def test_a_directory_is_repaired(tmp_path: Path) -> None:
    """Documents and hints are made anew from the logs; a damaged log is left to a backup."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("file", tmp_path) as store:
            await stories.tell(store, clock)
            await store.waiting()
    where = tmp_path / "sessions"
    document = (where / "talk.json").read_bytes()
    (where / "talk.json").write_bytes(document.replace(b"ada", b"eve"))
    (where / "views.json").write_bytes(b"{}")
    (where / ".waiting" / "talk").unlink()
    async with opened("file", tmp_path) as store:
        dry = await repair(store, dry_run=True)
        assert {each.where for each in dry.repaired} == {"talk.json", "views.json", ".waiting/talk"}
        assert (where / "talk.json").read_bytes() != document
        report = await repair(store)
        assert {each.where for each in report.repaired} == {each.where for each in dry.repaired}
        assert report.left == ()
    assert (where / "talk.json").read_bytes() == document
    log = where / "boss.jsonl"
    raw = log.read_bytes()
    log.write_bytes(raw[:200] + b"?" + raw[201:])
    damaged = log.read_bytes()
    async with opened("file", tmp_path) as store:
        report = await repair(store)
        assert report.left
    assert log.read_bytes() == damaged


async def test_a_store_of_another_kind_is_refused() -> None:
    """One in memory has nothing to repair, and is looked at all the same."""
    async with MemoryStore() as store:
        assert (await repair(store)).is_sound
    with pytest.raises(ConfigurationError, match="cannot be repaired"):
        await repair(object())  # type: ignore[arg-type]
