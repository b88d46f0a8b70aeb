"""The benchmark beside other libraries runs, for those that the development environment has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch):
    """The benchmark's command; it is not installed, so its child processes start in the checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    pytest.importorskip("pydantic_ai")
    from benchmarks.others import __main__

    monkeypatch.setattr(__main__, "MODULES", ("perdure", "pydantic_ai", "nowhere"))
    monkeypatch.setattr(__main__.measure, "SETTLE", 0.1)
    return __main__


def test_every_figure_is_taken_and_what_is_not_installed_is_said(others, tmp_path, capsys) -> None:
    """With tiny sizes, the test checks that the libraries are run to the end, not their times."""
    given = ["--json", "--histories", "0", "8", "--rounds", "1", "--slow-rounds", "1"]
    given += ["--cuts", "6", "--flips", "16", "--folder", str(tmp_path)]
    assert others.main(given) == 0
    report = json.loads(capsys.readouterr().out)
    saved, run, json_file, adapter = report["libraries"]
    assert [library["name"] for library in report["libraries"]] == [
        "perdure",
        "perdure, as a run",
        "Pydantic AI, JSON file",
        "Pydantic AI, PerdureConversationStore",
    ]
    for library in report["libraries"]:
        assert library["errors"] == []
        assert set(library["append"]) == {"0", "8"}
        assert library["load"] > 0
        assert library["fork"] > 0
    assert list(report["not_installed"]) == ["nowhere"]
    assert saved["two_writers"] == run["two_writers"] == "refused (SessionConflict)"
    assert json_file["two_writers"] == "the first is lost silently"
    assert adapter["two_writers"] == "refused (ConversationConflict)"
    assert saved["killed"]["default"] == (
        "there: nothing, on record: question, call, result; then the run is finished;"
        " now: question, call, result, answer"
    )
    assert saved["power_cuts"] == adapter["power_cuts"] == 0
    assert json_file["power_cuts"] > 0, "a file without fsync outlasts no power cut, or the attack proves nothing"
    assert run["power_cuts"] is None, "a second way to write into the same files is not attacked again"
    assert saved["flips"].get("wrong", 0) == adapter["flips"].get("wrong", 0) == 0
    assert json_file["flips"]["wrong"] > 0, "flipped letters are read as they are, or the attack flips nothing"
    assert json_file["killed"]["default"].startswith("there: nothing; then a next message is answered")
    assert not list(tmp_path.iterdir()), "the stores that were measured are removed"


def test_the_table_names_every_library_and_what_could_not_be_measured(others) -> None:
    """A library that fails is in the table's list with its error, and has no row of figures."""
    from benchmarks.others.measure import Findings, Sizes
    from benchmarks.others.table import lines

    fine = Findings("fine", {"fine": "1.0"}, "fsync", {0: 0.001, 8: 0.0025}, {8: 0.002}, 4096, 0.5)
    broken = Findings("broken", {"broken": "2.0"}, errors=["starting: OSError: no disk"])
    text = "\n".join(lines([fine, broken], Sizes((0, 8), 3, 2), {"cores": 2}, {"absent": "No module named 'absent'"}))
    row = next(line for line in text.splitlines() if line.startswith("fine "))
    assert row.split() == ["fine", "1.0", "ms", "2.5", "ms", "2.0", "ms", "4", "KB", "500.0", "ms", "no"]
    assert "NOT MEASURED starting: OSError: no disk" in text
    assert "absent: not installed (No module named 'absent')" in text


def test_the_page_is_written_from_the_findings(others) -> None:
    """All three tables of docs/comparison.md have a row for every library, and the sentence between them its load."""
    from benchmarks.others.attacks import Attacks
    from benchmarks.others.measure import Findings, Sizes
    from benchmarks.others.page import tables

    from benchmarks import documents

    killed = {"default": "there: nothing", "checkpoints": "the run is finished"}
    fine = Findings("fine", {"fine": "1.0"}, "fsync", {0: 0.001, 8: 0.0025}, {8: 0.002}, 4096, 0.5, 0.1, 2048)
    fine.two_writers, fine.killed = "both kept", killed
    second = Findings("fine, twice", {"fine": "1.0"}, "the same", {0: 0.001, 8: 0.003}, {8: 0.002}, 4096, 0.5)
    broken = Findings("broken", {"broken": "2.0"}, "unknown", errors=["starting: OSError: no disk"])
    machine = {"python": "3.11", "sqlite3": "3.50", "cores": 2, "load": "0.1"}
    page = documents.rewrite(
        others.PAGES[0].read_text(), "others", tables([fine, second, broken], Sizes((0, 8), 3, 2), Attacks(), machine)
    )
    assert "| fine | 1.0 | 2.5 | 2.0 | 4 | 500.0 | 100.0 | 2 |\n" in page
    assert "| fine, twice | 1.0 | 3.0 | 2.0 | 4 | 500.0 | no |  |\n" in page
    assert "| broken | not measured: starting: OSError: no disk |" in page
    assert "| fine | both kept | there: nothing<br>with `checkpoints`: the run is finished |\n" in page
    assert "| fine, twice |  | as above |\n" in page
    assert "| fine | fine 1.0 | fsync |\n" in page
    assert "load\n0.1: compare the rows" in page
    fine.power_cuts, fine.flips = 0, {"right": 198, "refused": 2}
    attacks = tables([fine, second], Sizes(), Attacks(), machine)("attacks")
    assert attacks.count("\n") == 3, "a library that was not attacked has no row"
    assert "| fine | 0 | 0 | 2 |\n" in attacks
    assert "LangGraph, as a run |" not in page, "the page's earlier rows are gone"
