"""The search index of the SQLite store: a file of its own that lags, catches up, and forgets what is erased."""

from __future__ import annotations

import asyncio
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import StoreError
from perdure.model.message import Message
from perdure.protocols import Indexed
from perdure.stores.search import _WORD, Place, Term, _folded, show
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import ranking as sqlite_ranking
from perdure.stores.sqlite import search as sqlite_search
from perdure.stores.sqlite.engine import SqliteEngine
from perdure.stores.sqlite.erasure import Erasure
from perdure.stores.sqlite.schema import search_path
from perdure.stores.sqlite.sums import connect_with_sums
from perdure.testing.samples import fork, new_session, say


def index_of(path: Path) -> Path:
    return path.with_name(path.name + "-search")


def words_in(path: Path) -> set[str]:
    """Return every word that the index has."""
    db = apsw.Connection(str(index_of(path)))
    try:
        db.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab('main', 'message', 'row')")
        return {term for (term,) in db.execute("SELECT term FROM temp.words")}
    finally:
        db.close()


def check_index(path: Path) -> None:
    """Raise an error if the index is not consistent in itself."""
    db = apsw.Connection(str(index_of(path)))
    try:
        db.execute("INSERT INTO message(message) VALUES ('integrity-check')")
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        db.close()


def bytes_in(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in path.parent.iterdir() if each.name.startswith(path.name))


async def ids(store: SqliteStore, text: str, **options: Any) -> list[str]:
    return [hit.session_id for hit in await store.search(text, **options)]


