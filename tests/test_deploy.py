"""The files in deploy/ and their page: linters accept them, numbers fit each other, perdure accepts the commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context

from perdure.cli.main import cli

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT, CONTAINER, MANIFEST = DEPLOY / "perdure-worker@.service", DEPLOY / "Containerfile", DEPLOY / "kubernetes.yaml"
TOOLS = Path(sys.executable).parent
SECRETS = re.compile(r"(?i)(_KEY|PASSWORD|_TOKEN|PERDURE_STORE)\s*[=:]\s*[\w\"']|://[^/\s]*:[^/\s]*@|kind: Secret")


def linted(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_unit(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return value


def in_container(instruction: str) -> list[str]:
    (value,) = re.findall(rf"^{instruction} (\[.*\])$", CONTAINER.read_text(), re.MULTILINE)
    return json.loads(value)


def deployment() -> dict[str, Any]:
    first, *_ = yaml.safe_load_all(MANIFEST.read_text())
    return first["spec"]["template"]["spec"]


def parsed(command: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line as perdure reads them. It refuses unknown ones."""
    name, *rest = command
    found = cli.get_command(Context(cli), name)
    assert found is not None, f"perdure has no command {name!r}"
    return found.make_context(name, rest, resilient_parsing=False).params


def commands() -> dict[str, list[str]]:
    return {
        "unit": shlex.split(in_unit("ExecStart"))[1:],
        "container": [*in_container("ENTRYPOINT")[1:], *in_container("CMD")],
        "kubernetes": ["worker", *deployment()["containers"][0]["args"]],
    }


def test_the_container_file_is_linted() -> None:
    """hadolint checks it with all of its rules."""
    assert linted(TOOLS / "hadolint", CONTAINER) == ""


def test_the_manifest_is_linted() -> None:
    """Kubernetes knows every field."""
    linted(TOOLS / "kubernetes-validate", "--strict", "--quiet", MANIFEST)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed on this machine")
def test_the_unit_is_verified(tmp_path: Path) -> None:
    """systemd itself verifies it, as an instance, with a program that exists."""
    program = shlex.split(in_unit("ExecStart"))[0]
    unit = tmp_path / "perdure-worker@1.service"
    unit.write_text(UNIT.read_text().replace(program, "/bin/true"))
    assert "perdure-worker" not in linted("systemd-analyze", "verify", unit)


@pytest.mark.parametrize("where", ["unit", "container", "kubernetes"])
def test_perdure_takes_the_command(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """perdure accepts every option, and a time to drain is set."""
    command = commands()[where]
    at = command.index("--tools") + 1
    tools = tmp_path / "tools.py"
    tools.write_text("")
    command[at] = str(tools)
    assert command[0] == "worker"
    assert "--drain" in command
    parsed(command)


def test_whoever_stops_a_worker_waits_for_longer_than_it_drains() -> None:
    """Otherwise the worker would be killed before it has handed over its runs."""
    waits = {"unit": float(in_unit("TimeoutStopSec")), "kubernetes": deployment()["terminationGracePeriodSeconds"]}
    (told,) = re.findall(r"--stop-timeout (\d+)", CONTAINER.read_text())
    waits["container"] = float(told)
    for where, command in commands().items():
        drain = float(command[command.index("--drain") + 1].removesuffix("s"))
        assert waits[where] >= drain + 10, where


def test_the_manifest_bounds_its_pods() -> None:
    """They have resources, probes, and no more rights than a worker needs."""
    pod = deployment()
    (container,) = pod["containers"]
    assert container["resources"].keys() == {"requests", "limits"}
    assert parsed_probe(container["readinessProbe"]) is not None
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]


def parsed_probe(probe: dict[str, Any]) -> dict[str, Any]:
    program, name, *rest = probe["exec"]["command"]
    assert program == "perdure"
    return parsed([name, *rest])


@pytest.mark.parametrize("path", [UNIT, CONTAINER, MANIFEST], ids=lambda path: path.name)
def test_there_is_no_secret_in_a_file(path: Path) -> None:
    """Secrets come from the environment."""
    for secret in ("OPENAI_API_KEY=sk-1", "PERDURE_STORE: postgresql://db/a", "x postgresql://app:pass@db/a"):
        assert SECRETS.search(secret)
    assert [line for line in path.read_text().splitlines() if SECRETS.search(line)] == []
