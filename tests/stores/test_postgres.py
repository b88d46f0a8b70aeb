"""Promises of the PostgreSQL store beyond the contracts: statements, schemas, plans, damage and live events."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests import postgres_server
from tests.loop.scenes import loops_of

from perdure import AgentDefinition, AgentSession, PostgresStore, SendMessage, SessionRuntime
from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidData,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
    StoreError,
)
from perdure.model import ids
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message
from perdure.protocols import Entry, Key, SessionQuery, Sketch
from perdure.stores.jobs.listing import Page
from perdure.stores.postgres import link, parcel, rows, statistics, writer
from perdure.stores.postgres import schema as migrating
from perdure.stores.urls import store_of
from perdure.testing import ScriptedDriver
from perdure.testing.samples import fork, new_session, note, say, texts

OPENING = """
import asyncio, sys
from perdure import PostgresStore

async def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    async with PostgresStore(sys.argv[1], schema=sys.argv[2]) as store:
        print(len(await store.list()), flush=True)

asyncio.run(main())
"""


TABLES = (
    "session",
    "claimed",
    "tag",
    "log",
    "msg",
    "head",
    "run",
    "batch",
    "inbox",
    "key",
    "sketch",
    "value",
    "uses",
    "ref",
    "word",
)


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return postgres_server.schema_of(tmp_path)


def store_in(schema: str, **options: Any) -> PostgresStore:
    return PostgresStore(postgres_server.dsn(), schema=schema, **options)


@asynccontextmanager
async def sql(schema: str) -> AsyncIterator[Callable[..., Awaitable[list[Any]]]]:
    """Run statements beside the store's own, as an administrator would."""
    async with await psycopg.AsyncConnection.connect(
        postgres_server.dsn(), autocommit=True, options=f"-c search_path={schema}"
    ) as connection:

        async def execute(statement: str, *values: Any) -> list[Any]:
            cursor = await connection.execute(statement.encode(), values or None)
            return await cursor.fetchall() if cursor.description else []

        yield execute


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the list of the statements that go to the server within the block."""
    sent: list[str] = []
    execute = psycopg.AsyncConnection.execute

    def counting(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(str(query))
        return execute(self, query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.AsyncConnection, "execute", counting)
        yield sent


async def test_a_save_and_a_load_are_one_statement_each(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save, an append, and the load of a short view, warm or cold, make one round trip."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.save(say(await store.create(new_session("a", "b")), "c"))
        with counted(monkeypatch) as sent:
            session = await store.save(note(say(session, "d"), "long", "x" * 1000))
        assert len(sent) == 1
        with counted(monkeypatch) as sent:
            assert await store.load(session.id) == session
        assert len(sent) == 1
        with counted(monkeypatch) as sent:
            assert await other.load(session.id) == session
        assert len(sent) == 1
        with counted(monkeypatch) as sent:
            claim, _ = await store.claim(session.id, version=session.version, owner="ann", entries=[Entry("start")])
            await store.append(claim, entries=[Entry("on")])
            await store.save(session, claim=claim, entries=[Entry("end")])
        assert len(sent) == 3


async def test_waiting_saves_go_out_together(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saves of many tasks are one statement, and a refused one does not disturb the others."""
    async with store_in(schema) as store, store_in(schema) as other:
        sessions = [await store.create(new_session(id=f"s{n}")) for n in range(20)]
        await other.save(say(sessions[7], "another's"))
        with counted(monkeypatch) as sent:
            saves = [store.save(say(session, session.id)) for session in sessions]
            outcomes = await asyncio.gather(*saves, return_exceptions=True)
        assert len(sent) == 1
        for n, outcome in enumerate(outcomes):
            if n == 7:
                assert isinstance(outcome, SessionConflict)
            else:
                assert (texts(outcome), outcome.version) == ([f"s{n}"], 2)
                assert await other.load(f"s{n}") == outcome
        assert texts(await store.load("s7")) == ["another's"]


async def test_what_the_database_refuses_of_one_save_does_not_hit_the_others(schema: str) -> None:
    """If one statement's row cannot be written, its batch is sent again one by one."""
    async with store_in(schema) as store, sql(schema) as execute:
        sessions = [await store.create(new_session(id=f"s{n}")) for n in range(4)]
        await execute("ALTER TABLE head ADD CONSTRAINT odd CHECK (version <> 2 OR sid <> (2))")
        ((marked,),) = await execute("SELECT id FROM session WHERE sid = 2")
        outcomes = await asyncio.gather(*(store.save(say(each, "x")) for each in sessions), return_exceptions=True)
        refused = {str(each.id): outcome for each, outcome in zip(sessions, outcomes, strict=True)}
        assert isinstance(refused.pop(marked), StoreError)
        assert all(texts(outcome) == ["x"] for outcome in refused.values())
        assert (await store.load(marked)).version == 1


def test_eight_processes_start_at_once_on_an_empty_database(schema: str) -> None:
    """The migrations are applied once, and every process works."""
    command = [sys.executable, "-c", OPENING, postgres_server.dsn(), schema]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(8)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in started] == ["0\n"] * 8


