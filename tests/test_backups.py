"""A backup is one state of a whole store, a restore gives that state back, and damage is never taken for a backup."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests import postgres_server, stories
from tests.stories import opened

from perdure import (
    AgentDefinition,
    ConfigurationError,
    FileKeyRing,
    FileStore,
    InjectMessage,
    InvalidData,
    MemoryStore,
    Message,
    PostgresStore,
    SessionConflict,
    SessionRuntime,
    SqliteStore,
    StoreError,
    connect,
    redacting,
    redactors,
)
from perdure.archive import fsck, repair
from perdure.archive.backups import packs
from perdure.archive.backups.deposit import Packing
from perdure.backups import Backup, backup, list_backups, restore, verify_backups
from perdure.errors import BackupDamaged, BackupNotFound, RestoreUnfinished, StoreNotEmpty
from perdure.model.ids import SessionId, use
from perdure.model.session import SessionStatus
from perdure.protocols import Change
from perdure.stores.folder import Folder
from perdure.stores.jobs.archive.archived import is_same
from perdure.testing import FrozenClock

KINDS = ("file", "sqlite", "postgres")


def closed(kind: str, where: Path) -> Any:
    """Return a store that is not open."""
    if kind == "sqlite":
        return SqliteStore(where / "sessions.db")
    if kind == "postgres":
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
    return FileStore(where / "sessions")


async def told(kind: str, where: Path) -> None:
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with opened(kind, where) as store:
            await stories.tell(store, clock)


async def ids(store: Any) -> set[str]:
    pages = [await store.list(limit=1000), await store.list(limit=1000, status=SessionStatus.DELETED)]
    return {info.id for page in pages for info in page}


async def say(store: Any, session_id: str, *texts: str) -> int:
    runtime = SessionRuntime(store)
    return (await runtime.execute(session_id, InjectMessage(*map(Message.user, texts)))).version


async def begun(store: Any, session_id: str, *texts: str) -> None:
    await SessionRuntime(store).create(AgentDefinition("talker"), session_id=session_id)
    await say(store, session_id, *texts)


async def texts(store: Any, session_id: str) -> list[str]:
    session = await store.load(session_id)
    assert session is not None
    return [message.text for message in session.state.messages]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_store_has_every_session_as_it_was(kind: str, tmp_path: Path) -> None:
    """Versions, forks, hidden and interrupted sessions, keys, timers and tokens come back; a check finds no fault."""
    await told(kind, tmp_path / "a")
    async with opened(kind, tmp_path / "a") as store:
        made = (await backup(store, tmp_path / "backups")).backup
        expected = {each: await store.dump(each) for each in await ids(store) if not await store.is_claimed(each)}
        tokens, timers, running = (
            await store.tokens(),
            await store.timers(),
            {run.session_id for run in await store.running()},
        )
    report = await restore(tmp_path / "backups", closed(kind, tmp_path / "b"), verify=True)
    assert (report.backup, report.is_verified, report.problems) == (made, True, ())
    assert report.lapsed == len(running) > 0
    async with opened(kind, tmp_path / "b") as store:
        assert await ids(store) >= expected.keys()
        for session_id, archived in expected.items():
            assert is_same(archived, await store.dump(session_id)), session_id
        assert list(await store.tokens()) == list(tokens)
        assert [(each.name, each.due) for each in await store.timers()] == [(each.name, each.due) for each in timers]
        assert {*await store.lapsed()} >= running
        await say(store, "talk", "It goes on.")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_backup_adds_what_has_changed(kind: str, tmp_path: Path) -> None:
    """Each backup is complete, though the second writes little; a restore by id or time gives each state."""
    async with opened(kind, tmp_path / "a") as store:
        for number in range(20):
            await begun(store, f"s{number}", *(os.urandom(2000).hex() for _ in range(10)))
        first = (await backup(store, tmp_path / "backups")).backup
        await say(store, "s3", "one turn")
        second = (await backup(store, tmp_path / "backups")).backup
        await begun(store, "later", "hello")
        third = (await backup(store, tmp_path / "backups")).backup
    assert 0 < second.added < first.added / 5
    assert [each.id for each in await list_backups(tmp_path / "backups")] == [first.id, second.id, third.id]
    for number, (at, version, is_there) in enumerate(
        [
            (first.id, 2, False),
            (second.id, 3, False),
            (second.at + timedelta(microseconds=1), 3, False),
            (None, 3, True),
        ]
    ):
        where = tmp_path / f"restored-{number}"
        await restore(tmp_path / "backups", closed(kind, where), at=at)
        async with opened(kind, where) as store:
            session = await store.load("s3")
            assert session is not None
            assert session.version == version
            assert await store.exists("later") is is_there


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_store_can_be_backed_up_again(kind: str, tmp_path: Path) -> None:
    """It is the same store: its backups continue the same series, and share equal chunks."""
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "x" * 100_000)
        first = (await backup(store, tmp_path / "backups")).backup
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"))
    async with opened(kind, tmp_path / "b") as store:
        await say(store, "s", "after")
        second = (await backup(store, tmp_path / "backups")).backup
    assert second.store == first.store
    await restore(tmp_path / "backups", closed(kind, tmp_path / "c"), verify=True)
    async with opened(kind, tmp_path / "c") as store:
        assert (await texts(store, "s"))[-1] == "after"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restore_writes_over_nothing(kind: str, tmp_path: Path) -> None:
    """A store that has sessions is refused and unchanged; an empty one is filled."""
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "old")
        await backup(store, tmp_path / "backups")
        await say(store, "s", "new")
    with pytest.raises(StoreNotEmpty) as refused:
        await restore(tmp_path / "backups", closed(kind, tmp_path / "a"))
    assert refused.value.sessions == 1
    async with opened(kind, tmp_path / "a") as store:
        assert await texts(store, "s") == ["old", "new"]
    async with opened(kind, tmp_path / "b") as store:
        assert await ids(store) == set()
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"))
    async with opened(kind, tmp_path / "b") as store:
        assert await texts(store, "s") == ["old"]


async def test_a_schema_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """Its tables stay, also those with perdure's names, and so do its functions."""
    async with opened("postgres", tmp_path / "a") as store:
        await begun(store, "s", "old")
        await backup(store, tmp_path / "backups")
    schema = sql.Identifier(postgres_server.schema_of(tmp_path / "b"))
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
        connection.execute(sql.SQL("SET search_path = {}").format(schema))
        connection.execute("CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        connection.execute("CREATE TABLE session (a int)")
        with pytest.raises(StoreError, match="tables that are not perdure's: session"):
            await restore(tmp_path / "backups", closed("postgres", tmp_path / "b"))
        assert connection.execute("SELECT a FROM session").fetchall() == []
        connection.execute("DROP TABLE session")
        await restore(tmp_path / "backups", closed("postgres", tmp_path / "b"), verify=True)
        connection.execute("CREATE TRIGGER touched BEFORE UPDATE ON session FOR EACH ROW EXECUTE FUNCTION touch()")
    async with opened("postgres", tmp_path / "b") as store:
        assert await texts(store, "s") == ["old"]


def _text(path: Path) -> Path:
    path.write_text("no store")
    return path


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _below_a_text(path: Path) -> Path:
    return _text(path) / "a" / "store"


def _closed_directory(path: Path) -> Path:
    path.mkdir(0o500)
    return path / "a" / "store"


@pytest.mark.parametrize("kind", ["sqlite", "file"])
@pytest.mark.parametrize("made", [_text, _directory, _pipe, _below_a_text, _closed_directory])
async def test_a_place_for_no_store_is_refused(kind: str, made: Callable[[Path], Path], tmp_path: Path) -> None:
    """The error names the place and says what to do. No file is written there or beside it."""
    if made is _closed_directory and os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    if (kind, made) == ("file", _directory):
        pytest.skip("an empty directory is a place for such a store")
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "old")
        await backup(store, tmp_path / "backups")
    place = made(tmp_path / "place")
    before = _seen(tmp_path)
    stores: dict[str, Any] = {"sqlite": SqliteStore, "file": FileStore}
    with pytest.raises(StoreError, match="place") as refused:
        await restore(tmp_path / "backups", stores[kind](place))
    assert "another place" in refused.value.advice
    assert _seen(tmp_path) == before


