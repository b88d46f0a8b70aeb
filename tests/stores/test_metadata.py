"""Metadata whose large values are kept separately: each is written once while it stays, and goes when it has to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stores.files import bytes_in
from tests.stories import KINDS, opened

from perdure import codec
from perdure.archive import fsck
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.session import AgentSession
from perdure.model.value import FrozenDict
from perdure.stores.format import heads, metadata
from perdure.stores.format.metadata import LARGE, apart_in, parts_of, put_together, taken_apart
from perdure.stores.format.packing import unpack
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import fork, new_session, note, say, texts

BIG = ["a large value", *(f"number {n}" for n in range(1000))]
every_store = pytest.mark.parametrize("kind", KINDS)


def noted(session: AgentSession, **more: Any) -> AgentSession:
    for key, value in more.items():
        session = note(session, key, value)
    return session


def values_in(path: Path) -> list[bytes]:
    """Return the values that a SQLite file keeps under hashes."""
    db = apsw.Connection(str(path))
    try:
        return [unpack(body) for (body,) in db.execute("SELECT body FROM value")]
    finally:
        db.close()


@every_store
async def test_metadata_comes_back_as_it_went_in(kind: str, tmp_path: Path) -> None:
    """Large and small values come back in their order, in every version, from a store that has nothing in memory."""
    async with opened(kind, tmp_path) as store:
        kept = [await store.create(noted(new_session("Hi", id="s"), first=1, big=BIG, last="x", same=BIG))]
        for change in ({"first": 2}, {"big": "y" * 9000}, {"big": "small again"}, {"odd ": {"~": BIG}, "": "z" * 5000}):
            kept.append(await store.save(noted(kept[-1], **change)))
        store.evict("s")
        for then in kept:
            found = await store.load("s", then.version)
            assert found == then
            assert [*found.state.metadata] == [*then.state.metadata]
        newest = await store.load("s")
        after = await store.save(noted(newest, first=3))
        store.evict("s")
        assert await store.load("s") == after
        assert await store.check() == []


async def test_a_value_that_stays_is_written_and_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that change something small neither encode nor write the large value, also after a load."""
    encoded: list[int] = []
    real, path = codec.encode, tmp_path / "s.db"

    def encode(value: Any, *rest: Any) -> bytes:
        raw = real(value, *rest)
        encoded.append(len(raw))
        return raw

    monkeypatch.setattr(codec, "encode", encode)
    async with SqliteStore(path) as store:
        session = await store.create(noted(new_session(id="s"), big=BIG, count=0))
        store.evict("s")
        session = await store.load("s") or session
        encoded.clear()
        for count in range(1, 6):
            session = await store.save(noted(session, count=count))
        assert max(encoded) < LARGE
        equal = await store.save(noted(session, big=[*BIG]))  # an equal object, which is encoded and not written
    assert len([value for value in values_in(path) if len(value) > LARGE]) == 1
    assert equal.version == 7


