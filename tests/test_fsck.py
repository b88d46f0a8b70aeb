"""A check finds no problem in a sound store, finds damage, and says what to do; it never fails itself."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests import stories
from tests.stories import KINDS, opened

import perdure
from perdure import ConfigurationError, Entry, SessionNotFound, SessionRuntime, SqliteStore, StoreError, recover
from perdure.archive import FsckReport, copy, fsck
from perdure.model.ids import use
from perdure.stores.engine import Delete
from perdure.testing import FrozenClock, ScriptedDriver
from perdure.testing.samples import new_session

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("originals")


@pytest.fixture
def told(originals: Path) -> Told:
    """Make a store with a long story in a directory."""

    async def tell(kind: str, where: Path) -> None:
        original = originals / kind
        if not original.exists():
            clock = FrozenClock(tick=0.001)
            with use(clock=clock):
                async with opened(kind, original) as store:
                    await stories.tell(store, clock)
        shutil.copytree(original, where, dirs_exist_ok=True)

    return tell


Told = Callable[[str, Path], Awaitable[None]]


async def checked(kind: str, where: Path) -> FsckReport:
    async with opened(kind, where) as store:
        return await fsck(store)


def assert_helpful(report: FsckReport) -> None:
    assert report.problems
    for problem in report.problems:
        assert problem.where
        assert problem.what
        assert len(problem.repair) > 30


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sound_store_has_no_problems(tmp_path: Path, kind: str) -> None:
    """This holds after any story, also with killed runs and erased messages."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(kind, tmp_path) as store:
            await stories.tell(store, clock)
            seen: list[tuple[int, int]] = []
            report = await fsck(store, progress=lambda done, of: seen.append((done, of)))
            assert report.problems == ()
            assert report.is_sound
            assert report.sessions == len(seen) == 11
            assert report.messages > 120
            await recover(SessionRuntime(store), stories.ledger_loops())
            assert (await fsck(store)).problems == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_store_in_which_everything_has_been_done_has_no_problems(tmp_path: Path, kind: str) -> None:
    """Sessions are adopted, compacted, redacted, posted to, run in parallel and recovered; then erased and copied."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with (
            opened(kind, tmp_path) as store,
            perdure.connect(store, driver=ScriptedDriver(lambda _: "Well.")) as sessions,
        ):
            await stories.tell(store, clock)
            await sessions.search("it")
            await recover(SessionRuntime(store), stories.ledger_loops())
            await sessions.adopt("talk", "a-fork")
            await sessions.undo("talk")
            await sessions.compact("views", keep_last=10)
            await sessions.uncompact("views")
            await store.post("views", Entry("note", {"text": "waits"}))
            await sessions.redact("talk", [(await sessions.history("talk"))[0].id])
            assert (await fsck(store)).problems == ()
            async with opened("sqlite", tmp_path / "copy") as other:
                await copy(store, other)
                assert (await fsck(other)).problems == ()
            assert await sessions.purge(status="deleted") == 1
            for each in ("talk", "a-fork", "views", "boss", "branches", "orphan"):
                await sessions.erase(each)
                assert (await fsck(store)).problems == ()
            await sessions.gc()
            assert (await fsck(store)).problems == ()


async def test_clearing_up_is_not_for_one_owner(tmp_path: Path) -> None:
    """It covers the sessions of all owners, so a connection of one owner refuses it."""
    async with SqliteStore(tmp_path / "s.db") as store:
        with pytest.raises(ConfigurationError, match="without an owner"):
            async with perdure.connect(store, owner="ada") as hers:
                await hers.gc()
        async with perdure.connect(store) as sessions:
            assert await sessions.gc() == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_under_way_is_no_problem(tmp_path: Path, kind: str) -> None:
    """A claim does not prevent a check of the saved versions."""
    async with opened(kind, tmp_path) as store:
        session = await store.create(new_session("hello"))
        await store.claim(session.id, version=1, owner="me")
        assert (await fsck(store)).problems == ()


async def test_one_session_is_checked_alone(told: Told, tmp_path: Path) -> None:
    """Problems elsewhere are not reported; an unknown id is an error."""
    await told("sqlite", tmp_path)
    damage(tmp_path, "UPDATE head SET crc = crc + 1 WHERE sid = (SELECT sid FROM session WHERE id = 'views')")
    async with opened("sqlite", tmp_path) as store:
        report = await fsck(store, session_id="talk")
        assert (report.sessions, report.problems) == (1, ())
        assert {problem.session_id for problem in (await fsck(store, session_id="views")).problems} == {"views"}
        with pytest.raises(SessionNotFound):
            await fsck(store, session_id="nobody")


def damage(where: Path, *statements: str) -> None:
    connection = apsw.Connection(str(where / "sessions.db"))
    for statement in statements:
        connection.execute(statement).fetchall()
    connection.close()


_ANY = "rowid IN (SELECT rowid FROM {} ORDER BY random() LIMIT 1)"
ROW_DAMAGE = [
    *(f"DELETE FROM {table} WHERE {_ANY.format(table)}" for table in ("msg", "head", "batch", "run", "value", "log")),
    *(f"UPDATE {table} SET crc = crc + 1 WHERE {_ANY.format(table)}" for table in ("msg", "head", "batch", "inbox")),
    *(
        f"UPDATE {table} SET body = zeroblob(length(body)) WHERE {_ANY.format(table)}"
        for table in ("msg", "head", "batch", "inbox", "value")
    ),
    "DELETE FROM inbox",
    "DELETE FROM uses",
    "DELETE FROM ref WHERE rowid = (SELECT min(rowid) FROM ref)",
    "DELETE FROM tag WHERE tag = 'vip'",
    "DELETE FROM session WHERE id = 'talk'",
    "DELETE FROM session WHERE id = 'boss'",
    "DELETE FROM meta WHERE key = 'erasures'",
    "UPDATE key SET version = 99",
    "UPDATE ref SET child = 999",
    "UPDATE msg SET pos = pos + 1000 WHERE rowid = (SELECT max(rowid) FROM msg)",
    "UPDATE head SET version = version + 100 WHERE version = 2",
    "UPDATE run SET log = 999",
    "UPDATE run SET end_pos = end_pos + 1000",
    "UPDATE session SET claim = CAST('nonsense' AS BLOB), expires = 0 WHERE id = 'talk'",
    *(
        f"UPDATE session SET {column} WHERE id = 'talk'"
        for column in (
            "version = version + 1",
            "version = version - 1",
            "status = 'suspended'",
            "agent = 'nobody'",
            "owner = 'eve'",
            "parent = 'views'",
            "created = created + 1",
            "updated = updated + 1",
            "msg_end = msg_end + 1",
            "evt_end = evt_end - 1",
            "inbox_end = inbox_end + 1",
            "log = log + 1",
            "id = 'talc'",
        )
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("statement", ROW_DAMAGE)
async def test_a_damaged_row_is_found(told: Told, tmp_path: Path, statement: str) -> None:
    """This holds for any table, whether the row is changed, moved or missing."""
    await told("sqlite", tmp_path)
    damage(tmp_path, statement)
    try:
        report = await checked("sqlite", tmp_path)
    except StoreError:
        pytest.fail("a damaged store has to be reported on")
    assert_helpful(report)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
async def test_a_damaged_page_breaks_no_check(told: Told, tmp_path: Path, seed: int) -> None:
    """Bytes overwritten anywhere in the file are reported, or were unused."""
    await told("sqlite", tmp_path)
    path, chance = tmp_path / "sessions.db", random.Random(seed)
    damage(tmp_path, "PRAGMA wal_checkpoint(TRUNCATE)")
    body = bytearray(path.read_bytes())
    place = chance.randrange(4096, len(body) - 64)
    body[place : place + 64] = chance.randbytes(64)
    path.write_bytes(body)
    try:
        async with SqliteStore(path) as store:
            report = await fsck(store)
    except StoreError:
        return  # a file that cannot even be opened raises
    if report.problems:
        assert_helpful(report)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
async def test_a_flipped_bit_in_a_file_is_found(told: Told, tmp_path: Path, seed: int) -> None:
    """This holds for any file of a file store, and any place in it."""
    await told("file", tmp_path / "sound")
    chance = random.Random(seed)
    files = sorted(path for path in (tmp_path / "sound" / "sessions").iterdir() if path.suffix in (".json", ".jsonl"))
    for number, path in enumerate(chance.sample(files, 8)):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "sound", copy)
        body = bytearray(path.read_bytes())
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        (copy / "sessions" / path.name).write_bytes(body)
        assert_helpful(await checked("file", copy))


@pytest.mark.parametrize("name", ["talk.jsonl", "a-fork.jsonl", "views.jsonl"])
async def test_a_missing_or_shortened_log_is_found(told: Told, tmp_path: Path, name: str) -> None:
    """The document that was made from it says how far it went."""
    await told("file", tmp_path)
    path = tmp_path / "sessions" / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    assert_helpful(await checked("file", tmp_path))
    path.unlink()
    assert_helpful(await checked("file", tmp_path))


async def test_a_document_that_people_have_edited_is_found(told: Told, tmp_path: Path) -> None:
    """The document is made again from the log, so no message is lost with it."""
    await told("file", tmp_path)
    path = tmp_path / "sessions" / "talk.json"
    path.write_bytes(path.read_bytes().replace(b"Do it.", b"Do so."))
    (problem, *_) = (await checked("file", tmp_path)).problems
    assert "elete" in problem.repair
    path.unlink()
    assert (await checked("file", tmp_path)).problems == ()


async def test_what_a_memory_store_lost_is_found() -> None:
    """A store without files is checked by its sessions alone."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened("memory", Path()) as store:
            await stories.tell(store, clock)
            tables: Any = store._engine._tables
            tables.answer(Delete("msg", {"pos": 0}))
            assert_helpful(await fsck(store))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["load", "dump", "read", "runs", "is_claimed"])
