"""A process that mirrors a scripted transcript into a store, as the Claude Agent SDK does: to be raced, or killed.

Claude's own command line cannot be run offline. Its output is scripted, and is sent as in the SDK's own tests:
as frames to the SDK's batcher, which calls the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from claude_agent_sdk._internal.transcript_mirror_batcher import TranscriptMirrorBatcher
from tests.adapters.processes import Tell

from perdure.adapters.claude_agent_sdk import PerdureSessionStore

PROJECT = "-home-ada-shop"
SESSION = "11111111-1111-4111-8111-111111111111"
KEY: Any = {"project_key": PROJECT, "session_id": SESSION}
SUBPATH = "subagents/agent-1"


def entry(uuid: str, parent: str | None, text: str, session_id: str = SESSION, **more: Any) -> dict[str, Any]:
    """Return an entry of a transcript: of the user if its text asks something, of the assistant if not."""
    role = "user" if text.endswith("?") else "assistant"
    content = text if role == "user" else [{"type": "text", "text": text}]
    return {
        "parentUuid": parent,
        "isSidechain": False,
        "userType": "external",
        "cwd": "/home/ada/shop",
        "sessionId": session_id,
        "version": "2.1.0",
        "gitBranch": "main",
        "type": role,
        "message": {"role": role, "content": content},
        "uuid": uuid,
        "timestamp": "2026-01-01T00:00:00.000Z",
        **more,
    }


def chain(name: str, count: int) -> list[dict[str, Any]]:
    """Return entries that follow each other: a question, an answer, a question …"""
    uuids = [f"{name}-{number}" for number in range(count)]
    said = ["Where is order {}?" if number % 2 == 0 else "Order {} is on its way." for number in range(count)]
    return [
        entry(uuid, uuids[number - 1] if number else None, said[number].format(number // 2))
        for number, uuid in enumerate(uuids)
    ]


def mirror(tell: Tell, url: str, count: int) -> None:
    """Mirror a chain."""
    anyio.run(_mirrored, tell, PerdureSessionStore(store=url), SESSION, "a", count)


def mirror_at_once(tell: Tell, wait: Callable[[], object], url: str, name: str, count: int, rounds: int) -> None:
    """Mirror a chain into one session after the other, at once with other processes."""
    store = PerdureSessionStore(store=url)
    for number in range(rounds):
        wait()
        anyio.run(_mirrored, tell, store, session_of(number), name, count)


def session_of(number: int) -> str:
    return f"{SESSION[:-4]}{number:04d}"


async def _mirrored(tell: Tell, store: PerdureSessionStore, session_id: str, name: str, count: int) -> None:
    """Mirror a chain in frames of two entries, and report after each flush how many entries are kept."""

    async def fail(key: Any, error: str) -> None:
        raise AssertionError(error)

    batcher = TranscriptMirrorBatcher(store, "/projects", fail)
    path = f"/projects/{PROJECT}/{session_id}"
    entries = chain(name, count)
    tell(0)
    for start in range(0, count, 2):
        batcher.enqueue(f"{path}.jsonl", entries[start : start + 2])  # type: ignore[arg-type]
        batcher.enqueue(f"{path}/{SUBPATH}.jsonl", entries[start : start + 1])  # type: ignore[arg-type]
        await batcher.flush()
        tell(start + 2)