async def test_there_is_no_index_until_somebody_searches(tmp_path: Path) -> None:
    """The first search makes it, and only its owner may read it."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("hello"))
        await store.delete(session.id)
        assert not index_of(path).exists()
        await store.search("hello")
        assert stat.S_IMODE(os.stat(index_of(path)).st_mode) == 0o600


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "cut", "flipped"])
async def test_a_lost_or_damaged_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    """Nobody is told: the index has nothing that the store does not have."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        sessions = [await store.create(new_session(*(f"word{n} common" for n in range(200)))) for _ in range(5)]
        assert len(await ids(store, "common", limit=1000)) == 1000
    found = index_of(path)
    body = found.read_bytes()
    found.unlink()
    if damage == "empty":
        found.write_bytes(b"")
    elif damage == "garbage":
        found.write_bytes(b"nonsense " * 1000)
    elif damage == "cut":
        found.write_bytes(body[: len(body) // 2])
    elif damage == "flipped":
        found.write_bytes(body[:100] + bytes(byte ^ 0xFF for byte in body[100:8000]) + body[8000:])
    async with SqliteStore(path) as store:
        assert sorted(await ids(store, "word7")) == sorted(session.id for session in sessions)
    check_index(path)


async def test_an_index_that_goes_while_it_is_open_is_made_anew(tmp_path: Path) -> None:
    """Another process may have removed it."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("hello there"))
        assert await ids(store, "hello") == [session.id]
        index_of(path).unlink()
        session = await store.save(say(session, "hello again"))
        assert await ids(store, "hello") == [session.id, session.id]


async def test_anothers_file_is_left_alone(tmp_path: Path) -> None:
    """A strange SQLite file in the index's place is not overwritten."""
    path = tmp_path / "sessions.db"
    other = apsw.Connection(str(index_of(path)))
    other.execute("CREATE TABLE precious (x)")
    other.close()
    async with SqliteStore(path) as store:
        await store.create(new_session("hello"))
        with pytest.raises(StoreError, match="Move it away"):
            await store.search("hello")


async def test_an_index_of_another_store_is_not_believed(tmp_path: Path) -> None:
    """A store that was moved to another one's place finds only its own words."""
    for name in ("a", "b"):
        async with SqliteStore(tmp_path / name) as store:
            session = await store.create(new_session(f"only in {name}"))
            await store.search("only")
    index_of(tmp_path / "a").rename(index_of(tmp_path / "b"))
    async with SqliteStore(tmp_path / "b") as store:
        assert await ids(store, "only") == [session.id]
        assert "a" not in words_in(tmp_path / "b")


async def test_an_erasure_that_was_not_finished_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure killed between the store and the index leaves words behind: the next search rebuilds the index."""
    path = tmp_path / "sessions.db"
    monkeypatch.setattr(sqlite_search, "_PATIENCE", 0.05)
    async with SqliteStore(path) as store:
        kept = await store.create(new_session("kept words"))
        gone = await store.create(new_session("quixotic words"))
        assert len(await ids(store, "words")) == 2

        async def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as killing:
            killing.setattr(store._engine.opened.searching, "erase", killed)
            with pytest.raises(KeyboardInterrupt):
                await store.delete(gone.id)
        assert "quixotic" in words_in(path)
        assert await ids(store, "words") == [kept.id]
        assert words_in(path) == {"kept", "words"} | {word for word in words_in(path) if word.startswith("l")}


async def test_erased_words_are_nowhere_in_the_index(tmp_path: Path) -> None:
    """They are neither among its words nor in any byte of its file; what is left is sound and found."""
    path = tmp_path / "sessions.db"
    draw = random.Random(7)
    vocabulary = [f"{draw.getrandbits(40):010x}" for _ in range(3000)]
    async with SqliteStore(path) as store:
        sessions = []
        for _ in range(30):
            texts = [" ".join(draw.choices(vocabulary, k=20)) for _ in range(20)]
            secret = f"secret{draw.getrandbits(60):x}"
            sessions.append((await store.create(new_session(*texts, f"the {secret} here")), secret))
            await store.search(secret)
        draw.shuffle(sessions)
        for session, secret in sessions[:15]:
            await store.delete(session.id)
            assert secret not in words_in(path)
            assert secret[6:].encode() not in bytes_in(path)
        check_index(path)
        for session, secret in sessions[15:]:
            assert await ids(store, secret) == [session.id]


def signposts(path: Path) -> list[str]:
    """Return the beginnings of words by which the index finds its leaves."""
    db = apsw.Connection(str(index_of(path)))
    try:
        return [bytes(term[1:]).decode() for (term,) in db.execute("SELECT term FROM message_idx WHERE term <> x''")]
    finally:
        db.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("verb", ["delete", "redact"])
async def test_an_erased_word_that_a_leaf_began_with_is_nowhere_in_the_index(tmp_path: Path, verb: str) -> None:
    """FTS5 finds leaves by the first word of each, cut where it differs from the word before, and keeps that."""
    path = tmp_path / "sessions.db"
    draw = random.Random(5)
    # Three differ in their last character alone, so that a whole word, and not its beginning, may lead to a leaf.
    alike = [f"{stem}é{end}" for stem in (f"{draw.getrandbits(400):0100x}" for _ in range(300)) for end in "abc"]
    async with SqliteStore(path) as store:
        sessions = {word: await store.create(new_session(f"the {word} here", "and more")) for word in alike}
        await store.search("more")
        first = [word for word in sessions if _folded(word) in signposts(path)]
        assert len(first) > 5
        for word in first:
            if verb == "delete":
                await store.delete(sessions[word].id)
            else:
                await store.redact(sessions[word].id, [sessions[word].state.messages[0].id])
            assert _folded(word) not in words_in(path)
            assert _folded(word).encode() not in bytes_in(path)
        check_index(path)
        assert [word for word in signposts(path) if not any(each.startswith(word) for each in words_in(path))] == []
        for word in {*alike} - {*first}:
            assert await ids(store, word) == [sessions[word].id]
        for word in first:
            assert await ids(store, word) == []


async def test_rowids_that_are_used_again_are_indexed_again(tmp_path: Path) -> None:
    """SQLite gives the rowids of erased messages to new ones."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        for round in range(6):
            first = await store.create(new_session("alpha", "beta"))
            second = await other.create(new_session(f"gamma{round}"))
            assert await ids(other, f"gamma{round}") == [second.id]
            await store.delete(second.id)
            third = await other.create(new_session(f"delta{round}", "epsilon"))
            assert await ids(store, f"delta{round}") == [third.id]
            await other.delete(first.id)
            assert await ids(store, f"gamma{round}") == []
        assert len(await ids(store, "epsilon")) == 6
    check_index(path)


async def test_the_newest_are_ranked_where_many_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of ranked messages, old messages are left out however well they match."""
    monkeypatch.setattr(sqlite_ranking, "MOST_RANKED", 10)
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await store.create(new_session("tea tea tea"))
        newer = await store.create(new_session(*(f"tea number {n}" for n in range(10))))
        assert set(await ids(store, "tea", limit=50)) == {newer.id}


async def test_a_fork_of_an_erased_parent_is_found_after_the_index_is_made_anew(tmp_path: Path) -> None:
    """Its parent's words are attributed to it, within its owner's scope too."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        parent = await store.create(new_session("shared", owner="ann"))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        assert await ids(store, "shared") == [child.id]
        assert await ids(store, "shared", owner="bob") == []


async def test_a_search_does_not_keep_the_erasure_waiting_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both need the one thread that searches. A search that waited in it would wait until its time-out."""
    monkeypatch.setattr(sqlite_search, "_PATIENCE", 3_600)
    async with SqliteStore(tmp_path / "sessions.db") as store:
        sessions = [await store.create(new_session(f"word{number} shared")) for number in range(8)]
        assert len(await ids(store, "shared")) == 8
        async with asyncio.timeout(30):
            erasures = (store.delete(session.id) for session in sessions[:7])
            await asyncio.gather(*(verb for each in erasures for verb in (each, ids(store, "shared"))))
        assert await ids(store, "shared") == [sessions[7].id]


async def test_many_may_catch_up_and_erase_at_once(tmp_path: Path) -> None:
    """Nothing is indexed twice, nothing is left out, and nothing erased stays, in any order."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as first, SqliteStore(path) as second:
        stores = (first, second)

        async def live(store: SqliteStore, name: str) -> list[tuple[str, str]]:
            kept: list[tuple[str, str]] = []
            for number in range(12):
                word = f"{name}word{number}"
                session = await store.create(new_session(*(f"{word} {place} shared" for place in range(10))))
                assert len(await store.search(word)) == 10
                if number % 3:
                    await store.delete(session.id)
                else:
                    kept.append((word, session.id))
            return kept

        kept = await asyncio.gather(*(live(store, name) for name, store in zip("abcd", stores * 2, strict=True)))
        for store in stores:
            assert len(await ids(store, "shared", limit=1000)) == 160
            for word, session_id in kept[0] + kept[3]:
                assert set(await ids(store, word)) == {session_id}
        known = {word for each in kept for word, _ in each}
        assert {word for word in words_in(path) if "word" in word} == known
    check_index(path)


WORD = st.sampled_from(["one", "One", "on", "two", "été", "e\u0301te\u0301", "字", "x" * 90, "--", "\n", "_", "3"])
TERM = st.builds(Term, st.lists(WORD.map(_folded).filter(_WORD.fullmatch), min_size=1, max_size=3).map(tuple))


@given(st.lists(WORD, max_size=60).map(" ".join), st.lists(TERM, min_size=1, max_size=3), st.booleans())
def test_a_snippet_shows_the_first_words_that_were_asked_for(text: str, terms: list[Term], prefix: bool) -> None:
    """In any text, every word of the snippet that belongs to a term is marked, and no other is."""
    asked = [term._replace(prefix=prefix) for term in terms]
    found = [(match.start(), _folded(match[0])) for match in _WORD.finditer(text)]
    words = [word for _, word in found]
    hits = [_hits(words, term) for term in asked]
    hit = show(Place("s", Message.user(text), 0), asked, 1.0)
    assert (hit is None) == (not all(hits))
    if hit is None:
        return
    inner = hit.snippet.removeprefix("…").removesuffix("…")
    shown = [_folded(hit.snippet[low:high]) for low, high in hit.matches]
    marked = [words[at] for at in sorted(set[int]().union(*hits))]
    assert inner in text
    assert shown == marked[: len(shown)]
    rest = hit.snippet[hit.matches[-1][1] :].removesuffix("…") if shown else ""
    assert len(shown) == len(marked) or len(marked[len(shown)]) > len(rest) or hit.snippet.endswith("…")


def _hits(words: list[str], term: Term) -> set[int]:
    """Return the places of the words that are part of a term, found in the simplest way."""
    size, places = len(term.words), set[int]()
    for at in range(len(words) - size + 1):
        *before, last = words[at : at + size]
        ends = last.startswith(term.words[-1]) if term.prefix else last == term.words[-1]
        if ends and tuple(before) == term.words[:-1]:
            places |= set(range(at, at + size))
    return places


async def test_a_very_long_message_does_not_hold_a_search_up(tmp_path: Path) -> None:
    """A tool's answer may be megabytes: only the part that is shown is looked at closely."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await store.create(new_session("word " * 400_000 + "needle at the end"))
        (hit,) = await store.search("needle")
        assert [hit.snippet[low:high] for low, high in hit.matches] == ["needle"]
        started = time.process_time()
        (hit,) = await store.search("word")
        assert time.process_time() - started < 1.0  # 0.1 s here; a look at each of its words takes 1.7 s
        assert {hit.snippet[low:high] for low, high in hit.matches} == {"word"}


async def test_an_index_that_has_lost_its_place_is_made_anew(tmp_path: Path) -> None:
    """Otherwise it would meet messages that it has already, and refuse every search."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("alpha", "beta"))
        assert len(await store.search("alpha")) == 1
        db = apsw.Connection(str(index_of(path)))
        db.execute("UPDATE note SET value = 1 WHERE key = 'cursor'")
        db.close()
        assert len(await store.search("beta")) == 1
    check_index(path)


async def test_what_is_saved_and_sought_while_traces_are_removed_is_indexed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc looks for traces even if there is nothing to erase, and others save and search meanwhile."""
    path = tmp_path / "sessions.db"
    original = SqliteEngine._leave_no_trace
    async with SqliteStore(path) as store:
        await store.create(new_session("alpha"))
        await store.search("alpha")

        async def late(engine: SqliteEngine, erasure: Erasure) -> None:
            await store.create(new_session("beta"))
            assert len(await store.search("beta")) == 1
            await original(engine, erasure)

        monkeypatch.setattr(SqliteEngine, "_leave_no_trace", late)
        assert await store.gc() == 0
        assert (len(await store.search("alpha")), len(await store.search("beta"))) == (1, 1)
    check_index(path)


async def test_indexing_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress says how many of all messages are done. No message is done twice, unless the index is rebuilt."""
    monkeypatch.setattr(sqlite_search, "_CHUNK", 10)
    path = tmp_path / "sessions.db"
    told: list[tuple[int, int]] = []
    async with SqliteStore(path) as store:
        assert isinstance(store, Indexed)
        await store.create(new_session(*(f"word{n}" for n in range(25))))
        assert await store.index(progress=lambda done, total: told.append((done, total))) == 25
        assert [each for each in told if each[0]] == [(10, 25), (20, 25), (25, 25)]
        assert await store.index(progress=lambda *_: pytest.fail("there is nothing to do")) == 0
        session = await store.create(new_session("word1", "more"))
        assert await store.index() == 2
        await store.delete(session.id)
        assert await store.index() == 0
        assert await store.index(rebuild=True) == 25
        assert len(await ids(store, "word1")) == 1
    check_index(path)


async def test_an_index_made_anew_has_what_the_old_one_had_lost(tmp_path: Path) -> None:
    """A sound index that lacks something is not noticed: `rebuild=True` makes it again."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("alpha", "beta"))
        await store.index()
        db = connect_with_sums(index_of(path), sqlite_search.has_sums)
        db.execute("INSERT INTO message(message) VALUES ('delete-all')")
        db.close()
        assert await ids(store, "beta") == []
        assert await store.index(rebuild=True) == 2
        assert await ids(store, "beta") == [session.id]


async def test_indexing_that_is_cancelled_keeps_what_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_search, "_CHUNK", 10)
    async with SqliteStore(tmp_path / "sessions.db") as store:
        await store.create(new_session(*(f"word{n}" for n in range(45))))

        def stop(done: int, total: int) -> None:
            if done >= 20:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await store.index(progress=stop)
        assert await store.index() == 25
        assert len(await ids(store, "word*", limit=100)) == 45


async def test_an_erasure_that_the_index_holds_up_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is gone in any case, and gc erases its words when the index is free again."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("a secret word", id="s"))
        assert await store.search("secret")
        monkeypatch.setattr(sqlite_search, "_wait_for_lock", lambda tries: False)
        async with SqliteStore(path) as other:
            holder = apsw.Connection(str(search_path(path)))
            holder.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreError, match=r"erased from the store.*gc"):
                await other.delete("s")
            assert not await store.exists("s")
            holder.execute("ROLLBACK")
            holder.close()
            await other.gc()
    assert b"secret" not in search_path(path).read_bytes()