async def test_a_session_that_is_erased_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    """This holds for an erasure at any moment of the check."""
    async with opened(kind, tmp_path) as store:
        session = await store.create(new_session("one", "two"))
        await store.create(new_session("three"))
        original = getattr(store, moment)

        async def late(*given: Any, **options: Any) -> Any:
            monkeypatch.setattr(store, moment, original)
            await store.delete(session.id)
            return await original(*given, **options)

        monkeypatch.setattr(store, moment, late)
        assert (await fsck(store)).problems == ()
        assert not await store.exists(session.id)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE run SET first_seq = first_seq + 1 WHERE run = (SELECT max(run) FROM run WHERE first_seq < last_seq)",
        "UPDATE run SET last_seq = last_seq - 1 WHERE run = (SELECT max(run) FROM run WHERE first_seq < last_seq)",
        "DELETE FROM uses WHERE sid = (SELECT sid FROM session WHERE id = 'talk')",
    ],
)
async def test_notes_that_would_hide_or_erase_something_are_found(tmp_path: Path, told: Told, damage: str) -> None:
    """The notes are the end of a run, and the values that a session uses: only the check finds them wrong in time."""
    await told("sqlite", tmp_path)
    db = apsw.Connection(str(tmp_path / "sessions.db"))
    db.execute(damage)
    assert db.changes()
    db.close()
    assert_helpful(await checked("sqlite", tmp_path))
