"""What a save leaves behind in memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from perdure.stores.file import FileStore
from perdure.stores.jobs.saving import Change
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session, say


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_a_save_leaves_nothing_to_the_garbage_collector(kind: str, tmp_path: Path) -> None:
    """What was to be changed goes when the caller has its answer: where many save, cycles would cost a fifth."""
    makers = {
        "memory": MemoryStore,
        "file": lambda: FileStore(tmp_path / "sessions"),
        "sqlite": lambda: SqliteStore(tmp_path / "sessions.db"),
    }
    gc.collect()
    gc.disable()
    try:
        async with makers[kind]() as store:
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=session.version, owner="me")
            await store.append(claim)
            await store.save(say(session, "Hello again"), claim=claim)
        assert not [each for each in gc.get_objects() if isinstance(each, Change)]
    finally:
        gc.enable()
