"""A page as a parser sees it: tags, texts and forms, and nothing that a script would do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx

_VOID = frozenset({"meta", "link", "input", "br", "path", "rect", "circle", "img"})


@dataclass
class Element:
    """A tag, its attributes, and the text within it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())


@dataclass
class Form:
    """A form as a browser without scripts would send it."""

    action: str
    fields: dict[str, str] = field(default_factory=dict)

    async def send(self, client: httpx.AsyncClient, **changed: str) -> httpx.Response:
        return await client.post(self.action, data={**self.fields, **changed})


class Page(HTMLParser):
    """A parsed page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.forms: list[Form] = []
        self._open: list[Element] = []
        self.feed(html)

    @classmethod
    async def get(cls, client: httpx.AsyncClient, path: str, status: int = 200, **headers: str) -> Page:
        response = await client.get(path, headers=headers)
        assert response.status_code == status, response.text
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        return cls(response.text)

    @classmethod
    async def once(cls, client: httpx.AsyncClient, path: str, is_so: Callable[[Page], bool]) -> Page:
        """Return a page as it is once something holds of it."""
        async with asyncio.timeout(40):
            while not is_so(page := await cls.get(client, path)):  # noqa: ASYNC110  # nobody tells of it
                await asyncio.sleep(0.05)
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(made)
        if tag not in _VOID:
            self._open.append(made)
        if tag == "form" and made.attributes.get("method") == "post":
            self.forms.append(Form(made.attributes["action"]))
        is_off = made.attributes.get("type") == "checkbox" and "checked" not in made.attributes
        if (
            tag in ("input", "textarea")
            and not is_off
            and self.forms
            and any(each.tag == "form" for each in self._open)
        ):
            self.forms[-1].fields[made.attributes.get("name", "")] = made.attributes.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open[-1].tag == tag, (tag, self._open[-1])
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for each in self._open:
            each.text += data

    def all(self, tag: str | None = None, kind: str | None = None) -> list[Element]:
        """Return the elements of a tag, or of a class."""
        found: Any = [each for each in self.elements if tag in (None, each.tag)]
        return [each for each in found if kind is None or kind in each.classes]

    def one(self, tag: str | None = None, kind: str | None = None) -> Element:
        (found,) = self.all(tag, kind)
        return found

    def by_id(self, id: str) -> Element:
        (found,) = [each for each in self.elements if each.attributes.get("id") == id]
        return found

    @property
    def text(self) -> str:
        return self.one("html").text

    def form(self, verb: str) -> Form:
        """Return the first form of a verb."""
        return next(each for each in self.forms if each.action.endswith(f"/{verb}"))

    def link(self, words: str) -> str:
        """Return where the first link with these words leads."""
        return next(each.attributes["href"] for each in self.all("a") if words in each.text)

    def links(self, kind: str | None = None) -> list[str]:
        return [each.attributes["href"] for each in self.all("a", kind)]
