"""Pages as files: the same as the inspector's, without a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests.server.html_page import CANARY, Page

import perdure
from perdure import AgentDefinition
from perdure.model.message import Message, ToolCall
from perdure.protocols import ModelRequest
from perdure.server.pages import static_site
from perdure.server.pages.static_html import as_file, links_of
from perdure.server.pages.static_site import write_site
from perdure.testing import ScriptedDriver

HELPER = AgentDefinition("helper", description="Helps.")


def script(request: ModelRequest) -> Message:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    if asked == "delegate" and request.step == 0:
        return Message.assistant(tool_calls=[ToolCall("helper", {"prompt": "help"})])
    return Message.assistant(f"You said: {asked}")


def connected(tmp_path: Path) -> Any:
    return perdure.connect(f"sqlite:///{tmp_path}/s.db", driver=ScriptedDriver(script), subagents=[HELPER])


def pages_in(folder: Path) -> dict[str, Page]:
    """Return all pages of a site. Nothing in them runs, is sent, or is fetched from anywhere."""
    found = {path.name: Page(path.read_text()) for path in folder.glob("*.html")}
    for page in found.values():
        assert not any(each.tag in ("form", "script", "button", "input") for each in page.elements)
        assert not any(name.startswith(("hx-", "on")) for each in page.elements for name in each.attributes)
    return found


def assert_whole(folder: Path) -> dict[str, Page]:
    """Assert that every link leads to an existing file, and to an existing place in it."""
    pages = pages_in(folder)
    for name, page in pages.items():
        for link in page.links():
            parts = urlsplit(link)
            assert not parts.scheme
            assert not parts.netloc
            target = unquote(parts.path) or name
            assert (folder / target).is_file(), (name, link)
            if parts.fragment and target in pages:
                ids = {each.attributes.get("id") for each in pages[target].elements}
                assert parts.fragment in ids, (name, link)
    return pages


async def test_a_site_is_whole(tmp_path: Path) -> None:
    """Links from the index lead to sessions, versions, runs, their steps' requests, and sub-agents."""
    site = tmp_path / "site"
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("order-7")
        await chat.send("hello")
        await chat.send("delegate")
        await sessions.open("another")
        await (await sessions.open("another")).send("not in it")
        report = await write_site(sessions, ["order-7"], site)
    pages = assert_whole(site)
    assert report.sessions == 2  # with the sub-agent's
    assert report.is_whole
    assert (site / "inspector.css").is_file()
    reached, todo = set(), ["index.html"]
    while todo:
        name = todo.pop()
        if name in pages and name not in reached:
            reached.add(name)
            todo += [urlsplit(link).path for link in pages[name].links()]
    assert reached == set(pages)
    text = " ".join(page.text for page in pages.values())
    assert "You said: hello" in text
    assert "What was sent" in text
    assert "not in it" not in text
    assert all(re.fullmatch(r"[a-z0-9-]+\.html", name) for name in pages)


async def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    site = tmp_path / "site"
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("a", AgentDefinition(f"agent {CANARY}", system_prompt=f"prompt {CANARY}"))
        await chat.rename(f"../../{CANARY}")
        await chat.send(f"said {CANARY}")
        await write_site(sessions, ["a"], site)
    pages = assert_whole(site)
    assert f"../../{CANARY}" in pages["index.html"].text
    assert any(f"prompt {CANARY}" in page.text for page in pages.values())
    assert sorted(path.parent for path in site.rglob("*"))[0] == site


async def test_an_owner_writes_only_their_own(tmp_path: Path) -> None:
    async with connected(tmp_path) as sessions:
        hers = await sessions.of("ada").open("a")
        await hers.send("hello")
        with pytest.raises(perdure.SessionNotFound):
            await write_site(sessions.of("bob"), [hers.id], tmp_path / "site")
        assert not (tmp_path / "site").exists()
        await write_site(sessions.of("ada"), ["a"], tmp_path / "site")
    assert_whole(tmp_path / "site")


async def test_two_sessions_are_linked_by_their_diff(tmp_path: Path) -> None:
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("a")
        await chat.send("hello")
        await (await sessions.fork("a", "b")).send("and then")
        await write_site(sessions, ["a", "b"], tmp_path / "both")
        await write_site(sessions, ["a"], tmp_path / "one")
    both, one = assert_whole(tmp_path / "both"), assert_whole(tmp_path / "one")
    assert any("messages in common" in page.text for page in both.values())
    assert not any("messages in common" in page.text for page in one.values())


async def test_a_session_of_many_versions_is_written_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all runs, and as many other pages as there is room for; links to the rest are left out."""
    monkeypatch.setattr(static_site, "MOST", 3)
    async with connected(tmp_path) as sessions:
        chat = await sessions.open("a")
        for number in range(4):
            await chat.send(f"number {number}")
        report = await write_site(sessions, ["a"], tmp_path / "site")
    pages = assert_whole(tmp_path / "site")
    assert not report.is_whole
    assert sum(name.startswith("run-") for name in pages) >= 4


def test_what_needs_a_server_is_left_out() -> None:
    html = (
        "<!doctype html><head><title>a</title></head><body><a href='/x?b=1#c'>x</a><a href='https://evil.example'>y</a>"
        "<form action='/z'><p>gone<input name='q'></p></form><noscript><a href='/n'>n</a></noscript>"
        "<script>alert(1)</script><div hx-get='/y' onclick='z' class='k'>&lt;b&gt; &amp;#x26;</div>"
        "<time datetime='d' title='at &lt;noon&gt;'>now</time><time>&lt;then</time>"
        "<button>gone</button><svg viewBox='0 0 1 1'><rect x='1'/></svg></body>"
    )
    made = as_file(html, "/here", {"/x?b=1": "x.html", "/n": "n.html"}.get)
    assert "gone" not in made
    assert "alert" not in made
    assert '<a href="x.html#c">x</a><a>y</a>' in made
    assert '<a href="n.html">n</a>' in made
    assert '<div class="k">&lt;b&gt; &amp;#x26;</div>' in made
    assert '<time datetime="d" title="at &lt;noon&gt;">at &lt;noon&gt;</time><time>&lt;then</time>' in made
    assert '<body class="static">' in made
    assert "script-src 'none'" in made
    assert links_of(html, "/here") == ["/x?b=1", "", "/n"]
