"""Runs in a store with keys that are killed and continued: in another process, by a worker, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from tests.stores.sealed_scene import MASTER, WORD, bytes_in, look_up
from tests.waiting import until

from perdure import Chat, FileKeyRing, KeyMissing, ToolCall, connect
from perdure.testing import ScriptedDriver
from perdure.workers import Worker

KILLED = f"""
import asyncio, sys
from pathlib import Path
from perdure import FileKeyRing, ToolCall, connect, tool
from perdure.testing import ScriptedDriver

@tool(idempotent=True)
async def look_up(bird: str) -> str:
    Path(sys.argv[1], "begun").touch()
    await asyncio.sleep(60)

async def main():
    ring = FileKeyRing(Path(sys.argv[1], "keys.json"), master={MASTER!r})
    script = ScriptedDriver([ToolCall("look_up", {{"bird": "{WORD}"}}, id="1"), "It is a {WORD}."])
    url = f"sqlite:///{{sys.argv[1]}}/sessions.db"
    async with connect(url, driver=script, tools=[look_up], keys=ring) as sessions:
        chat = await sessions.open("a")
        await chat.send("Which bird? The {WORD}?")

asyncio.run(main())
"""


def kill_a_run(where: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    doomed = subprocess.Popen([sys.executable, "-c", KILLED, str(where)], env=environment)
    deadline = time.monotonic() + 60
    while not (where / "begun").exists():
        assert doomed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    doomed.send_signal(signal.SIGKILL)
    doomed.wait()


async def test_a_killed_run_is_recovered_with_the_keys_and_not_without(tmp_path: Path) -> None:
    """Without the keys the run is left, and waits for a process that has them. The word is nowhere meanwhile."""
    ring = FileKeyRing(tmp_path / "keys.json", master=MASTER, create=True)
    kill_a_run(tmp_path)
    assert WORD.encode() not in b"".join(bytes_in(tmp_path).values())
    script = ScriptedDriver([ToolCall("look_up", {"bird": WORD}, id="1"), f"It is a {WORD}."])
    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    async with connect(url, driver=script, tools=[look_up]) as sessions:
        with pytest.raises(KeyMissing):
            await sessions.recover("a")
    async with connect(url, driver=script, tools=[look_up], keys=ring) as sessions:
        report = await sessions.recover()
        assert [*report.resumed] == ["a"]
        assert (await (await sessions.open("a")).history())[-1].text == f"It is a {WORD}."
    assert WORD.encode() not in b"".join(bytes_in(tmp_path).values())


async def answered(chat: Chat) -> bool:
    return len(await chat.history()) == 2


async def test_a_worker_answers_what_was_queued(tmp_path: Path) -> None:
    """Its inbox, its record and its answer are sealed. A forgotten key keeps no other owner waiting."""
    ring = FileKeyRing(tmp_path / "keys.json", master=MASTER, create=True)
    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    async with connect(url, driver=ScriptedDriver([f"a {WORD}"]), keys=ring) as sessions:
        for owner in ("ada", "bob"):
            chat = await sessions.of(owner).open("birds")
            await chat.enqueue(f"Which bird, {owner}? A {WORD}?")
        ring.forget("ada")
        async with Worker(sessions) as worker:
            running = asyncio.create_task(worker.run())
            async with asyncio.timeout(20):
                await until(lambda: answered(chat))
            worker.stop()
            await running
        assert [message.text for message in await chat.history()] == [f"Which bird, bob? A {WORD}?", f"a {WORD}"]
    assert WORD.encode() not in b"".join(bytes_in(tmp_path).values())


def test_a_service_with_workers_serves_a_sealed_store(tmp_path: Path) -> None:
    """An option names its key ring, and its master key is in the environment. Nothing it writes can be read."""
    from tests.server.serve_process import Serving

    master = urlsafe_b64encode(MASTER).decode()
    FileKeyRing(tmp_path / "keys.json", master=MASTER, create=True)
    serving = Serving(tmp_path)
    serving.start_working("--keys", "keys.json", PERDURE_MASTER_KEY=master)
    try:
        with serving.client("ada") as client:
            assert client.put("/api/sessions/birds", json={"name": f"The {WORD}"}).status_code == 201
            answer = client.post("/api/sessions/birds/messages", json={"text": f"add(a=1, b=2) for a {WORD}"})
            assert answer.status_code == 200, answer.text
            assert WORD in client.get("/api/sessions/birds").text
            held = b"".join(path.read_bytes() for path in tmp_path.glob("served.db*"))
            assert WORD.encode() not in held
    finally:
        serving.kill()
