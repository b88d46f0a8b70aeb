"""Texts that would run as scripts, in everything that is stored, on every page, fragment, stream and file."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from tests.server.browser import browsing, chromium, site_of
from tests.server.html_page import CANARY, Page
from tests.server.serving import Served, looking
from tests.server.test_pages_workers import left_over

import perdure
from perdure import AgentDefinition
from perdure.actions.parking import ParkSession
from perdure.loop.external import external_tool
from perdure.model.message import Media, Message, Thinking, ToolCall
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.protocols import ModelReply, ModelRequest
from perdure.server.pages.static_site import write_site
from perdure.server.table import ROUTES
from perdure.testing import ScriptedDriver

OWNER = f"owner {CANARY}"
LATER = datetime.now(UTC) + timedelta(days=3)
RAW = re.compile(rb"<img src=x|<script>alert|<svg/onload|javascript:alert", re.IGNORECASE)
"""The unescaped beginnings of canaries, which no page may have."""
STORED = (
    *("agent", "model", "name", "tag", "owner", "asked", "said", "thought", "tool", "argument", "result", "error"),
    *("reason", "summary", "file", "metadata", "key", "later", "parked", "queued", "prompt", "told", "stop", "pending"),
)
"""The kinds of stored text, each followed by a canary: all of them are seen on some page."""
MOST = 5
"""The number of pages of a kind that are checked."""
PAGES = [route for route in ROUTES if route.face == "page" and route.method == "GET" and route.path != "/static/{file}"]


@perdure.tool
def fails(text: str) -> str:
    """Fail."""
    raise ValueError(f"error {CANARY}")


@perdure.tool
def echoes(text: str) -> str:
    """Repeat."""
    return f"result {CANARY} {text}"


@perdure.tool(needs_approval=True)
def refund(text: str) -> str:
    """Give the money back."""
    return "done"


def hostile(request: ModelRequest) -> ModelReply:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    response = InferenceResponse(f"stop {CANARY}", Usage(1, 1), model=f"model {CANARY}", provider=CANARY)
    if "<conversation>" in asked:
        return ModelReply(Message.assistant(f"summary {CANARY}"), response)
    said = Message.assistant(Thinking(f"thought {CANARY}"), f"said {CANARY}")
    given = {"text": f"argument {CANARY}"}
    calls = {
        "tools": [ToolCall("fails", given, id=CANARY), ToolCall("echoes", given), ToolCall(f"tool {CANARY}", given)],
        "refund": [ToolCall("refund", {"text": f"pending {CANARY}"})],
        "outside": [ToolCall(f"outside-{asked[-1]}", {CANARY: f"pending {CANARY}"})],
    }
    wanted = calls.get(asked.partition(" ")[0], []) if request.step == 0 else []
    return ModelReply(Message.assistant(*said.parts, tool_calls=wanted), response)


async def fill(sessions: perdure.Sessions) -> None:
    """Store a canary in every place for somebody else's text."""
    hers = sessions.of(OWNER)
    agent = AgentDefinition(f"agent {CANARY}", system_prompt=f"prompt {CANARY}", model=f"x:model {CANARY}")
    chat = await hers.open("talk", agent, tags=[f"tag {CANARY}"])
    options = {"instructions": f"told {CANARY}", "key": f"key {CANARY}", "metadata": {CANARY: f"metadata {CANARY}"}}
    await chat.send(f"asked {CANARY}", **options)  # type: ignore[arg-type]
    await chat.send(f"tools {CANARY}")
    await chat.send(f"refund {CANARY}")
    await chat.deny(f"reason {CANARY}")
    await chat.inject(Message.user(f"asked {CANARY}", Media("text/plain", b"x", name=f"file {CANARY}")))
    await chat.compact(keep_last=2, compact_strategy="llm")
    await chat.rename(f"name {CANARY}")
    await chat.fork()
    for name, asked in (("waits", "refund"), ("outside", "outside 1")):
        waiting = await hers.open(name, agent)
        await waiting.send(asked, external_tools=[external_tool("outside-1", CANARY, None)])
    await hers.execute("parked", ParkSession(hers.loops, 3, f"parked {CANARY}"))
    await hers.enqueue("parked", f"queued {CANARY}")
    await hers.enqueue("talk", f"later {CANARY}", at=LATER, key=f"later {CANARY}")


@asynccontextmanager
async def filled(tmp_path: Path) -> AsyncIterator[Served]:
    options = {"driver": ScriptedDriver(hostile), "tools": [fails, echoes, refund]}
    async with left_over(tmp_path, OWNER, "parked"), looking(f"sqlite:///{tmp_path}/s.db", **options) as served:
        await fill(served.sessions)
        yield served


