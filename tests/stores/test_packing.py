"""Packed rows: what is unpacked is what was packed, and nothing else."""

from __future__ import annotations

import hashlib
import zlib
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import AgentDefinition, AgentSession, Message, SessionFactory, SqliteStore
from perdure.errors import InvalidData
from perdure.protocols import Entry
from perdure.stores.format import packing
from perdure.stores.sqlite.schema import connect

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)
ENTRY = st.builds(Entry, st.sampled_from(["message_end", "turn_start", "x"]), JSON, st.sampled_from([None, "a", "b"]))


def test_the_dictionary_is_part_of_the_format() -> None:
    """Every packed row needs it, byte for byte. A better dictionary needs another mark."""
    digest = hashlib.sha256(packing._DICTIONARY).hexdigest()
    assert digest == "7d76a60474a1428a33ff295628d3308c8b8365af60369f8de62a46a00b305ad7"


@given(JSON)
def test_any_json_comes_back(value: object) -> None:
    """A row comes back as it was written, packed or not."""
    raw = msgspec.json.encode(value)
    assert packing.unpack(packing.pack(raw)) == raw
    assert len(packing.pack(raw)) <= len(raw)


@given(st.lists(ENTRY, min_size=1, max_size=8))
def test_entries_come_back_with_their_runs(entries: list[Entry]) -> None:
    """A run is named once, where it differs from the first one's."""
    run, packed = packing.pack_entries([(entry, msgspec.json.encode(entry.body)) for entry in entries])
    assert packing.unpack_entries(run, packed) == entries


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(stored: bytes) -> None:
    """Damaged bytes raise no other error, and never come out as anything but bytes."""
    with suppress(InvalidData):
        assert isinstance(packing.unpack(stored), bytes)


def test_a_row_that_unpacks_to_more_than_is_ever_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small row cannot fill the memory."""
    monkeypatch.setattr(packing, "MOST", 1000)
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=packing._DICTIONARY)
    bomb = b"\x01" + deflate.compress(b"0" * 100_000) + deflate.flush()
    with pytest.raises(InvalidData, match="more than is ever stored"):
        packing.unpack(bomb)


def test_a_row_that_nobody_would_unpack_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large append is stored unpacked if it would be refused when it is read."""
    monkeypatch.setattr(packing, "MOST", 1000)
    entries = [Entry("tool_execution_end", {"result": "x" * 400}, "run") for _ in range(4)]
    run, stored = packing.pack_entries([(entry, msgspec.json.encode(entry.body)) for entry in entries])
    assert packing.unpack_entries(run, stored) == entries


@pytest.mark.parametrize(
    "stored", [b'[["kind"]]', b"[[1, {}]]", b'[["kind", {}, 7]]', b'{"kind": 1}', b"7", b"nonsense"]
)
def test_what_is_no_batch_is_refused(stored: bytes) -> None:
    """Entries have a kind, a body, and perhaps a run."""
    with pytest.raises(InvalidData):
        packing.unpack_entries("run", stored)


def said(session: AgentSession) -> AgentSession:
    """Return a session with nine more messages, so that its head alone gives no reason to pack it."""
    return session.with_state(session.state.with_messages(*(Message.user("x") for _ in range(9))))


async def test_the_heads_of_a_session_with_metadata_are_packed(tmp_path: Path) -> None:
    """A framework's session is saved in such heads, message by message; packed, they take half the space."""
    path = tmp_path / "a.db"
    async with SqliteStore(path) as store:
        new = SessionFactory().create(AgentDefinition("a"), session_id="a")
        plain = await store.create(said(new))
        kept = await store.save(said(plain.with_state(plain.state.with_metadata("customer", 7))))
        assert await store.load("a") == kept
    with closing(connect(path)) as db:
        first, second = [body for (body,) in db.execute("SELECT body FROM head ORDER BY version")]
    assert first[:1] == b"{"
    assert len(second) < len(packing.unpack(second)) / 2
    assert b'"customer":7' in packing.unpack(second)
