"""Compactions of compactions: a save writes only what is new, and every covered message comes back from any depth."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores.test_erasure import SECRET, bytes_of
from tests.stores.test_rows import Rows
from tests.stories import KINDS, opened

from perdure import codec
from perdure.archive import export_sessions, fsck, import_sessions
from perdure.errors import CorruptRecord
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Block, Transcript
from perdure.stores.format import blocks
from perdure.stores.format.gathering import gathered
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.packing import pack
from perdure.stores.format.rows import hash_of
from perdure.testing.samples import fork, new_session, run_of, say, show, texts

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

DEEP = 60
"""More than fits into one value, so that blocks name blocks that name blocks."""


def covered(session: AgentSession, start: int, stop: int, summary: str) -> AgentSession:
    return show(session, session.state.transcript.cover(start, stop, [Message.user(summary)], by="test"))


def deeper(session: AgentSession, level: int) -> AgentSession:
    """Return the session with one more message, and all but its last two messages and blocks covered."""
    more = say(session, f"said at {level}")
    return covered(more, 0, len(more.state.transcript) - 2, f"summary {level}")


def uncovered(session: AgentSession) -> AgentSession:
    return show(session, session.state.transcript.uncover())


def view(session: AgentSession | None) -> list[bytes]:
    """Return what a session shows, as encoded messages."""
    assert session is not None, "the session is not there"
    return [codec.encode_message(message) for message in session.state.messages]


async def nested(store: Any, levels: int = DEEP, id: str = "deep") -> list[list[bytes]]:
    """Make a session whose first message is covered `levels` times. Return its view before each compaction."""
    session = await store.create(new_session(f"The card is {SECRET}.", "Noted.", "Fine.", id=id))
    views = []
    for level in range(levels):
        session = await store.save(say(session, f"said at {level}"))
        views.append(view(session))
        session = await store.save(covered(session, 0, len(session.state.transcript) - 2, f"summary {level}"))
    return views


async def assert_comes_off(store: Any, session_id: str, views: list[list[bytes]]) -> None:
    """Assert that each view is as it was, block by block."""
    session = await store.load(session_id)
    for expected in reversed(views):
        session = await store.save(uncovered(session))
        tail = view(session)[len(expected) :]  # the messages added after it was covered are still there
        assert view(session) == expected + tail
    assert [*session.state.transcript.blocks()] == []


def head_of(rows: Rows, session: AgentSession) -> StoredHead:
    return StoredHead(rows.heads[session.id, session.version], session.id, session.version)


def test_a_compaction_writes_what_is_new_at_any_depth() -> None:
    """A head and its new values stay under 3 KB packed, and a save after it writes no value."""
    rows = Rows()
    session = rows.keep(new_session("a", "b", "c"))
    for level in range(400):
        before = set(rows.values)
        session = rows.keep(deeper(session, level))
        new = rows.values.keys() - before
        head = rows.heads[session.id, session.version]
        assert len(head) + sum(len(pack(rows.values[key])) for key in new) < 3000
        assert len(new) <= 1 + (level == 0)
        before = set(rows.values)
        session = rows.keep(say(session, "more"))
        assert rows.values.keys() == before


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Return a list of the blocks whose stored form is made."""
    met: list[Block] = []
    make = blocks._stored

    def noted(block: Block, inner: Any, *given: Any) -> Any:
        met.append(block)
        return make(block, inner, *given)

    monkeypatch.setattr(blocks, "_stored", noted)
    return met


def test_a_save_walks_no_block_that_an_earlier_one_has_walked(walked: list[Block]) -> None:
    """A compaction walks one block, and a save between compactions walks none."""
    rows = Rows()
    session = rows.keep(new_session("a", "b", "c"))
    for level in range(60):
        walked.clear()
        session = rows.keep(deeper(session, level))
        assert [block.id for block in walked] == [next(session.state.transcript.blocks()).id]
        walked.clear()
        outermost = session.state.transcript.pieces[0]
        session = rows.keep(say(session, "more"))
        session = rows.keep(run_of(session))
        assert walked == []
        assert session.state.transcript.pieces[0] is outermost


def test_a_save_after_a_cold_load_walks_what_stands_apart_no_more(walked: list[Block]) -> None:
    """Blocks that were read from values of their own are not written again."""
    rows = Rows()
    session = rows.keep(new_session("a", "b", "c"))
    for level in range(300):
        session = rows.keep(deeper(session, level))
    loaded = rows.load(session.id, session.version)
    before, _ = set(rows.values), walked.clear()
    again = rows.keep(say(loaded, "more"))
    assert len(walked) < 60
    assert rows.values.keys() == before
    assert rows.load(again.id, again.version, all=True) == again