async def crawled(served: Served) -> dict[str, str]:
    """Return all pages that can be reached, some of each kind, by their addresses. None fails."""
    talk = (await served.sessions.of(OWNER).info("talk")).id
    runs = [loop.loop_id for loop in (await served.sessions.record(talk)).loops]
    todo = [f"/sessions/{talk}", *(f"/sessions/{talk}/runs/{each}?step=1" for each in runs)]
    todo += [
        f"/sessions/{(await served.sessions.of(OWNER).info('parked')).id}",
        "/",
        "/approvals",
        "/workers",
        "/cost",
        "/diff",
        "/login",
        f"/?q={quote('canary said')}",
        "/?q=alert",
    ]
    todo += [f"/?tag={quote(CANARY)}&agent={quote(CANARY)}&owner={quote(CANARY)}", f"/?q={quote(CANARY)}"]
    todo += [
        f"/diff?left={quote(CANARY)}&right=x",
        f"/sessions/{quote(CANARY, safe='')}",
        f"/login?next={quote(CANARY)}",
    ]
    found: dict[str, str] = {}
    kinds: dict[tuple[str, ...], int] = {}
    while todo:
        url = todo.pop(0).partition("#")[0]
        kind = kind_of(url)
        kinds[kind] = kinds.get(kind, 0) + 1
        if url in found or kinds[kind] > MOST or not url.startswith("/") or url.startswith(("/static", "/api")):
            continue
        answer = await served.operator.get(url)
        assert answer.status_code < 500, (url, answer.text)
        found[url] = answer.text
        todo += Page(answer.text).links()
    return found


def kind_of(url: str) -> tuple[str, ...]:
    """Return the kind of a page: its route, and its parameters."""
    return (*sorted(routes_of([url])), *re.findall(r"[?&](\w+)=", url))


def routes_of(urls: list[str]) -> set[str]:
    """Return the routes of the table that these addresses belong to."""
    patterns = {route.path: re.compile(re.sub(r"{\w+}", "[^/]+", route.path)) for route in PAGES}
    return {path for url in urls for path, known in patterns.items() if known.fullmatch(url.partition("?")[0])}


def said_on(pages: dict[str, str]) -> set[str]:
    """Return the kinds of text whose canary a person sees on some page, as it was stored."""
    words = [page for text in pages.values() for page in (Page(text).text,)]
    forms = [CANARY, CANARY.replace('"', '\\"')]
    return {what for what in STORED for each in words if any(f"{what} {form}" in each for form in forms)}


async def test_no_stored_text_runs_on_any_page(tmp_path: Path) -> None:
    """Each kind is seen somewhere, and every page of the table is checked, as a page and as a fragment."""
    async with filled(tmp_path) as served:
        pages = await crawled(served)
        session = next(url for url in pages if re.fullmatch("/sessions/[^/?]+talk", url))
        pages[f"{session}/live"] = await heard(served, f"{session}/live?after=0")
        for url in [each for each in pages if "/blocks/" in each or each.startswith("/?")]:
            part = (await served.operator.get(url, headers={"HX-Request": "true"})).text
            pages[f"fragment of {url}"] = part
    for url, text in pages.items():
        assert not RAW.search(text.encode()), url
        if "live" not in url:
            Page(text)  # it refuses whatever would run
    assert routes_of(list(pages)) == {route.path for route in PAGES}
    assert set(STORED) - said_on(pages) == set()


async def heard(served: Served, path: str) -> str:
    """Return the content of a stream until nothing more is on record."""
    said = b""
    sent: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive() -> dict[str, object]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        sent.put_nowait(message.get("body", b""))  # type: ignore[attr-defined]

    route, _, query = path.partition("?")
    secret = served.operator.headers["Authorization"].encode()
    headers = [(b"host", b"127.0.0.1:7433"), (b"authorization", secret), (b"accept", b"text/event-stream")]
    scope = {"type": "http", "method": "GET", "path": route, "raw_path": b"", "query_string": query.encode()}
    given = {"headers": headers, "scheme": "http", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 1)}
    asking = asyncio.ensure_future(served.app({**scope, **given}, receive, send))  # type: ignore[arg-type]
    try:
        while True:
            said += await asyncio.wait_for(sent.get(), 1)
    except TimeoutError:
        return said.decode()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_no_stored_text_runs_in_a_static_site(tmp_path: Path) -> None:
    async with filled(tmp_path) as served:
        ids = [info.id for info in await served.sessions.list()]
        await write_site(served.sessions, ids, tmp_path / "site")
    pages = {each.name: each.read_text() for each in (tmp_path / "site").glob("*.html")}
    for name, text in pages.items():
        assert not RAW.search(text.encode()), name
    seen = said_on(pages)
    assert {"name", "agent", "said", "thought", "result", "error", "summary", "pending", "file"} <= seen


async def test_no_stored_text_runs_in_a_browser(tmp_path: Path) -> None:
    """Some page of each kind shows no dialog, logs no error, and asks no other host."""
    chromium()
    async with filled(tmp_path) as served:
        urls = list(await crawled(served))
        site = await site_of(served.sessions)
        async with site.up(), browsing(site.base, site.secret) as seen:
            dialogs: list[str] = []
            seen.page.on(
                "dialog", lambda dialog: dialogs.append(dialog.message) or asyncio.ensure_future(dialog.dismiss())
            )
            kinds: set[tuple[str, ...]] = set()
            for url in urls:
                kind = kind_of(url)
                if kind in kinds or quote(CANARY, safe="") in url or "left=%22" in url:  # those are errors: 404, 422
                    continue
                kinds.add(kind)
                await seen.go(url)
                await seen.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert dialogs == []
