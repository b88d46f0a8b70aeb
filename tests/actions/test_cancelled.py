"""An action that is cancelled at any point leaves no claim behind: the next one need not wait for a lease to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Chat, Entry, MemoryStore, Message, SqliteStore
from perdure.testing import ScriptedDriver


async def refuse(chat: Chat, store: Any) -> Coroutine[Any, Any, Any]:
    """Return a send while an item that can never be sent waits in the inbox."""
    await chat.send("hello", key="k")
    await store.post(chat.id, Entry("queue", {"messages": [Message.user("other").to_dict()], "key": "k"}))
    return chat.send("next")


async def compact(chat: Chat, store: Any) -> Coroutine[Any, Any, Any]:
    return chat.compact(keep_last=2)


async def send(chat: Chat, store: Any) -> Coroutine[Any, Any, Any]:
    return chat.send("next")


async def cancelled_after(steps: int, store: Any, verb: Any) -> bool:
    """Cancel a verb after some steps of the loop; return true if it had already ended."""
    async with perdure.connect(store, driver=ScriptedDriver(lambda _: "yes")) as sessions:
        chat = await sessions.open("x")
        for turn in range(3):
            await chat.send(f"turn {turn}")
        task = asyncio.ensure_future(await verb(chat, store))
        for _ in range(steps):
            await asyncio.sleep(0 if isinstance(store, MemoryStore) else 0.0003)
        is_over = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sessions.runtime.idle()
        assert not await store.is_claimed("x")
        assert not await store.is_interrupted("x")
        await chat.inject({"role": "user", "content": "at once"})
    return is_over


@pytest.mark.parametrize("verb", [send, compact, refuse])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_no_claim_is_left_behind(tmp_path: Path, kind: str, verb: Any) -> None:
    for steps in range(200):
        store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / f"{steps}.db")
        if await cancelled_after(steps, store, verb):
            break
    # On a busy machine SQLite's thread may have done its part before the loop's next turn.
    assert steps > (2 if kind == "memory" else 0)
