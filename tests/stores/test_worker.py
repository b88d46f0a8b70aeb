"""The threads that serve a SQLite store: every request gets an answer, and the threads end."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import apsw
import pytest
from tests.waiting import until

from perdure.errors import StoreError
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite import worker as workers
from perdure.stores.sqlite.readers import MOST_READERS, Readers
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
    """A request that another loop has not handed over when the thread ends is refused, not forgotten."""
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
    """Its threads end and its handles are closed, and only then is the cancellation raised."""
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
    """Commits are moved into the database file after a while, not only when there are many."""
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
    """The memory of a session of 100,000 messages is freed at once when it was loaded or saved, and released."""

    class Large:
        """An object that a job was given, or returns."""

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


@contextmanager
def held_up() -> Iterator[tuple[threading.Event, Callable[[apsw.Connection], int]]]:
    """Yield a job that lasts until the block ends, and an event that says that it has begun."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: apsw.Connection) -> int:
        begun.set()
        go_on.wait(30)
        return 7

    try:
        yield begun, wait
    finally:
        go_on.set()


def threads_of(name: str) -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return sorted(each for each in names if each.startswith(name) and "closing" not in each)


async def test_a_long_read_holds_up_no_other() -> None:
    """Another thread reads meanwhile. Threads are started when they are needed, and end with the store."""
    readers = Readers("held", partial(apsw.Connection, ":memory:"))
    assert threads_of("held") == []
    with held_up() as (begun, wait):
        assert await readers.run(answer) == await readers.run(answer) == 42
        assert threads_of("held") == ["held 1"]
        long = asyncio.ensure_future(readers.run(wait))
        await asyncio.to_thread(begun.wait)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*(readers.run(answer) for _ in range(100))) == [42] * 100
        assert not long.done()
        assert len(threads_of("held")) <= MOST_READERS
    assert await long == 7
    await readers.close()
    assert threads_of("held") == []
    with pytest.raises(StoreError, match="closed"):
        await readers.run(answer)


async def test_what_is_known_to_take_long_leaves_a_thread_for_the_others() -> None:
    """Twenty long reads leave one thread for the short ones."""
    readers = Readers("long", partial(apsw.Connection, ":memory:"))
    with held_up() as (begun, wait):
        long = [asyncio.ensure_future(readers.run(wait, long=True)) for _ in range(20)]
        await asyncio.to_thread(begun.wait)
        async with asyncio.timeout(20):
            assert [await readers.run(answer) for _ in range(20)] == [42] * 20
        assert len(threads_of("long")) == MOST_READERS
    assert await asyncio.gather(*long) == [7] * 20
    await readers.close()


async def test_readers_serve_several_loops_and_are_closed_once() -> None:
    """Requests made before the end are answered, in either loop."""
    readers = Readers("loops", partial(apsw.Connection, ":memory:"))

    async def ask() -> list[int]:
        return await asyncio.gather(*(readers.run(answer) for _ in range(50)))

    with loop_in_a_thread() as other:
        elsewhere = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), other))
        assert await asyncio.gather(ask(), elsewhere) == [[42] * 50] * 2
    await readers.close()
    await readers.close()
    assert threads_of("loops") == []


async def test_a_forked_child_has_no_readers() -> None:
    """It raises an error at once, though a thread of the parent may have held the lock at the fork."""
    readers = Readers("forked", partial(apsw.Connection, ":memory:"))
    await readers.run(answer)
    with readers._changed:
        pid = os.fork()
        if pid == 0:
            with suppress(StopIteration, StoreError):
                readers.run(answer).send(None)
                os._exit(1)
            os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert status == 0
    await readers.close()


async def test_a_cancelled_read_holds_up_no_other() -> None:
    """Its thread is busy until the read ends, though nobody waits for it; then it serves again."""
    readers = Readers("cancelled", partial(apsw.Connection, ":memory:"))
    with held_up() as (begun, wait):
        reading = asyncio.ensure_future(readers.run(wait))
        await asyncio.to_thread(begun.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(20):
            assert [await readers.run(answer) for _ in range(5)] == [42] * 5
        assert threads_of("cancelled") == ["cancelled 1", "cancelled 2"]
    await readers.close()
    assert threads_of("cancelled") == []


async def test_a_reader_that_could_not_open_the_file_is_replaced() -> None:
    """The caller gets the error; the next read succeeds if the file is there again."""
    found = iter([OSError("no such file"), apsw.Connection(":memory:")])

    def connect() -> apsw.Connection:
        each = next(found)
        if isinstance(each, OSError):
            raise each
        return each

    readers = Readers("broken", connect)
    with pytest.raises(StoreError, match="no such file"):
        await readers.run(answer)
    assert await readers.run(answer) == await readers.run(answer, long=False) == 42
    await readers.close()
    assert threads_of("broken") == []