def _seen(path: Path) -> list[tuple[str, int, int]]:
    return sorted((str(each), each.stat().st_mode, each.stat().st_size) for each in path.glob("*"))


class Writers:
    """Tasks that write while a backup is made: turns in sessions, pairs of sessions in one commit, and new forks."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._runtime = SessionRuntime(store)
        self.acknowledged: dict[str, int] = {}
        self.is_over = False

    async def begin(self) -> None:
        for name in ("a", "b", "c", "left", "right"):
            created = await self._runtime.create(AgentDefinition("talker"), session_id=name)
            self.acknowledged[name] = created.version

    async def run(self) -> None:
        await asyncio.gather(*(self._talk(name) for name in "abc"), self._pair(), self._fork())

    async def _talk(self, name: str) -> None:
        while not self.is_over:
            said = await self._runtime.execute(name, InjectMessage(Message.user("x" * 300), Message.assistant("y")))
            self.acknowledged[name] = said.version
            await asyncio.sleep(0)

    async def _pair(self) -> None:
        while not self.is_over:
            changes = []
            for name in ("left", "right"):
                session = await self._store.load(name)
                changes.append(Change(await InjectMessage(Message.user("both")).execute_on(session)))
            with suppress(SessionConflict):
                for saved in await self._store.save_all(changes):
                    self.acknowledged[saved.id] = saved.version
            await asyncio.sleep(0)

    async def _fork(self) -> None:
        number = 0
        while not self.is_over:
            session = await self._runtime.get_session("a")
            fork = await self._runtime.create(session.definition, session_id=f"new-{number}")
            self.acknowledged[fork.id] = fork.version
            number += 1
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_backup_beside_writers_is_one_state(kind: str, tmp_path: Path) -> None:
    """Each session is at an acknowledged version, and two that are saved together are never torn apart."""
    rounds = 8 if os.environ.get("PERDURE_TORTURE") else 2
    made: list[tuple[Backup, dict[str, int], dict[str, int]]] = []
    async with opened(kind, tmp_path / "a") as store:
        writers = Writers(store)
        await writers.begin()
        writing = asyncio.create_task(writers.run())
        for _ in range(rounds):
            await asyncio.sleep(0.05)
            before = dict(writers.acknowledged)
            report = await backup(store, tmp_path / "backups")
            made.append((report.backup, before, dict(writers.acknowledged)))
        writers.is_over = True
        await writing
    for number, (each, before, after) in enumerate(made):
        where = tmp_path / f"restored-{number}"
        report = await restore(tmp_path / "backups", closed(kind, where), at=each.id, verify=True)
        assert report.problems == ()
        async with opened(kind, where) as store:
            found = {info.id: info.version for info in await store.list(limit=1000)}
            assert before.items() <= {**found, **{k: v for k, v in before.items() if found.get(k, 0) >= v}}.items()
            # A save without an answer when the backup ended may be in it.
            assert all(version <= after.get(name, 1) + 1 for name, version in found.items())
            assert found["left"] == found["right"]


async def test_one_turn_in_a_store_of_50_mb_adds_little(tmp_path: Path) -> None:
    """It adds less than 2 % of the first backup, also if the write-ahead log was restarted in between."""
    path = tmp_path / "sessions.db"
    rng = random.Random(5)
    async with SqliteStore(path) as store:
        runtime = SessionRuntime(store)
        for number in range(25):
            await runtime.create(AgentDefinition("talker"), session_id=f"s{number}")
            said = [Message.user(rng.randbytes(20_000).hex()) for _ in range(50)]
            await runtime.execute(f"s{number}", InjectMessage(*said))
        first = (await backup(store, tmp_path / "backups")).backup
        await say(store, "s7", "a question", "an answer")
        second = (await backup(store, tmp_path / "backups")).backup
    async with SqliteStore(path) as store:
        await say(store, "s9", "a question", "an answer")
        third = (await backup(store, tmp_path / "backups")).backup
    assert first.bytes > 50_000_000
    assert second.added < first.added * 0.02
    assert third.added < first.added * 0.02
    restored = tmp_path / "restored.db"
    for each, name in ((second, "s7"), (third, "s9")):
        await restore(tmp_path / "backups", SqliteStore(restored), at=each.id)
        async with SqliteStore(restored) as store:
            assert (await texts(store, name))[-2:] == ["a question", "an answer"]
        restored.unlink()


async def test_what_the_log_proves_unchanged_is_what_would_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backups that skip pages equal ones that read all: after turns, checkpoints, erasures and growth."""
    rng = random.Random(3)
    skipped: list[int] = []
    put_known = Packing.put_known
    monkeypatch.setattr(Packing, "put_known", lambda *given: skipped.append(number) or put_known(*given))
    async with SqliteStore(tmp_path / "a.db") as store:
        for number in range(12):
            name = f"s{rng.randrange(4)}"
            if not await store.exists(name):
                await begun(store, name, rng.randbytes(rng.randrange(40_000)).hex())
            elif rng.random() < 0.2:
                await store.delete(name)
            else:
                await say(store, name, rng.randbytes(rng.randrange(20_000)).hex())
            if number in (4, 9):
                await asyncio.sleep(1.1)  # an idle writer empties its log, which the next commit restarts
            quick = (await backup(store, tmp_path / "quick")).backup
            slow = (await backup(store, tmp_path / f"slow-{number}")).backup
            assert (quick.chunks, quick.catalog) == (slow.chunks, slow.catalog)
    assert len({*skipped}) > 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flipped_byte_is_found_wherever_it_is(kind: str, tmp_path: Path) -> None:
    """In a chunk, an index or a manifest: verify names it, and a restore raises it and leaves no store that opens."""
    rounds = 400 if os.environ.get("PERDURE_TORTURE") else 12
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "x" * 3000, "y" * 70_000)
        made = (await backup(store, tmp_path / "backups")).backup
    files = [path for name in ("packs", "backups") for path in (tmp_path / "backups" / name).iterdir()]
    rng = random.Random(11)
    for number in range(rounds):
        path = files[number % len(files)]
        sound = path.read_bytes()
        place = rng.randrange(len(sound))
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << rng.randrange(8)]) + sound[place + 1 :])
        report = await verify_backups(tmp_path / "backups")
        assert not report.is_sound
        assert [key for key, _ in report.damaged] == [made.id]
        assert report.problems[0].path == str(path)
        if number < 4:
            with pytest.raises(BackupDamaged) as damaged:
                await restore(tmp_path / "backups", closed(kind, tmp_path / "b"))
            assert str(path) in str(damaged.value) or damaged.value.chunk is not None
            await assert_unfinished_or_absent(kind, tmp_path / "b")
        path.write_bytes(sound)
    assert (await verify_backups(tmp_path / "backups")).is_sound
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"), verify=True)


