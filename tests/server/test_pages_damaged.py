"""Pages over a store with one damaged session: they show the others, and say which one cannot be read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.server.html_page import Page
from tests.server.serving import Served, looking, refund

from perdure.model.message import ToolCall
from perdure.testing import ScriptedDriver

OF_IT = "sid = (SELECT sid FROM session WHERE id LIKE '%damaged')"
DAMAGE = {
    "versions": f"UPDATE head SET crc = crc + 1 WHERE {OF_IT}",
    "record": f"UPDATE batch SET crc = crc + 1 WHERE {OF_IT}",
    "messages": f"UPDATE msg SET crc = crc + 1 WHERE log IN (SELECT log FROM run WHERE {OF_IT})",
}


async def fill(served: Served) -> None:
    """Make two sessions that wait for a person, each after a run with a cost."""
    for name in ("sound", "damaged"):
        chat = await served.sessions.of("ada").open(name)
        await chat.send("hello")
        await chat.send("refund")


def script(request: object) -> object:
    asked = [each for each in request.messages if each.role == "user"][-1].text  # type: ignore[attr-defined]
    return [ToolCall("refund", {"order": 7})] if asked == "refund" else "Hello."


@pytest.mark.parametrize("what", DAMAGE)
async def test_one_damaged_session_hides_no_other(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s.db"
    options = {"driver": ScriptedDriver(script), "tools": [refund]}
    async with looking(f"sqlite:///{path}", **options) as served:
        await fill(served)
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(DAMAGE[what]).rowcount
    async with looking(f"sqlite:///{path}", **options) as served:
        pages = {each: await Page.get(served.ada, each) for each in ("/", "/approvals", "/cost", "/workers")}
    assert "sound" in pages["/"].html
    told = {path for path, page in pages.items() if "1 session could not be read: " in page.text}
    assert told == {"/approvals", "/cost"}
    assert "sound" in pages["/approvals"].html
