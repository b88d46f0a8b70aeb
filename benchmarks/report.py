"""What a run says at its end: one table, the same as JSON, and the tables in the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar
from benchmarks.harness import Reading

NOT_MEASURED = "not measured"
_BEGIN = re.compile(r"<!-- figures: ([^>]*?) -->\n")
_END = "<!-- end of figures -->"
_HEADER = "| operation | compared with | ratio |\n|---|---|---|\n"


@dataclass(frozen=True)
class Figure:
    """A bar and what was read against it."""

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
        return (
            NOT_MEASURED if value is None else _with_unit(f"{value:,.2f}" if value < 100 else f"{value:,.0f}", self.bar)
        )

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
    """Return a figure for each bar. One that no reading was taken for is not measured."""
    return [Figure(bar, readings.get(bar.key, Reading(None, "nothing was read"))) for bar in bars]


def _with_unit(number: str, bar: Bar) -> str:
    return f"{number} {bar.unit}" if bar.unit else f"{number}×"


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


def readings_from(text: str) -> dict[str, Reading]:
    """Return what an earlier run has read, from its JSON."""
    return {each["key"]: Reading(each["value"], each["detail"]) for each in json.loads(text)["figures"]}


def rewrite(text: str, figures: Mapping[str, Figure]) -> str:
    """Return a document with its tables of figures written again.

    A table stands between `<!-- figures: KEY KEY … -->` and `<!-- end of figures -->`. A key that this run has no
    figure for raises ValueError: all figures of a table come from one run.
    """
    parts, end = [], 0
    for found in _BEGIN.finditer(text):
        stop = text.find(_END, found.end())
        if stop < 0:
            raise ValueError(f"{found[0].strip()} has no {_END} behind it")
        parts += [text[end : found.end()], _HEADER, *(_row(key, figures) for key in found[1].split())]
        end = stop
    return "".join([*parts, text[end:]])


def _row(key: str, figures: Mapping[str, Figure]) -> str:
    if key not in figures:
        raise ValueError(f"a table has the figure {key!r}, which is not part of this run; run all benchmarks")
    bar = figures[key].bar
    return f"| {bar.operation} | {bar.compared_with or '–'} | {figures[key].measured} |\n"


def write_documents(paths: Iterable[Path], figures: Sequence[Figure]) -> list[Path]:
    """Write the tables of figures in documents again; return the documents that have any."""
    by_key = {figure.bar.key: figure for figure in figures}
    rewritten = {path: rewrite(path.read_text(), by_key) for path in paths if _BEGIN.search(path.read_text())}
    for path, text in rewritten.items():
        path.write_text(text)
    return list(rewritten)
