"""Getting a suite from PyPI and running it: pip by the package's name, pytest in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from suite import Report, Result, Suite

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "peers"
_FETCH_MINUTES = 5.0


def run(suite: Suite, plugin: str | None, jobs: int) -> Report:
    """Run a suite with a plug-in that swaps the store, or without one as the framework itself runs it."""
    began = time.monotonic()
    try:
        folder = fetched(suite.package)
    except (subprocess.SubprocessError, OSError, tarfile.TarError) as error:
        return Report(suite, (), time.monotonic() - began, f"Not fetched: {error}")
    written = BUILD / f"{suite.name}.results.jsonl"
    written.unlink(missing_ok=True)
    problem = _run_pytest(_command(suite, plugin, jobs), folder, _environment(suite, written), suite.minutes)
    results = tuple(_last_of_each(written))
    return Report(suite, results, time.monotonic() - began, problem if results else problem or "No test was run.")


def fetched(package: str) -> Path:
    """Return the folder with a package's source distribution, of the version that is installed."""
    folder = BUILD / f"{package}-{version(package)}"
    if not folder.exists():
        _unpack(_download(package, version(package)), folder)
    return folder


def _download(package: str, number: str) -> Path:
    into = BUILD / "downloads"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "--dest", str(into)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{package}=={number}"]
    subprocess.run(command, check=True, timeout=_FETCH_MINUTES * 60)
    stem = f"{package}-{number}.tar.gz".replace("-", "_").lower()
    return next(path for path in into.iterdir() if path.name.replace("-", "_").lower() == stem)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive beside the folder and rename: a folder that is there is whole."""
    beside = folder.with_suffix(f".{os.getpid()}")
    with tarfile.open(archive) as file:
        file.extractall(beside, filter="data")
    (top,) = beside.iterdir()
    top.rename(folder)
    beside.rmdir()


def _command(suite: Suite, plugin: str | None, jobs: int) -> list[str]:
    plugins = ["results", *([plugin] if plugin else [])]
    spread = ["-n", str(jobs)] if jobs > 1 else []
    quiet = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    chosen = [option for name in plugins for option in ("-p", name)]
    return [sys.executable, "-m", "pytest", *quiet, *chosen, *spread, *suite.arguments, *suite.files]


def _environment(suite: Suite, written: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _python_path(), "PERDURE_PEER_RESULTS": str(written), **suite.environment}


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


def _run_pytest(command: list[str], folder: Path, environment: dict[str, str], minutes: float) -> str:
    """Run pytest in a process group of its own. Return the reason if it did not finish."""
    log = BUILD / f"{Path(environment['PERDURE_PEER_RESULTS']).stem}.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"Stopped after {minutes:g} minutes; see {log}"
    return "" if code in (0, 1) else f"pytest ended with {code}; see {log}"


def _last_of_each(written: Path) -> Iterable[Result]:
    """Return each test once. A test that passed and then failed in its teardown has failed."""
    found: dict[str, Result] = {}
    lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    for line in lines:
        result = Result(**json.loads(line))
        found[result.test] = result
    return found.values()
