"""Attacks note their outcomes, and the table in docs/reliability.md is written from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.testing.outcomes import Outcome, main, note, read

HELD = Outcome(
    attack="power cut",
    store="sqlite",
    rounds=900,
    failures=0,
    control="no fsync",
    control_rounds=100,
    control_failures=97,
    day="2026-11-19",
)
PAGE = "# Reliability\n\n<!-- attacks -->\nold\n<!-- end of attacks -->\n\nThe rest.\n"


def test_outcomes_of_one_attack_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes note their share of the rounds; the table shows the sum."""
    monkeypatch.setenv("PERDURE_OUTCOMES", str(tmp_path / "out.jsonl"))
    note(HELD)
    note(HELD)
    (found,) = read(tmp_path / "out.jsonl")
    assert (found.rounds, found.control_rounds, found.control_failures) == (1800, 200, 194)


def test_nothing_is_noted_unless_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the tests that writes no table leaves no file behind."""
    monkeypatch.delenv("PERDURE_OUTCOMES", raising=False)
    monkeypatch.chdir(tmp_path)
    note(HELD)
    assert not list(tmp_path.iterdir())


def test_the_table_of_a_page_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text around the table stays as it is."""
    page, outcomes = tmp_path / "page.md", tmp_path / "out.jsonl"
    page.write_text(PAGE)
    monkeypatch.setenv("PERDURE_OUTCOMES", str(outcomes))
    note(HELD)
    assert main([str(outcomes), str(page)]) == 0
    text = page.read_text()
    assert "| power cut | sqlite | 900 | 0 | no fsync | 97 of 100 | 2026-11-19 |" in text
    assert "old" not in text
    assert text.endswith("<!-- end of attacks -->\n\nThe rest.\n")


def test_attacks_that_were_not_run_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one attack replaces all of its rows on that store, and no others."""
    from msgspec.structs import replace

    page, first, second = tmp_path / "page.md", tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    page.write_text(PAGE)
    monkeypatch.setenv("PERDURE_OUTCOMES", str(first))
    note(HELD)
    note(replace(HELD, rounds=0, control="no rename"))
    note(replace(HELD, store="files"))
    assert main([str(first), str(page)]) == 0
    monkeypatch.setenv("PERDURE_OUTCOMES", str(second))
    note(replace(HELD, rounds=50, day="2026-12-01"))
    assert main([str(second), str(page)]) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| power cut")]
    assert rows == [
        "| power cut | files | 900 | 0 | no fsync | 97 of 100 | 2026-11-19 |",
        "| power cut | sqlite | 50 | 0 | no fsync | 97 of 100 | 2026-12-01 |",
    ]


def test_an_outcome_says_on_which_day_it_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack need not name the day itself."""
    from datetime import date

    from msgspec.structs import replace

    monkeypatch.setenv("PERDURE_OUTCOMES", str(tmp_path / "out.jsonl"))
    note(replace(HELD, day=""))
    (found,) = read(tmp_path / "out.jsonl")
    assert date.fromisoformat(found.day)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"failures": 1}, "1 of 900 rounds failed"), ({"control_failures": 0}, "the control (no fsync) did not fail")],
)
def test_an_attack_that_succeeds_and_a_control_that_does_not_fail_are_told(
    change: dict[str, int],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits with 1 and names the attack."""
    from msgspec.structs import replace

    page, outcomes = tmp_path / "page.md", tmp_path / "out.jsonl"
    page.write_text(PAGE)
    monkeypatch.setenv("PERDURE_OUTCOMES", str(outcomes))
    note(replace(HELD, **change))
    assert main([str(outcomes), str(page)]) == 1
    assert reason in capsys.readouterr().err
