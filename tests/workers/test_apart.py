"""Processes apart, in which runs are tried again that have died with their process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Queued, RunFailed, SessionId, SessionNotActive, Sessions, Worker, connect
from perdure.actions.parking import deaths
from perdure.protocols import Entry
from perdure.testing import ScriptedDriver
from perdure.workers import Outcome
from perdure.workers.apart import EXIT_CODES, ProcessApart, python_with

PATIENCE = 30.0
IN_AN_APP = """
import asyncio, os, signal, sys
from perdure import Worker, connect
from perdure.testing import ScriptedDriver


class Model(ScriptedDriver):
    async def respond(self, request, on_delta):
        said = request.messages[-1].text
        with open(sys.argv[2], "a") as file:
            file.write(said + "\\n")
        await asyncio.sleep(0.3 if said == "die" else 0.6)
        if said == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().respond(request, on_delta)


async def main():
    model = Model(lambda request: f"re {request.messages[-1].text}")
    async with connect(sys.argv[1], model="offline", driver=model) as sessions:
        async with Worker(sessions, lease=1.0, concurrency=8) as worker:
            async def stop():
                while (await sessions.queue()).waiting or (await sessions.queue()).running:
                    await asyncio.sleep(0.1)
                worker.stop()
            await asyncio.gather(worker.run(), stop())


asyncio.run(main())
"""


def shell(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(("outcome", "code"), EXIT_CODES.items())
async def test_the_exit_code_says_what_has_come_of_it(outcome: Outcome, code: int) -> None:
    """A failed process counts as a run that was not begun; a process has only one kind of busy."""
    apart = ProcessApart(shell(f"raise SystemExit({code})"))
    expected = {Outcome.FAILED: None, Outcome.OWNER_BUSY: Outcome.BUSY}.get(outcome, outcome)
    assert await apart(SessionId("a")) == expected


async def test_a_process_that_is_killed_says_nothing() -> None:
    apart = ProcessApart(shell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert await apart(SessionId("a")) is None


async def test_it_is_given_the_session_and_its_environment(tmp_path: Path) -> None:
    script = f"import os, sys; open('{tmp_path}/told', 'w').write(sys.argv[1] + os.environ['PERDURE_STORE'])"
    assert await ProcessApart(shell(script), environment={"PERDURE_STORE": ":x"})(SessionId("a")) is Outcome.DONE
    assert (tmp_path / "told").read_text() == "a:x"


async def test_no_more_run_at_once_than_may() -> None:
    """One more than that is busy: another worker may take it."""
    apart = ProcessApart(shell("import sys; sys.stdin.read()"), at_once=1)
    first = asyncio.create_task(apart(SessionId("a")))
    await asyncio.sleep(0.1)
    assert await apart(SessionId("b")) is Outcome.BUSY
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


def test_perdure_is_found_where_this_process_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the current directory does not shadow it."""
    (tmp_path / "click.py").write_text("raise SystemExit(99)")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    run = subprocess.run(python_with("--version"), cwd=tmp_path, capture_output=True, check=False)
    assert run.returncode == 0


def entries(*kinds: str) -> list[Entry]:
    return [Entry(kind, {}, None if kind == "handed_over" else "r1") for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (["agent_start"], 1),
        (["agent_start", "turn_end"], 1),
        (["agent_start", "agent_start"], 2),
        (["agent_start", "turn_end", "agent_start"], 2),
        (["agent_start", "agent_start", "tool_execution_end"], 1),
        (["agent_start", "handed_over"], 0),
        (["agent_start", "agent_start", "handed_over", "agent_start"], 1),
        ([], 0),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
async def test_how_often_a_run_has_died(tmp_path: Path, kinds: list[str], count: int) -> None:
    """Each start without an end is a death. Progress begins the count again, and a hand-over does not count."""
    async with connect(f"sqlite:///{tmp_path}/a.db", model="offline") as sessions:
        await sessions.open("a")
        await sessions.store.note("a", entries(*kinds))  # type: ignore[attr-defined]
        assert await deaths(sessions.store, "a") == count  # type: ignore[arg-type]


async def left(sessions: Sessions, messages: dict[str, str]) -> list[Queued]:
    for session_id in messages:
        await sessions.open(session_id)
    return [await sessions.enqueue(session_id, text, key="k") for session_id, text in messages.items()]


async def test_without_a_place_apart_the_last_try_is_made_alone(tmp_path: Path) -> None:
    """An application loses its process a few times, and no session is parked because of another."""
    store, heard = f"sqlite:///{tmp_path}/a.db", tmp_path / "heard"
    async with connect(store, model="offline") as sessions:
        asked = await left(sessions, {**{f"n{number}": f"say {number}" for number in range(4)}, "poison": "die"})
        command = [sys.executable, "-c", IN_AN_APP, store, str(heard)]
        codes = []
        while not codes or codes[-1] != 0:
            child = await asyncio.create_subprocess_exec(*command)
            codes.append(await asyncio.wait_for(child.wait(), PATIENCE))
            assert len(codes) < 5
        assert [str(each.session_id) for each in (await sessions.queue()).parked] == ["poison"]
        with pytest.raises(RunFailed, match=r"RunParked: .* died each time it was run \(3 times\)"):
            await asked[-1].reply(PATIENCE)
        with pytest.raises(SessionNotActive, match=r"parked.*unpark"):
            await sessions.send("poison", "hello")
        await sessions.resume("poison")
        assert (await sessions.info("poison")).tags == ()
        for number, each in enumerate(asked[:-1]):
            reply = await each.reply(PATIENCE)
            assert reply is not None
            assert reply.text == f"re say {number}"
    assert heard.read_text().splitlines().count("die") == 3


async def test_what_is_tried_apart_is_handed_over_when_the_worker_stops(tmp_path: Path) -> None:
    """The process apart gets the order to end, and the worker waits for it."""
    store = f"sqlite:///{tmp_path}/a.db"
    script = f"import signal, sys; open('{tmp_path}/began', 'w'); signal.pause()"
    async with connect(store, model="offline", driver=ScriptedDriver(lambda request: "yes")) as sessions:
        await sessions.open("a")
        await sessions.store.claim("a", version=1, owner="gone", lease=0.01, entries=entries("agent_start"))  # type: ignore[attr-defined]
        apart = ProcessApart(shell(script))
        async with Worker(sessions, lease=1.0, drain=0.1, apart=apart) as worker:
            running = asyncio.create_task(worker.run())
            async with asyncio.timeout(PATIENCE):
                while not await asyncio.to_thread((tmp_path / "began").exists):  # noqa: ASYNC110  # a file
                    await asyncio.sleep(0.05)
            assert worker.under_way == {"a"}
            worker.stop()
            await asyncio.wait_for(running, PATIENCE)
            assert worker.handed_over == {"a"}
            assert worker.under_way == frozenset()
