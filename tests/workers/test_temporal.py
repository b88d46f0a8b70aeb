"""perdure under Temporal: `examples/temporal_workflow.py` with Temporal's own server, and its activities alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("temporalio")

from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment, WorkflowEnvironment
from tests.workers.engine_tools import DEADLY, LEDGER, example

import perdure

ROOT = Path(__file__).parents[2]
SERVER = Path(sys.executable).with_name("temporal")
MESSAGE = "pack(order=7) then ship(order=7)"


@contextmanager
def working(address: str, where: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that works for a server, until the block is left."""
    told = {**os.environ, LEDGER: str(where / "ledger"), "ORDERS_BEAT": "0.25"}
    told["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-m", "tests.workers.temporal_process", address]
    with (where / "worker.log").open("ab") as log:
        process = subprocess.Popen(command, env={**told, **environment}, cwd=where, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def test_an_activity_whose_process_is_killed_is_continued(tmp_path: Path) -> None:
    """Temporal tries it again elsewhere, and perdure continues the run: no completed tool is called again."""
    app = example("temporal_workflow")
    ledger = tmp_path / "ledger"
    server: Any = {"dev_server_existing_path": str(SERVER), "dev_server_log_level": "error"}
    async with await WorkflowEnvironment.start_local(**server) as environment:
        app.SERVER = environment.client.service_client.config.target_host
        asked = asyncio.create_task(app.asked("order-7", MESSAGE, "request-1"))
        with working(app.SERVER, tmp_path, **{DEADLY: "1"}) as first:
            await asyncio.to_thread(first.wait, 120)
        assert first.returncode == -signal.SIGKILL, (tmp_path / "worker.log").read_text()
        assert ledger.read_text().splitlines() == ["packed 7", "shipping 7"]
        with working(app.SERVER, tmp_path):
            assert await asked == "pack says: packed 7, and ship says: shipped 7."
            assert await app.asked("order-7", MESSAGE, "request-1") == await asked
    assert ledger.read_text().splitlines() == ["packed 7", "shipping 7", "shipping 7", "shipped 7"]


async def test_an_activity_that_is_cancelled_hands_its_run_over() -> None:
    """As at its worker's shutdown: the run is not ended, and the next try continues it."""
    app, started = example("temporal_workflow"), asyncio.Event()

    @perdure.tool(idempotent=True)
    async def ship(order: int) -> str:
        """Ship an order."""
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)
        return f"shipped {order}"

    async with perdure.connect("memory://", model="offline", tools=[ship]) as sessions:
        does = app.Activities(sessions)
        await ActivityEnvironment().run(does.leave, "order-7", "ship(order=7)", "key-1")
        environment, beats = ActivityEnvironment(), []
        environment.on_heartbeat = lambda *_: beats.append(1)
        step = asyncio.create_task(environment.run(does.look_at, "order-7"))
        await started.wait()
        with pytest.raises(ApplicationError, match="busy"):
            await ActivityEnvironment().run(does.look_at, "order-7")
        environment.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert beats
        assert await ActivityEnvironment().run(does.look_at, "order-7") == "done"
        answer = await ActivityEnvironment().run(does.answer_to, "order-7", "key-1")
        assert answer == "ship says: shipped 7."
