"""`python -m benchmarks [TOPIC …]`: measure every figure, or those of some topics, and say which keep their bounds."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import documents
from benchmarks.bars import BARS
from benchmarks.harness import Run
from benchmarks.report import figures_of, from_json, summary, table, tables, to_json

ROOT = Path(__file__).parents[1]
TOPICS = tuple(dict.fromkeys(bar.topic for bar in BARS))


def measure(topic: str, run: Run) -> None:
    """Measure one topic. If it fails, its missing figures are not measured, and the other topics continue."""
    print(topic, file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        asyncio.run(import_module(f"benchmarks.bench_{topic}").measure(run))
    except Exception as error:  # one failing benchmark does not end the others
        traceback.print_exc()
        for bar in BARS:
            if bar.topic == topic and bar.key not in run.readings:
                run.skip(bar.key, f"{type(error).__name__}: {error}")
    gc.collect()
    run.say(f"{time.perf_counter() - start:.0f} s")


def machine() -> dict[str, Any]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {"python": platform.python_version(), "cores": os.cpu_count(), "load": load}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"one or more of: {', '.join(TOPICS)}")
    parser.add_argument("--full", action="store_true", help="use the largest sizes; takes long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    parser.add_argument("--before", type=Path, metavar="FILE", help="show the figures of an earlier run's JSON beside")
    parser.add_argument("--reuse", type=Path, metavar="FILE", help="measure nothing: take the figures from this JSON")
    parser.add_argument("--write-docs", action="store_true", help="write the tables in README.md and docs/ again")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every figure is met")
    options = parser.parse_args(given)
    if unknown := set(options.topics) - set(TOPICS):
        parser.error(f"no such topic: {', '.join(sorted(unknown))}. There are: {', '.join(TOPICS)}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    logging.disable(logging.WARNING)
    topics = options.topics or TOPICS
    before = from_json(options.before.read_text())[0] if options.before else None
    start = machine()
    run = Run(full=options.full)
    if options.reuse:
        run.readings, start = from_json(options.reuse.read_text())
    else:
        for topic in topics:
            measure(topic, run)
    figures = figures_of([bar for bar in BARS if bar.topic in topics], run.readings)
    print(f"{start['cores']} cores, load {start['load']} at the start; Python {start['python']}")
    print(table(figures, before))
    print(summary(figures))
    if options.json:
        options.json.write_text(to_json(figures, start))
    if options.write_docs:
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        print("written: " + ", ".join(path.name for path in documents.write(pages, "figures", tables(figures, start))))
    return 1 if options.strict and any(figure.verdict != "met" for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
