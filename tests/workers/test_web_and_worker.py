"""The example with a web server and workers, as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

EXAMPLE = Path(__file__).parents[2] / "examples" / "web_and_worker.py"
PATIENCE = 60.0


@contextmanager
def process(where: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "ORDERS_STORE": f"sqlite:///{where / 'orders.db'}"}
    started = subprocess.Popen([sys.executable, *map(str, command)], env=environment, cwd=where)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def answered(url: str, status: int = 200, **given: Any) -> Any:
    """Ask until the answer has this status."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            answer = httpx.request("POST" if given else "GET", url, timeout=PATIENCE, **given)
        except httpx.ConnectError:  # it is being started
            time.sleep(0.05)
            continue
        if answer.status_code == status:
            return answer.json()
        time.sleep(0.05)
    raise AssertionError(f"{url} had no answer {status} within {PATIENCE:g} s")


def test_a_server_takes_messages_in_and_a_worker_answers_them(tmp_path: Path) -> None:
    """A message that comes without a worker is answered once by a later one; SIGTERM ends it cleanly."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = ("-m", "uvicorn", f"{EXAMPLE.stem}:app", "--app-dir", EXAMPLE.parent, "--port", port)
    with process(tmp_path, *served, "--log-level", "warning"):
        order = f"http://127.0.0.1:{port}/orders/7"
        body = {"text": 'call ship {"order": 7}', "key": "evt-1"}
        assert answered(order, 202, json=body) == {"key": "evt-1"}
        assert answered(order, 202, json=body) == {"key": "evt-1"}  # the sender was not sure
        assert answered(f"{order}/evt-1", 202) == {"answer": None}
        with process(tmp_path, EXAMPLE) as worker:
            said = {"answer": "ship says: order 7 is on its way.", "waits_for": []}
            assert answered(f"{order}/evt-1") == said
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE) == 0
        with httpx.Client(timeout=PATIENCE) as client:
            full = [client.post(order, json={**body, "key": f"k{each}"}) for each in range(101)]
        assert [each.status_code for each in full] == [202] * 100 + [429]
        assert int(full[-1].headers["Retry-After"]) > 0
