"""AG-UI over real HTTP, with a service that is killed in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

ROUNDS = 20 if os.environ.get("PERDURE_TORTURE") else 1
SCRIPT = Path(__file__).with_name("agui_process.py")


@asynccontextmanager
async def process(path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.subprocess.Process]]:
    """Start a service in a process of its own. Yield a client of it, and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(SCRIPT), f"sqlite:///{path}/a.db", str(port), str(path / "mark")]
    made = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert made.stdout is not None
        secret = (await made.stdout.readline()).decode().strip()
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            yield client, made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()
        made._transport.close()  # type: ignore[attr-defined]  # or it warns that nobody has


async def events_of(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/agui", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_the_same_request_goes_on_where_a_killed_service_was(tmp_path: Path, number: int) -> None:
    """Events come while the run is under way; after the kill nothing is lost, and nothing is said twice."""
    body = {"threadId": "t", "runId": "r", "messages": [{"id": "u1", "role": "user", "content": "call nap {}"}]}
    async with process(tmp_path) as (client, made):
        seen = await _seen_until_killed(client, body, made)
        assert seen == ["RUN_STARTED", "TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END"]
    async with process(tmp_path) as (client, _):
        told = [event async for event in events_of(client, body)]
        assert [each["type"] for each in told[:2]] == ["RUN_STARTED", "MESSAGES_SNAPSHOT"]
        # The run may have been recovered before the request: then the answer is in the snapshot.
        shown = [each.get("content") for each in told[1]["messages"]]
        text = "".join(each["delta"] for each in told if each["type"] == "TEXT_MESSAGE_CONTENT")
        assert [*shown, text].count("nap returned rested.") == 1
        assert told[-1]["outcome"] == {"type": "success"}
        said = (await client.get("/api/sessions/t/messages")).json()["messages"]
        assert [each["role"] for each in said] == ["user", "assistant", "tool", "assistant"]
        assert len((await client.get("/api/sessions/t/runs")).json()["runs"]) == 1


async def _seen_until_killed(
    client: httpx.AsyncClient, body: dict[str, Any], made: asyncio.subprocess.Process
) -> list[str]:
    """Return the events until the tool runs; then kill the process, with the stream open."""
    seen: list[str] = []
    with suppress(httpx.HTTPError):
        async for event in events_of(client, body):
            seen.append(event["type"])
            if event["type"] == "TOOL_CALL_END":
                made.kill()
    return seen
