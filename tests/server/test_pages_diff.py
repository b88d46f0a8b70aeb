"""The page that shows two sessions, or two versions of one, side by side."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from tests.server.html_page import CANARY, Page
from tests.server.serving import looking


async def test_a_fork_parts_from_its_parent(tmp_path: Path) -> None:
    """The common beginning is folded and counted; after it, each column has its own messages."""
    async with looking(f"sqlite:///{tmp_path}/s.db") as served:
        ada = served.sessions.of("ada")
        chat = await ada.open("a")
        await chat.send("the common past")
        fork = await ada.fork("a", "b")
        await chat.send("left goes on")
        await fork.send("right goes on")
        page = await Page.get(served.reader, "/diff?left=a&right=b")
        swapped = await Page.get(served.ada, "/diff?left=b&right=a")
        missing = await Page.get(served.ada, "/diff?left=a")
    assert "2 messages in common" in page.text
    assert page.text.index("left goes on") < page.text.index("right goes on")
    assert swapped.text.index("right goes on") < swapped.text.index("left goes on")
    assert any(link.endswith(".b") and "left=a" in link for link in missing.links())


async def test_two_versions_of_one_session(tmp_path: Path) -> None:
    async with looking(f"sqlite:///{tmp_path}/s.db") as served:
        ada = served.sessions.of("ada")
        chat = await ada.open("a")
        for text in ("first", "second", "third"):
            await chat.send(text)
        await chat.trim(2)
        page = await Page.get(served.ada, "/diff?left=a@2&right=a@4")
        none = await Page.get(served.ada, "/diff?left=a&right=a@4")
        same = await Page.get(served.ada, "/diff?left=a&right=a")
        chosen = await Page.get(served.ada, "/diff?left=a@2")
        bad = await served.ada.get("/diff?left=a@x&right=a")
        gone = await served.ada.get("/diff?left=a@99&right=a")
    assert "2 messages in common" in page.text
    assert "Nothing more." in page.text
    assert "4 messages of its own" in page.text
    assert "Nothing in common" in none.text
    assert same.text.count("Nothing more.") == 2
    assert sum("%40" in link for link in chosen.links()) == 4
    assert [f"version {number}" in chosen.text for number in (1, 2, 3, 4, 5)] == [True, False, True, True, True]
    assert (bad.status_code, gone.status_code) == (422, 404)


async def test_long_sessions_have_pages(tmp_path: Path) -> None:
    async with looking(f"sqlite:///{tmp_path}/s.db") as served:
        ada = served.sessions.of("ada")
        await ada.open("a")
        await ada.inject("a", [{"role": "user", "content": f"number {place}"} for place in range(150)])
        await ada.open("b")
        first = await Page.get(served.ada, "/diff?left=a&right=b")
        second = await Page.get(served.ada, "/diff?left=a&right=b&after=100")
    assert first.has("message") == 100
    assert second.has("message") == 50
    assert "number 149" in second.text


async def test_sessions_of_others_are_not_there(tmp_path: Path) -> None:
    async with looking(f"sqlite:///{tmp_path}/s.db") as served:
        hers = await served.sessions.of("ada").open("a")
        await served.sessions.of("bob").open("b")
        for left, right in (("b", "{}"), ("{}", "b"), ("{}", "")):
            path = f"/diff?left={left}&right={right}"
            there = await served.bob.get(path.format(hers.id))
            missing = await served.bob.get(path.format(f"{hers.id}x"))
            assert there.status_code == missing.status_code == 404
            assert there.text == missing.text.replace(f"{hers.id}x", hers.id)


async def test_nothing_that_was_stored_runs_on_the_page(tmp_path: Path) -> None:
    async with looking(f"sqlite:///{tmp_path}/s.db") as served:
        ada = served.sessions.of("ada")
        for name in ("a", "b"):
            await ada.open(name)
            await ada.rename(name, f"name {CANARY}")
            await ada.inject(name, f"said {CANARY}")
        page = await Page.get(served.ada, "/diff?left=a&right=b")
        echoed = await served.ada.get(f"/diff?left={quote(CANARY)}&right=a")
    assert page.text.count(f"name {CANARY}") == page.text.count(f"said {CANARY}") == 2
    assert echoed.status_code in (404, 422)
    assert "<img" not in echoed.text