async def assert_unfinished_or_absent(kind: str, where: Path) -> None:
    """Assert that nothing there passes for the store: it is marked as unfinished, or absent."""
    try:
        async with opened(kind, where) as store:
            assert await ids(store) == set()
            if kind != "postgres":
                shutil.rmtree(where)
    except RestoreUnfinished:
        pass


async def test_a_damaged_chunk_is_written_again_by_a_full_backup(tmp_path: Path) -> None:
    """Backups that share the chunk are whole again, too."""
    async with SqliteStore(tmp_path / "a.db") as store:
        await begun(store, "s", "x" * 100_000)
        first = (await backup(store, tmp_path / "backups")).backup
        (pack,) = (tmp_path / "backups" / "packs").iterdir()
        raw = pack.read_bytes()
        pack.write_bytes(raw[:50_000] + b"?" + raw[50_001:])
        await backup(store, tmp_path / "backups", full=True)
    report = await verify_backups(tmp_path / "backups")
    assert report.is_sound
    assert len(report.unneeded) == 1
    await restore(tmp_path / "backups", SqliteStore(tmp_path / "b.db"), at=first.id, verify=True)


@pytest.mark.parametrize("at", [50_000, -20], ids=["chunk", "index"])
async def test_damage_that_no_backup_needs_is_a_warning(tmp_path: Path, at: int) -> None:
    """A full backup has written all chunks again. The damaged file is named, and the directory counts as sound."""
    target = tmp_path / "backups"
    async with SqliteStore(tmp_path / "a.db") as store:
        await begun(store, "s", "x" * 100_000)
        await backup(store, target)
        (pack,) = (target / "packs").iterdir()
        raw = bytearray(pack.read_bytes())
        raw[at] ^= 4
        pack.write_bytes(raw)
        damaged = await verify_backups(target)
        assert (damaged.is_sound, len(damaged.problems), damaged.unneeded) == (False, 1, ())
        await backup(store, target, full=True)
    report = await verify_backups(target)
    assert (report.is_sound, report.problems, len(report.backups)) == (True, (), 2)
    assert [each.path for each in report.unneeded] == [str(pack)]
    if report.unneeded[0].chunk is None:
        pack.unlink()
        assert (await verify_backups(target)).unneeded == ()


