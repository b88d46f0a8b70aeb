"""Build the wheel and the source archive, install both in empty environments, and use what is there: `make wheel`.

Each extra gets an environment of its own with each Python. The packages come from PyPI, in the newest versions that
`pyproject.toml` allows. The files are left in build/dist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DIST = ROOT / "build" / "dist"
SMOKE = Path(__file__).with_name("smoke.py")
FOR_DEVELOPERS = {"dev", "docs", "engines", "peers"}
ARCHIVE = "source archive"


class Case(NamedTuple):
    """One environment: a Python, and what is installed into it beside perdure."""

    python: str
    extra: str


class Outcome(NamedTuple):
    """The problem of a case, which is empty if all went well, and the number of packages that pip installed."""

    case: Case
    problem: str
    packages: int


def main(arguments: list[str] | None = None) -> int:
    """Build, try every requested case, print a line for each, and return 1 if one failed."""
    given = _parsed(arguments)
    _build()
    problems = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for future in as_completed([pool.submit(_tried, case) for case in _cases(given.python, given.extras)]):
            outcome = future.result()
            print(_told(outcome), flush=True)
            problems += bool(outcome.problem)
    return 1 if problems else 0


def extras() -> list[str]:
    """Return the extras for users, without those for developers of perdure."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name not in FOR_DEVELOPERS]


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="these extras only; '' is perdure alone. All without one")
    parser.add_argument("--python", action="append", help="a Python to install with, may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="environments at a time")
    given = parser.parse_args(arguments)
    given.python = given.python or [sys.executable]
    given.extras = given.extras or ["", ARCHIVE, *extras()]
    return given


def _cases(pythons: Iterable[str], names: Iterable[str]) -> list[Case]:
    return [Case(python, extra) for extra, python in product(names, pythons)]


def _build() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL)


def _tried(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="perdure-wheel-") as place:
        here = Path(place)
        python = str(here / "env" / "bin" / "python")
        empty = here / "empty"
        empty.mkdir()
        commands = (
            [case.python, "-m", "venv", "--without-pip", str(here / "env")],
            [*_pip(python), "install", "--quiet", *_wanted(case.extra)],
            [*_pip(python), "check"],
            [python, "-W", "error", str(SMOKE), *([case.extra] if case.extra in extras() else [])],
        )
        for command in commands:
            done = subprocess.run(command, cwd=empty, env=_environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                return Outcome(case, f"{' '.join(command)}\n{done.stdout}{done.stderr}", 0)
        return Outcome(case, "", len(list((here / "env").glob("lib/*/site-packages/*.dist-info"))))


def _pip(python: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]


def _wanted(extra: str) -> list[str]:
    if extra == ARCHIVE:
        return [str(next(DIST.glob("*.tar.gz")))]
    wheel = next(DIST.glob("*.whl"))
    return [f"perdure[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)]


def _environment() -> dict[str, str]:
    """Return the environment without variables that show the sources to a Python, or a store to perdure."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PERDURE_"))}


def _told(outcome: Outcome) -> str:
    python, extra = outcome.case
    name = f"{python}  perdure" + (f", {extra}" if extra == ARCHIVE else f"[{extra}]" if extra else "")
    return f"FAILED  {name}\n{outcome.problem}" if outcome.problem else f"ok  {name}  {outcome.packages} packages"


if __name__ == "__main__":
    sys.exit(main())