async def test_a_schema_of_a_newer_release_is_refused(schema: str) -> None:
    """Nothing is touched, and the error says what to do."""
    async with store_in(schema) as store, sql(schema) as execute:
        await store.create(new_session("a"))
        await execute("UPDATE perdure_schema SET number = 99")
        with pytest.raises(StoreError, match="Upgrade perdure"):
            async with store_in(schema):
                pass


async def test_an_old_schema_is_brought_up_to_date(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the first release are read and listed as before, and rows without a checksum get one."""
    scripts = migrating.migrations()
    # This release writes columns that the first one did not have; they are dropped again here.
    columns = (("session", "line"), ("session", "spawned"), ("ref", "since"))
    added = [f"ALTER TABLE {table} ADD COLUMN {column} bigint;" for table, column in columns]
    monkeypatch.setattr(migrating, "migrations", lambda: [scripts[0] + "".join(added)])
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.save(await store.create(new_session("a", id="s")), key=Key("k", "digest"))
        await store.create(fork(session, id="child"))
        await store.create(new_session("b", id="spawned", spawn_ref=SpawnRef("s", "run", "call", "ask")))
        for table, column in columns:
            await execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    monkeypatch.undo()
    async with store_in(schema) as store, sql(schema) as execute:
        assert await execute("SELECT number FROM perdure_schema") == [(len(scripts),)]
        assert await store.load("s") == session
        assert await store.find_key("s", "k") == (Key("k", "digest"), 2)
        assert [info.id for info in await store.list()] == ["spawned", "child", "s"]
        assert [info.id for info in await store.list(top_level=True, order="updated")] == ["child", "s"]
        assert len((await store.dump("s")).logs) == 1
        assert await store.check() == []


async def test_tenants_are_kept_apart_by_schema(schema: str) -> None:
    """The same ids in two schemas of one database are different sessions."""
    async with store_in(schema) as one, store_in(f"{schema}_b") as two:
        await one.create(new_session("one's", id="same"))
        assert await two.load("same") is None
        await two.create(new_session("two's", id="same"))
        assert texts(await one.load("same")) == ["one's"]
        await two.delete("same")
        assert await one.exists("same")
    for odd in ("", "a-b", 'a"b', "x" * 60, "1a"):
        with pytest.raises(InvalidData):
            PostgresStore("postgresql://", schema=odd)


async def test_a_url_can_name_the_schema(schema: str) -> None:
    """`schema` is taken out of the query, and the rest is left to the driver."""
    dsn = postgres_server.dsn()
    query = f"{'&' if '?' in dsn else '?'}schema={schema}&connect_timeout=5"
    async with store_in(schema) as store, store_of(dsn + query) as named:
        session = await store.create(new_session("a"))
        assert await named.load(session.id) == session
    assert store_of("postgresql://host/name")._schema == "perdure"
    for odd in ("", "a-b", "a%22b", "%00", "1a", "a.b"):
        with pytest.raises(InvalidData, match="schema"):
            store_of(f"postgresql://host/name?schema={odd}")
    with pytest.raises(ConfigurationError, match="2 schemas"):
        store_of("postgresql://ann:secret@host/name?schema=a&sslmode=require&schema=b")


@pytest.mark.parametrize("url", ["host=h password=s3cr3t", "sslpassword='s3 cr3t' host=h", "mysql://me:s3cr3t@h/db"])
def test_a_url_of_another_kind_is_not_quoted_with_its_password(url: str) -> None:
    """libpq's own form of an address, or another database's, is refused."""
    with pytest.raises(ConfigurationError, match="names no store") as caught:
        store_of(url)
    assert "cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:a@s3cr3t@127.0.0.1:9/db",
        "postgresql://me:a/s3cr3t@127.0.0.1:9/db",
        "postgresql://me:1/s3cr3t@127.0.0.1:9/db",
        "postgresql://me:%zzs3cr3t@127.0.0.1:9/db",
        "postgresql://me:s3cr3t@[::1/db",
        "postgresql//me:s3cr3t@127.0.0.1:9/db",
        "host=127.0.0.1 port=9 password=my s3cr3t",
        "host=127.0.0.1 port=s3cr3t",
        "me:s3cr3t@127.0.0.1:9/db",
    ],
)
async def test_a_dsn_that_cannot_be_read_is_not_shown(dsn: str) -> None:
    """Any part of it may be the password, which libpq would quote."""
    with pytest.raises(ConfigurationError, match="DSN cannot be read") as caught:
        async with PostgresStore(dsn):
            pass
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("options", ["password=s3cr3t&sslmode=s3cr3t", "sslpassword=s3cr3t&gssencmode=s3cr3t"])
async def test_no_password_is_in_an_error(options: str) -> None:
    """The password is removed from libpq's message; the rest of the message stays."""
    with pytest.raises(StoreError, match=r'invalid (ssl|gssenc)mode value: "…"') as caught:
        async with PostgresStore(f"postgresql://127.0.0.1:9/db?{options}"):
            pass
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


async def test_a_server_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening raises StoreError, not an error of psycopg."""
    with pytest.raises(StoreError, match="Check the DSN"):
        async with PostgresStore("postgresql:///nothing?host=/nowhere&connect_timeout=2"):
            pass
    with pytest.raises(InvalidData):
        PostgresStore("")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:hush/hush@localhost/name",
        "postgresql://me:hush@hush@localhost/name",
        "postgresql://me:hush%hush@localhost/name",
        "host=localhost password=very hush user=me",
        "host=localhost password='hush user=me",
        "hush",
    ],
)
async def test_a_dsn_that_cannot_be_read_is_not_quoted(dsn: str) -> None:
    """The error says how to write one, and contains nothing of the password."""
    with pytest.raises(ConfigurationError, match="DSN cannot be read") as raised:
        async with PostgresStore(dsn):
            pass
    assert "hush" not in str(raised.value)
    assert raised.value.__suppress_context__


async def test_the_dsn_wins_over_the_limits(schema: str) -> None:
    """Every connection has time-outs, and those that the DSN sets are kept."""
    dsn = psycopg.conninfo.make_conninfo(
        postgres_server.dsn(), options="-c lock_timeout=7s", keepalives_idle=77, connect_timeout=5
    )
    async with PostgresStore(dsn, schema=schema) as store, store_in(schema) as usual:
        for each, expected in ((store, "7s"), (usual, "20s")):
            async with each._engine.opened.link.connection() as connection:
                shown = [
                    (await (await connection.execute(f"SHOW {name}".encode())).fetchall())[0][0]
                    for name in ("idle_in_transaction_session_timeout", "lock_timeout")
                ]
            assert shown == ["10s", expected]
            given = connection.info.get_parameters()
            assert given["keepalives_idle"] == ("77" if each is store else "10")
            assert given["tcp_user_timeout"] == "20000"


async def test_leases_go_by_the_clock_of_the_database(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is an hour ahead takes over no live claim."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        claim, _ = await store.claim(session.id, version=1, owner="ann", lease=30)
        ahead = ids._utc_now().replace(year=2099)
        monkeypatch.setattr(time, "time", lambda: ahead.timestamp())
        with pytest.raises(SessionBusy):
            await store.claim(session.id, version=1, owner="ben")
        assert await store.is_claimed(session.id)
        await store.release(claim)
        await store.claim(session.id, version=1, owner="ben", lease=0.05)
        await asyncio.sleep(0.2)
        assert not await store.is_claimed(session.id)


DAMAGE = {
    "msg": "UPDATE msg SET body = body || '\\x20'::bytea",
    "moved": "UPDATE msg SET pos = pos + 9 WHERE pos = 1",
    "lost": "DELETE FROM msg WHERE pos = 0",
    "head": "UPDATE head SET body = body || '\\x20'::bytea WHERE version = 2",
    "no head": "DELETE FROM head WHERE version = 2",
    "value": "UPDATE value SET body = '\\x7b7d'::bytea",
    "no value": "DELETE FROM value",
    "wanted": "UPDATE head SET wanted = '{999,0,1}', body = body || '\\x20'::bytea",
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damage_is_told(schema: str, kind: str) -> None:
    """A changed, moved or missing row raises CorruptRecord, and is never read as another conversation."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.save(say(await store.create(new_session("a", "b")), "c"))
        await execute(DAMAGE[kind])
    async with store_in(schema) as store:
        with pytest.raises(CorruptRecord):
            await store.load(session.id)


async def test_columns_that_only_help_are_not_trusted(schema: str) -> None:
    """Columns that repeat parts of a head's body may be missing or wrong: the body decides."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a", "b"))
        for help in ("wanted = NULL", "wanted = '{1,0,1}'", "wanted = '{}', hashes = '{}'"):
            await execute(f"UPDATE head SET {help}")
            async with store_in(schema) as other:
                assert await other.load(session.id) == session


async def test_a_damaged_record_is_told(schema: str) -> None:
    """A changed or missing batch of entries raises CorruptRecord."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a"))
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=[Entry("one"), Entry("two")])
        await store.append(claim, entries=[Entry("three")])
        await execute("UPDATE batch SET crc = crc + 1 WHERE last = 2")
        with pytest.raises(CorruptRecord):
            await store.read(session.id)
        assert [entry.kind for entry in await store.read(session.id, last=1)] == ["three"]
        await execute("DELETE FROM batch WHERE last = 3")
        with pytest.raises(CorruptRecord):
            await store.read(session.id)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM msg WHERE pos = 0 AND log = (SELECT min(log) FROM log)",
        "DELETE FROM msg WHERE pos = 2 AND log = (SELECT min(log) FROM log)",
        "DELETE FROM msg WHERE pos = 1 AND log = (SELECT max(log) FROM log)",
        "DELETE FROM log WHERE name = 'branch'",
        "DELETE FROM log WHERE name = ''",
        "DELETE FROM head WHERE version = 1",
        "DELETE FROM head WHERE version = 2",
        "DELETE FROM inbox WHERE seq = 2",
    ],
)
async def test_a_dump_leaves_nothing_out(schema: str, damage: str) -> None:
    """If an index finds fewer rows, a dump raises CorruptRecord: the copy would be taken for whole."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.save(say(await store.create(new_session("a", "b", id="s")), "c"))
        claim, _ = await store.claim("s", version=2, owner="ann")
        branch = [Message.user("d"), Message.user("e")]
        await store.append(claim, messages=branch, entries=[Entry("start", run="branch")], log="branch")
        await store.post("s", Entry("one"))
        await store.post("s", Entry("two"))
        await store.release(claim)
        dumped = await store.dump("s")
        assert {name: len(rows) for name, rows in dumped.logs.items()} == {"s": 3, "s/branch": 2}
        assert (len(dumped.heads), len(dumped.inbox), session.version) == (2, 2, 2)
        await execute(damage)
        with pytest.raises(CorruptRecord):
            await store.dump("s")


async def test_keys_and_logs_have_a_checksum(schema: str) -> None:
    """A key or a log that has changed on the disk is damage: it gives no wrong answer and nobody else's message."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("secret", id="s", owner="ann"))
        await store.save(session, key=Key("k", "digest"))
        await store.create(new_session("another", id="t", owner="bob"))
        assert await store.find_key("s", "k") == (Key("k", "digest"), 2)
        for table in ("key", "log"):
            await execute(f"ALTER TABLE {table} ALTER COLUMN seal DROP EXPRESSION")
        await execute("UPDATE key SET version = 1")
        for look in (lambda: store.find_key("s", "k"), lambda: store.dump("s")):
            with pytest.raises(CorruptRecord, match="key 'k'"):
                await look()
        await execute("UPDATE log SET sid = 2, name = 'moved' WHERE sid = 1")
        assert await store.search("secret", owner="bob") == []
        assert await store.search("secret") == []
        with pytest.raises(CorruptRecord, match="log"):
            await store.dump("t")
        wrong = {problem.where for problem in await store.check() if "checksum" in problem.what}
        assert {"key 1/k", "log 1/moved"} <= wrong


