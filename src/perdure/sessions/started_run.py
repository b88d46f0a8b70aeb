"""A run that outlives its caller. It belongs to the connection, and can be listened to, waited for, and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from perdure.errors import ConfigurationError, RunInterrupted
from perdure.model.ids import SessionId
from perdure.sessions.cursors import Place
from perdure.sessions.reply import Chunk, Reply
from perdure.sessions.streaming import Listener

T = TypeVar("T")


class StartedRun(Generic[T]):
    """The run that `start` returns. Of all that can be done with it, only `cancel` ends the run."""

    def __init__(
        self, session_id: SessionId, listener: Listener, run: Coroutine[Any, Any, Reply[T]], *, is_detached: bool = True
    ) -> None:
        self._is_detached = is_detached
        self._was_left = False
        self._session_id = session_id
        self._listener = listener
        self.work = listener.listen_to(run)
        self.work.add_done_callback(_retrieve)

    @property
    def is_detached(self) -> bool:
        """Return whether the run continues when nobody listens any more. A run that is only waited for does."""
        return self._is_detached or self._listener.waits

    def leave(self) -> None:
        """Give up waiting for another run, since the connection is closed."""
        if self._listener.waits and self.work.cancel():
            self._was_left = True

    @property
    def session_id(self) -> SessionId:
        """The session that it runs in."""
        return self._session_id

    @property
    def is_done(self) -> bool:
        """True once the run is over."""
        return self.work.done()

    async def begun(self) -> None:
        """Wait until the run has claimed its session. Raise the error that kept it from that."""
        began = asyncio.ensure_future(self._listener.began.wait())
        try:
            await asyncio.wait({began, self.work}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        finally:
            began.cancel()
        if self.work.done() and not self._listener.began.is_set():
            await self.result()

    async def stream(self) -> AsyncIterator[Chunk]:
        """Yield the answer's text, from its beginning, as it comes. The last chunk is empty and has the `reply`.

        Any number of listeners may come, early or late, and leave again.
        """
        place: Place | None = None
        is_silent = True
        async for chunk in self._listener.heard():
            yield chunk
            place, is_silent = chunk.place, False
        reply = await self.result()
        for chunk in last_chunks(reply, place or self._listener.start, is_silent=is_silent):
            yield chunk

    async def result(self) -> Reply[T]:
        """Wait for the answer. Raise RunFailed if the run ends without one, RunInterrupted if it waits for recovery."""
        # Not awaited directly: a caller that is cancelled would cancel the run.
        await asyncio.wait({self.work})
        if self.work.cancelled() and self._was_left:
            raise RunInterrupted(
                self._session_id,
                f"The connection was closed before session {self._session_id!r} had answered. The message is kept: "
                "it is answered by the run that it waits for, or by recover().",
            )
        if self.work.cancelled():
            raise ConfigurationError(
                f"The run of session {self._session_id!r} was stopped before it had an answer: somebody cancelled it "
                "here, or its connection was closed while it was listened to. What was said so far is kept."
            )
        return self.work.result()

    async def cancel(self) -> bool:
        """Stop the run, and wait until what was said so far is kept. Return False if it was over.

        If the answer is another run's, that run continues, and only the wait for it ends. `chat.cancel()` stops it.
        """
        stopped = self.work.cancel()
        await asyncio.wait({self.work})
        return stopped

    def __repr__(self) -> str:
        return f"<StartedRun of {self._session_id}{', done' if self.is_done else ''}>"


def last_chunks(reply: Reply[Any], place: Place | None, *, is_silent: bool) -> Iterator[Chunk]:
    """Yield the chunks that end a stream. If it had no text so far, the text of the reply comes first."""
    untold = 0
    if is_silent and reply.text:  # it was answered before, under its key, or its driver does not stream
        untold = len(reply.text)
        yield Chunk(reply.text, offset=0 if place is None else place.end, place=place)
    yield last_chunk(reply, place, untold)


def last_chunk(reply: Reply[Any], place: Place | None, untold: int = 0) -> Chunk:
    """Return the chunk that ends a stream. After a run that waits for a person, its place leads to what comes later.

    Its offset is after the place, and after `untold` characters that the place does not count.
    """
    if place is not None and not reply.pending_calls:
        place = place.ended()
    return Chunk(reply=reply, offset=untold + (0 if place is None else place.end), place=place)


def _retrieve(work: asyncio.Task[Reply[Any]]) -> None:
    """Fetch the error of a run, so that asyncio does not complain: its session's record tells of it."""
    if not work.cancelled():
        work.exception()
