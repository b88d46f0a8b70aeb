"""perdure under DBOS: `examples/dbos_workflow.py` in real processes, on a real DBOS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dbos")

from tests import postgres_server
from tests.workers.engine_tools import DEADLY, LEDGER

ROOT = Path(__file__).parents[2]


def on_sqlite(where: Path) -> dict[str, str]:
    return {"ORDERS_STORE": f"sqlite:///{where / 'orders.db'}", "DBOS_DATABASE": f"sqlite:///{where / 'dbos.db'}"}


def on_postgres(where: Path) -> dict[str, str]:
    schema = postgres_server.schema_of(where)
    url = postgres_server.dsn().replace("postgres://", "postgresql://")
    return {"ORDERS_STORE": postgres_server.url_of(where), "DBOS_DATABASE": url, "DBOS_SCHEMA": f"{schema}_dbos"}


def run(what: str, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, LEDGER: str(where / "ledger"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.workers.dbos_process", what]
    return subprocess.run(
        command, env={**told, **environment}, cwd=where, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("stores", [on_sqlite, on_postgres] if os.environ.get("PERDURE_TORTURE") else [on_sqlite])
def test_a_workflow_whose_process_is_killed_is_continued(stores, tmp_path: Path) -> None:
    """DBOS repeats the step, and perdure continues the run in it: the completed tool is not called again."""
    where = stores(tmp_path)
    killed = run("ask", tmp_path, **where, **{DEADLY: "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ledger = tmp_path / "ledger"
    assert ledger.read_text().splitlines() == ["packed 7", "shipping 7"]

    done = run("recover", tmp_path, **where)
    assert done.returncode == 0, done.stderr
    first, again, *others = json.loads(done.stdout)
    assert first == again == "pack says: packed 7, and ship says: shipped 7."
    assert others == [f"pack says: packed {number}." for number in (1, 2, 3)]
    lines = ledger.read_text().splitlines()
    assert lines[:4] == ["packed 7", "shipping 7", "shipping 7", "shipped 7"]
    assert sorted(lines[4:]) == ["packed 1", "packed 2", "packed 3"]
