"""The example of a session as a regression test."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_regression.py"


def test_the_example_finds_the_price_that_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """With the same tools nothing differs; with another price the result of one call does."""
    asyncio.run(runpy.run_path(str(EXAMPLE))["main"]())
    before, after = capsys.readouterr().out.split("--- after the price has changed\n")
    assert "the model: 3 of 3 steps are the same\nthe tools: same\n" in before
    assert "the model: 3 of 3 steps are the same\nthe tools: different\n" in after
    assert "        result: 450 → 480\n" in after
