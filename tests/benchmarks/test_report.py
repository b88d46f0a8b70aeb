"""The report of a benchmark run, and the tables that it writes into the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.bars import BARS, Bar
from benchmarks.harness import Reading
from benchmarks.report import figures_of, from_json, summary, table, tables, to_json

from benchmarks import documents

ROOT = Path(__file__).parents[2]
SMALL = Bar("a.small", "a save", "a bare one", 1.5, 1.2)
LARGE = Bar("a.large", "saves a second", "another library's", 8, at_least=True)
PLAIN = Bar("b.plain", "memory", "", 12, 10, unit="MB")
ALL = (SMALL, LARGE, PLAIN)
MACHINE = {"python": "3.11", "cores": 2, "load": "0.1"}
PAGE = """# Figures
Before.

<!-- figures: b.plain a.small -->
what was here
<!-- end of figures -->

After.
"""


@pytest.mark.parametrize(("value", "verdict"), [(1.5, "met"), (1.51, "missed"), (None, "not measured")])
def test_a_figure_is_met_up_to_its_bound(value: float | None, verdict: str) -> None:
    """The bound itself is met; a figure without a value is neither met nor missed."""
    (figure,) = figures_of([SMALL], {"a.small": Reading(value)})
    assert figure.verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(8, "met"), (7.99, "missed")])
def test_a_figure_that_should_be_large_is_met_from_its_bound_on(value: float, verdict: str) -> None:
    """A rate has a minimum."""
    (figure,) = figures_of([LARGE], {"a.large": Reading(value)})
    assert figure.verdict == verdict


def test_a_figure_without_a_reading_is_not_measured() -> None:
    """A benchmark that forgets a figure cannot meet it."""
    (figure,) = figures_of([SMALL], {})
    assert figure.verdict == "not measured"
    assert figure.measured == "not measured"


def test_the_table_shows_value_bound_aim_and_verdict() -> None:
    """One line a figure, with the detail at its end."""
    readings = {"a.small": Reading(1.3, "1.3 ms / 1 ms"), "a.large": Reading(1234.5)}
    header, small, large, plain = table(figures_of(ALL, readings)).splitlines()
    assert header.split() == ["figure", "measured", "bound", "aim", "detail"]
    assert small.split(maxsplit=7) == ["a.small", "1.30×", "≤", "1.5×", "≤", "1.2×", "met", "1.3 ms / 1 ms"]
    assert large.split() == ["a.large", "1,234×", "≥", "8×", "met"]
    assert plain.startswith("b.plain")
    assert plain.count("not measured") == 2
    assert "nothing was read" in plain


def test_the_table_shows_an_earlier_run_beside() -> None:
    """Figures that the earlier run did not measure say so."""
    readings = {"a.small": Reading(1.3), "b.plain": Reading(9)}
    header, small, _, plain = table(figures_of(ALL, readings), {"a.small": Reading(1.6)}).splitlines()
    assert header.split()[:4] == ["figure", "measured", "before", "bound"]
    assert small.split()[:3] == ["a.small", "1.30×", "1.60×"]
    assert plain.split()[:5] == ["b.plain", "9.00", "MB", "not", "measured"]


def test_the_summary_counts_verdicts() -> None:
    """Met, missed and not measured, in this order."""
    readings = {"a.small": Reading(2), "a.large": Reading(9)}
    assert summary(figures_of(ALL, readings)) == "1 met, 1 missed, 1 not measured"


def test_json_can_be_read_back() -> None:
    """An earlier run's readings come back unchanged, also those without a value."""
    readings = {"a.small": Reading(1.3, "how"), "a.large": Reading(None, "not installed"), "b.plain": Reading(9.5)}
    text = to_json(figures_of(ALL, readings), {"cores": 2})
    assert from_json(text) == (readings, {"cores": 2})
    first = json.loads(text)["figures"][0]
    assert (first["key"], first["must"], first["aim"], first["verdict"]) == ("a.small", 1.5, 1.2, "met")


def test_a_table_in_a_document_is_written_between_its_marks() -> None:
    """Rows are in the mark's order; the rest of the page, and the marks, stay."""
    table_of = tables(figures_of(ALL, {"a.small": Reading(1.3), "b.plain": Reading(None)}), MACHINE)
    page = documents.rewrite(PAGE, "figures", table_of)
    assert page == PAGE.replace(
        "what was here\n",
        "\n| operation | compared with | ratio |\n|---|---|---|\n"
        "| memory | – | not measured |\n| a save | a bare one | 1.30× |\n"
        "\nMeasured with Python 3.11 on 2 cores; load at the start 0.1.\n\n",
    )
    assert documents.rewrite(page, "figures", table_of) == page


def test_a_table_whose_figures_are_not_of_this_run_is_left_alone(tmp_path: Path) -> None:
    """All figures of a table come from one run: the table is not written if some are missing."""
    whole, other = tmp_path / "whole.md", tmp_path / "other.md"
    whole.write_text(PAGE)
    other.write_text(PAGE.replace("a.small", "c.unknown"))
    figures = figures_of(ALL, {"a.small": Reading(1.3), "b.plain": Reading(9)})
    with pytest.raises(ValueError, match=r"c\.unknown"):
        documents.write([whole, other], "figures", tables(figures, MACHINE))
    assert whole.read_text() == PAGE


def test_a_mark_without_an_end_is_refused() -> None:
    """Otherwise the rest of the page would be lost."""
    with pytest.raises(ValueError, match="end of figures"):
        documents.rewrite("<!-- figures: a.small -->\n| a |\n", "figures", str)


def test_only_documents_with_tables_are_written(tmp_path: Path) -> None:
    """A page without marks is not touched."""
    marked, plain = tmp_path / "marked.md", tmp_path / "plain.md"
    marked.write_text(PAGE)
    plain.write_text("# Nothing\n")
    figures = figures_of(ALL, {"a.small": Reading(1.3), "b.plain": Reading(9)})
    assert documents.write([marked, plain], "figures", tables(figures, MACHINE)) == [marked]
    assert "| a save | a bare one | 1.30× |" in marked.read_text()
    assert plain.read_text() == "# Nothing\n"


def test_the_tables_of_our_documents_name_figures_that_there_are() -> None:
    """A figure that is renamed is renamed in the documents too."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = [page for page in pages if "<!-- figures:" in page.read_text()]
    assert ROOT / "README.md" in marked
    for page in marked:
        documents.rewrite(page.read_text(), "figures", tables(figures_of(BARS, {}), MACHINE))
