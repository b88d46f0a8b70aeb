"""The report of a run: one table, the same as JSON, and the tables of figures for documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bars import Bar
from benchmarks.documents import TableOf, markdown
from benchmarks.harness import Reading, number

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Figure:
    """A bar and its reading."""

    bar: Bar
    reading: Reading

    @property
    def verdict(self) -> str:
        if self.reading.value is None:
            return NOT_MEASURED
        return "met" if self.bar.is_met_by(self.reading.value) else "missed"

    @property
    def measured(self) -> str:
        """The value with its unit; the sign of a ratio is ×."""
        value = self.reading.value
        return NOT_MEASURED if value is None else _with_unit(number(value), self.bar)

    def as_dict(self) -> dict[str, Any]:
        bar = self.bar
        return {
            "key": bar.key,
            "operation": bar.operation,
            "compared_with": bar.compared_with,
            "value": self.reading.value,
            "unit": bar.unit,
            "must": bar.must,
            "aim": bar.aim,
            "at_least": bar.at_least,
            "verdict": self.verdict,
            "detail": self.reading.detail,
        }


def figures_of(bars: Iterable[Bar], readings: Mapping[str, Reading]) -> list[Figure]:
    """Return a figure for each bar. One without a reading is not measured."""
    return [Figure(bar, readings.get(bar.key, Reading(None, "nothing was read"))) for bar in bars]


def _with_unit(value: str, bar: Bar) -> str:
    return f"{value} {bar.unit}" if bar.unit else f"{value}×"


def _bound(bar: Bar, value: float | None) -> str:
    return "" if value is None else f"{'≥' if bar.at_least else '≤'} {_with_unit(f'{value:,g}', bar)}"


def table(figures: Sequence[Figure], before: Mapping[str, Reading] | None = None) -> str:
    """Lay figures out for a terminal. With the readings of an earlier run there is a column for them."""
    rows = [("figure", "measured", *(("before",) if before is not None else ()), "bound", "aim", "", "detail")]
    for figure in figures:
        bar = figure.bar
        earlier = () if before is None else (Figure(bar, before.get(bar.key, Reading(None))).measured,)
        bounds = (_bound(bar, bar.must), _bound(bar, bar.aim))
        rows.append((bar.key, figure.measured, *earlier, *bounds, figure.verdict, figure.reading.detail))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def summary(figures: Sequence[Figure]) -> str:
    verdicts = [figure.verdict for figure in figures]
    return ", ".join(f"{verdicts.count(each)} {each}" for each in ("met", "missed", NOT_MEASURED))


def to_json(figures: Sequence[Figure], machine: Mapping[str, Any]) -> str:
    return json.dumps({"machine": machine, "figures": [figure.as_dict() for figure in figures]}, indent=2) + "\n"


def from_json(text: str) -> tuple[dict[str, Reading], dict[str, Any]]:
    """Return the readings of an earlier run, and the machine it ran on."""
    report = json.loads(text)
    return {each["key"]: Reading(each["value"], each["detail"]) for each in report["figures"]}, report["machine"]


def tables(figures: Sequence[Figure], machine: Mapping[str, Any]) -> TableOf:
    """Return a function that writes a document's table of figures, with the machine. The mark names the keys.

    A key that this run has no figure for raises ValueError: all figures of a table come from one run.
    """
    by_key = {figure.bar.key: figure for figure in figures}

    def table_of(keys: str) -> str:
        if unknown := [key for key in keys.split() if key not in by_key]:
            raise ValueError(
                f"a table has figures that are not part of this run: {', '.join(unknown)}. Run all topics."
            )
        rows = [("operation", "compared with", "ratio"), *(_row(by_key[key]) for key in keys.split())]
        return f"{markdown(rows)}\nMeasured with {_on(machine)}.\n"

    return table_of


def _on(machine: Mapping[str, Any]) -> str:
    return f"Python {machine['python']} on {machine['cores']} cores; load at the start {machine['load']}"


def _row(figure: Figure) -> tuple[str, str, str]:
    return figure.bar.operation, figure.bar.compared_with or "–", figure.measured