def test_steps_name_the_block_that_they_were_shown() -> None:
    """A run over a deep view does not write the view's blocks again for each of its steps."""
    rows = Rows()
    session = rows.keep(new_session("a", "b", "c"))
    for level in range(40):
        session = rows.keep(deeper(session, level))
    before = set(rows.values)
    session = rows.keep(run_of(session))
    assert sum(len(rows.values[key]) for key in rows.values.keys() - before) < 2000
    assert rows.load(session.id, session.version, all=True) == session


def test_a_head_says_its_format_only_if_it_names_blocks() -> None:
    """An older release refuses by its number a head that it cannot read, and reads all others."""
    rows = Rows()
    plain = rows.keep(new_session("a", "b", "c"))
    small = rows.keep(deeper(plain, 0))
    large = small
    while not any(name.startswith("block") for name in head_of(rows, large).head.hashed):
        assert b'"format"' not in rows.heads[large.id, large.version]
        large = rows.keep(deeper(large, large.version))
    assert msgspec.json.decode(rows.heads[large.id, large.version])["format"] == 2
    assert large.version > small.version


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_nesting_comes_off_level_by_level(data: st.DataObject) -> None:
    """Blocks may lie side by side or over one another, with runs between: everything comes back from rows alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CUT", data.draw(st.sampled_from([1, 300, 700, 4096])))
        patch.setattr(blocks, "INLINE", data.draw(st.sampled_from([1, 300, 512])))
        rows = Rows()
        session = rows.keep(new_session("a", "b", "c", "d"))
        naive = Transcript.of(session.state.messages)  # this one is never stored
        for level in range(data.draw(st.integers(1, 12))):
            run = data.draw(st.sampled_from([say, run_of]))
            longer = run(session, f"said {level}") if run is say else run_of(session)
            naive = naive.append(*longer.state.messages[len(naive) :])
            start, stop = _stretch_of(data, naive)
            summary = [Message.user(f"summary {level}")]
            naive = naive.cover(start, stop, summary, by="test", block_id=str(level))
            view_of_it = longer.state.transcript.cover(start, stop, summary, by="test", block_id=str(level))
            session = rows.keep(show(longer, view_of_it))
            if data.draw(st.booleans()):
                session = rows.load(session.id, session.version)
        _assert_comes_off_alike(data, rows, session, naive)


def _stretch_of(data: st.DataObject, transcript: Transcript) -> tuple[int, int]:
    """Return a stretch of a view that may be covered."""
    edges = [place for place in range(len(transcript) + 1) if transcript.edge_from(place) == place]
    start = data.draw(st.sampled_from(edges[:-1]))
    return start, data.draw(st.sampled_from([edge for edge in edges if edge > start]))


def _assert_comes_off_alike(data: st.DataObject, rows: Rows, session: AgentSession, naive: Transcript) -> None:
    """Assert that blocks come off one by one, with the same views from rows as from memory."""
    while True:
        loaded = rows.load(session.id, session.version)
        assert list(loaded.state.messages) == list(naive)
        blocks_left = [piece.id for piece in naive.pieces if isinstance(piece, Block)]
        if not blocks_left:
            break
        block_id = data.draw(st.sampled_from(blocks_left))
        naive = naive.uncover(block_id)
        session = rows.keep(show(loaded, loaded.state.transcript.uncover(block_id)))
    assert [*naive.blocks()] == [*session.state.transcript.blocks()] == []


@settings(deadline=None, max_examples=6)
@given(st.sampled_from(["memory", "file", "sqlite"]), st.integers(1, 40), st.sampled_from([200, 700, 4096]))
def test_any_depth_comes_back_from_a_store(kind: str, depth: int, cut: int) -> None:
    """A session is saved, loaded by an instance that has read nothing, and uncovered level by level."""

    async def there_and_back() -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "CUT", cut)
            async with reopening(kind, Path(folder)) as store:
                views = await nested(store(), depth)
                await store.anew()
                await assert_comes_off(store(), "deep", views)

    asyncio.run(there_and_back())


class _Reopened:
    """A store that can be closed and opened again."""

    def __init__(self, kind: str, where: Path) -> None:
        self._kind, self._where = kind, where
        self._context: Any = None
        self._store: Any = None

    def __call__(self) -> Any:
        return self._store

    async def anew(self) -> None:
        if self._kind != "memory" or self._context is None:
            await self.close()
            self._context = opened(self._kind, self._where)
            self._store = await self._context.__aenter__()

    async def close(self) -> None:
        if self._context is not None:
            await self._context.__aexit__(None, None, None)


@asynccontextmanager
async def reopening(kind: str, where: Path) -> Any:
    store = _Reopened(kind, where)
    await store.anew()
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_deep_blocks_come_off_after_reopening(kind: str, tmp_path: Path) -> None:
    """Deep blocks come off for an instance that has never read them, and a check finds no problem."""
    async with reopening(kind, tmp_path) as store:
        views = await nested(store())
        await store.anew()
        assert (await fsck(store())).problems == ()
        await assert_comes_off(store(), "deep", views)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_keeps_what_it_covers_when_its_parent_is_deleted(kind: str, tmp_path: Path) -> None:
    """Deep blocks over another session's log stay whole: neither messages nor values go with the parent."""
    async with reopening(kind, tmp_path) as store:
        views = await nested(store())
        parent = await store().load("deep")
        await store().create(fork(parent, id="branch"))
        await store().delete("deep")
        await store().gc()
        await store.anew()
        assert (await fsck(store())).problems == ()
        await assert_comes_off(store(), "branch", views)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_covered_many_times_over_is_redacted(kind: str, tmp_path: Path) -> None:
    """A redaction finds it beneath all the blocks, and no byte of it is left."""
    async with reopening(kind, tmp_path) as store:
        await nested(store(), 100 if os.environ.get("PERDURE_TORTURE") else 40)
        session = await store().load("deep", 1)
        assert await store().redact("deep", [session.state.messages[0].id]) == 1
        await store.anew()
        session = await store().load("deep")
        while any(isinstance(piece, Block) for piece in session.state.transcript.pieces):
            session = await store().save(uncovered(session))
        assert texts(session)[:2] == ["[redacted]", "Noted."]
    if kind in ("file", "sqlite"):
        assert SECRET.encode() not in bytes_of(tmp_path)


