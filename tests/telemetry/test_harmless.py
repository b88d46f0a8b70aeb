"""Telemetry never breaks a run, and is absent unless it is asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from tests.telemetry.watching import Watching, told

import perdure
from perdure import ConfigurationError, InvalidData, Telemetry, ToolCall, tool
from perdure.testing import ScriptedDriver


class Broken(SpanProcessor):
    """A processor that raises in every method it can."""

    def __init__(self, *where: str) -> None:
        self._where = where

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._raise("start")

    def on_end(self, span: Any) -> None:
        self._raise("end")

    def _raise(self, where: str) -> None:
        if where in self._where:
            raise RuntimeError(f"broken at its {where}")


class BrokenSampler(Sampler):
    """A sampler that raises."""

    def should_sample(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no sample")

    def get_description(self) -> str:
        return "broken"


class BrokenMeters:
    """A provider whose instruments raise."""

    def get_meter(self, *arguments: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            return lambda *arguments, **options: self
        raise AttributeError(name)

    def record(self, *arguments: Any) -> None:
        raise RuntimeError("no record")

    add = record


def broken(how: str) -> Telemetry:
    if how == "meters":
        return Telemetry(tracer_provider=TracerProvider(), meter_provider=BrokenMeters())  # type: ignore[arg-type]  # only its instruments are used
    provider = TracerProvider(sampler=BrokenSampler() if how == "sampler" else None)
    provider.add_span_processor(Broken(*how.split("+")))
    return Telemetry(tracer_provider=provider)


@pytest.mark.parametrize("how", ["start", "end", "start+end", "sampler", "meters"])
async def test_a_hook_that_fails_never_breaks_a_run(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure in telemetry is logged once, and every run, tool and sub-agent continues as without it."""
    telemetry = broken(how)

    @tool
    def look() -> str:
        """Ask for the current span, as a user's own instrumentation does."""
        from opentelemetry import trace

        trace.get_current_span().set_attribute("seen", trace.get_current_span().get_span_context().is_valid)
        return "ok"

    driver = ScriptedDriver([ToolCall("look"), "done"])
    with caplog.at_level(logging.WARNING, "perdure.telemetry"):
        async with perdure.connect("memory://", driver=driver, tools=[look], telemetry=telemetry) as sessions:
            chat = await sessions.open()
            for _ in range(3):
                assert (await chat.send("go")).text == "done"
            results = [each for message in (await chat.history()) for each in message.tool_results]
    assert [each.is_error for each in results] == [False] * 3
    assert len([record for record in caplog.records if record.name == "perdure.telemetry"]) == 1


async def test_a_span_that_is_not_sampled_costs_no_attributes() -> None:
    """If a sampler drops the trace, runs continue, and the record says that it was dropped."""
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    async with perdure.connect(
        "memory://", driver=ScriptedDriver(["x"]), telemetry=Telemetry(tracer_provider=provider)
    ) as sessions:
        chat = await sessions.open("a")
        await chat.send("go")
        starts = [event async for event in sessions.runtime.events("a") if isinstance(event, perdure.AgentStart)]
    assert starts[0].trace is not None
    assert int(starts[0].trace[-2:], 16) & 1 == 0


async def test_without_an_sdk_nothing_is_traced_or_stored() -> None:
    """With OpenTelemetry's API alone, runs have no trace."""
    from opentelemetry.metrics import NoOpMeterProvider
    from opentelemetry.trace import NoOpTracerProvider

    silent = Telemetry(tracer_provider=NoOpTracerProvider(), meter_provider=NoOpMeterProvider())
    async with perdure.connect("memory://", driver=ScriptedDriver(["x"]), telemetry=silent) as sessions:
        await (await sessions.open("a")).send("go")
        starts = [event async for event in sessions.runtime.events("a") if isinstance(event, perdure.AgentStart)]
    assert [start.trace for start in starts] == [None]


async def test_a_trace_on_record_that_cannot_be_read_is_passed_over() -> None:
    """A stored trace of another form does not keep a run from being sent."""
    from perdure.telemetry.spans import _from_text

    for text in (None, 7, "", "00-1-2", "00-zz-zz-zz", f"00-{0:032x}-{0:016x}-01", "a-b-c-d-e"):
        assert _from_text(text) is None


async def test_keys_are_in_no_span() -> None:
    """The address of a model's server is traced without its path, query and user."""
    seen = Watching(content=True)
    model = perdure.ModelConfig("openai:gpt", base_url="https://llm.example:8443/v1/tenants/s3cr3t")
    async with perdure.connect(
        "memory://", driver=ScriptedDriver(["x"]), model=model, telemetry=seen.telemetry
    ) as sessions:
        await (await sessions.open()).send("go")
    assert told(seen.the("chat"))["server.address"] == "llm.example"
    assert told(seen.the("chat"))["server.port"] == 8443
    assert "s3cr3t" not in seen.text()


def test_telemetry_that_is_off_imports_nothing() -> None:
    """A process without telemetry has run an agent without loading a module of OpenTelemetry."""
    program = """
import asyncio, sys, perdure
from perdure.testing import ScriptedDriver
async def main():
    async with perdure.connect("memory://", driver=ScriptedDriver(["x"])) as sessions:
        await (await sessions.open()).send("go")
asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry", "perdure.telemetry"))])
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry, asking for telemetry raises an error that names the extra."""
    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "perdure.telemetry."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"perdure\[otel\]"):
        Telemetry()


def test_something_else_is_no_telemetry() -> None:
    """Any other value than a `Telemetry` is refused at once."""
    with pytest.raises(ConfigurationError, match=r"perdure\.Telemetry"):
        perdure.connect("memory://", telemetry=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider"])
def test_what_is_no_provider_is_refused(name: str) -> None:
    """The error has the path of the argument."""
    with pytest.raises(InvalidData, match="expected a provider") as refused:
        Telemetry(**{name: "x"})  # type: ignore[arg-type]  # as a user may
    assert refused.value.path == f"$.{name}"
