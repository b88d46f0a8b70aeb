"""The socket that a service listens on, and the HTTP server behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.errors import ConfigurationError
from perdure.server.settings import Settings

_BACKLOG = 512
_HEAD = 32 << 10
"""Bytes that a request's line and headers may have."""
_HEAD_WITHIN = 20.0
"""Seconds until a connection that has not sent its first headers is closed."""
_KEEP_ALIVE = 75
"""Seconds that a connection is kept between two requests: longer than proxies keep theirs, which is 60 mostly."""
_TO_END = 10
"""Seconds that requests have to end once the server stops."""


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raise ConfigurationError if the address cannot be had; port 0 is any free one."""
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
    # With its protocol, or asyncio does not know it for TCP, leaves Nagle's algorithm on, and answers take 40 ms more.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """Return the server of an app. It logs no requests: addresses have one-time codes in them."""
    return HttpServer(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client could name another address than its own, and pass for the proxy
            h11_max_incomplete_event_size=_HEAD,
            limit_concurrency=2 * settings.limits.streams,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_TO_END,
        )
    )


class _Protocol(H11Protocol):
    """A connection that is closed if nothing whole comes over it: uvicorn waits for the first headers without end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_HEAD_WITHIN, self._expire)

    def _expire(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
