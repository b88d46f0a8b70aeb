"""Forks of forks of forks: each notes only what its line does not; nothing shown is lost, and nothing else is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stories import KINDS, opened

from perdure import FileStore, MemoryStore, SqliteStore
from perdure.errors import SessionNotFound
from perdure.stores.engine import Delete, Job, Lock, Select, Update
from perdure.stores.file import commit
from perdure.stores.file.log import SessionLog, encode_operation, line, opening
from perdure.testing.samples import fork, new_session, say, show, texts

pytestmark = pytest.mark.sample(2)  # make torture runs all

ANY, FEW = st.integers(0, 9), st.integers(0, 3)
FORK = st.tuples(st.just("fork"), FEW, st.sampled_from([0, 0, 0, 1, 2, 3]))
STEPS = st.lists(
    FORK
    | FORK
    | st.tuples(st.just("say"), ANY, FEW)
    | st.tuples(st.just("show"), ANY, ANY)
    | st.tuples(st.just("cut"), ANY, FEW)
    | st.tuples(st.just("hide"), ANY, FEW)
    | st.tuples(st.just("erase"), ANY, FEW)
    | st.tuples(st.just("erase many"), ANY, st.integers(1, 3)),
    min_size=10,
    max_size=40,
)


def table(name: str, columns: tuple[str, ...]) -> Any:
    def job() -> Job[list[Any]]:
        return (yield Select(name, columns))

    return job


async def rows_of(store: Any, name: str, *columns: str) -> list[Any]:
    return list(await store._engine.run(table(name, columns)))


async def written(store: Any, statement: Any) -> None:
    def job() -> Job[None]:
        yield Lock((), "alone")
        yield statement

    await store._engine.run(job, "write")


async def lines(store: Any) -> dict[str, str | None]:
    rows = await rows_of(store, "session", "sid", "id", "line")
    names = {sid: session_id for sid, session_id, _ in rows}
    return {session_id: None if line is None else names[line] for _, session_id, line in rows}


class Forest:
    """Sessions in a store, and beside it what they should show and what was said in each."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.said: dict[str, list[str]] = {}
        self.versions: dict[str, list[list[str]]] = {}
        self.hidden: set[str] = set()
        self._count = 0

    def _next(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _chosen(self, number: int) -> str:
        return [*self.said][-1 - number % len(self.said)]  # prefer young ones, so that lines grow long

    async def play(self, steps: Sequence[tuple[str, int, int]]) -> None:
        for verb, number, more in steps:
            if not self.said:
                await self.begin()
            await getattr(self, f"_{verb.replace(' ', '_')}")(self._chosen(number), more)

    async def begin(self) -> None:
        text = self._next("text")
        session = await self.store.create(new_session(text, id=self._next("s")))
        self._note(session, [text])

    def _note(self, session: Any, said: list[str]) -> None:
        self.said.setdefault(session.id, []).extend(said)
        self.versions.setdefault(session.id, []).append(texts(session))

    async def _save(self, session: Any, *said: str) -> None:
        self._note(await self.store.save(session), [*said])

    async def _fork(self, session_id: str, without: int) -> None:
        session = await self.store.load(session_id)
        view = session.state.transcript
        new = show(fork(session, id=self._next("s")), view.cut(0, max(1, len(view) - without)))
        self._note(await self.store.create(new), [])
        await self._say(new.id, 0)

    async def _say(self, session_id: str, _: int) -> None:
        text = self._next("text")
        await self._save(say(await self.store.load(session_id), text), text)

    async def _show(self, session_id: str, number: int) -> None:
        """Make a session show another one's messages at its end, so that they are noted late."""
        session, other = await self.store.load(session_id), await self.store.load(self._chosen(number))
        pieces = (*session.state.transcript.pieces, *other.state.transcript.pieces[-1:])
        await self._save(show(session, type(session.state.transcript)(pieces)))

    async def _cut(self, session_id: str, without: int) -> None:
        session = await self.store.load(session_id)
        view = session.state.transcript
        await self._save(show(session, view.cut(0, max(1, len(view) - without))))

    async def _hide(self, session_id: str, _: int) -> None:
        if session_id not in self.hidden:
            self.hidden.add(session_id)
            await self._save((await self.store.load(session_id)).deleted())

    async def _erase(self, session_id: str, _: int) -> None:
        await self.store.delete(session_id)
        self._forget(session_id)

    async def _erase_many(self, session_id: str, count: int) -> None:
        ids = [*self.said]
        first = ids.index(session_id)
        some = ids[first : first + count][::-1]
        assert await self.store.delete_many(some) == some
        for each in some:
            self._forget(each)

    def _forget(self, session_id: str) -> None:
        del self.said[session_id], self.versions[session_id]

    async def require_whole(self) -> None:
        """Assert that every version of every session is there and nothing else, and that a check finds no problem."""
        assert await self.store.check() == []
        for session_id, versions in self.versions.items():
            for number, expected in enumerate(versions, 1):
                assert texts(await self.store.load(session_id, number)) == expected
        shown = {text for versions in self.versions.values() for version in versions for text in version}
        kept = {text for said in self.said.values() for text in said} | shown
        bodies = [json.loads(body) for (body,) in await rows_of(self.store, "msg", "body")]
        assert {body["parts"][0]["text"] for body in bodies} == kept
        for text in sorted(kept):
            found = await self.store.search(text)
            assert all(self._shows(hit.session_id, text) for hit in found)
            assert found or not any(
                self._shows(session_id, text) for session_id in self.said if self._is_seen(session_id)
            )
        for session_id in self.said if len(self.said) < 5 else ():
            for text in sorted(kept):
                hits = await self.store.search(text, session_id=session_id)
                assert not hits or self._shows(session_id, text)

    def _is_seen(self, session_id: str) -> bool:
        return session_id not in self.hidden

    def _shows(self, session_id: str, text: str) -> bool:
        return text in self.said[session_id] or any(text in version for version in self.versions[session_id])


async def played(store: Any, steps: Sequence[tuple[str, int, int]]) -> None:
    async with store:
        forest = Forest(store)
        await forest.play([("fork", place, 0) for place in (0, 0, 0, 0, 2, 0, 0)])
        await forest.play(steps)
        await forest.require_whole()
        while forest.said:
            await forest._erase(forest._chosen(len(steps)), 0)
        await forest.require_whole()
        assert await rows_of(store, "ref", "log") == []
        assert await rows_of(store, "log", "log") == []


@given(STEPS)
async def test_any_tree_of_forks_in_memory(steps: list[tuple[str, int, int]]) -> None:
    """Sessions are forked, cut, hidden and erased in any order, and all that they show is there."""
    await played(MemoryStore(), steps)


@given(STEPS)
async def test_any_tree_of_forks_in_sqlite(steps: list[tuple[str, int, int]]) -> None:
    with TemporaryDirectory() as folder:
        await played(SqliteStore(Path(folder) / "s.db", cache=len(steps) % 3 * 4), steps)


@given(STEPS)
async def test_any_tree_of_forks_in_files(steps: list[tuple[str, int, int]]) -> None:
    with TemporaryDirectory() as folder:
        await played(FileStore(Path(folder) / "s"), steps)


async def line_of(store: Any, depth: int) -> Any:
    """Make a fork of a fork of a fork: s0, s1, s2 and so on, each with a message of its own."""
    session = await store.create(new_session("said in s0", id="s0"))
    for number in range(1, depth):
        session = await store.create(fork(await store.load(session.id), id=f"s{number}"))
        session = await store.save(say(await store.load(session.id), f"said in s{number}"))
    return session


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_notes_only_what_its_line_does_not(kind: str, tmp_path: Path) -> None:
    """It has one row of its own, and names the session whose first version has the rest."""
    async with opened(kind, tmp_path) as store:
        await line_of(store, 6)
        assert await lines(store) == {"s0": None, "s1": None, "s2": "s1", "s3": "s2", "s4": "s3", "s5": "s4"}
        counts = [child for (child,) in await rows_of(store, "ref", "child")]
        assert len(counts) == len({*counts}) == 5
        assert await store.check() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["012345", "543210", "204153", "341025"])
