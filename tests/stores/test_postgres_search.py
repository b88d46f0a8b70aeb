"""Promises of PostgreSQL's search beyond the contract: the server ranks, and only the best messages are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace
from tests import postgres_server

from perdure import PostgresStore
from perdure.errors import CorruptRecord
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Entry, Indexed
from perdure.stores.postgres import search
from perdure.stores.postgres.link import Queries, ask
from perdure.stores.search import Query, Term
from perdure.testing.samples import fork, new_session


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return postgres_server.schema_of(tmp_path)


def store_in(schema: str) -> PostgresStore:
    return PostgresStore(postgres_server.dsn(), schema=schema)


@pytest.mark.parametrize(
    "text",
    [
        " ".join(f"word{n}" for n in range(150_000)),
        "a b " * 100_000,
        " ".join(map(chr, range(0x4E00, 0x9FFF))),
        "x" * 3_000_000,
        "it's a \\ 'quoted' \x00 text",
        "",
    ],
    ids=["many", "two", "unspaced", "one", "odd", "none"],
)
def test_any_text_has_a_vector(text: str) -> None:
    """PostgreSQL's bounds on words, places and bytes are kept, whatever is said."""
    with psycopg.connect(postgres_server.dsn()) as connection:
        _, _, vector = search.vector_of(Message.user(text))
        connection.execute("SELECT %s::tsvector", (vector,))


async def test_phrases_are_found_where_places_end(schema: str) -> None:
    """Phrases are found in messages with more words, or more uses of a word, than PostgreSQL has places for."""
    late = " ".join(f"w{n}" for n in range(17_000)) + " red green"
    often = "red " * 400 + "green"
    apart = "green red " + "filler " * 20_000
    async with store_in(schema) as store:
        session = await store.create(new_session(late, often, apart, "green red", "red green"))
        ids = [message.id for message in session.state.messages]
        hits = await store.search('"red green"')
        assert {hit.message_id for hit in hits} == {ids[0], ids[1], ids[4]}
        assert hits[0].message_id == ids[4]


