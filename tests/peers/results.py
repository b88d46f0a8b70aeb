"""A pytest plug-in that writes the outcome of each test, one JSON line each, as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_FILE = "PERDURE_PEER_RESULTS"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's outcome, and each failure of its set-up or its end."""
    if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
        _write(report.nodeid, report.outcome, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a file that cannot be imported as one failed test."""
    if report.failed:
        _write(report.nodeid, "failed", report)


def _write(test: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that gave the worker its tests gets the report, and writes it
        return
    line = {"test": test, "outcome": outcome, "why": _why(report) if outcome == "failed" else ""}
    with Path(os.environ[_FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line in which pytest names the exception."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr if crash is None else crash.message)
    lines = text.strip().splitlines() or [""]
    return lines[0 if crash is not None else -1][:200]