@pytest.mark.parametrize(
    ("damage", "session_id", "name"),
    [("seal = seal # 1 WHERE sid = 1", "s", ""), ("sid = 2, name = 'moved' WHERE sid = 1", "t", "moved")],
)
async def test_a_log_is_not_found_by_a_row_that_has_changed(
    schema: str, damage: str, session_id: str, name: str
) -> None:
    """A changed row could lead to another session's messages: log_of() raises CorruptRecord."""
    async with store_in(schema) as store, sql(schema) as execute:
        for each in ("s", "t"):
            await store.create(new_session("a", id=each))
        assert (await store.log_of("s"))[1] == 1
        await execute("ALTER TABLE log ALTER COLUMN seal DROP EXPRESSION")
        await execute(f"UPDATE log SET {damage}")
        with pytest.raises(CorruptRecord, match="log 1"):
            await store.log_of(session_id, name)


@pytest.mark.parametrize("damage", ["name = 'j'", "sid = 7", "name_hash = 5"])
async def test_a_key_whose_name_has_changed_is_not_taken_for_a_new_one(schema: str, damage: str) -> None:
    """The request would run again, so a key is also looked for by the hash of its name."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a", id="s"))
        await store.save(session, key=Key("k", "digest"))
        for column in ("seal", "name_hash"):
            await execute(f"ALTER TABLE key ALTER COLUMN {column} DROP EXPRESSION")
        await execute(f"UPDATE key SET {damage}")
        with pytest.raises(CorruptRecord, match="key 'k'"):
            await store.find_key("s", "k")
        assert await store.find_key("s", "another") is None
        assert any(problem.where.startswith("key ") for problem in await store.check())


async def test_a_run_that_one_index_does_not_find_is_damage(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record would seem empty, as of a run that did nothing, and the run would be dropped."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        await store.claim(session.id, version=1, owner="ann", entries=[Entry("start", run="r")])
        fetched = link.fetched

        async def blind(connection: Any, query: str, values: Any) -> Any:
            by_index = query.startswith("SELECT first_seq")
            blinded = query.replace("reach.loop = %(run)s::text", "false")
            return [] if by_index else await fetched(connection, blinded, values)

        monkeypatch.setattr(link, "fetched", blind)
        with pytest.raises(CorruptRecord, match="run r"):
            await store.read(session.id, run="r")
        assert await store.read(session.id, run="unknown") == []


async def test_forks_race_with_the_erasure_of_their_parent(schema: str) -> None:
    """A fork is whole, or refused because its parent is gone, whichever comes first."""
    async with store_in(schema) as store, store_in(schema) as other:
        kept = refused = 0
        for round in range(25):
            parent = await store.create(note(new_session("one", "two"), "long", f"{round}" * 500))
            child = fork(parent)

            async def erase_late(parent: str = parent.id, delay: float = round * 0.0002) -> None:
                await asyncio.sleep(delay)
                await other.delete(parent)

            outcome, _ = await asyncio.gather(store.create(child), erase_late(), return_exceptions=True)
            if isinstance(outcome, SessionNotFound):
                refused += 1
                assert not await other.exists(child.id)
            else:
                kept += 1
                async with store_in(schema) as third:
                    loaded = await third.load(child.id)
                assert loaded == outcome
                assert texts(loaded) == ["one", "two"]
        assert kept + refused == 25


async def test_erasure_leaves_no_row(schema: str) -> None:
    """When the last session is gone, every row of it is gone from every table."""
    async with store_in(schema) as store, sql(schema) as execute:
        parent = await store.create(note(new_session("a", tags=("t",)), "long", "x" * 1000))
        await store.post(parent.id, Entry("steer"))
        claim, _ = await store.claim(parent.id, version=1, owner="ann", entries=[Entry("start", run="r")])
        appended = await store.append(claim, entries=[Entry("on", run="r")], log="branch")
        await store.sketch(claim, Sketch("r", "m", "half", seq=appended.seq))
        await store.release(claim, interrupted=True)
        assert await execute("SELECT count(*) FROM sketch") == [(1,)]
        child = await store.create(fork(parent))
        for session in (parent, child):
            await store.delete(session.id)
        for table in TABLES:
            assert await execute(f"SELECT count(*) FROM {table}") == [(0,)], table


async def test_many_are_erased_at_once(schema: str) -> None:
    """Running and missing sessions are skipped; what a fork shows stays."""
    async with store_in(schema) as store, store_in(schema) as other, sql(schema) as execute:
        made = [await store.create(new_session(f"s{number}")) for number in range(4)]
        child = await store.create(fork(made[0]))
        await other.load(made[1].id)
        claim, _ = await store.claim(made[3].id, version=1, owner="ann")
        asked = [*(session.id for session in made), "unknown", made[0].id]
        ((before,),) = await execute("SELECT erasures FROM meta")
        assert await store.delete_many(asked) == [session.id for session in made[:3]]
        assert await execute("SELECT erasures FROM meta") == [(before + 3,)]
        assert await other.load(made[1].id) is None
        assert texts(await other.load(child.id)) == ["s0"]
        await store.release(claim)
        assert await store.delete_many(asked) == [made[3].id]
        assert await store.delete_many([child.id]) == [child.id]
        assert await store.delete_many([]) == []
        for table in TABLES:
            assert await execute(f"SELECT count(*) FROM {table}") == [(0,)], table


async def test_erasures_of_many_and_saves_do_not_wait_for_each_other(schema: str) -> None:
    """Saves with values of their own run in any order while all of their sessions are being erased."""
    async with store_in(schema) as store, store_in(schema) as other:
        for round in range(5):
            made = [await store.create(new_session(f"{round} {number}")) for number in range(12)]
            saves = [store.save(note(session, "long", f"{session.id}" * 50)) for session in made[::-1]]
            answers = await asyncio.gather(
                other.delete_many([session.id for session in made]), *saves, return_exceptions=True
            )
            assert sorted(answers[0]) == sorted(session.id for session in made)
            assert all(isinstance(each, AgentSession | SessionNotFound) for each in answers[1:]), answers
            assert not await other.list()


async def test_an_erasure_that_is_caught_in_a_deadlock_is_tried_again(schema: str) -> None:
    """A transaction that indexes messages holds some of them, and asks for others that are being erased."""
    async with store_in(schema) as store, sql(schema) as execute, sql(schema) as beside:
        first, second = [await store.create(new_session("a")) for _ in range(2)]
        held = "SELECT 1 FROM msg JOIN session ON session.log = msg.log WHERE session.id = %s FOR KEY SHARE OF msg"
        await execute("BEGIN")
        await execute(held, second.id)
        erasing = asyncio.create_task(store.delete_many([first.id, second.id]))
        await _until_waiting(beside)
        await asyncio.sleep(0.3)
        assert not erasing.done()
        assert await execute(held, first.id) == [(1,)]
        await execute("COMMIT")
        assert await erasing == [first.id, second.id]
        assert not await store.list()


async def _until_waiting(execute: Callable[..., Awaitable[list[Any]]]) -> None:
    """Wait until a connection of the stores on this schema waits for a lock."""
    asked = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'perdure ' || current_schema()"
    async with asyncio.timeout(20):
        while not await execute(f"{asked} AND wait_event_type = 'Lock'"):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)


async def test_claims_lapse_when_the_store_is_closed(schema: str) -> None:
    """A run whose store was closed cannot write any more, so that others may take it over at once."""
    async with store_in(schema) as other:
        async with store_in(schema) as store:
            sessions = {
                name: await store.create(new_session(id=name)) for name in ("kept", "saved", "released", "lost")
            }
            claims = {name: (await store.claim(name, version=1, owner="ann"))[0] for name in sessions}
            await store.save(sessions["saved"], claim=claims["saved"])
            await store.release(claims["released"])
            await store.release(claims["lost"])
            await other.claim("lost", version=1, owner="ben")
            assert await other.lapsed() == []
        assert await other.lapsed() == ["kept"]
        assert await other.is_interrupted("kept")
        assert await other.is_claimed("lost")


async def test_closing_that_is_cancelled_is_seen_through(schema: str) -> None:
    """No connection is left, and the save under way is carried out."""
    async with sql(schema) as execute:
        store = await store_in(schema).__aenter__()
        session = await store.create(new_session("a"))
        await execute("BEGIN")
        await execute("SELECT 1 FROM session FOR UPDATE")
        saving = asyncio.create_task(store.save(say(session, "b")))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(store.__aexit__())
        await asyncio.sleep(0.05)
        closing.cancel()
        await execute("COMMIT")
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await saving).version == 2
        await _until_gone(execute)


async def _until_gone(execute: Callable[..., Awaitable[list[Any]]]) -> None:
    """Wait until the server has noticed that no connection of the stores on this schema is left."""
    asked = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'perdure ' || current_schema()"
    for _ in range(1000):
        if not await execute(asked):
            return
        await asyncio.sleep(0.02)
    pytest.fail("a connection is left open")


def test_a_store_may_be_closed_after_its_loop(schema: str) -> None:
    """Its connections are closed, though their loop is gone."""

    async def opened() -> PostgresStore:
        store = await store_in(schema).__aenter__()
        await store.create(new_session("a"))
        return store

    async def closed(store: PostgresStore) -> None:
        async with sql(schema) as execute:
            await store.__aexit__()
            await _until_gone(execute)

    store = asyncio.run(opened())
    asyncio.run(closed(store))


async def test_a_forked_child_may_leave_the_block(schema: str) -> None:
    """The child closes nothing that its parent uses, and waits for nothing."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        child = os.fork()
        if child == 0:
            with suppress(StopIteration):
                store.__aexit__().send(None)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
        assert (await store.save(say(session, "b"))).version == 2


