"""The threads that serve a SQLite store: nothing handed to them is left without an answer, and they end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import apsw
import pytest
from tests.waiting import until

from perdure.errors import StoreError
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import worker as workers
from perdure.stores.sqlite.worker import Worker
from perdure.testing.samples import new_session, say


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def answer(_: apsw.Connection) -> int:
    return 42


async def test_a_request_of_another_loop_is_answered_though_the_store_is_closed() -> None:
    """What another loop has gathered and not yet handed over when the thread ends is refused, not forgotten."""
    worker = Worker("test", partial(apsw.Connection, ":memory:"))
    with loop_in_a_thread() as other:
        gathered, go_on = threading.Event(), threading.Event()

        async def ask() -> int:
            asking = asyncio.ensure_future(worker.run(answer))
            await asyncio.sleep(0)
            gathered.set()
            go_on.wait(30)  # the other loop stands still with the request in hand
            found: int = await asyncio.wait_for(asking, 10)
            return found

        asked = asyncio.run_coroutine_threadsafe(ask(), other)
        await asyncio.to_thread(gathered.wait)
        await worker.close()
        go_on.set()
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wrap_future(asked)


async def test_what_was_handed_over_before_the_end_is_carried_out() -> None:
    """A request made in the same turn of the loop as the closing gets its answer."""
    worker = Worker("test", partial(apsw.Connection, ":memory:"))
    asking = [asyncio.ensure_future(worker.run(answer)) for _ in range(3)]
    await asyncio.sleep(0)
    await worker.close()
    assert await asyncio.gather(*asking) == [42] * 3
    with pytest.raises(StoreError, match="closed"):
        await worker.run(answer)


async def test_a_closing_that_is_cancelled_closes_all_the_same(tmp_path: Path) -> None:
    """Its threads end and its handles go, and only then is the cancellation heard."""
    before = set(threading.enumerate())
    store = SqliteStore(tmp_path / "sessions.db")
    await store.__aenter__()
    await store.create(new_session("Hello"))
    await store.search("hello")
    begun, go_on = threading.Event(), threading.Event()

    def hold_up(_: apsw.Connection) -> None:
        begun.set()
        go_on.wait(30)

    held = asyncio.ensure_future(store._engine.opened.writer.run(hold_up))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.ensure_future(store.__aexit__())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    closing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await held
    left = {thread for thread in threading.enumerate() if thread.name.startswith("perdure")} - before
    assert [thread.name for thread in left if "closing" not in thread.name] == []
    assert not (tmp_path / "sessions.db-wal").exists(), "the last connection has been closed"


async def test_an_idle_writer_empties_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed is moved into the database file after a while, not first when much has gathered."""
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.02)
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        session = await store.create(new_session("Hello"))
        await store.save(say(session, "a word that is looked for"))
        for _ in range(1000):
            if b"a word that is looked for" in path.read_bytes():
                break
            await asyncio.sleep(0.01)
        assert b"a word that is looked for" in path.read_bytes()


@pytest.mark.parametrize("alone", [False, True])
async def test_what_was_delivered_is_not_kept_until_the_next_request(alone: bool) -> None:
    """A session of 100,000 messages that was loaded or saved, and let go of, leaves the memory at once."""

    class Large:
        """What a job was given, or has brought back."""

    worker = Worker("test", partial(apsw.Connection, ":memory:"))
    try:
        given, brought = Large(), Large()
        alive = [weakref.ref(given), weakref.ref(brought)]
        assert await worker.run(partial(_bring, given, [brought]), alone=alone) is brought
        del given, brought
        await until(lambda: [each() for each in alive] == [None, None])
    finally:
        await worker.close()


def _bring(given: object, brought: list[object], _: apsw.Connection) -> object:
    return brought.pop()
