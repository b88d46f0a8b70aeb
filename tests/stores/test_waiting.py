"""Waiting items and timers, beneath their contract: the indexes and transactions they use, and nothing left over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests import postgres_server
from tests.stores.files import bytes_in, files_in
from tests.stores.test_postgres_loss import lose_commits

from perdure import Entry, FileStore, Message, OwnerBusy, PostgresStore, SqliteStore, codec
from perdure.model.ids import SessionId
from perdure.protocols import Timer
from perdure.stores.engine import Select
from perdure.stores.jobs import timers, waiting
from perdure.stores.postgres import waiting as postgres_waiting
from perdure.stores.sqlite.engine import TRANSLATOR
from perdure.testing.samples import new_session, say, tell

ITEM = Entry("queue", {"said": "hello"})


def timer(name: str = "t", *, text: str = "hello", **options: Any) -> Timer:
    return Timer(SessionId("it"), name, 5.0, Entry("queue", {"said": text}), **options)


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return postgres_server.schema_of(tmp_path)


def store_in(schema: str) -> PostgresStore:
    return PostgresStore(postgres_server.dsn(), schema=schema)


def connected(schema: str) -> psycopg.Connection[Any]:
    return psycopg.connect(postgres_server.dsn(), autocommit=True, options=f"-c search_path={schema}")


class TestSqlite:
    async def test_each_question_has_an_index(self, tmp_path: Path) -> None:
        """The cost follows the number of results, however many sessions wait or do not."""
        async with SqliteStore(tmp_path / "s.db"):
            pass
        claimed = {**waiting.WAITS, "status": "active", "claim !=": None}
        turns = waiting.InTurn("", (), ())
        asked = {
            "session_waiting (status=?)": self._waiting(),
            "session_claimed": Select("session", waiting.COLUMNS, claimed),
            "session_waiting_by_owner (owner=?)": Select(
                "session", ("inbox_end",), {"owner": "ada", **waiting.WAITS}, limit=9
            ),
            "session_waiting (status=? AND priority<?)": turns.highest(5),
            "session_in_turn (status=? AND priority=? AND owner>?)": turns.next_owner(5, "ada"),
            "session_in_turn (status=? AND priority=? AND owner=?)": turns.lane(5, "ada", 9),
            "timer_by_due (due<?)": Select("timer", timers.COLUMNS, {"due <=": 5.0}, order="due timer", limit=9),
        }
        for index, select in asked.items():
            plan = self._plan(tmp_path / "s.db", select)
            assert [index in step for step in plan] == [True], (index, plan)

    def _waiting(self) -> Select:
        where = {**waiting.WAITS, "status": "active", "claim": None}
        return Select("session", waiting.COLUMNS, where, order="-priority since sid", limit=9)

    def _plan(self, path: Path, select: Select) -> Sequence[str]:
        db = apsw.Connection(str(path))
        text, values = TRANSLATOR.select(select)
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}", tuple(values))]
        db.close()
        return plan

    async def test_no_byte_of_a_timer_is_left(self, tmp_path: Path) -> None:
        """After its session is erased, nothing is left of a timer that rang, was dropped or is set."""
        async with SqliteStore(tmp_path / "s.db") as store:
            await _rung_dropped_and_set(store)
            await store.delete("it")
            assert b"erase-me" not in bytes_in(tmp_path)


class TestFiles:
    async def test_no_byte_of_a_timer_is_left(self, tmp_path: Path) -> None:
        """The hints are gone too."""
        async with FileStore(tmp_path) as store:
            await _rung_dropped_and_set(store)
            await store.delete("it")
            assert b"erase-me" not in bytes_in(tmp_path)
            assert not files_in(tmp_path).keys() & {".timers/it", ".waiting/it"}

    async def test_a_redaction_leaves_nothing_of_timers_that_are_gone(self, tmp_path: Path) -> None:
        """Such a timer may have had the text of a redacted message. A timer that is still set keeps its item."""
        async with FileStore(tmp_path) as store:
            await _rung_dropped_and_set(store)
            session = await store.load("it")
            assert session is not None
            message = Message.user("erase-me rung")
            session = await store.save(tell(session, message), taken=1)
            await store.redact("it", [message.id])
            found = (tmp_path / "it.jsonl").read_bytes()
            assert b"erase-me dropped" not in found
            assert found.count(b"erase-me rung") == found.count(b'"kind":"inbox"')  # the redaction knows it by ids
            assert [each.name for each in await store.timers()] == ["set"]

    async def test_no_byte_of_a_schedule_that_was_redacted_is_left(self, tmp_path: Path) -> None:
        """It is neither in the line that is valid nor in those before it."""
        async with FileStore(tmp_path) as store:
            message = Message.user("erase-me, please")
            session = await store.create(new_session("Hello", id="it"))
            body = {"id": "i", "messages": [codec.decode_plain(codec.encode_message(Message.user(message.text)))]}
            kept = await store.set_timer(Timer(SessionId("it"), "s", 5.0, Entry("queue", body), cron="0 7 * * *"))
            assert await store.ring(kept, again=9.0, entry=ITEM)
            await store.save(tell(session, message), taken=1)
            await store.redact("it", [message.id])
            assert b"erase-me" not in bytes_in(tmp_path)
            (kept,) = await store.timers("it")
            assert kept.due == 9.0
        async with FileStore(tmp_path) as store:
            assert await store.timers("it") == [kept]
            assert [*await store.check()] == []

    async def test_a_directory_of_an_older_release_is_looked_through_once(self, tmp_path: Path) -> None:
        """It has no hints. From then on each post writes one."""
        async with FileStore(tmp_path) as store:
            for name in ("a", "b"):
                await store.create(new_session("Hello", id=name))
            await store.post("a", ITEM)
            (tmp_path / ".waiting" / "a").unlink()
            assert [each.session_id for each in await store.waiting()] == ["a"]
            assert {name for name in files_in(tmp_path) if name.startswith(".waiting")} == {".waiting/+", ".waiting/a"}
            await store.post("b", ITEM)
            assert len(await store.waiting()) == 2

    async def test_a_lost_hint_is_named_and_made_anew(self, tmp_path: Path) -> None:
        """A check finds it missing, and after gc the store looks at all sessions again."""
        async with FileStore(tmp_path) as store:
            await store.create(new_session("Hello", id="it"))
            await store.post("it", ITEM)
            await store.set_timer(timer())
            assert len(await store.waiting()) == 1
            assert [*await store.check()] == []
            for kind in (".waiting", ".timers"):
                (tmp_path / kind / "it").unlink()
            assert [problem.where for problem in await store.check()] == [".waiting/it", ".timers/it"]
            assert [*await store.waiting()] == [*await store.timers()] == []
            await store.gc()
            assert (len(await store.waiting()), len(await store.timers())) == (1, 1)
            assert [*await store.check()] == []

    async def test_a_damaged_session_stops_no_other(self, tmp_path: Path) -> None:
        """It is left out of the sessions that wait, and of those that are due."""
        async with FileStore(tmp_path) as store:
            for name in ("it", "other"):
                await store.create(new_session("Hello", id=name))
                await store.post(name, ITEM)
            await store.set_timer(timer())
            path = tmp_path / "it.jsonl"
            path.write_bytes(path.read_bytes().replace(b"Hello", b"Jello"))
        async with FileStore(tmp_path) as store:
            assert [each.session_id for each in await store.waiting()] == ["other"]
            assert [*await store.due(9.0)] == []


async def _rung_dropped_and_set(store: Any) -> None:
    await store.create(new_session("Hello", id="it"))
    for name in ("rung", "dropped", "set"):
        kept = await store.set_timer(timer(name, text=f"erase-me {name}"))
        if name == "rung":
            assert await store.ring(kept)
    assert await store.drop_timer("it", "dropped")


class TestPostgres:
    async def test_the_last_look_waits_for_a_post_that_is_under_way(self, schema: str) -> None:
        """Without the lock it would see nothing, and the item would wait until somebody writes again."""
        async with store_in(schema) as store:
            await store.create(new_session("Hello", id="it"))
            with connected(schema) as db, db.transaction():
                db.execute("UPDATE session SET inbox_end = 1, since = 5 WHERE id = 'it'")
                look = asyncio.create_task(store.has_waiting("it"))
                done, _ = await asyncio.wait({look}, timeout=0.3)
                assert not done
            assert await look

    @pytest.mark.parametrize("when", ["before", "after"])
    async def test_what_was_counted_and_whose_answer_was_lost_is_made_once(
        self, schema: str, when: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second attempt of a post, a claim or a ring does not count the first one towards the limit."""
        plan: list[str] = []
        lose_commits(monkeypatch, plan)
        async with store_in(schema) as store, store_in(schema) as other:
            for name in ("it", "more"):
                await store.create(new_session("Hello", id=name, owner="ada"))
            plan += [when]
            assert await store.post("it", ITEM, most_of_owner=1) == 1
            kept = await store.set_timer(timer())
            plan += [when]
            assert await store.ring(kept)
            plan += [when]
            claim, _ = await store.claim("it", version=1, owner="me", per_owner=1)
            assert plan == []
            assert len(await other.read("it", inbox=True)) == 2
            with pytest.raises(OwnerBusy):
                await other.claim("more", version=1, owner="me", per_owner=1)
            await store.release(claim)
            await other.claim("more", version=1, owner="me", per_owner=1)

    async def test_a_page_of_many_that_wait_is_read_by_an_index(self, schema: str) -> None:
        """It costs what it returns. The benchmarks measure a page of a hundred thousand."""
        async with store_in(schema) as store:
            await store.create(new_session("Hello", id="it"))
            with connected(schema) as db:
                db.execute(
                    "INSERT INTO session (id, log, version, status, agent, created, updated, inbox_end, since, op)"
                    " SELECT 'w' || n, 0, 1, 'active', 'a', n, n, 1, n, '' FROM generate_series(1, 5000) AS n"
                )
                db.execute("ANALYZE session, waiting")
                text = postgres_waiting.page(10, idle_only=True)
                plan = "\n".join(row[0] for row in db.execute(f"EXPLAIN {text}".encode()))
            assert "waiting_by_urgency" in plan
            assert "Sort" not in plan
            assert [each.session_id for each in await store.waiting(3)] == ["w1", "w2", "w3"]

    async def test_owners_take_turns_by_an_index(self, schema: str) -> None:
        """The index leads from one owner to the next, however many sessions the first has."""
        async with store_in(schema) as store:
            await store.create(new_session("Hello", id="it"))
            turns = postgres_waiting.InTurnHere("", (), ())
            with connected(schema) as db:
                db.execute(
                    "INSERT INTO session"
                    " (id, log, version, status, agent, owner, created, updated, inbox_end, since, op)"
                    " SELECT 'w' || n, 0, 1, 'active', 'a', 'ann', n, n, 1, n, '' FROM generate_series(1, 5000) AS n"
                )
                db.execute("ANALYZE session, waiting")
                for index, (text, values) in (
                    ("waiting_by_urgency", turns.highest(5)),
                    ("waiting_in_turn", turns.next_owner(0, "ann")),
                    ("waiting_in_turn", turns.lane(0, "ben", 9)),
                ):
                    plan = "\n".join(row[0] for row in db.execute(f"EXPLAIN {text}".encode(), values))
                    assert index in plan
                    assert "Sort" not in plan
            for name, owner in (("strange", "b\\e\x00n"), ("nobody", None)):
                await store.create(new_session("Hello", id=name, owner=owner))
                await store.post(name, ITEM)
            found = await store.in_turn(4)
            assert [(each.session_id, each.owner) for each in found] == [
                ("w1", "ann"),
                ("strange", "b\\e\x00n"),
                ("nobody", None),
                ("w2", "ann"),
            ]
            assert [each.session_id for each in await store.in_turn(1, not_of=["ann", "b\\e\x00n"])] == ["nobody"]

    async def test_a_save_stays_on_its_page(self, schema: str) -> None:
        """No index has what a post or a taken item changes: the session's new row needs no new entry in any."""
        async with store_in(schema) as store:
            session = await store.create(new_session("Hello", id="it"))
            with connected(schema) as db:
                for round in range(3):
                    await store.post("it", ITEM, priority=round)
                    session = await store.save(say(session, f"answer {round}"), taken=round + 1)
                await asyncio.sleep(1.2)  # statistics are reported once a second
                await store.exists("it")
                sql = "SELECT n_tup_upd - n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = %s AND relname = %s"
                ((cold,),) = db.execute(sql, (schema, "session")).fetchall()
            assert cold <= 1  # a new minute may begin, and lists are ordered by it
            assert [*await store.waiting()] == []