async def test_what_is_pinned_stays_at_hand(schema: str) -> None:
    """A pinned session stays in memory until it is unpinned, however many others are used."""
    async with store_in(schema, cache=2) as store:
        first = await store.create(new_session("first"))
        store.pin(first.id)
        for _ in range(4):
            await store.create(new_session("another"))
        assert await store.load(first.id) is first
        store.unpin(first.id)
        store.evict(first.id)
        assert await store.load(first.id) is not first
        assert await store.load(first.id) == first


def test_schemas_of_the_tests_are_dropped() -> None:
    """They are dropped with everything in them; other schemas stay."""
    names = ("t_dropped", "t_dropped_too", "t_kept")
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        for name in names:
            connection.execute(f"CREATE SCHEMA {name}; CREATE TABLE {name}.one (n int)".encode())
        postgres_server.drop(postgres_server.dsn(), ["t_dropped"])
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname = ANY (%s)", (list(names),))
        assert left.fetchall() == [("t_kept",)]
        connection.execute("DROP SCHEMA t_kept CASCADE")


FOUND_BY_CHECK = {
    "UPDATE session SET owner = 'another'": "column owner",
    "UPDATE session SET msg_end = msg_end + 1": "the end of its log",
    "UPDATE session SET version = version + 1": "its newest version",
    "DELETE FROM claimed": "its claim",
    "DELETE FROM ref": "of log",
    "DELETE FROM tag": "tags",
    "UPDATE tag SET status = 'gone'": "its tags in lists",
    "UPDATE session SET created = updated + 1; DELETE FROM backdated": "its place in lists",
    "DELETE FROM value": "value",
    "DELETE FROM uses": "value",
    "DELETE FROM session WHERE id = 'child'": "head",
}


