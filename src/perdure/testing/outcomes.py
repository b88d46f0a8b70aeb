"""Results of attacks on a store. Each attack notes its own result, and the table in docs/reliability.md shows them all.

PERDURE_OUTCOMES=outcomes.jsonl make torture
python -m perdure.testing.outcomes outcomes.jsonl docs/reliability.md

All attacks together take many hours, so a run of some of them replaces their rows and keeps the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

_START, _END = "<!-- attacks -->\n", "<!-- end of attacks -->\n"
_COLUMNS = ("attack", "store", "rounds", "failures", "control", "failures of the control", "last run")
_HEADER = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one attack on one store, and of its control: the same attack with a protection taken away."""

    attack: str
    store: str
    rounds: int
    failures: int
    control: str = ""
    """The protection that the control took away, for example "fsync does nothing". Empty without a control."""
    control_rounds: int = 0
    control_failures: int = 0
    day: str = ""
    """The day of the run, as in 2026-11-19."""

    @property
    def holds(self) -> bool:
        """Tell whether the store withstood the attack, and the control (if there is one) did not."""
        return not self.failures and (not self.control or self.control_failures > 0)


def note(outcome: Outcome) -> None:
    """Append an outcome to the file that PERDURE_OUTCOMES names, if it names one.

    Several processes may append to one file: each line is one write.
    """
    path = os.environ.get("PERDURE_OUTCOMES")
    if path:
        outcome = msgspec.structs.replace(outcome, day=outcome.day or datetime.now(UTC).date().isoformat())
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, msgspec.json.encode(outcome) + b"\n")
        finally:
            os.close(handle)


def read(path: Path) -> Sequence[Outcome]:
    """Return the outcomes in a file. Those of the same attack on the same store are added up."""
    found: dict[tuple[str, str, str], Outcome] = {}
    for line in path.read_bytes().splitlines():
        outcome = msgspec.json.decode(line, type=Outcome)
        key = (outcome.attack, outcome.store, outcome.control)
        found[key] = _together(found[key], outcome) if key in found else outcome
    # Sorted: tests run in any order, and the page must not change with it.
    return [found[key] for key in sorted(found)]


def table(outcomes: Iterable[Outcome], older: Iterable[str] = ()) -> str:
    """Return outcomes as a table in Markdown, with the rows of an older table whose attacks were not run."""
    rows = [f"| {' | '.join(_cells(outcome))} |" for outcome in outcomes]
    run = {_attacked(row) for row in rows}
    rows += [row for row in older if _attacked(row) not in run]
    return _HEADER + "".join(f"{row}\n" for row in sorted(rows))


def write_table(outcomes: Iterable[Outcome], page: Path) -> None:
    """Write the table between the two marks of a page."""
    before, start, rest = page.read_text(encoding="utf-8").partition(_START)
    old, end, after = rest.partition(_END)
    if not (start and end):
        raise SystemExit(f"{page} has no table: it needs the lines {_START.strip()} and {_END.strip()}.")
    older = [line for line in old.splitlines()[3:] if line.startswith("| ")]
    page.write_text(f"{before}{start}\n{table(outcomes, older)}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Write the rows of a page's table that were run. Return 1 if an attack succeeded, or a control did not fail."""
    outcomes = read(Path(arguments[0]))
    write_table(outcomes, Path(arguments[1]))
    # A control that does not fail counts as broken, too: an attack that cannot fail proves nothing.
    broken = [outcome for outcome in outcomes if not outcome.holds]
    for outcome in broken:
        print(f"{outcome.attack} on {outcome.store}: {', '.join(_reasons(outcome))}", file=sys.stderr)
    return 1 if broken else 0


def _together(one: Outcome, other: Outcome) -> Outcome:
    counts: Mapping[str, int] = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("rounds", "failures", "control_rounds", "control_failures")
    }
    return msgspec.structs.replace(one, day=max(one.day, other.day), **counts)


def _cells(outcome: Outcome) -> Sequence[str]:
    control = f"{outcome.control_failures:,} of {outcome.control_rounds:,}" if outcome.control else "–"
    cells = (outcome.attack, outcome.store, f"{outcome.rounds:,}", f"{outcome.failures:,}", outcome.control or "–")
    return *cells, control, outcome.day


def _attacked(row: str) -> tuple[str, ...]:
    """Return the attack and the store that a row of the table is about."""
    return tuple(cell.strip() for cell in row.split("|")[1:3])


def _reasons(outcome: Outcome) -> Iterable[str]:
    if outcome.failures:
        yield f"{outcome.failures:,} of {outcome.rounds:,} rounds failed"
    if outcome.control and not outcome.control_failures:
        yield f"the control ({outcome.control}) did not fail"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
