"""A page as a parser sees it: tags, texts and forms, and nothing that a script would do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx

CANARY = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>"
"""A text that would run as a script on a page that does not escape it."""
_VOID = frozenset({"meta", "link", "input", "br", "path", "rect", "circle", "img"})
_APART = frozenset({"td", "th", "dt", "dd", "li", "p", "div", "pre", "summary", "header", "title"})
"""The elements whose words are not joined with the words before them."""


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
    buttons: list[tuple[str, str]] = field(default_factory=list)

    async def send(self, client: httpx.AsyncClient, **changed: str) -> httpx.Response:
        return await client.post(self.action, data={**self.fields, **changed})


class Page(HTMLParser):
    """A parsed page. The test fails if the page has something that a browser would run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[Element] = []
        self.forms: list[Form] = []
        self._open: list[Element] = []
        self._words: list[str] = []
        self.feed(html)
        self.close()

    @classmethod
    async def get(cls, client: httpx.AsyncClient, path: str, status: int = 200, **headers: str) -> Page:
        response = await client.get(path, headers=headers)
        assert response.status_code == status, response.text
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        return cls(response.text)

    @classmethod
    async def once(cls, client: httpx.AsyncClient, path: str, is_so: Callable[[Page], bool]) -> Page:
        """Return a page once a condition holds for it."""
        async with asyncio.timeout(40):
            while not is_so(page := await cls.get(client, path)):  # noqa: ASYNC110  # nobody tells of it
                await asyncio.sleep(0.05)
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        require_harmless(made)
        self.elements.append(made)
        self._words += [" "] if tag in _APART else []
        if tag not in _VOID:
            self._open.append(made)
        if tag == "form" and made.attributes.get("method") == "post":
            self.forms.append(Form(made.attributes["action"]))
        if self.forms and any(each.tag == "form" for each in self._open):
            self._in_form(made)

    def _in_form(self, made: Element) -> None:
        given, form = made.attributes, self.forms[-1]
        is_off = given.get("type") == "checkbox" and "checked" not in given
        if made.tag in ("input", "textarea") and not is_off:
            form.fields[given.get("name", "")] = given.get("value", "")
        if made.tag == "button":
            form.buttons.append((given.get("name", ""), given.get("value", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open[-1].tag == tag, (tag, self._open[-1])
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._words.append(data)
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
        """Return all words, with single spaces between them."""
        return " ".join("".join(self._words).split())

    def has(self, *classes: str) -> int:
        """Return how many elements have all these classes."""
        return sum(set(classes) <= each.classes for each in self.elements)

    def form(self, verb: str) -> Form:
        """Return the first form of a verb."""
        return next(each for each in self.forms if each.action.endswith(f"/{verb}"))

    def link(self, words: str) -> str:
        """Return the address of the first link with these words."""
        return next(each.attributes["href"] for each in self.all("a") if words in each.text)

    def links(self, kind: str | None = None) -> list[str]:
        """Return the addresses of links: of a class, or all, with those of style sheets and the like."""
        return [each.attributes["href"] for each in self.all(None, kind) if "href" in each.attributes]


def require_harmless(made: Element) -> None:
    """Fail for an element that runs something, or that our pages never have."""
    given = made.attributes
    assert made.tag not in ("img", "iframe", "object", "embed", "style", "base"), made.tag
    assert made.tag != "script" or given["src"].startswith("/static/")
    assert not any(name.startswith("on") or name == "style" for name in given), given
    target = given.get("href", "").strip().lower()
    assert not target.startswith(("javascript:", "data:", "vbscript:")), target
