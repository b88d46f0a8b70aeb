"""The inspector's pages about some sessions, as files that need no server. The app itself is asked for each."""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from perdure.actions.children import spawned_by
from perdure.model.ids import SessionId, now
from perdure.server.app import unguarded
from perdure.server.call import Call
from perdure.server.gate import Caller
from perdure.server.pages.render import page
from perdure.server.pages.static_html import as_file, links_of
from perdure.server.pages.texts import counted
from perdure.server.routes import Handler, Route
from perdure.server.service import Service
from perdure.server.table import ROUTES
from perdure.sessions.sessions import Sessions

INDEX = "index.html"
MOST = 500
"""The most pages of one session that are written besides those of its runs: older versions, and steps."""
_STATIC = "/static/"
_OF_SESSION = re.compile(r"/sessions/([^/]+)(?:/(run|block)s/[^/]+)?")
"""The paths of pages about one session. The stream that follows a session is not among them."""
_UNFIT = re.compile("[^a-z0-9]+")
_READABLE = 24
Tell = Callable[[int, int], None]


class Listed(msgspec.Struct, frozen=True):
    """A session on the first page."""

    id: str
    title: str
    agent: str
    status: str
    messages: str
    changed: datetime
    runs: tuple[tuple[str, str], ...]
    """The ids and the ends of the ids of its last runs."""


class SiteReport(msgspec.Struct, frozen=True):
    """The files that were written."""

    sessions: int
    pages: int
    is_whole: bool
    """False if a session has more pages than are written."""


async def write_site(
    sessions: Sessions, session_ids: Iterable[str], folder: Path, *, tell: Tell | None = None
) -> SiteReport:
    """Write the pages of sessions, and of their sub-agents' sessions, into a folder. Replace files of the same name.

    The pages are those of a caller that may only read: without forms, and without what changes by itself.
    """
    named = [(await sessions.info(each)).id for each in session_ids]
    children = [info.id for each in named for info in await spawned_by(sessions.store, each)]
    chosen = tuple(dict.fromkeys((*named, *children)))
    with tempfile.TemporaryDirectory(prefix="perdure-") as raw:
        site = _Site(sessions, chosen, Path(raw))
        await site.gather(tell)
        await asyncio.to_thread(site.write, folder)
    return SiteReport(len(chosen), len(site.files), site.is_whole)


