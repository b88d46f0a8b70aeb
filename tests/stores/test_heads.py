"""Heads of many sessions: what they cost, and which damage is reported where rows are lines of files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.stores.test_postgres import schema, store_in
from tests.stores.test_postgres_rounds import round_trips

from perdure import SqliteStore
from perdure.errors import CorruptRecord
from perdure.stores.file import FileStore
from perdure.testing.samples import new_session, note, say

__all__ = ["schema"]


async def test_a_page_of_heads_is_one_exchange(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is two if something has to be read by its hash: a large value of the metadata, or a new definition."""
    async with store_in(schema) as store:
        for number in range(50):
            await store.create(note(new_session(*"abc" * 20, id=f"s{number}"), "n", number))
        await store.create(note(new_session(id="large"), "n", "x" * 10_000))
        await store.heads(["s0"])
        with round_trips(monkeypatch) as made:
            assert len(await store.heads([f"s{number}" for number in range(50)])) == 50
        assert len(made) == 1
        with round_trips(monkeypatch) as made:
            assert len(await store.heads(["s1", "large", "s2"])) == 3
        assert len(made) == 2


async def test_a_head_costs_the_same_however_long_the_session_is(tmp_path: Path) -> None:
    """A view of 20,000 messages is not read, nor is one of 500 pieces."""
    spent: dict[str, list[float]] = {"short": [], "long": []}
    async with SqliteStore(tmp_path / "s.db") as store:
        for name, length in (("short", 2), ("long", 20_000)):
            await store.create(note(say(new_session(id=name), *["text"] * length), "k", "v" * 1_000))
    async with SqliteStore(tmp_path / "s.db") as store:
        for _ in range(30):
            for name, times in spent.items():
                start = time.process_time()
                assert len(await store.heads([name])) == 1
                times.append(time.process_time() - start)
    assert min(spent["long"]) < 3 * min(spent["short"]) + 0.0005


async def test_a_damaged_file_stops_no_other(tmp_path: Path) -> None:
    """The damaged file is named, and so is a directory in place of a file."""
    async with FileStore(tmp_path / "s") as store:
        for name in ("one", "two", "three"):
            await store.create(note(new_session("Hello", id=name), "k", name))
        sound = await store.heads(["one", "two", "three"])
        log = tmp_path / "s" / "two.jsonl"
        lines = log.read_bytes()
        log.write_bytes(lines.replace(b'"two"', b'"owt"'))
        found = await store.heads(["one", "two", "nobody", "three"])
        assert found == {key: sound[key] for key in ("one", "three")}
        assert isinstance(found.damaged["two"], CorruptRecord)
        log.unlink()
        log.mkdir()  # nobody can read a directory as a file
        found = await store.heads(["one", "two", "three"])
        assert [*found] == ["one", "three"]
        assert isinstance(found.damaged["two"], CorruptRecord)
