"""The command line as a person uses it: quickly, in this process, or as the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perdure.cli.main import cli

SLOW = '''
import time
from pathlib import Path
from perdure import tool

@tool(idempotent=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    Path("begun").touch()
    if not Path("quick").exists():
        time.sleep(60)
    return a + b
'''
COMMAND = [sys.executable, "-m", "perdure.cli"]


class Said:
    """The output of a command, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory without other settings; new sessions ask the built-in model."""
    for name in list(os.environ):
        if name.startswith("PERDURE_") or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # hints use this name
    monkeypatch.setenv("PERDURE_MODEL", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def perdure(home: Path) -> Callable[..., Said]:
    """Return a function that runs the command in this process."""

    def call(*arguments: object, code: int = 0, stdin: str | bytes | None = None) -> Said:
        result = CliRunner().invoke(cli, [str(each) for each in arguments], input=stdin, prog_name="perdure")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
        return Said(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def process(home: Path) -> Callable[..., Said]:
    """Return a function that runs the command as a process of its own."""

    def call(*arguments: object, code: int = 0, env: dict[str, str] | None = None) -> Said:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            env=os.environ | (env or {}),
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return Said(done.returncode, done.stdout, done.stderr)

    return call