async def test_metadata_that_stays_is_not_encoded_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that adds a message reuses the bytes of the version before, large or small."""
    async with MemoryStore() as store:
        session = await store.create(noted(new_session(id="s"), big=BIG, count=0))
        monkeypatch.setattr(metadata, "taken_apart", None)
        kept = await store.save(say(session, "more"))
        store.evict("s")
        assert await store.load("s") == kept


@every_store
async def test_a_value_goes_with_the_last_that_has_it(kind: str, tmp_path: Path) -> None:
    """A fork keeps the value that it shares with its parent; when both are deleted, it is gone from every file."""
    async with opened(kind, tmp_path) as store:
        parent = await store.create(noted(new_session("Hi", id="p"), big=BIG))
        await store.create(fork(parent, id="f"))
        await store.delete("p")
        store.evict("f")
        assert (await store.load("f")).state.metadata["big"] == BIG
        assert await store.check() == []
        await store.delete("f")
        assert await store.check() == []
    if kind == "file":
        assert b"number 77" not in bytes_in(tmp_path / "sessions")
    elif kind == "sqlite":
        assert values_in(tmp_path / "sessions.db") == []


@every_store
@pytest.mark.parametrize("length", [10, 900])
async def test_a_redaction_goes_through_what_stands_apart(kind: str, tmp_path: Path, length: int) -> None:
    """A redaction replaces quotes of the message in every version; all other values stay, in their order."""
    secret, replacement = "the secret of the house", "r" * length
    async with opened(kind, tmp_path) as store:
        session = await store.create(noted(new_session(secret, "Other", id="s"), quote=[secret, *BIG], big=BIG, n=1))
        session = await store.save(noted(session, n=2, short=[secret] * 8))
        assert await store.redact("s", [session.state.messages[0].id], replacement=replacement) == 1
        for version in (1, 2, 3):
            found = (await store.load("s", version)).state.metadata
            assert found["quote"] == [replacement, *BIG]
            assert found["big"] == BIG
            assert found.get("short", [replacement] * 8) == [replacement] * 8
        assert [*found] == [*session.state.metadata]
        after = await store.save(noted(await store.load("s"), n=3))
        store.evict("s")
        assert await store.load("s") == after
        assert await store.check() == []
    if kind == "file":
        assert secret.encode() not in bytes_in(tmp_path / "sessions")
    elif kind == "sqlite":
        assert not [value for value in values_in(tmp_path / "sessions.db") if secret.encode() in value]


@every_store
async def test_an_erasure_in_between_makes_a_save_write_all(kind: str, tmp_path: Path) -> None:
    """Values in memory may be of erased sessions: the next save does not rely on them."""
    async with opened(kind, tmp_path) as store, opened(kind, tmp_path) as other:
        if kind == "memory":
            other = store
        session = await store.create(noted(new_session("Hi", id="s"), big=BIG))
        await other.create(noted(new_session(id="t"), big=BIG))
        await other.delete("t")
        kept = await store.save(noted(session, n=1))
        other.evict("s")
        assert await other.load("s") == kept
        assert await store.check() == []


@every_store
@pytest.mark.parametrize("target", ["memory", "file"])
async def test_a_copy_has_it_too(kind: str, target: str, tmp_path: Path) -> None:
    """A session moves with all versions of its metadata, and its copy can be saved and moved again."""
    async with opened(kind, tmp_path / "from") as source, opened(target, tmp_path / "to") as copy:
        session = await source.create(noted(new_session("Hi", id="s"), big=BIG, n=1))
        session = await source.save(noted(session, n=2))
        archived = await source.dump("s")
        assert await copy.restore(archived)
        assert [await copy.load("s", version) for version in (1, 2)] == [await source.load("s", 1), session]
        again = await copy.dump("s")
        assert (again.heads, again.values) == (archived.heads, archived.values)
        after = await copy.save(noted(await copy.load("s"), n=3))
        copy.evict("s")
        assert await copy.load("s") == after
        assert await copy.check() == []


async def test_a_value_that_is_missing_is_damage(tmp_path: Path) -> None:
    """A load and fsck name the missing value, and versions without it load."""
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hi", id="s"))
        session = await store.save(noted(session, big=BIG))
        (name,) = store._cache["s"].metadata.apart.values()  # type: ignore[union-attr]
    db = apsw.Connection(str(path))
    db.execute("DELETE FROM value WHERE hash = ?", (name,))
    db.close()
    async with SqliteStore(path) as store:
        with pytest.raises(CorruptRecord, match=f"value {name}"):
            await store.load("s")
        assert texts(await store.load("s", 1)) == ["Hi"]
        assert any(name in problem.where for problem in (await fsck(store)).problems)


async def test_only_a_head_with_such_a_value_has_the_new_format(tmp_path: Path) -> None:
    """Older releases read all other heads, and refuse this one by its number instead of reading half of it."""
    async with MemoryStore() as store:
        plain = await store.create(noted(new_session("Hi", id="s"), some="x" * (LARGE - 500)))
        large = await store.save(noted(plain, some="x" * (LARGE + 500)))
        formats = []
        for session in (plain, large):
            raw, *_ = heads.encode_head(session, "op")
            formats.append(codec.decode_plain(raw).get("format", 1))
        assert formats == [1, 3]
        with pytest.raises(InvalidData, match="a newer perdure may"):
            codec.check_format(formats[1], heads.FORMAT - 1)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(given=st.dictionaries(st.text(max_size=6), JSONS, max_size=6), most=st.integers(0, 40), data=st.data())
def test_what_is_taken_apart_is_put_together(given: dict[str, Any], most: int, data: st.DataObject) -> None:
    """The same values come back in the same order, whichever are large and whichever were known before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metadata, "LARGE", most)
        first, values = taken_apart(FrozenDict(given))
        known = {key: name for key, name in first.apart.items() if data.draw(st.booleans())}
        again, new = taken_apart(FrozenDict(given), known)
    found = put_together(codec.decode_plain(again.rest), apart_in(parts_of(again.apart)), {**values, **new})
    assert found == given
    assert [*found] == [*given]
    assert {again.apart[key] for key in known} == {*known.values()}
