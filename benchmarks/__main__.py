"""Runs every benchmark, or those named on the command line, and says which figures miss their bound."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    folder = Path(__file__).parent
    names = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    missed = 0
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load}; ratios of medians, both sides in one run", flush=True)
    for name in names:
        print(f"\n{name}", flush=True)
        for figure in asyncio.run(import_module(f"benchmarks.bench_{name}").figures()):
            print("  " + figure.line(), flush=True)
            missed += not figure.is_met
    print(f"\n{missed} missed" if missed else "\nall met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
