"""The benchmark of adapters runs the frameworks to the end, and reads a figure for every bar."""

from __future__ import annotations

import os

import pytest
from benchmarks.bars import BARS
from benchmarks.harness import Run

from benchmarks import bench_adapters

PAIRS = {pair.key: pair for pair in bench_adapters.PAIRS}
TRIED = PAIRS if os.environ.get("PERDURE_TORTURE") else ("pydantic", "claude")


def test_every_figure_of_an_adapter_has_a_bar() -> None:
    read = {f"adapters.{pair.key}_{what}" for pair in PAIRS.values() for what in (*pair.sizes, "bytes")}
    assert read == {bar.key for bar in BARS if bar.topic == "adapters"}


@pytest.mark.parametrize("key", TRIED)
async def test_a_framework_is_measured_on_both_stores(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """With tiny sizes, the test checks that both stores keep the turns, not how long they take."""
    monkeypatch.setattr(bench_adapters, "PAIRS", (PAIRS[key],))
    monkeypatch.setattr(bench_adapters, "SIZES", {"1k": 20, "10k": 40})
    run = Run()
    await bench_adapters.measure(run)
    wanted = {f"adapters.{key}_{what}" for what in (*PAIRS[key].sizes, "bytes")}
    assert {name for name, reading in run.readings.items() if reading.value} == wanted
