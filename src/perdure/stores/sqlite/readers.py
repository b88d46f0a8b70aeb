"""Threads that read a SQLite file, started as they are needed. A long read does not hold up the others."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable

import apsw

from perdure.errors import PerdureError
from perdure.stores.sqlite.worker import Request, Requests, as_store_error, deliver, joined, read, read_alone

# Each has a connection, with a cache of a few hundred kilobytes.
MOST_READERS = 4


class Readers(Requests):
    """Threads with a connection each. A free one takes the next job.

    The first thread takes no long jobs, so that one thread is always left for short ones.
    """

    def __init__(self, name: str, connect: Callable[[], apsw.Connection]) -> None:
        super().__init__()
        self._name = name
        self._connect = connect
        self._changed = threading.Condition()
        self._short: deque[Request] = deque()
        self._long: deque[Request] = deque()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def _accept(self, requests: list[Request]) -> bool:
        with self._changed:
            if self._is_ended:
                return False
            for request in requests:
                (self._long if request.long else self._short).append(request)
            self._start_threads()
            self._changed.notify_all()
            return True

    def _start_threads(self) -> None:
        wanted = self._busy + len(self._short) + len(self._long)
        # The first thread takes no long jobs, so a long one needs a second thread.
        least = 2 if self._long else 1
        while len(self._threads) < min(max(wanted, least), MOST_READERS):
            number = len(self._threads) + 1
            is_for_short = number == 1 < MOST_READERS
            thread = threading.Thread(
                target=self._serve, args=(is_for_short,), name=f"{self._name} {number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, is_for_short: bool) -> None:
        connection: apsw.Connection | None = None
        while self._wait(is_for_short):
            connection = self._serve_one(connection, is_for_short)
        if connection is not None:
            connection.close()

    def _wait(self, is_for_short: bool) -> bool:
        """Wait for a job. Return False if there is none and none can come."""
        with self._changed:
            while not self._short and (is_for_short or not self._long):
                if self._is_ended:
                    return False
                self._changed.wait()
            return True

    def _serve_one(self, connection: apsw.Connection | None, is_for_short: bool) -> apsw.Connection | None:
        """Carry out the next job, unless another thread has taken it.

        This is a function of its own so that nothing of a job stays in memory while the thread waits for the next.
        """
        with self._changed:
            if self._short:
                request = self._short.popleft()
            elif self._long and not is_for_short:
                request = self._long.popleft()
            else:
                return connection
            self._busy += 1
        connection = self._carry_out(connection, request)
        with self._changed:  # before the caller gets its answer, after which it may hand in more
            self._busy -= 1
        deliver([request])
        return connection

    def _carry_out(self, connection: apsw.Connection | None, request: Request) -> apsw.Connection | None:
        try:
            connection = connection or self._connect()
        except (apsw.Error, OSError, PerdureError) as error:  # the next one tries again: the file may be back by then
            request.error = as_store_error(error)
            return None
        (read_alone if request.alone else read)(connection, request)
        return connection

    async def close(self) -> None:
        """End the threads when they have carried out what is waiting."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        await asyncio.sleep(0)  # what was gathered in this turn of the loop is handed over first
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        for thread in self._threads:
            await joined(thread)
