"""Every promise that a store makes beneath its sessions: a check names the one that was broken, and no other."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import msgspec
import psycopg
import pytest
from tests import postgres_server, stories
from tests.stories import opened

from perdure import MemoryStore, SqliteStore, StoreError, Transcript
from perdure.archive import FsckReport, copy, fsck
from perdure.model.ids import use
from perdure.stores.claims import Holder
from perdure.stores.engine import Delete, Select, Update
from perdure.stores.file.log import Held, Line, SessionLog, line, rewritten
from perdure.stores.format.rows import hash_of
from perdure.stores.sqlite import check as sqlite_check
from perdure.stores.sqlite.search import has_sums
from perdure.stores.sqlite.sums import connect_with_sums
from perdure.testing import FrozenClock
from perdure.testing.samples import fork, new_session, show


class Damage(NamedTuple):
    """Something done to a store, and what a check reports: the session, and the words."""

    done: Any
    session: str | None
    said: str


def assert_named(report: FsckReport, damage: Damage) -> None:
    told = [f"{each.where}: {each.what}" for each in report.problems if each.session_id == damage.session]
    assert any(damage.said in each for each in told), report.problems
    assert all(len(each.repair) > 30 for each in report.problems)


def of(session: str) -> str:
    return f"(SELECT sid FROM session WHERE id = '{session}')"


def in_session(change: str, session: str = "talk") -> str:
    return f"UPDATE session SET {change} WHERE id = '{session}'"


# Both dialects read them as they stand.
ROWS = (
    # A session's row: its counters, its claim, its log.
    Damage(in_session("version = version + 1"), "talk", "its newest version: it is not what"),
    Damage(in_session("msg_end = msg_end + 1"), "talk", "the end of its log: it is not what"),
    Damage(in_session("evt_end = evt_end - 1"), "talk", "the end of its record: it is not what"),
    Damage(in_session("inbox_end = inbox_end + 1"), "talk", "the end of its inbox: it is not what"),
    Damage(in_session("taken = inbox_end + 1"), "talk", "inbox is taken: it is noted to be taken to where it does not"),
    Damage(in_session("taken = -1"), "talk", "inbox is taken: it is noted to be taken to where it does not"),
    Damage(in_session("epoch = 7"), "talk", "its epoch: it is out of the session's range"),
    Damage(in_session("epoch = (sid + 1) << 20"), "talk", "its epoch: it is out of the session's range"),
    Damage(in_session("expires = 5"), "talk", "its claim: it has a holder and no end, or an end and no holder"),
    Damage(in_session("expires = NULL", "killed"), "killed", "its claim: it has a holder and no end"),
    Damage(in_session("log = 999"), "talk", "its log: it is not what"),
    # The columns that filters go by.
    Damage(in_session("status = 'suspended'"), "talk", "header: it does not agree with its head"),
    Damage(in_session("agent = 'nobody'"), "talk", "column agent: it says 'nobody', and the newest version"),
    Damage(in_session("owner = 'eve'"), "talk", "column owner: it says 'eve', and the newest version 'ada'"),
    Damage(in_session("parent = 'views'"), "talk", "column parent: it says 'views', and the newest version None"),
    Damage(in_session("created = created + 1"), "talk", "column created: it says"),
    Damage(in_session("updated = updated + 1"), "talk", "column updated: it says"),
    Damage(f"INSERT INTO tag (tag, sid) SELECT 'extra', {of('talk')}", "talk", "tags: they are not those of"),
    Damage("DELETE FROM tag WHERE tag = 'vip'", "talk", "tags: they are not those of"),
    # Idempotency keys.
    Damage("DELETE FROM key WHERE name = 'first'", "talk", "key 'first': run "),
    Damage("UPDATE key SET version = 99 WHERE name = 'first'", "talk", "it names a version that does not exist"),
    Damage("UPDATE key SET sid = 999 WHERE name = 'first'", None, "key 999: it belongs to no session"),
    # What is noted for erasures to go by.
    Damage(f"DELETE FROM ref WHERE child = {of('a-fork')}", "a-fork", "that is not noted where deletions look"),
    Damage(f"UPDATE ref SET stop = stop + 1000 WHERE child = {of('a-fork')}", "a-fork", "that does not reach so far"),
    Damage(f"UPDATE ref SET stop = stop + 1 WHERE child = {of('a-fork')}", "a-fork", "and no version does"),
    Damage(f"UPDATE ref SET start = -1 WHERE child = {of('a-fork')}", "a-fork", "of others: it is a stretch of a log"),
    Damage(f"UPDATE ref SET start = stop + 1 WHERE child = {of('a-fork')}", "a-fork", "of others: it is a stretch of"),
    Damage(f"UPDATE ref SET log = 999 WHERE child = {of('a-fork')}", "a-fork", "stretch of a log that is not there"),
    Damage(f"INSERT INTO ref (log, child, start, stop) SELECT log, {of('a-fork')}, 0, 1 FROM session"
           " WHERE id = 'views'", "a-fork", "it is noted that the session shows it, and no version does"),
    Damage(f"DELETE FROM uses WHERE sid = {of('talk')}", "talk", "a version names it, and that is not noted"),
    Damage(f"INSERT INTO uses (hash, sid) SELECT hash, {of('a-fork')} FROM uses WHERE sid = {of('boss')}"
           f" AND hash NOT IN (SELECT hash FROM uses WHERE sid = {of('a-fork')})",
           "a-fork", "it is noted to be used, and no version names it"),
    Damage("DELETE FROM value WHERE hash = (SELECT min(hash) FROM uses WHERE sid ="
           f" {of('boss')} AND hash NOT IN (SELECT hash FROM uses WHERE sid <> {of('boss')}))", "boss", "is missing"),
    Damage("INSERT INTO value (hash, body) SELECT 'nobody', body FROM value LIMIT 1", None, "value nobody: it belongs"),
    Damage("UPDATE meta SET {erasures}", None, "meta erasures: it is not the number"),
    # Runs and their packed rows.
    Damage(f"UPDATE batch SET run = (SELECT max(run) FROM run) WHERE sid = {of('talk')}", "talk", "checksum does not"),
    Damage(f"UPDATE batch SET count = count + 1 WHERE sid = {of('talk')}", "talk", "its checksum does not match"),
    Damage(f"UPDATE batch SET crc = crc + 1 WHERE sid = {of('talk')}", "talk", "its checksum does not match"),
    Damage(f"DELETE FROM batch WHERE sid = {of('talk')} AND last = (SELECT min(last) FROM batch WHERE sid ="
           f" {of('talk')})", "talk", "is missing"),
    Damage(f"UPDATE run SET loop = 'other' WHERE sid = {of('talk')} AND first_seq = 1", "talk", "checksum does not"),
    Damage(f"UPDATE run SET last_seq = last_seq - 1 WHERE sid = {of('talk')}", "talk", "it is noted to reach from"),
    Damage(f"UPDATE run SET end_pos = end_pos + 1000 WHERE sid = {of('talk')}", "talk", "it goes beyond the log"),
    Damage(f"UPDATE run SET first_pos = -1 WHERE sid = {of('talk')}", "talk", "it goes beyond the log"),
    Damage(f"UPDATE run SET first_pos = end_pos WHERE sid = {of('talk')}", "talk", "its run's record names it, and"),
    Damage("UPDATE run SET log = 999", "talk", "the log of one of its runs: it is missing"),
    Damage("UPDATE log SET name = 'other' WHERE log = (SELECT max(log) FROM log WHERE name <> '')",
           "branches", "runs: it is missing, another session's, or a branch's of another name"),
    # Messages, versions, the inbox.
    Damage("DELETE FROM msg WHERE pos = 50 AND log = (SELECT log FROM session WHERE id = 'views')", "views", "missing"),
    Damage("UPDATE msg SET crc = crc + 1 WHERE pos = 50 AND log = (SELECT log FROM session WHERE id = 'views')",
           "views", "message 50 of log"),
    Damage("INSERT INTO msg (log, pos, crc, body) SELECT 999, 0, crc, body FROM msg LIMIT 1", None, "msg 999: it"),
    Damage(f"DELETE FROM head WHERE version = 2 AND sid = {of('talk')}", "talk", "head 2: it is missing"),
    Damage(f"UPDATE head SET crc = crc + 1 WHERE version = 2 AND sid = {of('talk')}", "talk", "head 2: its checksum"),
    Damage(f"UPDATE inbox SET crc = crc + 1 WHERE sid = {of('talk')}", "talk", "inbox 1: its checksum does not match"),
    Damage(f"UPDATE inbox SET crc = crc + 1 WHERE sid = {of('talk')};{in_session('taken = inbox_end')}",
           "talk", "inbox 1: its checksum does not match"),
    Damage(f"UPDATE inbox SET seq = 5 WHERE sid = {of('talk')};{in_session('inbox_end = 5, taken = 5')}",
           "talk", "its inbox: an item is missing from it"),
    Damage(in_session("since = NULL"), "talk", "since when its inbox waits, or how urgent it is: it is missing"),
    # Timers and rates.
    Damage("UPDATE timer SET crc = crc + 1 WHERE name = 'wake'", "talk", "timer 'wake': its checksum does not match"),
    Damage("UPDATE timer SET due = due + 1 WHERE name = 'wake'", "talk", "timer 'wake': its checksum does not match"),
    Damage("UPDATE timer SET name = 'x' WHERE name = 'wake'", "talk", "timer 'x': its checksum does not match"),
    Damage("UPDATE timer SET sid = 999", None, "timer 999: it belongs to no session"),
    Damage("UPDATE rate SET until = -1", None, "rate 'a key': it is not a time"),
    # Tokens: none may give more rights than were granted.
    Damage("UPDATE token SET owner = NULL", None, "token 'aaaaaaaaaaaa': its columns do not say what its body says"),
    Damage("UPDATE token SET id = 'x' WHERE owner = 'ada'", None, "token 'x': its columns do not say what its body"),
    Damage("UPDATE token SET digest = 'x' WHERE owner = 'ada'", None, "its columns do not say what its body says"),
    Damage("UPDATE token SET crc = crc + 1 WHERE owner = 'ada'", None, "aaaaaaaa': its checksum does not match"),
    # Rows that belong to nobody.
    Damage(f"UPDATE tag SET sid = 999 WHERE tag = 'late' AND sid = {of('talk')}", None, "tag 999: it belongs to"),
    Damage("UPDATE inbox SET sid = 999", None, "inbox 999: it belongs to no session"),
    Damage(f"UPDATE ref SET child = 999 WHERE child = {of('a-fork')}", None, "ref 999: it belongs to no session"),
    Damage("DELETE FROM session WHERE id = 'views'", None, "it belongs to no session"),
    Damage(f"DELETE FROM ref WHERE child = {of('orphan')}", None, "of an erased session"),
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return directories of stores in which a good deal has happened; each story is told once."""
    where = tmp_path_factory.mktemp("originals")

    async def tell(kind: str) -> None:
        clock = FrozenClock(tick=0.001)
        with use(clock=clock):
            async with opened(kind, where / kind) as store:
                await stories.tell(store, clock)
                await store.search("it")

    def told(kind: str) -> Path:
        if not (where / kind).exists():
            (where / kind).mkdir()
            asyncio.run(tell(kind))
        return where / kind

    return told


