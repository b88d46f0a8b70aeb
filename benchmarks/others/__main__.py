"""`python -m benchmarks.others`: perdure beside other libraries' session stores, as a table or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.others import attacks, measure
from benchmarks.others.attacks import Attacks
from benchmarks.others.library import Subject
from benchmarks.others.measure import Bench, Findings, Sizes
from benchmarks.others.page import tables
from benchmarks.others.table import lines

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "comparison.md", DOCS / "reliability.md")

MODULES = (
    "perdure",
    "openai_agents",
    "langgraph",
    "google_adk",
    "agno",
    "strands",
    "pydantic_ai",
)


def subjects() -> tuple[list[type[Subject]], dict[str, str]]:
    """Return the libraries that can be imported, and the errors of the others."""
    found: list[type[Subject]] = []
    missing: dict[str, str] = {}
    for name in MODULES:
        try:
            found += import_module(f"benchmarks.others.with_{name}").SUBJECTS
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


async def findings_of(chosen: list[type[Subject]], sizes: Sizes, times: Attacks, folder: Path) -> list[Findings]:
    benches: list[Bench] = []
    for number, subject in enumerate(chosen):
        versions = {package: metadata.version(package) for package in subject.packages}
        found = Findings(subject.name, versions, subject.durability)
        benches.append(Bench(subject(), folder / str(number), found))
    everything = [bench.findings for bench in benches]
    benches = await _surviving(benches, "starting", lambda bench: measure.prepare(bench, sizes))
    for step in (measure.appends, measure.loads, measure.forks):
        print(f"{step.__name__}: all", file=sys.stderr, flush=True)
        await step(benches, sizes)
    benches = await _surviving(benches, "two writers", _two_writers)
    benches = await _surviving(benches, "a killed run", _killed)
    for bench in await _surviving(benches, "attacks", lambda bench: _attacked(bench, times)):
        await measure.close(bench)
    return everything


async def _two_writers(bench: Bench) -> None:
    bench.findings.two_writers = await measure.two_writers(bench)


async def _killed(bench: Bench) -> None:
    for setting in bench.subject.run_settings:
        bench.findings.killed[setting] = await measure.killed(bench, setting)


async def _attacked(bench: Bench, times: Attacks) -> None:
    kind, folder = type(bench.subject), bench.folder / "attacks"
    if attacks.is_attacked(kind):
        bench.findings.power_cuts = await attacks.power_cuts(kind, folder / "cuts", times.cuts)
        bench.findings.flips = dict(await attacks.flipped_bits(kind, folder / "flips", times.flips))


async def _surviving(benches: list[Bench], what: str, step: Callable[[Bench], Awaitable[None]]) -> list[Bench]:
    """Return the libraries whose step worked. The others are reported with their errors, and no longer measured."""
    left = []
    for bench in benches:
        print(f"{what}: {bench.subject.name}", file=sys.stderr, flush=True)
        try:
            await step(bench)
        except Exception as error:  # a library that fails is a finding, and does not end the others
            bench.findings.errors.append(f"{what}: {type(error).__name__}: {error}")
        else:
            left.append(bench)
    return left


def machine() -> dict[str, Any]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "python": platform.python_version(),
        "sqlite3": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load": load,
    }


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the tables of docs/comparison.md and docs/reliability.md again"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="libraries whose name begins so")
    parser.add_argument("--histories", nargs="+", type=int, default=list(Sizes.histories), metavar="MESSAGES")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="rounds of appends")
    parser.add_argument("--slow-rounds", type=int, default=Sizes.slow_rounds, help="rounds of loads and forks")
    parser.add_argument("--cuts", type=int, default=Attacks.cuts, help="power cuts for each library")
    parser.add_argument("--flips", type=int, default=Attacks.flips, help="flipped bits for each library")
    parser.add_argument("--folder", type=Path, help="where the stores are put; a temporary directory unless given")
    parser.add_argument("--hang", nargs=4, metavar=("NAME", "SETTING", "FOLDER", "MARK"), help=argparse.SUPPRESS)
    parser.add_argument("--acknowledge", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # other libraries' deprecations are not measured
    if options.hang:
        name, setting, folder, mark = options.hang
        asyncio.run(measure.hang(_subject(name), setting, Path(folder), Path(mark)))
        return 0
    if options.acknowledge:
        name, folder = options.acknowledge
        asyncio.run(attacks.acknowledge(_subject(name), Path(folder)))
        return 0
    found, missing = subjects()
    if options.only:
        found = [subject for subject in found if subject.name.lower().startswith(tuple(map(str.lower, options.only)))]
    times = Attacks(options.cuts, options.flips)
    sizes = Sizes(tuple(options.histories), options.rounds, options.slow_rounds)
    with tempfile.TemporaryDirectory(prefix="perdure-others-", dir=options.folder) as folder:
        everything = asyncio.run(findings_of(found, sizes, times, Path(folder)))
    if options.write_docs:
        documents.write(PAGES, "others", tables(everything, sizes, times, machine()))
    if options.json:
        report = {"machine": machine(), "rounds": sizes.rounds, "slow_rounds": sizes.slow_rounds}
        report |= {"libraries": [findings.as_dict() for findings in everything], "not_installed": missing}
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(lines(everything, sizes, machine(), missing)))
    return 0


def _subject(name: str) -> Subject:
    """Return a library in its child process, by the name that its parent gave."""
    module, _, kind = name.partition(":")
    subject: Subject = getattr(import_module(module), kind)()
    return subject


if __name__ == "__main__":
    sys.exit(main())