async def test_a_line_is_erased_in_any_order(kind: str, order: str, tmp_path: Path) -> None:
    """The sessions that are left show all that they showed, and refer to nothing that is gone."""
    async with opened(kind, tmp_path) as store:
        await line_of(store, 6)
        left = {f"s{number}": [f"said in s{each}" for each in range(number + 1)] for number in range(6)}
        for number in order:
            await store.delete(f"s{number}")
            del left[f"s{number}"]
            assert await store.check() == []
            store._forget_all()
            assert {key: texts(await store.load(key)) for key in left} == left
            assert all(line is None or line in left for line in (await lines(store)).values())
            kept = {text for said in left.values() for text in said}
            assert len(await rows_of(store, "msg", "pos")) == len(kept)
        assert await rows_of(store, "log", "log") == await rows_of(store, "ref", "log") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_what_came_late_to_be_shown_is_not_handed_down(kind: str, tmp_path: Path) -> None:
    """A fork made before does not keep it, and is not listed as showing it."""
    async with opened(kind, tmp_path) as store:
        stranger = await store.create(new_session("secret", id="stranger"))
        parent = await line_of(store, 3)
        await store.create(fork(parent, id="fork"))
        pieces = (*parent.state.transcript.pieces, *stranger.state.transcript.pieces)
        await store.save(show(parent, type(parent.state.transcript)(pieces)))
        await store.delete("stranger")
        assert [hit.session_id for hit in await store.search("secret")] == ["s2"]
        assert not await store.search("secret", session_id="fork")
        await store.delete("s2")
        assert not await store.search("secret")
        assert await store.check() == []
        assert "fork" in await lines(store)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_is_found_by_what_it_shows_through_its_line(kind: str, tmp_path: Path) -> None:
    """A session that is erased or hidden is found too, by its own id and within its owner's scope."""
    async with opened(kind, tmp_path) as store:
        root = await store.create(new_session("said in s0", id="s0", owner="ada"))
        last = root
        for number in range(1, 4):
            last = await store.create(fork(await store.load(last.id), id=f"s{number}"))
            last = await store.save(say(await store.load(last.id), f"said in s{number}"))
        await store.save((await store.load("s1")).deleted())
        assert [hit.session_id for hit in await store.search("s1")] == ["s2"]
        await store.delete("s0")
        assert [hit.session_id for hit in await store.search("s0", session_id="s3")] == ["s3"]
        await store.save((await store.load("s2")).deleted())
        assert [hit.session_id for hit in await store.search("s0")] == ["s3"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_shown_through_a_line_is_redacted_from_the_last_fork(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as store:
        last = await line_of(store, 5)
        await store.delete("s1")
        first = last.state.messages[0]
        assert await store.redact("s4", [first.id], replacement="gone") == 1
        for key in ("s0", "s2", "s3", "s4"):
            assert texts(await store.load(key))[0] == "gone"
        assert await store.check() == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_that_begins_before_its_parents_beginning_ends_has_no_line(kind: str, tmp_path: Path) -> None:
    """With a line, it would inherit what it does not show, and keep that when all others are gone."""
    async with opened(kind, tmp_path) as store:
        parent = await line_of(store, 4)
        await store.create(show(fork(parent, id="early"), parent.state.transcript.cut(0, 2)))
        assert (await lines(store))["early"] is None
        assert await store.delete_many(["s0", "s1", "s2", "s3"]) == ["s0", "s1", "s2", "s3"]
        assert len(await rows_of(store, "msg", "pos")) == 2
        assert texts(await store.load("early")) == ["said in s0", "said in s1"]


async def test_a_parent_of_the_same_id_is_not_a_line() -> None:
    """A parent that was erased and created again shows other messages, even if the first is still in memory."""
    async with MemoryStore() as store:
        parent = await line_of(store, 4)
        await store.delete("s3")
        await store.create(new_session("another", id="s3"))
        with pytest.raises(SessionNotFound):
            await store.create(fork(parent, id="fork"))
        early = show(fork(parent, id="early"), parent.state.transcript.cut(0, 3))
        await store.create(early)
        assert (await lines(store))["early"] is None
        assert await store.check() == []


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_a_check_finds_a_wrong_line(kind: str, tmp_path: Path) -> None:
    """A check finds a line that is lost, that names no session, or that names a younger one."""
    async with opened(kind, tmp_path) as store:
        await line_of(store, 5)
        sids = dict(await rows_of(store, "session", "id", "sid"))
        for line, found in ((None, "where deletions look"), (999, "not there"), (sids["s4"], "younger")):
            await written(store, Update("session", {"line": line}, {"sid": sids["s3"]}))
            assert [each for each in await store.check() if each.session_id == "s3" and found in str(each)]
            await written(store, Update("session", {"line": sids["s2"]}, {"sid": sids["s3"]}))
            assert await store.check() == []
        await written(store, Delete("ref", {"child": sids["s2"]}))
        assert {each.session_id for each in await store.check()} == {"s2"}


async def test_an_erasure_in_files_that_is_killed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks note what they show of a session before it goes. A deletion killed in between can be repeated."""
    async with FileStore(tmp_path) as store:
        await line_of(store, 5)

        def killed(*_: Any) -> None:
            raise OSError(5, "killed")

        with monkeypatch.context() as patch:
            patch.setattr(commit, "_erase", killed)
            with pytest.raises(Exception, match="killed"):
                await store.delete("s2")
    async with FileStore(tmp_path) as store:
        assert await store.check() == []
        assert (await lines(store))["s3"] == "s1"
        await store.delete("s2")
        assert texts(await store.load("s4")) == [f"said in s{number}" for number in range(5)]
        assert await store.check() == []


async def test_a_damaged_fork_in_files_is_not_touched_when_its_line_is_erased(tmp_path: Path) -> None:
    """The messages that its heads name are kept for it, and the fork behind it still loads."""
    async with FileStore(tmp_path) as store:
        await line_of(store, 5)
        file = tmp_path / "s3.jsonl"
        raw = bytearray(file.read_bytes())
        raw[raw.index(b'"ref"') + 2] ^= 1
        file.write_bytes(raw)
        for name in ("s1", "s2"):
            await store.delete(name)
        assert file.read_bytes() == raw
        assert {problem.session_id for problem in await store.check()} == {"s3"}
    async with FileStore(tmp_path) as store:
        assert texts(await store.load("s4")) == [f"said in s{number}" for number in range(5)]


async def test_a_line_that_an_older_release_has_erased_is_found_and_costs_nothing(tmp_path: Path) -> None:
    """The older release kept what the heads of the forks name. Here the heads count too, until a copy is made."""
    async with FileStore(tmp_path) as store:
        await line_of(store, 5)
        log = SessionLog("s2")
        log.feed((tmp_path / "s2.jsonl").read_bytes())
        left = [opening(log.key), line("message", at=0, body=log.messages[""][0])]
        (tmp_path / f"{log.key}.jsonl").write_bytes(encode_operation(left, 1))
        (tmp_path / "s2.jsonl").unlink()
        (tmp_path / "s2.json").unlink()
    async with FileStore(tmp_path) as store:
        assert [problem.where for problem in await store.check()] == ["its line"]
        await store.delete_many(["s0", "s1"])
        await store.gc()
        assert texts(await store.load("s3")) == [f"said in s{number}" for number in range(4)]
        assert texts(await store.load("s4")) == [f"said in s{number}" for number in range(5)]


async def test_a_release_without_lines_takes_such_a_file_for_damaged(tmp_path: Path) -> None:
    """An older release meets an unknown format in the first line of the log, and uses the heads when it erases."""
    async with FileStore(tmp_path) as store:
        await line_of(store, 3)
    formats = {
        name: json.loads((tmp_path / f"{name}.jsonl").read_bytes().splitlines()[0])["body"]["format"]
        for name in ("s0", "s1", "s2")
    }
    assert formats == {"s0": 1, "s1": 1, "s2": 2}
