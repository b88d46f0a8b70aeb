"""The rows of a file store's logs: the sessions they belong to, and lines that make no row."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.stores.files import files_in, names, small

from perdure.errors import CorruptRecord
from perdure.protocols import Entry
from perdure.stores.file import FileStore
from perdure.stores.file.log import Line, rewritten
from perdure.testing.samples import fork, say, texts


async def test_sessions_that_were_born_at_the_same_time_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes may create sessions in one tick of a coarse clock: each keeps its own messages and claims."""
    monkeypatch.setattr("perdure.stores.file.desk.time.time_ns", lambda: 1_700_000_000_000_000_000)
    async with FileStore(tmp_path) as one, FileStore(tmp_path) as other:
        a = await one.create(small("apple", id="a"))
        b = await other.create(small("banana", id="b"))
        for store in (one, other):
            assert [hit.session_id for hit in await store.search("banana")] == ["b"]
            assert await store.gc() == 0
            assert [*await store.check()] == []
        claim, _ = await one.claim("a", version=1, owner="ann")
        assert await other.is_claimed("a")
        assert not await other.is_claimed("b")
        await one.save(say(a, "more"), claim=claim)
        await other.save(say(b, "more"))
        await one.create(fork(b, id="f"))
        await other.delete("b")
        assert texts(await one.load("f")) == ["banana"]
        assert texts(await one.load("a")) == ["apple", "more"]


async def test_a_version_that_nobody_can_read_is_not_erased(tmp_path: Path) -> None:
    """A head in a later release's form stops no search, and no erasure takes its session for gone."""
    async with FileStore(tmp_path) as store:
        await store.create(small("keep me", id="later"))
        await store.create(small("keep me too", id="other"))
        gone = await store.create(small("erase me", id="gone"))
        await store.create(fork(gone, id="of-gone"))
    path = tmp_path / "later.jsonl"
    path.write_bytes(rewritten(path.read_bytes(), "later", _in_another_form))
    (tmp_path / "later.json").unlink()
    before = files_in(tmp_path)["later.jsonl"]
    async with FileStore(tmp_path) as store:
        assert [hit.session_id for hit in await store.search("keep")] == ["other"]
        assert await store.gc() == 0
        await store.delete("gone")
        assert await store.gc() == 0
        assert texts(await store.load("of-gone")) == ["erase me"]
        assert [error.session_id for error in (await store.list()).damaged] == ["later"]
        for verb in (lambda: store.load("later"), lambda: store.post("later", Entry("steer"))):
            with pytest.raises(CorruptRecord):
                await verb()
        assert files_in(tmp_path)["later.jsonl"] == before
        await store.delete("later")
        assert "later.jsonl" not in names(tmp_path)


def _in_another_form(line: Line) -> Line:
    return msgspec.structs.replace(line, body=msgspec.Raw(b'{"of":"later"}')) if line.kind == "head" else line


async def test_many_sessions_are_erased_and_their_forks_stay_whole(tmp_path: Path) -> None:
    """A running session is left, a missing one is skipped, and what nobody shows is in no file any more."""
    async with FileStore(tmp_path) as store:
        made = [await store.create(small(f"shown{n}", id=f"s{n}")) for n in range(4)]
        await store.create(fork(made[1], id="f"))
        await store.claim("s2", version=1, owner="ann")
        assert await store.delete_many(["s0", "s1", "s2", "unknown"]) == ["s0", "s1"]
        assert texts(await store.load("f")) == ["shown1"]
        assert {info.id for info in await store.list()} == {"s2", "s3", "f"}
        await store.delete_many(["f"])
        left = b"".join(files_in(tmp_path).values())
        assert b"shown1" not in left
        assert b"shown0" not in left
        assert {name for name in names(tmp_path, ".jsonl") if "@" in name} == set()
