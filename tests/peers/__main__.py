"""Run the frameworks' own test suites with perdure's adapters in place of their stores: `make peers`.

Each file `peer_*.py` beside this one has the suites of a framework (`SUITES`), and is the pytest plug-in that swaps the
store in them. The suites come from PyPI and go to build/peers; none of their code is kept here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import groupby

from running import BUILD, HERE, run
from suite import Report, Suite


def main(arguments: list[str] | None = None) -> int:
    """Run the requested suites, print their ends, and return 1 if a bar is missed."""
    given = _parsed(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    reports = []
    for plugin, suite in _suites(given.names):
        print(f"{suite.name} …", flush=True)
        reports.append(run(suite, None if given.own else plugin, given.jobs))
    for report in reports:
        print(_told(report, in_full=given.all))
    print(_table(reports))
    return 0 if given.own or all(report.is_met for report in reports) else 1


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="suites whose name begins so; all without one")
    parser.add_argument("--own", action="store_true", help="with the framework's own store, to see what fails there")
    parser.add_argument("--all", action="store_true", help="print every excused test, not one line for each reason")
    parser.add_argument("--jobs", type=int, default=2, help="processes for each suite")
    return parser.parse_args(arguments)


def _suites(names: list[str]) -> Iterable[tuple[str, Suite]]:
    for path in sorted(HERE.glob("peer_*.py")):
        suites: tuple[Suite, ...] = import_module(path.stem).SUITES
        for suite in suites:
            if not names or any(suite.name.startswith(name) for name in names):
                yield path.stem, suite


def _told(report: Report, *, in_full: bool) -> str:
    """Return the failures of a suite: the unknown ones each, the known ones by their reason."""
    lines = [f"\n{report.suite.name}"]
    if report.problem:
        lines.append(f"  {report.problem}")
    lines += [f"  FAILED {each.test}\n         {each.why}" for each in report.unexpected]
    known = sorted(report.excused, key=lambda pair: pair[1])
    for why, group in groupby(known, key=lambda pair: pair[1]):
        tests = [result.test for result, _ in group]
        lines.append(f"  excused, {len(tests)}: {why}")
        lines += [f"    {test}" for test in tests if in_full]
    return "\n".join(lines)


def _table(reports: Iterable[Report]) -> str:
    rows = [("suite", "passed", "bar", "failed", "excused", "skipped", "seconds", "")]
    for each in reports:
        counts = (each.count("passed"), each.suite.bar, each.count("failed"), len(list(each.excused)))
        verdict = "met" if each.is_met else "MISSED"
        rows.append((each.suite.name, *map(str, (*counts, each.count("skipped"), round(each.seconds))), verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n" + "\n".join("  ".join(map(_padded, row, widths)) for row in rows)


def _padded(cell: str, width: int) -> str:
    return cell.rjust(width) if cell.isdigit() else cell.ljust(width)


if __name__ == "__main__":
    sys.exit(main())