class _Site:
    """Pages that have been asked for, by their URLs."""

    def __init__(self, sessions: Sessions, chosen: Sequence[SessionId], raw: Path) -> None:
        self._sessions = sessions
        self._chosen = chosen
        self._raw = raw
        index = Route("GET", "/", _index_of(sessions, chosen), "The sessions that were written", face="page")
        routes = [index, *(route for route in ROUTES if route.face == "page" and route.path != "/")]
        self._app = unguarded(Service(sessions), routes)
        # A caller that may only read gets pages without forms.
        self._caller = Caller(sessions.owner, may_write=False)
        self.files: dict[str, str] = {}
        """The files of the URLs that were there."""
        self._asked: set[str] = set()
        self.is_whole = True

    async def gather(self, tell: Tell | None) -> None:
        """Ask for the first page, and then for the pages of each session."""
        await self._follow(["/"], within=None)
        for done, session_id in enumerate(self._chosen, 1):
            loops = (await self._sessions.record(session_id)).loops
            runs = [f"/sessions/{session_id}/runs/{quote(loop.loop_id, safe='')}" for loop in loops]
            await self._follow([f"/sessions/{session_id}", *runs], within=session_id)
            if tell is not None:
                tell(done, len(self._chosen))

    async def _follow(self, seeds: Sequence[str], within: SessionId | None) -> None:
        """Ask for pages, and for those of one session that they link to."""
        todo, left = deque(seeds), len(seeds) + MOST
        while todo:
            url = todo.popleft()
            if url in self._asked:
                continue
            if not left:
                self.is_whole = False
                return
            self._asked.add(url)
            html = await self._page(url)
            if html is None:
                continue
            left -= 1
            links = links_of(html, url)
            todo += [link for link in links if within is not None and self._is_about(link, within)]
            await self._take_files(links)

    def _is_about(self, url: str, session_id: SessionId) -> bool:
        """Tell whether a page shows this session, alone or beside another one that is written too."""
        parts = urlsplit(url)
        found = _OF_SESSION.fullmatch(parts.path)
        if found is not None:
            return unquote(found[1]) == session_id
        sides = parse_qs(parts.query)
        named = [value.partition("@")[0] for side in ("left", "right") for value in sides.get(side, ())]
        return parts.path == "/diff" and len(named) == 2 and session_id in named and set(named) <= set(self._chosen)

    async def _page(self, url: str) -> str | None:
        status, kind, body = await _asked_in_process(self._app, url, self._caller)
        if status != 200 or not kind.startswith("text/html"):
            return None
        name = INDEX if url == "/" else _file_name(url)
        await asyncio.to_thread((self._raw / name).write_bytes, body)
        self.files[url] = name
        return body.decode()

    async def _take_files(self, links: Iterable[str]) -> None:
        """Take the files that pages are drawn with, except scripts."""
        for link in links:
            name = link.removeprefix(_STATIC)
            if not link.startswith(_STATIC) or link in self._asked or not name.endswith((".css", ".svg")):
                continue
            self._asked.add(link)
            status, _, body = await _asked_in_process(self._app, link, self._caller)
            if status == 200 and "/" not in name:
                await asyncio.to_thread((self._raw / name).write_bytes, body)
                self.files[link] = name

    def write(self, folder: Path) -> None:
        """Write every page with links to the others, and the files beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        for url, name in self.files.items():
            raw = (self._raw / name).read_bytes()
            if name.endswith(".html"):
                # Links can be written only now that the files of all pages are known.
                raw = as_file(raw.decode(), url, self.files.get).encode()
            (folder / name).write_bytes(raw)


def _file_name(url: str) -> str:
    """Return a name that is safe everywhere: a few letters for people, and a hash, as some systems ignore case."""
    path = unquote(urlsplit(url).path)
    found = _OF_SESSION.fullmatch(path)
    kind = "page" if found is None else found[2] or "session"
    readable = _UNFIT.sub("-", path.rpartition("/")[2].lower())[-_READABLE:].strip("-")
    # A URL may have lone surrogates, and needs a name all the same.
    digest = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{kind}-{readable}-{digest}.html"


def _index_of(sessions: Sessions, chosen: Sequence[SessionId]) -> Handler:
    async def get_index(call: Call) -> Response:
        """Show the sessions that were written."""
        listed = [await _listed(sessions, each) for each in chosen]
        return page(call, "site.html", listed=listed, made=now())

    return get_index


async def _listed(sessions: Sessions, session_id: SessionId) -> Listed:
    info = (await sessions.list(id=session_id, limit=1))[0]
    loops = (await sessions.record(session_id, limit=10)).loops
    return Listed(
        info.id,
        info.title or info.id,
        info.agent_name,
        info.status.value,
        counted(info.message_count or 0, "message"),
        info.updated_at,
        tuple((loop.loop_id, loop.loop_id[-6:]) for loop in reversed(loops)),
    )


async def _asked_in_process(app: ASGIApp, url: str, caller: Caller) -> tuple[int, str, bytes]:
    """Return an app's status, content type and body for a URL."""
    parts, sent = urlsplit(url), []
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "headers": [(b"host", b"localhost")],
        "scheme": "http",
        "server": ("localhost", 80),
        "state": {"caller": caller},
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    kind = next((value for name, value in sent[0]["headers"] if name.lower() == b"content-type"), b"")
    return sent[0]["status"], kind.decode("latin-1"), b"".join(message.get("body", b"") for message in sent[1:])