@pytest.mark.parametrize("damage", FOUND_BY_CHECK)
async def test_a_check_finds_what_is_wrong_beneath_the_sessions(schema: str, damage: str) -> None:
    """A sound store has no problems. Each problem of a damaged store says where it is and what to do."""
    async with store_in(schema) as store, sql(schema) as execute:
        parent = await store.create(note(new_session("a", "b", tags=("t",)), "long", "x" * 1000))
        await store.create(say(fork(parent, id="child"), "c"))
        await store.claim(parent.id, version=1, owner="ann", entries=[Entry("start", run="r")])
        assert await store.check() == []
        await execute(damage)
        found = await store.check()
        assert any(FOUND_BY_CHECK[damage] in problem.where for problem in found), found
        assert all(len(problem.repair) > 30 for problem in found)


def lists() -> dict[str, list[dict[str, Any]]]:
    """Return lists grouped by the index that serves them; those without one by what they go through."""
    return {
        "session_by_created": [{}, {"created_before": _at(50_000)}, {"updated_before": _at(50_000)}],
        "session_by_shelf ": [
            {"status": "suspended", "after": "90000.0_90000"},
            *({"status": "deleted"}, {"top_level": True}),
            {"order": "updated", "created_before": _at(100)},
        ],
        "session_by_shelf_recent": [
            *({"order": "updated"}, {"order": "updated", "top_level": True, "after": "u50000.0_50000"}),
            *({"order": "updated", "updated_before": _at(50_000)}, {"updated_before": _at(100)}),
        ],
        "session_by_agent_shelf ": [
            {"agent": "agent 3", "after": "50000.0_50000"},
            {"agent": "agent 3", "status": "failed"},
        ],
        "session_by_agent_shelf_recent": [{"agent": "agent 3", "order": "updated"}],
        "session_by_owner_shelf ": [
            *({"owner": "owner 7"}, {"owner": "owner 7", "status": "failed"}, {"owner": None}),
        ],
        "session_by_owner_shelf_recent": [
            {"owner": "owner 7", "order": "updated", "after": "u50000.0_50000"},
            *({"owner": None, "order": "updated"}, {"owner": None, "order": "updated", "top_level": True}),
        ],
        "session_by_owner_agent_shelf ": [
            {"owner": "owner 7", "agent": "agent 107"},
            {"owner": "owner 7", "agent": "x"},
        ],
        "session_by_owner_agent_shelf_recent": [{"owner": "owner 7", "agent": "agent 107", "order": "updated"}],
        "session_by_parent": [{"parent": "s5"}, {"parent": "s5", "tag": "common", "owner": "owner 0"}],
        "tag_by_shelf ": [{"tag": "common"}, {"tag": "rare", "status": "active"}],
        "tag_by_shelf_recent": [{"tag": "common", "order": "updated"}],
        "tag_by_agent_shelf ": [{"tag": "common", "agent": "agent 3"}],
        "tag_by_agent_shelf_recent": [{"tag": "common", "agent": "agent 3", "order": "updated"}],
        "tag_by_owner_shelf ": [{"tag": "rare", "owner": "owner 7"}, {"tag": "common", "owner": "owner 7"}],
        "tag_by_owner_shelf_recent": [{"tag": "common", "owner": "owner 7", "order": "updated"}],
        "tag_by_owner_agent_shelf ": [{"tag": "common", "owner": "owner 7", "agent": "agent 3"}],
        "tag_by_owner_agent_shelf_recent": [
            {"tag": "common", "owner": "owner 7", "agent": "agent 3", "order": "updated"},
        ],
        "session_id_key": [{"id": "s77"}],
    }


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