@pytest.mark.parametrize("kind", ["file", "sqlite"])
async def test_an_erased_session_leaves_no_block(kind: str, tmp_path: Path) -> None:
    """The values with its blocks are erased with it."""
    async with opened(kind, tmp_path) as store:
        await nested(store)
        session = await store.load("deep")
        names = [block.id.encode() for block in session.state.transcript.blocks()]
        assert all(name in bytes_of(tmp_path) for name in names[:3])
        await store.delete("deep")
    left = bytes_of(tmp_path)
    assert not any(name in left for name in (*names, SECRET.encode()))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("one", "other"), [("memory", "sqlite"), ("sqlite", "file"), ("file", "postgres"), ("postgres", "memory")]
)
async def test_deep_blocks_move_between_stores(one: str, other: str, tmp_path: Path) -> None:
    """The file is the same from either store, importing it twice changes nothing, and every block comes off."""
    async with opened(one, tmp_path / "one") as source, opened(other, tmp_path / "other") as target:
        views = await nested(source)
        file = io.BytesIO()
        await export_sessions(source, file)
        for _ in range(2):
            await import_sessions(target, io.BytesIO(file.getvalue()))
        again = io.BytesIO()
        await export_sessions(target, again)
        assert _sessions_in(again) == _sessions_in(file)
        assert (await fsck(target)).problems == ()
        await assert_comes_off(target, "deep", views)


def _sessions_in(file: io.BytesIO) -> list[bytes]:
    return file.getvalue().splitlines()[1:]


def _named_heads(values: dict[str, bytes], name: str) -> StoredHead:
    """Return a head of format 2 whose view is one named block."""
    rows = Rows()
    session = rows.keep(new_session("a"))
    plain = msgspec.json.decode(rows.heads[session.id, 1])
    plain |= {"parts": {"transcript": [name]}, "hashed": {"block 1": name}, "format": 2}
    values |= rows.values
    return StoredHead(msgspec.json.encode(plain), session.id, 1)


def _span(log: int | str, start: int, stop: int) -> Any:
    return Transcript.of([Message.user("a")]).pieces[0]


def _bombs() -> Iterator[tuple[dict[str, bytes], str]]:
    yield {"me": b'{"shown":[],"covered":["me"]}'}, "me"
    values, name = {}, ""
    for _ in range(40):
        body = msgspec.json.encode({"shown": [], "covered": [name, name] if name else [[1, 0, 1]]})
        name = hash_of(body)
        values[name] = body
    yield values, name


@pytest.mark.parametrize(("values", "name"), [*_bombs()], ids=["itself", "without end"])
def test_blocks_that_name_one_another_without_end_are_refused(values: dict[str, bytes], name: str) -> None:
    """A few bytes cannot stand for a view that fits into no memory."""
    head = _named_heads(values, name)
    assert set(gathered(head, values.__getitem__).values) <= set(values)
    with pytest.raises(CorruptRecord):
        head.session(values, _span)
