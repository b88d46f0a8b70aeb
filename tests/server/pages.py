"""Pages of the inspector as tests look at them: over a real store, through the whole app, read by an HTML parser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx
from tests.server.serving import Served, client_of

import perdure
from perdure.server.app import make_app
from perdure.server.service import Service
from perdure.server.tokens import new_token

CANARY = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>"
"""A text that would run as a script on a page that does not escape it."""
_APART = ("td", "th", "dt", "dd", "li", "p", "div", "pre", "summary", "header", "title")
"""The elements whose words are not joined with those before them."""


@dataclass
class Form:
    """A form of a page: where it is sent, and what is in it unless a person changes that."""

    action: str
    fields: dict[str, str] = field(default_factory=dict)
    buttons: list[tuple[str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """What a page says, what it links to, and what can be sent from it. What a browser would run is refused."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.links: list[str] = []
        self.forms: list[Form] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._words: list[str] = []
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        return " ".join("".join(self._words).split())

    def has(self, *classes: str) -> int:
        """Return how many elements have all these classes."""
        return sum(set(classes) <= set(attributes.get("class", "").split()) for _, attributes in self.tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag in _APART:
            self._words.append(" ")
        assert tag not in ("img", "iframe", "object", "style"), tag
        assert tag != "script" or attributes["src"].startswith("/static/")
        assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
        if "href" in attributes:
            assert not attributes["href"].lower().startswith(("javascript:", "data:")), attributes["href"]
            self.links.append(attributes["href"])
        if tag == "form":
            self.forms.append(Form(attributes.get("action", "")))
        if tag in ("input", "textarea") and self.forms:
            self.forms[-1].fields[attributes.get("name", "")] = attributes.get("value", "")
        if tag == "button" and self.forms:
            self.forms[-1].buttons.append((attributes.get("name", ""), attributes.get("value", "")))

    def handle_data(self, data: str) -> None:
        self._words.append(data)


async def opened(client: httpx.AsyncClient, path: str, status: int = 200) -> Page:
    """Return the page that a client is shown."""
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    return Page(answer.text)


@asynccontextmanager
async def looking(url: str, **options: Any) -> AsyncIterator[Served]:
    """Serve a store without any worker, so that what waits goes on waiting."""
    async with perdure.connect(url, **{"model": "offline", **options}) as sessions:
        service = Service(sessions)
        app, clients = make_app(service), []
        for owner, may_write in (("ada", True), ("bob", True), ("ada", False), (None, True)):
            secret, _ = await new_token(service.gate._book, owner, may_write=may_write)
            clients.append(client_of(app, secret))
        yield Served(sessions, service, app, *clients, client_of(app, None))
        for each in clients:
            await each.aclose()
        await service.feeds.close()
