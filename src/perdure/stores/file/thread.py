"""The one thread that works in a directory of sessions. If a job's session is locked, it is put back and others run."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from perdure.aio import finish_despite_cancel
from perdure.errors import StoreError
from perdure.stores.file.directory import Directory
from perdure.stores.folder import PutBack, Turn

T = TypeVar("T")
Job = Callable[[Directory], Any]


class FileThread:
    """A thread with an open directory. A job that was handed in is carried out, even if its caller is gone."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._put_back: list[_Request] = []
        self._directory: Directory | None = None
        self._closing = threading.Lock()
        self._last: _Request | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def open(self, path: Path, lock_timeout: float) -> Directory:
        """Open the directory. If that fails, the thread ends."""

        def opening() -> Directory:
            self._directory = Directory(path, lock_timeout)
            return self._directory

        try:
            opened: Directory = await self._ask(_Opening(opening, patient=True))
        except BaseException:
            await finish_despite_cancel(self.close(lambda _: None))
            raise
        return opened

    @property
    def is_inherited(self) -> bool:
        """True in a forked child, which has a copy of the directory's handle but not the thread."""
        return self._pid != os.getpid()

    def let_go(self) -> None:
        """Close a forked child's copy of the handle."""
        if self._directory is not None:
            self._directory.close()

    def check_process(self) -> None:
        if self.is_inherited:
            raise StoreError("This store was opened in another process. Open one of your own after the fork.")

    async def run(
        self, job: Callable[[Directory], T], *, patient: bool = False, finish: Callable[[T], Any] | None = None
    ) -> Any:
        """Return the result of a job. A patient job is not put back: others wait while it waits for a lock.

        `finish` is called with the result in the caller's event loop, even if the caller is gone.
        """
        self.check_process()
        return await self._ask(_Request(job, patient, finish))

    async def _ask(self, request: _Request) -> Any:
        # Under the lock: a request behind the None that ends the queue would never be answered.
        with self._closing:
            if self._last is not None:
                raise StoreError(
                    "This store is closed. Open it with `async with`, and keep the block open while it is used."
                )
            self._queue.put(request)
        return await request.future

    async def close(self, last: Job) -> None:
        """Carry out what is waiting and then a last job, close the directory, and end the thread."""
        ending = _Request(last, patient=True)
        with self._closing:
            if self._last is not None:
                return
            self._last = ending
            self._queue.put(None)
        await asyncio.wait({ending.future})
        # Read, or asyncio would log it: the store is closed in any case.
        ending.future.exception()
        self._thread.join()

    def _serve(self) -> None:
        while (request := self._next()) is not None:
            self._attempt(request)
        # Jobs that wait for a lock are still tried until their deadline: they were handed in before the end.
        while self._put_back:
            time.sleep(_pause())
            self._try_again()
        assert self._last is not None
        if self._directory is None:
            self._last.deliver(None, None)
        else:
            self._attempt(self._last)
            self._directory.close()

    def _next(self) -> _Request | None:
        """Return the next job. Try those again that were put back."""
        while True:
            try:
                # Never with a timeout: CPython 3.11 waits for ever if a short one is over too soon.
                request = self._queue.get(block=not self._put_back)
            except queue.Empty:
                time.sleep(_pause())
                self._try_again()
                continue
            self._try_again()
            return request

    def _try_again(self) -> None:
        waiting, self._put_back = self._put_back, []
        for request in waiting:
            self._attempt(request)

    def _attempt(self, request: _Request) -> None:
        """Do a job, unless it has to wait for a lock, or for other jobs that already wait for the same lock."""
        try:
            request.attempt(self._directory, {each.blocked_by for each in self._put_back})
        except PutBack as locked:
            request.blocked_by = locked.session_id
            self._put_back.append(request)


def _pause() -> float:
    # Waiters that pause at random do not starve each other.
    return random.uniform(0.0005, 0.003)


class _Request:
    """A job, and the future of the loop that waits for it."""

    def __init__(self, job: Callable[..., Any], patient: bool, finish: Callable[[Any], Any] | None = None) -> None:
        self._job = job
        self._patient = patient
        self._finish = finish
        self._turn: Turn | None = None
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.blocked_by = ""

    def attempt(self, directory: Directory | None, blocked: set[str]) -> None:
        assert directory is not None, "it is opened first"
        if not self._patient:
            self._turn = self._turn or Turn(time.monotonic() + directory.lock_timeout)
            self._turn.blocked = blocked
        self._answer(lambda: directory.run(self._job, self._turn))

    def _answer(self, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except PutBack:
            raise
        except BaseException as error:  # around a request: without an answer its caller would wait for ever
            self.deliver(None, error)
        else:
            self.deliver(result, None)

    def deliver(self, result: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed, so none of its tasks is waiting
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if error is None and self._finish is not None:
            try:
                result = self._finish(result)
            except Exception as failure:  # around a request: the caller has to be told, whatever it is
                error = failure
        if self.future.done():  # its caller was cancelled
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _Opening(_Request):
    """The first job, which makes the directory that the others work in."""

    def attempt(self, directory: Directory | None, blocked: set[str]) -> None:
        self._answer(self._job)