async def checked(kind: str, where: Path) -> FsckReport:
    async with opened(kind, where) as store:
        return await fsck(store)


async def assert_a_copy_is_sound(kind: str, where: Path, into: Path) -> None:
    async with opened(kind, where) as damaged, SqliteStore(into / "copy.db") as mended:
        await copy(damaged, mended)
        assert (await fsck(mended)).problems == ()


def is_mended_by_a_copy(report: FsckReport, damage: Damage) -> bool:
    """Return whether the report says that a copy mends the damage, or everything that the damage has caused."""
    named = [each for each in report.problems if damage.said in f"{each.where}: {each.what}"]
    return any(_names_a_copy(each.repair) for each in named) or all(
        _names_a_copy(each.repair) or "in a copy of the store" in each.repair for each in report.problems
    )


def _names_a_copy(repair: str) -> bool:
    return "opying the store" in repair or "copy the store" in repair


def execute(path: Path, script: str) -> None:
    # The index has checksums in its pages, which its own layer writes: the damage is in its rows.
    is_index = path.name.endswith("-search")
    connection = connect_with_sums(path, has_sums) if is_index else apsw.Connection(str(path))
    for statement in script.split(";"):
        connection.execute(statement).fetchall()
        assert connection.changes() or statement.startswith(("DROP", "INSERT INTO message")), statement
    connection.close()


