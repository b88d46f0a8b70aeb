"""A service over a real store, asked through its whole ASGI app."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

import perdure
from perdure.server.app import make_app
from perdure.server.service import Service
from perdure.server.settings import Settings
from perdure.server.tokens import new_token
from perdure.workers.worker import Worker

BASE = "http://127.0.0.1:7433"


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


@dataclass
class Served:
    """A service that runs, and clients of it."""

    sessions: perdure.Sessions
    service: Service
    app: ASGIApp
    ada: httpx.AsyncClient
    bob: httpx.AsyncClient
    reader: httpx.AsyncClient
    """Ada's, with a token that may only read."""
    operator: httpx.AsyncClient
    nobody: httpx.AsyncClient


@asynccontextmanager
async def serving(
    url: str, settings: Settings | None = None, *, tools: Sequence[Any] = (refund,)
) -> AsyncIterator[Served]:
    async with perdure.connect(url, model="offline", tools=[*tools]) as sessions, Worker(sessions) as worker:
        work = asyncio.ensure_future(worker.run())
        service = Service(sessions, settings, runs_here=True)
        app = make_app(service)
        clients = []
        for owner, may_write in (("ada", True), ("bob", True), ("ada", False), (None, True)):
            secret, _ = await new_token(service.gate._book, owner, may_write=may_write)
            clients.append(client_of(app, secret))
        yield Served(sessions, service, app, *clients, client_of(app, None))
        for each in clients:
            await each.aclose()
        await service.feeds.close()
        worker.stop()
        await work


def client_of(app: ASGIApp, secret: str | None) -> httpx.AsyncClient:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30)


def in_service(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Give a test the service that its parameter `served` asks for, over a SQLite file of its own."""

    async def run(tmp_path: Path, **given: Any) -> None:
        async with serving(f"sqlite:///{tmp_path}/served.db") as served:
            await test(served=served, **given)

    kept = [each for each in inspect.signature(test).parameters.values() if each.name != "served"]
    own = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([own, *kept])  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run
