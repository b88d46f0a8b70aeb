"""Sessions in memory: their number, those that stay, and that they are never older than the store's."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import InjectMessage, SqliteStore
from perdure.stores.jobs import loading
from perdure.testing import Delay, ScriptedDriver


async def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path / 's.db'}", live=2) as sessions:
        for name in ("a", "b"):
            await sessions.open(name)
        await sessions.open("a")
        await sessions.open("c")
        assert list(sessions.live) == ["a", "c"]
        assert await sessions.length("b") == 0


async def test_a_subscribed_session_stays(tmp_path: Path) -> None:
    """It stays until its subscriber leaves."""
    async with perdure.connect(f"sqlite:///{tmp_path / 's.db'}", live=1) as sessions:
        heard: list[object] = []
        handle = (await sessions.open("a")).subscribe(heard.append)
        for name in ("b", "c"):
            await sessions.open(name)
        assert "a" in sessions.live
        await sessions.inject("a", {"role": "user", "content": "hi"})
        assert heard
        handle.cancel()
        await sessions.open("d")
        assert list(sessions.live) == ["d"]


async def test_a_running_session_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    async with perdure.connect(url, live=1, driver=ScriptedDriver([Delay(0.2, "done")])) as sessions:
        chat = await sessions.open("a")
        run = asyncio.ensure_future(chat.send("hi"))
        await asyncio.sleep(0.05)
        await sessions.open("b")
        assert "a" in sessions.live
        assert (await run).text == "done"
        await sessions.open("c")
        assert list(sessions.live) == ["c"]


async def test_close_evicts_at_once(tmp_path: Path) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path / 's.db'}") as sessions:
        chat = await sessions.open("a")
        await chat.close()
        assert len(sessions.live) == 0
        store = sessions.store
        assert isinstance(store, SqliteStore)
        assert "a" not in store._cache
        assert await chat.length() == 0


async def test_a_closed_session_is_pinned_by_nobody(tmp_path: Path) -> None:
    """This holds if it is closed while it runs, or if a late subscriber cancels."""
    async with perdure.connect(f"sqlite:///{tmp_path / 's.db'}") as sessions:
        chat = await sessions.open("a")
        handle = chat.subscribe(print)

        async def close(event: object) -> None:
            await chat.close()

        chat.subscribe(close)
        await chat.inject({"role": "user", "content": "hi"})
        handle.cancel()
        store = sessions.store
        assert isinstance(store, SqliteStore)
        assert store._cache.pinned == set()


WRITER = """
import asyncio, sys, perdure
async def main():
    async with perdure.connect(sys.argv[1]) as sessions:
        for number in range(3):
            await sessions.inject("shared", {"role": "user", "content": f"from afar {number}"})
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_what_another_process_has_written_is_seen(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the new messages are read."""
    url = f"sqlite:///{tmp_path / 's.db'}" if kind == "sqlite" else f"file://{tmp_path / 'files'}"
    rows: list[int] = []
    read: Any = loading.decoded

    def counting(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        rows.append(len(found))
        return found

    async with perdure.connect(url) as sessions:
        chat = await sessions.open("shared")
        many = [{"role": "user", "content": f"line {number}"} for number in range(500)]
        await sessions.execute("shared", InjectMessage(*many))
        assert await chat.length() == 500
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, url, env=environment)
        assert await writer.wait() == 0
        monkeypatch.setattr(loading, "decoded", counting)
        messages = (await chat.session()).state.messages
        assert [message.text for message in messages[-3:]] == [f"from afar {number}" for number in range(3)]
        assert len(messages) == 503
        assert sum(rows) == (3 if kind == "sqlite" else 503)  # a file store keeps no session in memory
        await chat.inject({"role": "user", "content": "and here"})
        assert await chat.length() == 504
