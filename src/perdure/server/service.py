"""The parts that all handlers share: the sessions, the agents that are served, and the streams that are open."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from perdure.model.definition import AgentDefinition
from perdure.server.feeds import Feeds
from perdure.server.gate import Caller, Gate
from perdure.server.metrics import Metrics
from perdure.server.problems import Problem
from perdure.server.settings import Settings
from perdure.server.tokens import token_book
from perdure.sessions.sessions import Sessions
from perdure.sessions.talking import ASSISTANT

_LOOK_AT_TOKEN = 15.0
"""Seconds after which an open stream checks whether its caller's token is still valid."""


class Service:
    """A store's sessions as they are served. The connection has to be open, and stays the caller's to close.

    `agents` are those that new sessions can have; the first is that of a session that names none. `runs_here` tells
    whether messages are answered in this process too, or only by workers elsewhere.
    """

    def __init__(
        self,
        sessions: Sessions,
        settings: Settings | None = None,
        *,
        agents: Sequence[AgentDefinition] = (),
        runs_here: bool = False,
    ) -> None:
        self.settings = Settings() if settings is None else settings
        self._sessions = sessions
        self.agents: Mapping[str, AgentDefinition] = {each.name: each for each in (agents or (ASSISTANT,))}
        self.runs_here = runs_here
        self.gate = Gate(token_book(sessions.store), self.settings, sessions.owner)
        self.feeds = Feeds(sessions)
        self.metrics = Metrics()
        self.closing = asyncio.Event()
        """Set when the service is about to stop: streams end, and say so."""
        self._streams: Counter[str | None] = Counter()

    @property
    def sessions(self) -> Sessions:
        """All that the service reaches, for any caller."""
        return self._sessions

    def sessions_of(self, caller: Caller) -> Sessions:
        """Return the sessions that a caller reaches."""
        if caller.owner is None or caller.owner == self._sessions.owner:
            return self._sessions
        return self._sessions.of(caller.owner)

    @property
    def open_streams(self) -> int:
        return self._streams.total()

    @asynccontextmanager
    async def stream(self, caller: Caller) -> AsyncIterator[None]:
        """Count a stream as open. Raise a Problem if there are too many."""
        self.require_room(caller)
        self._streams[caller.owner] += 1
        try:
            yield
        finally:
            self._streams[caller.owner] -= 1
            self._streams += Counter()  # this drops owners without streams, which would add up

    def require_room(self, caller: Caller) -> None:
        """Raise a Problem if the caller, or all callers together, have as many streams open as they may."""
        if not self.has_room(caller):
            what = "Too many streams are open. Close one, or try again later."
            raise Problem(429, "TooManyStreams", what, headers={"Retry-After": "5"})

    def has_room(self, caller: Caller) -> bool:
        """Tell whether a caller may open one more stream."""
        limits = self.settings.limits
        return self._streams[caller.owner] < limits.streams_of_owner and self._streams.total() < limits.streams

    async def watch(self, caller: Caller) -> str:
        """Wait until a stream has to end. Return the reason: the service stops, or the token is not valid any more."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_AT_TOKEN):
                    await self.closing.wait()
                return "shutdown"
            except TimeoutError:
                if not await self.gate.is_valid(caller):
                    return "token"
