"""A real Chromium that opens pages of a real server. Without one, its tests are skipped and say so."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.server.chromium import LACKING, found
from tests.server.serving import on_a_port, until

import perdure
from perdure.server.gate import COOKIE
from perdure.server.service import Service
from perdure.server.settings import Settings
from perdure.server.tokens import new_token

_ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def chromium() -> str:
    """Return the path of a Chromium. Without one, skip the test, or fail it if one is required."""
    there = found()
    if there is not None:
        return there
    if os.environ.get("PERDURE_BROWSER") == "required":
        pytest.fail(LACKING)
    pytest.skip(LACKING)


@dataclass
class Seen:
    """The page that a browser was shown, and the errors meanwhile."""

    page: Any
    base: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    async def go(self, path: str) -> None:
        await self.page.goto(self.base + path)

    async def is_wider_than_its_window(self) -> bool:
        wide: bool = await self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )
        return wide


@asynccontextmanager
async def browsing(base: str, secret: str | None, *, width: int = 1280, script: bool = True) -> AsyncIterator[Seen]:
    """Open a browser that is signed in with a token. Fail if an error occurs in it, or if it asks another host."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=list(_ARGUMENTS))
        size: Any = {"width": width, "height": 844}
        context = await browser.new_context(viewport=size, java_script_enabled=script)
        context.set_default_timeout(30_000)
        if secret is not None:
            await context.add_cookies([{"name": COOKIE, "value": secret, "url": base}])
        seen = Seen(await context.new_page(), base)
        seen.page.on(
            "console", lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("request", lambda asked: None if asked.url.startswith(base) else seen.foreign.append(asked.url))
        try:
            yield seen
        finally:
            await browser.close()
        assert not seen.errors, seen.errors
        assert not seen.foreign, seen.foreign


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Site:
    """A service that browsers reach."""

    sessions: perdure.Sessions
    secret: str
    port: int

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def up(self, *, runs_here: bool = False) -> AsyncIterator[None]:
        """Serve, until the block ends. It can be served again on the same port."""
        service = Service(self.sessions, Settings(port=self.port), runs_here=runs_here)
        async with on_a_port(service, self.port):
            try:
                yield
            finally:
                service.closing.set()  # streams end by themselves
                await until(lambda: not service.open_streams)
        await service.feeds.close()


async def site_of(sessions: perdure.Sessions, owner: str | None = None) -> Site:
    """Return a site for open sessions, and a token for its visitors."""
    from perdure.server.tokens import token_book

    secret, _ = await new_token(token_book(sessions.store), owner)
    return Site(sessions, secret, free_port())
