"""The page about the service, and the unit that starts it: commands that a reader copies work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click import Context
from tests.server.serve_process import served_in
from tests.test_deploy import DEPLOY, SECRETS, linted

from perdure.cli.main import cli
from perdure.server.table import ROUTES

PAGE = DEPLOY.parent / "docs" / "service.md"
UNIT = DEPLOY / "perdure-serve.service"
TOOLS = '''
from perdure import tool

@tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"
'''


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed on this machine")
def test_the_requests_of_the_page_are_answered(tmp_path: Path) -> None:
    """Every block of the page is tried, in order, against one server."""
    with served_in(tmp_path) as server:
        (tmp_path / "tools.py").write_text(TOOLS)
        server.start_working()
        with server.client("ada") as ada, server.client() as operator:
            tokens = [each.headers["Authorization"].removeprefix("Bearer ") for each in (ada, operator)]
        environment = {**os.environ, "URL": server.url, "TOKEN": tokens[0], "OPERATOR": tokens[1]}
        said = ""
        for block in blocks("bash"):
            typed = ["bash", "-euo", "pipefail", "-c", block]
            done = subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (block, done.stdout, done.stderr)
            said += done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")  # sent, and read back by its hash
    for part in ('"name":"Order 7"', "order 7 is refunded", "id: 1\n", "event: message_end", "perdure_open_streams"):
        assert part in said


def parsed(line: str) -> dict[str, object]:
    program, name, *rest = shlex.split(line, comments=True)
    assert Path(program).name == "perdure"
    found = cli.get_command(Context(cli), name)
    assert found is not None
    return found.make_context(name, rest, resilient_parsing=False).params


def test_the_page_names_every_path_of_the_api() -> None:
    """Its last word is in the table or the text."""
    told = PAGE.read_text()
    for route in ROUTES:
        if route.face in ("api", "health"):
            word = [part for part in route.path.split("/") if part and "{" not in part][-1]
            assert f"/{word}" in told, route.path


def test_the_unit_waits_for_longer_than_the_service_drains() -> None:
    """Its command is one that perdure accepts, without a secret."""
    unit = UNIT.read_text()
    given = parsed(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) >= float(str(given["drain"])) + 10
    assert given["opens"] is False
    assert [line for line in unit.splitlines() if SECRETS.search(line)] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed on this machine")
def test_the_unit_is_verified(tmp_path: Path) -> None:
    """systemd itself verifies it, with a program that exists."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/perdure/bin/perdure", "/bin/true"))
    assert "perdure-serve" not in linted("systemd-analyze", "verify", unit)
