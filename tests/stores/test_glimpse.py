"""A session with a short view is read in the event loop's thread, and all others by the reading threads."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure import CorruptRecord, Message, SqliteStore
from perdure.stores.sqlite.glimpse import FEW, Patience
from perdure.testing.samples import new_session


async def readers_asked(store: SqliteStore, monkeypatch: pytest.MonkeyPatch, session_id: str) -> int:
    """Load a session that is not in memory, and return how often a thread was asked to read."""
    asked = 0
    readers = store._engine.opened.readers  # type: ignore[attr-defined]  # the SQLite engine's
    ask = readers.run

    async def counting(*given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        return await ask(*given, **named)

    store.evict(session_id)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "run", counting)
        assert await store.load(session_id) is not None
    return asked


@pytest.mark.parametrize(("said", "asked"), [(["short"] * FEW, 0), (["short"] * (FEW + 1), 1), (["long " * 10_000], 1)])
async def test_a_long_view_or_a_large_message_is_left_to_a_thread(
    said: list[str], asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of few short messages asks no thread. One message too many, or a large one, does."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session(*said, id="s"))
        assert await readers_asked(store, monkeypatch, "s") == asked
        store.evict("s")
        assert await store.load("s") == session


async def test_a_short_view_is_read_while_the_writer_is_busy(tmp_path: Path) -> None:
    """A load does not wait for a write in progress: another connection reads the last commit."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("Hello", id="s"))
        begun, go_on = threading.Event(), threading.Event()

        def hold_up(_: apsw.Connection) -> None:
            begun.set()
            go_on.wait(30)

        held = asyncio.ensure_future(store._engine.opened.writer.run(hold_up))  # type: ignore[attr-defined]
        await asyncio.to_thread(begun.wait)
        store.evict("s")
        assert await asyncio.wait_for(store.load("s"), 10) == session
        go_on.set()
        await held


async def test_damage_in_a_short_view_is_told_as_in_a_long_one(tmp_path: Path) -> None:
    """A message that has changed on the disk raises CorruptRecord, which names the session and the message."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        await store.create(new_session("Hello", "there", id="s"))
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE msg SET body = CAST(replace(CAST(body AS TEXT), 'there', 'where') AS BLOB)")
    connection.close()
    async with SqliteStore(path) as store:
        with pytest.raises(CorruptRecord, match="message 1 of log 1") as raised:
            await store.load("s")
    assert raised.value.session_id == "s"


async def test_a_version_that_another_process_saved_is_seen_in_passing(tmp_path: Path) -> None:
    """The next load sees what another store has written to the file, also on the connection that writes here."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store, SqliteStore(path) as other:
        session = await store.create(new_session("Hello", id="s"))
        for number in range(5):
            said = session.state.with_messages(Message.user(f"from elsewhere {number}"))
            session = await other.save(session.with_state(said))
            assert await store.load("s") == session


def test_a_slow_read_is_not_tried_again_for_a_hundred_times_as_long() -> None:
    """After a read of 50 ms, loads are left to the threads for five seconds. A quick read changes nothing."""
    patience = Patience()
    patience.note(10.0, 10.001)
    assert patience.is_there(10.001)
    patience.note(20.0, 20.05)
    assert not patience.is_there(20.05)
    assert not patience.is_there(25.0)
    assert patience.is_there(25.06)
