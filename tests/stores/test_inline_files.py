"""Images and files that earlier releases stored within messages stay readable, and are taken out when they move.

`tests/golden/inline-files` was written by the last release that did so: a session, a fork of it, and an item in an
inbox, each with the same 10 KB.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from perdure import FileStore, Media, Message, SqliteStore, codec
from perdure.archive import export_sessions, import_sessions
from perdure.copying import copy
from perdure.stores.memory import MemoryStore
from perdure.testing.parts.attaching import files_in
from perdure.testing.samples import fork, tell

GOLDEN = Path(__file__).parents[1] / "golden" / "inline-files"
BODY = bytes(range(256)) * 40
HASH = codec.hash_of_bytes(BODY)


@pytest.fixture(params=["sqlite", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "files":
        return FileStore(shutil.copytree(GOLDEN / "files", tmp_path / "files"))
    return SqliteStore(shutil.copy(GOLDEN / "sessions.sqlite", tmp_path / "sessions.sqlite"))


async def test_they_are_read_where_they_are(store: Any) -> None:
    """Their bytes are read from logs and inboxes; a check finds no problem, and the store works as before."""
    async with store:
        one, two = await store.load("one"), await store.load("two")
        assert files_in(one) == [Media("image/png", data=BODY, name="a.png")]
        assert [part.data for part in files_in(two)] == [BODY, BODY]
        (item,) = await store.read("two", inbox=True)
        assert Message.from_dict(item.body["messages"][0]).parts[0] == Media("image/png", data=BODY)
        assert [*await store.check()] == []
        saved = await store.save(tell(one, Message.user(Media("image/png", data=BODY))))
        assert [part.hash for part in files_in(saved)] == [None, HASH]
        await store.create(fork(saved, id="three"))
        await store.delete("one")
        assert [part.hash for part in files_in(await store.load("three"))] == [None, HASH]
        assert await store.attachments("three", [HASH]) == {HASH: BODY}
        assert await store.redact("two", ["photo", "again"]) == 2
        assert files_in(await store.load("two")) == []
        assert [*await store.check()] == []


async def test_they_are_taken_out_when_they_move(store: Any, tmp_path: Path) -> None:
    """An export and a copy take them out; the session that has moved is still the same session."""
    async with store, MemoryStore() as target, MemoryStore() as copied:
        await export_sessions(store, tmp_path / "export.jsonl")
        assert (await import_sessions(target, tmp_path / "export.jsonl")).sessions == 2
        assert (await import_sessions(store, tmp_path / "export.jsonl")).skipped == 2
        assert (await copy(store, copied)).differing == ()
        for each in (target, copied):
            assert [part.hash for part in files_in(await each.load("two"))] == [HASH, HASH]
            assert await each.attachments("two", [HASH]) == {HASH: BODY}
            assert [*await each.check()] == []


async def test_an_export_of_an_earlier_release_is_taken_in(tmp_path: Path) -> None:
    """Any store imports it, and keeps the bytes once; a second import finds it there already."""
    for store in (MemoryStore(), SqliteStore(tmp_path / "s.db"), FileStore(tmp_path / "files")):
        async with store:
            assert (await import_sessions(store, GOLDEN / "export.jsonl")).sessions == 2
            assert (await import_sessions(store, GOLDEN / "export.jsonl")).skipped == 2
            assert [part.hash for part in files_in(await store.load("two"))] == [HASH, HASH]
            assert await store.attachments("two", [HASH]) == {HASH: BODY}
            assert [*await store.check()] == []
    assert [path.name for path in (tmp_path / "files" / "blobs").iterdir()] == [HASH]
