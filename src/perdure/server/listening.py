"""The socket that a service listens on, and the HTTP server behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.errors import ConfigurationError
from perdure.server.settings import Limits, Settings

_BACKLOG = 512
_UNSENT = 128 << 10
"""Bytes that the system buffers for a reader. By default it buffers megabytes, and tells late what was taken."""
_HEAD = 32 << 10
"""The most bytes of a request's line and headers."""
_KEEP_ALIVE = 75
"""Seconds that a connection is kept between two requests: longer than proxies keep theirs, which is mostly 60."""
_TO_END = 10
"""Seconds that requests have to end once the server stops."""


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 is any free one. Raise ConfigurationError if the address cannot be used."""
    try:
        return _listening(host.strip("[]"), port)
    except OSError as error:
        if error.errno == EADDRINUSE:
            what = f"Port {port} is in use on {host}: perhaps by another `perdure serve`."
            raise ConfigurationError(f"{what} Stop that one, or choose another: --port {port + 1}") from None
        reason = error.strerror or str(error)
        raise ConfigurationError(f"{host} port {port} cannot be listened on: {reason}. Check --host.") from None


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # The protocol is given, or asyncio does not see that it is TCP, and Nagle's algorithm adds 40 ms to answers.
    listener = socket.socket(family, kind, protocol)
    try:
        # A service that is restarted can bind while old connections are still closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)  # its connections inherit this
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the command decides what a signal does."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Take no more connections. Requests under way have some seconds to end, or with `at_once` none."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once


def http_server(app: ASGIApp, settings: Settings) -> HttpServer:
    """Return the server of an app. It logs no requests, since addresses may have one-time codes in them."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=partial(_Protocol, limits=settings.limits),  # type: ignore[arg-type]  # called as the class is
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client could name another address than its own, and pass for the proxy
            h11_max_incomplete_event_size=_HEAD,
            # Streams have a limit of their own: beside them there is room for as many other requests.
            limit_concurrency=2 * settings.limits.streams,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_TO_END,
        )
    )


class _Protocol(H11Protocol):
    """A connection that is cut off if a request does not come in, or nothing of a response is taken, in time.

    uvicorn has no limit for headers that come in pieces, and none for the rest of a body that nobody reads. It also
    waits for a reader that has stopped, even after it has closed the connection.
    """

    def __init__(self, *given: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*given, **options)
        self._limits = limits
        self._awaited: object = None
        """The state of the request that comes in: its head, or its body."""
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every byte that is not taken
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._taken()

    def handle_events(self) -> None:
        super().handle_events()
        self._await_rest()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE or self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:  # a response is under way: it cannot become another
            self.transport.abort()

    def _await_rest(self) -> None:
        """Limit the time for the rest of a request. What comes meanwhile does not extend it."""
        awaited = self.conn.their_state
        is_idle = awaited is h11.IDLE and self.timeout_keep_alive_task is not None
        if is_idle or awaited not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif awaited is not self._awaited:
            self._stop_waiting()
            # A body that is read has a limit of its own, and its client an error. This is for bodies that nobody reads.
            within = self._limits.head if awaited is h11.IDLE else 2 * self._limits.patience
            self._awaited, self._late = awaited, self.loop.call_later(within, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._awaited = None
        if self._late is not None:
            self._late.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self._limits.patience, self._require_less, left)

    def _require_less(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            self.transport.abort()  # `close` would wait for the reader, too

    def _taken(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
