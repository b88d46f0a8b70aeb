"""A page made fit for a file: links lead to other files, and what needs a server or a script is left out."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

Target = Callable[[str], str | None]
"""A function that returns the file of a URL of the service, or None if it is in no file."""
_LEFT_OUT = frozenset({"form", "script", "button", "input", "textarea", "select", "template", "dialog", "footer"})
_UNWRAPPED = frozenset({"noscript"})
"""The elements with what a page shows without scripts, as a file is shown."""
_LIVE = ("hx-", "sse-", "ws-", "on", "data-hx")
"""The prefixes of attributes that need a script."""
# Files have no script, and what was said is escaped. If that should ever fail, browsers still run none.
_POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"script-src 'none'; form-action 'none'\">"


def links_of(html: str, url: str) -> list[str]:
    """Return the URLs that a page links to, without fragments, each as it is asked for."""
    found = _Links(url)
    found.feed(html)
    found.close()
    return list(dict.fromkeys(found.urls))


def as_file(html: str, url: str, target: Target) -> str:
    """Return a page as it is written into a file."""
    made = _Rewriter(url, target)
    made.feed(html)
    made.close()
    return "".join(made.out)


def asked_for(url: str, href: str) -> str:
    """Return what a browser on a page asks a server for when a link is followed: a path and a query."""
    parts = urlsplit(urljoin(url, href))
    if parts.scheme or parts.netloc:
        return ""
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


class _Links(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [asked_for(self._url, value) for name, value in attrs if name == "href" and value]


class _Rewriter(HTMLParser):
    """A parser that writes what it reads, except what a file cannot have."""

    def __init__(self, url: str, target: Target) -> None:
        # Character references are written as they were read.
        super().__init__(convert_charrefs=False)
        self._url = url
        self._target = target
        self._skipped: list[str] = []
        """The elements that are left out and still open."""
        self._time: str | None = None
        """The time of an open element. It replaces a text such as "3 min ago", which is not true for long."""
        self.out: list[str] = []

    def handle_decl(self, decl: str) -> None:
        self.out.append(f"<!{decl}>")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _LEFT_OUT and tag != "input":  # an input has no end tag
            self._skipped.append(tag)
        if self._skipped or tag == "input" or tag in _UNWRAPPED:
            return
        marked = [*attrs, ("class", "static")] if tag == "body" else attrs  # the style sheet knows files by this
        self.out.append(f"<{tag}{''.join(self._attributes(tag, marked))}>")
        if tag == "head":
            self.out.append(_POLICY)
        if tag == "time":
            self._time = dict(attrs).get("title")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._skipped and tag not in _LEFT_OUT:
            self.out.append(f"<{tag}{''.join(self._attributes(tag, attrs))}/>")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[-1]:
                self._skipped.pop()
        elif tag not in _LEFT_OUT | _UNWRAPPED:
            self.out.append(f"</{tag}>")
        if tag == "time":
            self._time = None

    def handle_data(self, data: str) -> None:
        self._say(escape(data, quote=False))

    def handle_entityref(self, name: str) -> None:
        self._say(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._say(f"&#{name};")

    def _say(self, text: str) -> None:
        if self._time is not None:
            text, self._time = escape(self._time), ""
        if not self._skipped:
            self.out.append(text)

    def _attributes(self, tag: str, attrs: list[tuple[str, str | None]]) -> list[str]:
        kept = []
        for name, value in attrs:
            if name.startswith(_LIVE):
                continue
            if name in ("href", "src") and not (tag == "img" and (value or "").startswith("data:")):
                value = self._file_of(value or "")
                if value is None:
                    continue
            kept.append(f" {name}" if value is None else f' {name}="{escape(value)}"')
        return kept

    def _file_of(self, href: str) -> str | None:
        if href.startswith("#"):
            return href
        found = self._target(asked_for(self._url, href))
        fragment = urlsplit(href).fragment
        return f"{found}#{fragment}" if found and fragment else found