async def test_lists_use_their_indexes_at_any_number_of_sessions(schema: str) -> None:
    """An index with the order serves every filter: a list reads no more rows than a page has."""
    async with store_in(schema) as store, sql(schema) as execute:
        many = 100_000 if os.environ.get("PERDURE_TORTURE") else 30_000
        await execute(
            "INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, op, spawned)"
            f" SELECT 's' || n, n, 1, CASE WHEN n > {many * 9 // 10} THEN 'deleted' WHEN n % 997 = 0 THEN 'suspended'"
            " WHEN n % 7 = 0 THEN 'failed' ELSE 'active' END, 'agent ' || n % 500,"
            " CASE WHEN n % 11 > 0 THEN 'owner ' || n % 100 END, CASE WHEN n % 1000 = 0 THEN 's5' END, n, n, '',"
            " (n % 3 = 0)::int"
            f" FROM generate_series(1, {many}) AS n"
        )
        await execute(f"INSERT INTO tag (tag, sid) SELECT 'common', n FROM generate_series(1, {many}) AS n")
        await execute(f"INSERT INTO tag (tag, sid) SELECT 'rare', n FROM generate_series(1, {many}, 1000) AS n")
        await execute("ANALYZE session; ANALYZE tag")
        for index, filters in [(index, each) for index, several in lists().items() for each in several]:
            steps, link = rows.SQL.page(Page(SessionQuery.of(filters))), store._engine.opened.link
            statement, values = next(steps)
            if statement.startswith("SELECT count"):
                statement, values = steps.send(await link.rows(statement, tuple(values)))
            said = await link.rows(f"EXPLAIN (ANALYZE, TIMING OFF) {statement}", tuple(values))
            plan = "\n".join(row[0] for row in said)
            assert index in plan, plan
            assert "Seq Scan" not in plan, plan
            read = [float(rows) * int(loops) for rows, loops in re.findall(r"actual rows=([\d.]+) loops=(\d+)", plan)]
            passed = [int(found) for found in re.findall(r"Rows Removed by Filter: (\d+)", plan)]
            assert max(*read, *passed, 0) <= 8 * 51, plan
        # The planner by itself, without the settings of the store's connections.
        for index in ("session_by_owner_shelf ", "tag_by_owner_shelf ", "tag_by_owner_shelf_recent"):
            statement, values = next(rows.SQL.page(Page(SessionQuery.of(lists()[index][0]))))
            plan = "\n".join(row[0] for row in await execute(f"EXPLAIN {statement}", *values))
            assert index in plan, plan