async def test_only_the_best_are_read(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search reads no more messages than it was asked for, however many match."""
    async with store_in(schema) as store:
        said = [f"kettle number {number}" for number in range(300)]
        session = await store.create(new_session(*said, "kettle kettle"))
        assert len(await store.search("kettle", limit=1)) == 1
        read: list[int] = []
        decoded = search.decoded

        def counting(*row: Any) -> Message | None:
            read.append(row[1])
            return decoded(*row)

        monkeypatch.setattr(search, "decoded", counting)
        hits = await store.search("kettle", limit=5)
        assert [hit.position for hit in hits] == [300, 299, 298, 297, 296]
        assert sorted(read) == [296, 297, 298, 299, 300]
        assert {hit.session_id for hit in hits} == {session.id}


async def test_what_may_not_be_shown_is_passed_over(schema: str) -> None:
    """Better hits in a hidden session do not displace the others, nor what a fork of it shows."""
    async with store_in(schema) as store:
        hidden = await store.create(new_session(*["kettle kettle"] * 100))
        child = await store.create(fork(hidden))
        other = await store.create(new_session("a kettle among other things", owner="ann"))
        await store.save(hidden.deleted())
        assert {hit.session_id for hit in await store.search("kettle", limit=1000)} == {child.id, other.id}
        await store.save(child.deleted())
        assert [hit.session_id for hit in await store.search("kettle", limit=2)] == [other.id]


async def test_others_messages_do_not_crowd_out_an_owners(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a limited number of the newest messages are ranked, of those that the owner may see."""
    monkeypatch.setattr(search, "MOST_RANKED", 5)
    async with store_in(schema) as store:
        mine = await store.create(new_session("tea", owner="ann"))
        await store.create(new_session(*["tea"] * 20, owner="bob"))
        assert [hit.session_id for hit in await store.search("tea", owner="ann")] == [mine.id]
        assert [hit.session_id for hit in await store.search("tea", session_id=mine.id)] == [mine.id]
        assert len(await store.search("tea")) == 5


@pytest.mark.parametrize("most_logs", [1, 1_000], ids=["many sessions", "few sessions"])
async def test_an_owner_finds_what_forks_show_of_sessions_that_are_gone(
    schema: str, monkeypatch: pytest.MonkeyPatch, most_logs: int
) -> None:
    """It works for any number of sessions, and finds nothing of other owners, nor what nobody shows any more."""
    monkeypatch.setattr(search, "_MOST_LOGS", most_logs)
    async with store_in(schema) as store:
        erased = await store.create(new_session("erased tea", owner="ann"))
        hidden = await store.create(new_session("hidden tea", owner="ann"))
        alone = await store.create(new_session("lonely tea", owner="ann"))
        theirs = await store.create(new_session("their tea", owner="bob"))
        children = [await store.create(_anns(fork(parent))) for parent in (erased, hidden, theirs)]
        mine = await store.create(new_session("my tea", owner="ann"))
        await store.delete(erased.id)
        await store.save(hidden.deleted())
        await store.save(alone.deleted())
        found = {hit.session_id: hit.snippet for hit in await store.search("tea", owner="ann")}
        assert found == {children[0].id: "erased tea", children[1].id: "hidden tea", mine.id: "my tea"}
        assert [hit.session_id for hit in await store.search("tea", owner="bob")] == [theirs.id]
        assert await store.search("tea", owner="carl") == []


def _anns(session: AgentSession) -> AgentSession:
    return replace(session, info=replace(session.info, owner="ann"))


async def test_closer_words_weigh_more(schema: str) -> None:
    """PostgreSQL ranks close words above distant ones, and short messages above long ones."""
    async with store_in(schema) as store:
        said = ("red and then, after a while, green", "red green", "red green and much more to be said about it")
        session = await store.create(new_session(*said))
        apart, near, long = (message.id for message in session.state.messages)
        assert [hit.message_id for hit in await store.search("green red")] == [near, long, apart]


def test_words_are_asked_for_as_they_are_indexed() -> None:
    """Quotes are doubled; a word too long for the index is searched by its beginning."""
    assert search.lexemes(Term(("it's", "x" * 300))) == ["'it''s'", f"'{'x' * 200}':*"]
    assert search.all_phrases((Term(("a", "b"), prefix=True), Term(("c",)))) == "('a' <-> 'b':*) & ('c')"
    assert search.all_words((Term(("a", "b")), Term(("a",)))) == "'a' & 'b'"


async def test_plans_use_the_indexes(schema: str) -> None:
    """At 100,000 messages an index finds rare words, a scan from the newest common ones, and the log a session's."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        async with store._engine.opened.link.connection() as connection:
            await connection.execute(GENERATE)
            await connection.execute("ANALYZE word")
            for index, text, session_id in (
                ("word_by_words", "seldom", None),
                ("word_by_words", "seldom common", None),
                ("word_by_words", "sel*", None),
                ("word_by_number", "common", None),
                ("word_pkey", "common", session.id),
            ):
                query = Query.of(text, None, session_id, 20)
                async with connection.transaction():
                    rows = await ask(connection, explained(query))
                plan = "\n".join(row[0] for row in rows)
                assert index in plan, plan
                assert "Seq Scan" not in plan, plan


def explained(query: Query) -> Queries[list[Any]]:
    yield search._PLANNED, ()
    statement, values = yield from search._ranking(query)
    return (yield f"EXPLAIN {statement}", {**values, "most": 40, "passed": 0})


GENERATE = """
    WITH said AS (
        INSERT INTO msg SELECT 1000 + n / 100, n % 100, 0, '' FROM generate_series(1, 100000) AS n RETURNING log, pos
    )
    INSERT INTO word (log, pos, size, whole, words)
    SELECT log, pos, 2, true, (CASE WHEN pos = 7 THEN 'common:1 seldom:2' ELSE 'common:1 other:2' END)::tsvector
    FROM said
"""


async def test_indexing_can_be_watched_and_repeated(schema: str) -> None:
    """Progress says how many of all messages are done. A rebuilt index has every message once."""
    told: list[tuple[int, int]] = []
    async with store_in(schema) as store:
        assert isinstance(store, Indexed)
        sessions = [await store.create(new_session(*(f"word{n} tea" for n in range(1_500)))) for _ in range(3)]
        assert await store.index(progress=lambda done, total: told.append((done, total))) == 4_500
        assert told == [(3_000, 4_500), (4_500, 4_500)]
        assert await store.index(progress=lambda *_: pytest.fail("there is nothing to do")) == 0
        await store.delete(sessions[0].id)
        before = [hit.message_id for hit in await store.search("tea", limit=1000)]
        assert await store.index(rebuild=True) == 3_000
        assert await store.index() == 0
        assert [hit.message_id for hit in await store.search("tea", limit=1000)] == before
        assert {hit.session_id for hit in await store.search("word7")} == {session.id for session in sessions[1:]}


async def test_an_id_that_rotted_leaves_its_session_out_of_a_search(schema: str) -> None:
    """An id may rot into a form that no id can have. A search skips the damaged session, and other lists report it."""
    async with store_in(schema) as store:
        await store.create(new_session("common words", id="sound"))
        await store.create(new_session("common words", id="rotten"))
        await store.post("rotten", Entry("said", "hi"))
        assert len(await store.search("common")) == 2
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
            connection.execute(f"UPDATE {schema}.session SET id = 'rott$n' WHERE id = 'rotten'")
        assert [hit.session_id for hit in await store.search("common")] == ["sound"]
        for verb in (store.ids_with_prefix(""), store.waiting()):
            with pytest.raises(CorruptRecord, match="session table"):
                await verb