async def test_old_backups_are_removed_with_what_only_they_need(tmp_path: Path) -> None:
    """`keep` counts the backups of this store; those of another in the same directory stay."""
    target = tmp_path / "backups"
    async with SqliteStore(tmp_path / "other.db") as other:
        await begun(other, "other", "mine")
        await backup(other, target)
    async with SqliteStore(tmp_path / "a.db") as store:
        await begun(store, "s", "x" * 400_000)
        for _ in range(3):
            await say(store, "s", os.urandom(100_000).hex())
            await backup(store, target)
        size = sum(path.stat().st_size for path in (target / "packs").iterdir())
        await store.delete("s")
        await begun(store, "t", "small")
        report = await backup(store, target, keep=1)
    assert len(report.removed) == 3
    assert report.freed > size / 2
    assert sum(path.stat().st_size for path in (target / "packs").iterdir()) < size / 2
    assert (await verify_backups(target)).is_sound
    assert len(await list_backups(target)) == 2
    await restore(target, SqliteStore(tmp_path / "b.db"), at=report.backup.id, verify=True)
    with pytest.raises(InvalidData, match="several stores"):
        await restore(target, SqliteStore(tmp_path / "c.db"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_disk_leaves_earlier_backups_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do; with room again, the next backup cleans up and succeeds."""
    async with opened(kind, tmp_path / "a") as store:
        await begun(store, "s", "old")
        first = (await backup(store, tmp_path / "backups")).backup
        await say(store, "s", *(os.urandom(30_000).hex() for _ in range(30)))
        written = 0
        really = os.writev

        def writev(handle: int, parts: list[bytes]) -> int:
            nonlocal written
            written += sum(map(len, parts))
            if written > 1 << 20:
                raise OSError(28, os.strerror(28))
            return really(handle, parts)

        with monkeypatch.context() as patched:
            patched.setattr(packs.os, "writev", writev)
            with pytest.raises(StoreError, match="No space left") as refused:
                await backup(store, tmp_path / "backups")
        assert "Free some space" in refused.value.advice
        assert (await verify_backups(tmp_path / "backups")).backups == (first,)
        await backup(store, tmp_path / "backups")
    assert list((tmp_path / "backups" / "unfinished").iterdir()) == []
    assert not [path for path in (tmp_path / "backups" / "packs").iterdir() if path.suffix == ".tmp"]
    await restore(tmp_path / "backups", closed(kind, tmp_path / "b"), verify=True)


async def test_a_cancelled_backup_adds_none(tmp_path: Path) -> None:
    """The store keeps working, and the next backup succeeds."""
    async with SqliteStore(tmp_path / "a.db") as store:
        for number in range(5):
            await begun(store, f"s{number}", *(os.urandom(20_000).hex() for _ in range(20)))
        making = asyncio.create_task(backup(store, tmp_path / "backups", progress=lambda done, of: making.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await making
        assert await list_backups(tmp_path / "backups") == []
        await backup(store, tmp_path / "backups")
    assert (await verify_backups(tmp_path / "backups")).is_sound


async def test_progress_is_told(tmp_path: Path) -> None:
    """A backup, a check and a restore report growing bytes, up to all of them."""
    told: list[tuple[int, int]] = []
    async with SqliteStore(tmp_path / "a.db") as store:
        await begun(store, "s", *(os.urandom(20_000).hex() for _ in range(60)))
        made = (await backup(store, tmp_path / "backups", progress=lambda *each: told.append(each))).backup
        await asyncio.sleep(0)
    assert told == sorted(told)
    assert told[-1] == (made.bytes, made.bytes)
    for verb in (verify_backups, lambda target, **given: restore(target, SqliteStore(tmp_path / "b.db"), **given)):
        told.clear()
        await verb(tmp_path / "backups", progress=lambda *each: told.append(each))
        await asyncio.sleep(0)
        assert told[-1][0] > 2_000_000


async def test_what_cannot_be_backed_up_or_restored_is_refused(tmp_path: Path) -> None:
    """Each raises an error of its own kind, and writes nothing."""
    async with MemoryStore() as memory:
        with pytest.raises(ConfigurationError, match="MemoryStore cannot be backed up"):
            await backup(memory, tmp_path / "backups")
    with pytest.raises(BackupNotFound):
        await restore(tmp_path / "backups", SqliteStore(tmp_path / "b.db"))
    assert os.listdir(tmp_path) == []
    async with SqliteStore(tmp_path / "a.db") as store:
        made = (await backup(store, tmp_path / "backups")).backup
        for keep in (0, -1, True, "2"):
            with pytest.raises(InvalidData):
                await backup(store, tmp_path / "backups", keep=keep)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="not empty"):
            await backup(store, tmp_path)
        with pytest.raises(BackupNotFound):
            await restore(tmp_path / "backups", SqliteStore(tmp_path / "b.db"), at="1999")
        with pytest.raises(BackupNotFound):
            await restore(tmp_path / "backups", SqliteStore(tmp_path / "b.db"), at=datetime(1999, 1, 1, tzinfo=UTC))
        with pytest.raises(ConfigurationError, match="is of a sqlite store"):
            await restore(tmp_path / "backups", FileStore(tmp_path / "files"))
        assert made.id[:10] in str(await list_backups(tmp_path / "backups"))
    async with connect("memory://", owner="ada") as sessions:
        with pytest.raises(ConfigurationError, match="whole store"):
            await sessions.backup(tmp_path / "backups")


async def test_two_backups_into_one_directory_take_turns(tmp_path: Path) -> None:
    """The second one raises at once, and says why."""
    async with SqliteStore(tmp_path / "a.db") as store, SqliteStore(tmp_path / "b.db") as other:
        for each in (store, other):
            await begun(each, "s", *(os.urandom(20_000).hex() for _ in range(40)))
        done = await asyncio.gather(
            *(backup(each, tmp_path / "backups") for each in (store, other)), return_exceptions=True
        )
    failed = [each for each in done if isinstance(each, BaseException)]
    assert all(isinstance(each, StoreError) and "under way" in str(each) for each in failed)
    assert len(failed) < 2
    assert (await verify_backups(tmp_path / "backups")).is_sound


async def test_two_first_backups_into_a_new_directory_take_turns(tmp_path: Path) -> None:
    """Both find no directory. One makes it, and the other is told that a backup is under way."""
    async with SqliteStore(tmp_path / "a.db") as store, SqliteStore(tmp_path / "b.db") as other:
        for each in (store, other):
            await begun(each, "s", "Hello")
        for number in range(5):
            target = tmp_path / f"backups-{number}"
            done = await asyncio.gather(backup(store, target), backup(other, target), return_exceptions=True)
            failed = [str(each) for each in done if isinstance(each, BaseException)]
            assert [each for each in failed if "under way" not in each] == []
            assert len(failed) < 2
            assert (await verify_backups(target)).is_sound


async def test_sessions_are_backed_up_by_the_face(tmp_path: Path) -> None:
    """`sessions.backup` is the same call on an open connection."""
    async with connect(f"sqlite:////{tmp_path}/a.db", model="offline") as sessions:
        chat = await sessions.open("trip")
        await chat.send("Where to?")
        await sessions.backup(tmp_path / "backups")
    await restore(tmp_path / "backups", f"sqlite:////{tmp_path}/b.db")
    async with connect(f"sqlite:////{tmp_path}/b.db", model="offline") as sessions:
        assert (await sessions.history("trip"))[0].text == "Where to?"
        assert (await fsck(sessions.store)).is_sound


async def test_a_connection_that_redacts_is_backed_up_and_repaired(tmp_path: Path) -> None:
    """Redactors change what is written, but neither a backup nor a repair writes a text."""
    async with connect(f"sqlite:////{tmp_path}/a.db", model="offline", redact=redactors.DEFAULT) as sessions:
        await (await sessions.open("trip")).send("Where to?")
        await sessions.backup(tmp_path / "backups")
        assert (await repair(sessions.store)).found == ()
    report = await restore(tmp_path / "backups", redacting(f"sqlite:////{tmp_path}/b.db", redactors.DEFAULT))
    assert report.backup.counts["session"] == 1


async def test_a_sealed_store_is_verified_with_its_keys(tmp_path: Path) -> None:
    """Without them, each session of a sound backup would be reported as impossible to check."""
    ring = FileKeyRing(tmp_path / "keys.json", master=bytes(32), create=True)
    async with connect(f"sqlite:////{tmp_path}/a.db", model="offline", keys=ring) as sessions:
        await (await sessions.open("trip")).send("Where to?")
        await sessions.backup(tmp_path / "backups")
    report = await restore(tmp_path / "backups", SqliteStore(tmp_path / "b.db", keys=ring), verify=True)
    assert report.problems == ()


def test_ids_of_sessions_are_no_paths() -> None:
    """A part's name comes from a backup that another may have written: it cannot lead outside."""
    from perdure.stores.file.copying import _LOG, _PLEDGE

    for name in ("../x.jsonl", "/etc/x.jsonl", "a/b.jsonl", "..jsonl", ".x.redaction"):
        assert not _LOG.fullmatch(name)
        assert not _PLEDGE.fullmatch(name)
    assert _LOG.fullmatch(f"{SessionId('a.b')}.jsonl")


async def test_logs_that_grow_while_they_are_looked_at_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup never has a session's save without the saves before it."""
    saved: list[str] = []
    stamp = Folder.stamp

    async def save(*names: str) -> None:
        async with FileStore(tmp_path / "sessions") as other:
            for name in names:
                await say(other, name, "more")

    def stamped(folder: Folder, name: str) -> Any:
        found = stamp(folder, name)
        pair = ["one", "two"]
        if not saved and name.removesuffix(".jsonl") in pair:
            saved.append(name.removesuffix(".jsonl"))
            pair.remove(saved[0])
            saved.extend(pair)
            asyncio.run(save(*saved))  # the log that is read already comes first
        return found

    async with FileStore(tmp_path / "sessions") as store:
        for name in ("one", "two"):
            await begun(store, name, "hello")
        monkeypatch.setattr(Folder, "stamp", stamped)
        await backup(store, tmp_path / "backups")
    await restore(tmp_path / "backups", FileStore(tmp_path / "restored"))
    async with FileStore(tmp_path / "restored") as store:
        found = {info.id: info.version for info in await store.list()}
    assert len(saved) == 2
    assert found[SessionId(saved[0])] == found[SessionId(saved[1])] == 3


@pytest.mark.parametrize("call", [list_backups, verify_backups, lambda target: restore(target, "sqlite:///none.db")])
async def test_a_target_that_is_no_path_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidData, match="expected a path, got 5"):
        await call(5)
