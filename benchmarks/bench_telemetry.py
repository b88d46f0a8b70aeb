"""Telemetry: the cost of a run's spans and metrics with the real SDK, and of the checks when it is off."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from benchmarks.bench_loop import look_up
from benchmarks.harness import Cost, Run, Side, ms, timed
from benchmarks.others.turns import TEXT
from benchmarks.setting import AGENT
from perdure import LoopFactory, Message, SendMessage, SessionRuntime, SqliteStore, ToolCall
from perdure.testing import ScriptedDriver

RUNS = 10
"""The number of runs timed together: spans are exported later, in batches, and their cost must count."""
MEASUREMENTS = 7
"""The number of measurements of a run with one tool call: its duration, and three of each model call."""
CHECKS = 14
"""The number of times a run with one tool call checks if it is traced: an upper limit, counted in the code."""


async def measure(run: Run) -> None:
    try:
        from perdure.telemetry.telemetry import Telemetry

        sdk = Sdk()
        telemetry = Telemetry(tracer_provider=sdk.tracers, meter_provider=sdk.meters)
    except ImportError as error:
        for name in ("on", "on_cpu", "off"):
            run.skip(f"telemetry.{name}", f"{error}")
        return
    with run.folder() as folder:
        async with SqliteStore(folder / "bench.db") as store:
            runtime = SessionRuntime(store)
            # One file for both: two files with the same content may differ by more than telemetry costs.
            off, on = [_runs(runtime, (await runtime.create(AGENT)).id, each) for each in (None, telemetry)]
            rounds = run.size(40, 120)
            plain, traced = await _in_blocks(off, on, rounds=rounds)
        telemetry.flush()
    alone = f"; the SDK alone takes {sdk.alone() * 1e6:.0f} µs for the same"
    for key, name, more in (("on", "wall", ""), ("on_cpu", "cpu", alone)):
        ratio, low, high = _compared([getattr(each, name) for each in plain], [getattr(each, name) for each in traced])
        usual = statistics.median(getattr(each, name) for each in plain)
        run.report(f"telemetry.{key}", ratio, f"beside {ms(usual)} a run; quartiles {low:.3f} to {high:.3f}{more}")
    step = statistics.median(each.cpu for each in plain)
    run.report("telemetry.off", _checks() / step, f"{_checks() * 1e6:.1f} µs / {ms(step)}")


class Sdk:
    """OpenTelemetry's SDK with its own batching, and an exporter that sends nothing anywhere."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        seen = self._seen = dict[str, list[Any]]()

        class Nowhere(SpanExporter):
            def export(self, spans: Sequence[Any]) -> SpanExportResult:
                seen.clear()
                for span in spans:
                    seen.setdefault(span.name, []).append(span)
                return SpanExportResult.SUCCESS

        self.tracers = TracerProvider()
        self.tracers.add_span_processor(BatchSpanProcessor(Nowhere()))
        self.meters = MeterProvider([InMemoryMetricReader()])

    def alone(self) -> float:
        """Return the processor time of the spans and measurements of a run, made in a row and with the SDK alone."""
        self.tracers.force_flush()
        # Of a run with one tool call: its own span, two model calls and a tool call.
        spans = [span for name in self._seen for span in self._seen[name][: 2 if name.startswith("chat") else 1]]
        start = self.tracers.get_tracer("alone").start_span
        record = self.meters.get_meter("alone").create_histogram("alone").record
        best = float("inf")
        for _ in range(20):
            began = time.process_time()
            for _ in range(RUNS):
                for span in spans:
                    start(span.name, None, span.kind, span.attributes).end()
                for number in range(MEASUREMENTS):
                    record(number, spans[0].attributes)
            best = min(best, (time.process_time() - began) / RUNS)
        return best


def _runs(runtime: SessionRuntime, session_id: str, telemetry: Any) -> Side:
    """Return a function that makes some runs with one tool call each, every step durable."""
    call = Message.assistant(tool_calls=[ToolCall("look_up", {"query": TEXT})])
    loops = LoopFactory(tools=[look_up], driver=ScriptedDriver([call, TEXT]), telemetry=telemetry)

    async def side() -> None:
        for _ in range(RUNS):
            await runtime.execute(session_id, SendMessage("go", loops))

    return side


async def _in_blocks(*sides: Side, rounds: int, warm_up: int = 3) -> list[list[Cost]]:
    """Return the cost of each run of each side, block by block, with the sides in turn."""
    taken: list[list[Cost]] = [[] for _ in sides]
    for turn in range(rounds + warm_up):
        for place in range(len(sides)):
            number = (turn + place) % len(sides)
            gc.collect()
            cost = await timed(sides[number])
            if turn >= warm_up:
                taken[number].append(Cost(cost.wall / RUNS, cost.cpu / RUNS))
    return taken


def _compared(plain: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of blocks that were timed side by side, and their quartiles."""
    ratios = [each / beside for beside, each in zip(plain, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def _checks() -> float:
    """Return the seconds that a run spends on checking if it is traced, when it is not."""
    loops, nothing = SimpleNamespace(telemetry=None), nullcontext()
    best = float("inf")
    for _ in range(20):
        began = time.process_time()
        for _ in range(1_000):
            for _ in range(CHECKS):
                trace = None if loops.telemetry is None else loops
            if trace is None:
                with nothing:
                    pass
        best = min(best, (time.process_time() - began) / 1_000)
    return best