MANY_AT_ONCE = (
    "ALTER TABLE session SET (autovacuum_enabled = off)",
    "INSERT INTO session (id, log, version, status, agent, owner, created, updated, op, spawned)"
    " SELECT 's' || n, n, 1, 'active', 'a', 'ann', n, n, '', 1 FROM generate_series(1, 5000) AS n",
)


KNOWN = "SELECT tablename FROM pg_stats WHERE schemaname = %s AND tablename IN ('session', 'tag') LIMIT 1"


async def test_lists_are_planned_well_soon_after_an_import(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many new sessions the store runs ANALYZE: it does not wait for autovacuum, which may be off."""
    monkeypatch.setattr(statistics, "_BETWEEN_LOOKS", 2)
    async with store_in(schema) as store, sql(schema) as execute:
        for statement in MANY_AT_ONCE:
            await execute(statement)
        await store.create(new_session())
        assert store._engine.opened.statistics._task is None, "one is not many"
        assert await execute(KNOWN, schema) == []
        await store.create(new_session())
        await store._engine.opened.statistics._task
        assert await execute(KNOWN, schema) == [("session",)]


async def test_sessions_that_are_brought_in_count_as_well(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import does not write them the way `create` does."""
    monkeypatch.setattr(statistics, "_BETWEEN_LOOKS", 2)
    async with store_in(schema) as store, sql(schema) as execute:
        for statement in MANY_AT_ONCE:
            await execute(statement)
        session = await store.create(new_session())
        archived = await store.dump(session.id)
        await store.delete(session.id)
        await store.restore(archived)
        await store._engine.opened.statistics._task
        assert await execute(KNOWN, schema) == [("session",)]


async def test_a_store_can_be_closed_while_the_planner_looks(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for ANALYZE: another store will run it."""
    monkeypatch.setattr(statistics, "_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(statistics, "_ANALYZE", "SELECT pg_sleep(60)")
    async with sql(schema) as execute, asyncio.timeout(30), store_in(schema) as store:
        for statement in MANY_AT_ONCE:
            await execute(statement)
        await store.create(new_session())
        await asyncio.sleep(0.1)


async def test_few_sessions_are_not_looked_at(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any plan finds a few sessions quickly."""
    monkeypatch.setattr(statistics, "_BETWEEN_LOOKS", 1)
    async with store_in(schema) as store, sql(schema) as execute:
        await execute("ALTER TABLE session SET (autovacuum_enabled = off)")
        await store.create(new_session())
        await store._engine.opened.statistics._task
        assert await execute(KNOWN, schema) == []


async def test_a_full_batch_does_not_wait_for_another(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one connection is writing, the other takes a full batch of changes."""
    async with store_in(schema) as store:
        sessions = [await store.create(new_session("a")) for _ in range(writer.MOST_PER_BATCH + 1)]
        held, is_held, started = asyncio.Event(), asyncio.Event(), list[int]()
        carry_out = writer.Writer._carry_out

        async def slowly(self: Any, batch: list[Any], lane: Any) -> None:
            started.append(len(batch))
            if len(batch) == 1:
                is_held.set()
                await held.wait()
            await carry_out(self, batch, lane)

        monkeypatch.setattr(writer.Writer, "_carry_out", slowly)
        first = asyncio.create_task(store.save(say(sessions[0], "b")))
        await is_held.wait()
        try:
            await asyncio.wait_for(asyncio.gather(*(store.save(say(each, "b")) for each in sessions[1:])), 10)
        finally:
            held.set()
        assert (await first).version == 2
        assert started == [1, writer.MOST_PER_BATCH]


async def test_followers_hear_at_once(schema: str) -> None:
    """`changed` returns when another store has written, long before its time-out."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session())
        claim, appended = await store.claim(session.id, version=1, owner="ann", entries=[Entry("start")])
        began = time.perf_counter()
        await other.changed(session.id, 0, 30)
        assert time.perf_counter() - began < 10, "entries written before do not make it wait"
        for _ in range(3):
            waiting = asyncio.create_task(other.changed(session.id, appended.seq, 30))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            appended = await store.append(claim, entries=[Entry("on")])
            async with asyncio.timeout(10):
                await waiting
        began = time.perf_counter()
        await other.changed(session.id, appended.seq, 0.1)
        assert 0.09 < time.perf_counter() - began < 5


async def test_late_news_of_something_older_ends_no_wait(schema: str) -> None:
    """A notification may arrive after its entry was seen. `changed` then looks again, and continues to wait."""
    async with store_in(schema) as store, store_in(schema) as other, sql(schema) as execute:
        session = await store.create(new_session())
        claim, appended = await store.claim(session.id, version=1, owner="ann", entries=[Entry("start")])
        waiting = asyncio.create_task(other.changed(session.id, appended.seq, 30))
        for _ in range(3):
            await asyncio.sleep(0.1)
            await execute("SELECT pg_notify(%s, %s)", f"perdure {schema}"[:63], session.id)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await store.append(claim, entries=[Entry("on")])
        async with asyncio.timeout(10):
            await waiting


async def test_a_follower_that_was_cut_off_misses_nothing(schema: str) -> None:
    """Every connection is cut while it follows; it still gets every event once, in order."""
    async with store_in(schema) as store, store_in(schema) as other, sql(schema) as execute:
        runtime = SessionRuntime(store)
        session = await runtime.create(AgentDefinition("agent"))
        seen: list[int] = []

        async def follow() -> None:
            async for event in SessionRuntime(other).events(session.id, follow=True):
                seen.append(event.cursor)

        following = asyncio.create_task(follow())
        for turn in range(4):
            await runtime.execute(session.id, SendMessage(f"{turn}", loops_of(ScriptedDriver(["Hello."]))))
            if turn < 3:
                await cut_off(execute)
        last = (await store.read(session.id, last=1))[0].seq
        async with asyncio.timeout(30):
            while not seen or seen[-1] < last:  # noqa: ASYNC110 (nobody tells how far a follower is)
                await asyncio.sleep(0.02)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert seen == [*range(1, last + 1)]


async def cut_off(execute: Callable[..., Awaitable[list[Any]]]) -> None:
    """End every connection of the stores on the same schema."""
    await execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure ' || current_schema()"
    )


def test_writers_notify_nobody_in_vain() -> None:
    """The statement checks whether anybody follows: a notification takes a lock that all commits queue for."""
    assert "store.followed > answer.time" in parcel.statement(frozenset({"record"}))
    assert "pg_notify" not in parcel.statement(frozenset({"head", "messages"}))


async def test_statements_are_not_compiled_first(tmp_path: Path) -> None:
    """PostgreSQL before 18 would take seconds for it at every statement, since it estimates very high costs."""
    async with PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path)) as store:
        assert await store._engine.opened.link.row("SHOW jit") == ("off",)