GHOST = (
    "INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos)"
    " SELECT sid, 'ghost', 1, 2, log, 0, 0 FROM session WHERE id = 'talk'"
)
IN_SQLITE = (
    *ROWS,
    Damage("UPDATE key SET digest = 'x' WHERE name = 'first'", "talk", "key 'first': its checksum does not match"),
    Damage("UPDATE key SET version = 1 WHERE name = 'first'", "talk", "key 'first': its checksum does not match"),
    Damage("UPDATE log SET crc = crc + 1 WHERE log = 1", None, "log 1: its checksum does not match"),
    Damage(GHOST, "talk", "run ghost: its record does not begin and end where it is noted to"),
    Damage("UPDATE meta SET value = 'many' WHERE key = 'erasures'", None, "meta erasures: it is not the number"),
    Damage("DELETE FROM sqlite_sequence WHERE name = 'log'", None, "the sequence of log: it is behind the highest"),
    Damage("UPDATE sqlite_sequence SET seq = 1 WHERE name = 'session'", None, "the sequence of session: it is behind"),
    Damage("DROP INDEX session_by_agent_shelf", None, "index session_by_agent_shelf: it is missing"),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("damage", IN_SQLITE, ids=lambda damage: str(damage.done)[:90])
async def test_a_damaged_row_of_a_sqlite_file_is_named(
    originals: Callable[[str], Path], tmp_path: Path, damage: Damage
) -> None:
    """A check names the damaged row. Where it says that a copy mends it, a copy does."""
    shutil.copytree(await asyncio.to_thread(originals, "sqlite"), tmp_path, dirs_exist_ok=True)
    execute(tmp_path / "sessions.db", damage.done.format(erasures="value = -1 WHERE key = 'erasures'"))
    report = await checked("sqlite", tmp_path)
    assert_named(report, damage)
    if is_mended_by_a_copy(report, damage):
        await assert_a_copy_is_sound("sqlite", tmp_path, tmp_path)


IN_SEARCH_INDEX = (
    Damage("UPDATE note SET value = value + 1000 WHERE key = 'cursor'", None, "it claims to have read up to message"),
    Damage("INSERT INTO place VALUES (99999, 1, NULL)", None, "it holds messages that the store does not have"),
    Damage("DELETE FROM place WHERE id = 3", None, "it lacks messages that it claims to have read"),
    Damage("DELETE FROM message_docsize WHERE id = 3", None, "its words and its places are not of the same messages"),
    Damage("INSERT INTO message(message) VALUES ('delete-all')", None, "its words and its places are not of the same"),
    Damage("UPDATE place SET log = log + 50 WHERE id = 3", None, "it places message 3 in another log"),
    Damage("UPDATE place SET owner = 'eve' WHERE id = 3", None, "or with another owner"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", IN_SEARCH_INDEX, ids=lambda damage: damage.done[:90])
async def test_a_search_index_that_claims_what_is_not_so_is_named(
    originals: Callable[[str], Path], tmp_path: Path, damage: Damage
) -> None:
    """A check names the index. Once the index is deleted, the store has no problem left."""
    shutil.copytree(await asyncio.to_thread(originals, "sqlite"), tmp_path, dirs_exist_ok=True)
    execute(tmp_path / "sessions.db-search", damage.done)
    report = await checked("sqlite", tmp_path)
    assert_named(report, damage)
    assert {each.where for each in report.problems} == {"the search index"}
    assert "delete the file sessions.db-search" in report.problems[0].repair
    (tmp_path / "sessions.db-search").unlink()
    assert (await checked("sqlite", tmp_path)).problems == ()


async def test_a_search_index_that_is_no_database_is_named(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """A check reads the file and does not change it."""
    shutil.copytree(await asyncio.to_thread(originals, "sqlite"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "sessions.db-search").write_bytes(b"not a database, " * 512)
    assert_named(await checked("sqlite", tmp_path), Damage(None, None, "the search index: it cannot be read"))
    assert (tmp_path / "sessions.db-search").read_bytes() == b"not a database, " * 512


async def test_a_search_index_that_a_power_cut_has_left_is_no_damage(tmp_path: Path) -> None:
    """Its journal is beside it. The check rolls it back on opening, and finds the index sound."""
    (tmp_path / "open").mkdir()
    async with SqliteStore(tmp_path / "open" / "sessions.db") as store:
        await store.create(new_session("alpha", *(f"word{number}" for number in range(500))))
        await store.search("alpha")
        await store.gc()
    index = apsw.Connection(str(tmp_path / "open" / "sessions.db-search"))
    index.pragma("cache_spill", 1)
    index.pragma("cache_size", 1)
    index.execute("BEGIN IMMEDIATE")
    index.execute("UPDATE place SET log = log + 1, owner = 'somebody else'")
    index.cache_flush()
    shutil.copytree(tmp_path / "open", tmp_path / "cut")
    assert (tmp_path / "cut" / "sessions.db-search-journal").stat().st_size > 0
    index.execute("ROLLBACK")
    index.close()
    async with SqliteStore(tmp_path / "cut" / "sessions.db") as store:
        assert (await fsck(store)).problems == ()


async def test_a_disk_that_fails_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error is reported as a read error: restoring a backup would not help."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await store.create(new_session("alpha"))

        def broken(*_: object) -> Any:
            raise apsw.IOError("disk I/O error")

        monkeypatch.setattr(sqlite_check, "page_problems", broken)
        with pytest.raises(StoreError, match="disk I/O error"):
            await store.check()
        (problem,) = (await fsck(store)).problems
        assert "backup" not in problem.repair


async def test_a_search_index_may_be_behind(originals: Callable[[str], Path], tmp_path: Path) -> None:
    """An index of another store, or one from before an erasure, is not a problem: the next search renews it."""
    original = await asyncio.to_thread(originals, "sqlite")
    for number, change in enumerate(("'elsewhere' WHERE key = 'uid'", "value - 1 WHERE key = 'erasures'")):
        shutil.copytree(original, tmp_path / str(number))
        execute(tmp_path / str(number) / "sessions.db-search", f"UPDATE note SET value = {change}")
        assert (await checked("sqlite", tmp_path / str(number))).problems == ()


class Schema:
    """A PostgreSQL schema that can be put back to what it was."""

    def __init__(self, where: Path) -> None:
        self._name = postgres_server.schema_of(where)
        self.db = psycopg.connect(postgres_server.dsn(), autocommit=True, options=f"-c search_path={self._name}")
        found = self.db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (self._name,)).fetchall()
        # Words point to messages.
        self._tables = sorted((name for (name,) in found), key=lambda name: (name == "word", name))
        self._rows = {name: self.db.execute(f'CREATE TEMP TABLE "kept_{name}" AS TABLE "{name}"') for name in
                      self._tables}  # fmt: skip

    def damage(self, script: str) -> None:
        for statement in script.split(";"):
            assert self.db.execute(statement.encode()).rowcount, statement

    def _columns(self, table: str) -> list[str]:
        """Return the columns that the database does not compute itself."""
        asked = (
            "SELECT quote_ident(attname) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''"
        )
        return [name for (name,) in self.db.execute(asked, (f'"{table}"',)).fetchall()]

    def put_back(self) -> None:
        self.db.execute(f"TRUNCATE {', '.join(self._tables)}".encode())
        for name in self._tables:
            if name == "waiting":  # the triggers of `session` fill it
                continue
            columns = ", ".join(self._columns(name))
            insert = f'INSERT INTO "{name}" ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM "kept_{name}"'
            self.db.execute(insert.encode())
        self.db.execute("SELECT setval(pg_get_serial_sequence('log', 'log'), (SELECT max(log) FROM log))")


@pytest.fixture(scope="module")
def kept_schema(originals: Callable[[str], Path]) -> Iterator[Schema]:
    schema = Schema(originals("postgres"))
    yield schema
    schema.db.close()


@pytest.fixture
def schema(kept_schema: Schema) -> Iterator[Schema]:
    yield kept_schema
    kept_schema.put_back()


IN_POSTGRES = (
    *(ROWS if os.environ.get("PERDURE_TORTURE") else ROWS[::3]),  # the same checks find them in SQLite
    Damage("UPDATE key SET digest = 'x' WHERE name = 'first'", "talk", "key 'first': it does not stand for"),
    Damage("UPDATE key SET version = 1 WHERE name = 'first'", "talk", "key 'first': it stands for version 1, which"),
    Damage(GHOST, "talk", "run ghost: its record does not begin and end where it is noted to"),
    Damage("DELETE FROM claimed", "killed", "its claim: it is not noted where recovery looks"),
    Damage(f"INSERT INTO claimed (sid) SELECT {of('talk')}", "talk", "its claim: it is noted where those who recover"),
    Damage("INSERT INTO claimed (sid) VALUES (999)", None, "claimed 999: it belongs to no session"),
    Damage("DELETE FROM waiting", "talk", "what waits in its inbox: it is not noted as its row says"),
    Damage("UPDATE waiting SET priority = priority + 1", "talk", "what waits in its inbox: it is not noted as its row"),
    Damage("INSERT INTO waiting VALUES (999, NULL, 'active', 0, 0)", "999", "what waits in its inbox: it is not noted"),
    Damage(f"UPDATE head SET hashes = ARRAY['x'] WHERE version = 2 AND sid = {of('talk')}", "talk", "along with"),
    Damage(f"UPDATE head SET wanted = ARRAY[1, 0, 99] WHERE version = 2 AND sid = {of('talk')}", "talk", "along with"),
    Damage("DELETE FROM word WHERE pos = 1", None, "the search index of log"),
    Damage("SELECT setval(pg_get_serial_sequence('log', 'log'), 1)", None, "the sequence of log: it is behind"),
)  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("damage", IN_POSTGRES, ids=lambda damage: damage.done[:90])
async def test_a_damaged_row_of_a_postgres_schema_is_named(
    schema: Schema, originals: Callable[[str], Path], tmp_path: Path, damage: Damage
) -> None:
    """A check names the row. Where it says that a copy mends it, a copy does; tests above copy what SQLite has too."""
    schema.damage(damage.done.format(erasures="erasures = -1"))
    report = await checked("postgres", originals("postgres"))
    assert_named(report, damage)
    if damage not in ROWS and is_mended_by_a_copy(report, damage):
        await assert_a_copy_is_sound("postgres", originals("postgres"), tmp_path)


def rewrite(where: Path, name: str, change: Callable[[Line], Line]) -> None:
    """Change lines of a log and seal them again. Remove its document, which would show the change."""
    path = where / "sessions" / f"{name}.jsonl"
    path.write_bytes(rewritten(path.read_bytes(), "damage", change))
    path.with_suffix(".json").unlink()


def append(where: Path, name: str, *lines: Line) -> None:
    path = where / "sessions" / f"{name}.jsonl"
    log = SessionLog(name)
    log.feed(path.read_bytes())
    path.write_bytes(path.read_bytes() + log.encode(lines))


def changing(stem: str, of_kind: str, /, **fields: Any) -> Callable[[Path], None]:
    """Return a function that changes fields in all lines of a kind."""

    def change(given: Line) -> Line:
        return msgspec.structs.replace(given, **fields) if given.kind == of_kind else given

    return lambda where: rewrite(where, stem, change)


def appending(name: str, *lines: Line) -> Callable[[Path], None]:
    return lambda where: append(where, name, *lines)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def move_last_message(where: Path) -> None:
    rewrite(where, "views", lambda each: msgspec.structs.replace(each, at=500) if each.at == 99 else each)


def move_last_version(where: Path) -> None:
    rewrite(where, "talk", lambda each: msgspec.structs.replace(each, at=50) if each.kind == "head" and each.at == 5
            else each)  # fmt: skip


def rename_a_log(where: Path) -> None:
    shutil.copy(where / "sessions" / "talk.jsonl", where / "sessions" / "tale.jsonl")


def forget_who_shows_it(where: Path) -> None:
    for ending in ("json", "jsonl"):
        (where / "sessions" / f"orphan.{ending}").unlink()


IN_FILES = (
    Damage(changing("talk", "key", kind="lost"), "talk", "key 'first': run "),
    Damage(changing("talk", "key", at=99), "talk", "the session has no version 99"),
    Damage(changing("talk", "key", at=1), "talk", "key 'first': it stands for version 1, which"),
    Damage(changing("talk", "key", body=raw("x")), "talk", "key 'first': it does not stand for the request"),
    Damage(appending("talk", line("taken", at=9)), "talk", "inbox is taken: it is noted to be taken to where it does"),
    Damage(
        appending("talk", line("claim", at=1, body=raw(Held(Holder("me"), 0))), line("release", at=1)),
        "talk",
        "its epoch: it is out of the session's range",
    ),
    Damage(changing("a-fork", "ref", kind="lost"), "a-fork", "that is not noted where deletions look"),
    Damage(appending("a-fork", line("ref", "talk@1", body=b"[0,5000]")), "a-fork", "and no version does"),
    Damage(appending("talk", line("value", hash_of(b'"x"'), body=b'"x"')), "talk", "and no version names it"),
    Damage(appending("talk", line("value", "x", body=b'"x"')), "talk", "value x: its hash does not match"),
    Damage(changing("views", "value", name="x"), "views", "value "),
    Damage(move_last_message, "views", "its messages are not numbered from 0 on"),
    Damage(move_last_version, "talk", "its versions: they are not numbered from 1 on"),
    Damage(rename_a_log, "tale", "it is the log of 'talk@"),
    Damage(forget_who_shows_it, None, "are left of an erased session, and nobody shows them"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", IN_FILES, ids=lambda damage: damage.said)
async def test_lines_of_a_file_that_do_not_add_up_are_named(
    originals: Callable[[str], Path], tmp_path: Path, damage: Damage
) -> None:
    """A check names lines whose checksums match: no flipped bit causes this, but a person or a faulty program may."""
    shutil.copytree(await asyncio.to_thread(originals, "file"), tmp_path, dirs_exist_ok=True)
    damage.done(tmp_path)
    assert_named(await checked("file", tmp_path), damage)


async def test_what_is_kept_of_others_may_have_gaps(tmp_path: Path) -> None:
    """A session that was brought in without the one it shows keeps only the messages that it shows."""
    async with MemoryStore() as source, opened("file", tmp_path) as target:
        parent = await source.create(new_session("a", "b", "c", "d", id="parent"))
        shown = Transcript((*parent.state.transcript[:1].pieces, *parent.state.transcript[2:].pieces))
        await source.create(fork(show(parent, shown), id="child"))
        await target.restore(await source.dump("child", alone=True))
        assert list(await target.check()) == []


def changed(session: str, table: str, values: dict[str, Any] | None, **where: Any) -> Callable[[Any], None]:
    """Return a function that gives rows of a session other values, or deletes them if `values` is None."""

    def change(store: Any) -> None:
        answer = store._engine._tables.answer
        ((sid, log),) = answer(Select("session", ("sid", "log"), {"id": session}))
        whose = {"log": log} if table == "msg" else {"sid": sid}
        answer(Delete(table, {**whose, **where}) if values is None else Update(table, values, {**whose, **where}))

    return change


def lose_who_shows_it(store: Any) -> None:
    changed("orphan", "session", None)(store)
    store._engine._tables.answer(Delete("ref", {}))


IN_MEMORY = (
    Damage(changed("talk", "session", {"taken": 9}), "talk", "how far its inbox is taken"),
    Damage(changed("talk", "session", {"epoch": 1}), "talk", "its epoch: it is out of the session's range"),
    Damage(changed("killed", "session", {"expires": None}), "killed", "its claim: it has a holder and no end"),
    Damage(changed("talk", "key", None), "talk", "key 'first': run "),
    Damage(changed("talk", "key", {"version": 99, "crc": None}), "talk", "key 'first': it names a version that"),
    Damage(changed("talk", "key", {"digest": "x", "crc": None}), "talk", "key 'first': it does not stand for"),
    Damage(
        changed("talk", "batch", None, **{"last <": 8}), "talk", "its record: its entries are not numbered from 1 on"
    ),
    Damage(changed("talk", "head", None, version=2), "talk", "its versions: they are not numbered from 1 on"),
    Damage(changed("views", "msg", None, pos=50), "views", "is missing"),
    Damage(lose_who_shows_it, None, "they are left of an erased session, and nobody shows them"),
)


@pytest.mark.parametrize("damage", IN_MEMORY, ids=lambda damage: damage.said)
async def test_what_a_memory_store_has_lost_is_named(damage: Damage) -> None:
    """A memory store is checked like the others."""
    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with MemoryStore() as store:
            await stories.tell(store, clock)
            damage.done(store)
            assert_named(await fsck(store), damage)
