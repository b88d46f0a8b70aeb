"""A service over a real store, asked through its whole ASGI app."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

import perdure
from perdure.server.app import make_app
from perdure.server.listening import HttpServer, bound, http_server
from perdure.server.service import Service
from perdure.server.settings import Settings
from perdure.server.tokens import new_token
from perdure.workers.worker import Worker

Test = Callable[..., Awaitable[None]]
BASE = "http://127.0.0.1:7433"


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


@dataclass
class Served:
    """A running service, and clients of it."""

    sessions: perdure.Sessions
    service: Service
    app: ASGIApp
    ada: httpx.AsyncClient
    bob: httpx.AsyncClient
    reader: httpx.AsyncClient
    """Ada's client, with a token that may only read."""
    operator: httpx.AsyncClient
    nobody: httpx.AsyncClient


@asynccontextmanager
async def serving(url: str, settings: Settings | None = None, **options: Any) -> AsyncIterator[Served]:
    """Serve a store, and answer messages as a worker does."""
    options = {"model": "offline", "tools": [refund], **options}
    async with perdure.connect(url, **options) as sessions, Worker(sessions) as worker:
        work = asyncio.ensure_future(worker.run())
        async with _asked(Service(sessions, settings, runs_here=True)) as served:
            yield served
        worker.stop()
        await work


@asynccontextmanager
async def looking(url: str, **options: Any) -> AsyncIterator[Served]:
    """Serve a store without a worker, so that waiting messages stay."""
    connecting = perdure.connect(url, **{"model": "offline", **options})
    async with connecting as sessions, _asked(Service(sessions)) as served:
        yield served


@asynccontextmanager
async def _asked(service: Service) -> AsyncIterator[Served]:
    app, clients = make_app(service), []
    for owner, may_write in (("ada", True), ("bob", True), ("ada", False), (None, True)):
        secret, _ = await new_token(service.gate._book, owner, may_write=may_write)
        clients.append(client_of(app, secret))
    yield Served(service.sessions, service, app, *clients, client_of(app, None))
    for each in clients:
        await each.aclose()
    await service.feeds.close()


@asynccontextmanager
async def on_a_port(service: Service, port: int = 0) -> AsyncIterator[str]:
    """Serve on a port of the loopback as `perdure serve` does, in this event loop. Yield its address."""
    async with answering(service, port) as (_, url):
        yield url


@asynccontextmanager
async def answering(service: Service, port: int = 0) -> AsyncIterator[tuple[HttpServer, str]]:
    """Serve on a port, and yield the server itself, too."""
    server = http_server(make_app(service), service.settings)
    with bound("127.0.0.1", port) as listener:
        serves = asyncio.ensure_future(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            service.closing.set()  # streams end by themselves
            server.stop()
            await serves


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0.01)


def client_of(app: ASGIApp, secret: str | None) -> httpx.AsyncClient:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30)


def with_service(serves: Callable[[str], AbstractAsyncContextManager[Any]]) -> Callable[[Test], Test]:
    """Return a decorator: it gives a test the service of its parameter `served`, over a SQLite file of its own."""

    def decorated(test: Test) -> Test:
        async def run(tmp_path: Path, **given: Any) -> None:
            async with serves(f"sqlite:///{tmp_path}/served.db") as served:
                await test(served=served, **given)

        kept = [each for each in inspect.signature(test).parameters.values() if each.name != "served"]
        own = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([own, *kept])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorated


in_service = with_service(serving)
