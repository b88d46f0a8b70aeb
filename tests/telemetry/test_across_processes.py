"""A trace continues in another process: after a kill, and for a message that was left for a worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from tests.telemetry import traced_process
from tests.telemetry.watching import Watching, is_beneath, links_of, told, trace_of

import perdure
from perdure import AgentDefinition, AgentStart, ParallelLoopStart
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("clerk")


def started(url: str, session_id: str, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, traced_process.__file__, url, session_id, how]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where)


def run_and_kill(url: str, session_id: str, how: str) -> None:
    """Kill a process once its run waits for the model, or all of its branches do."""
    with started(url, session_id, how) as process:
        assert process.stdout is not None
        for _ in range(2 if how == "parallel" else 1):
            assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGKILL)


async def events_of(sessions: perdure.Sessions, session_id: str, kind: type) -> list[Any]:
    return [event async for event in sessions.runtime.events(session_id) if isinstance(event, kind)]


def is_continued(span: ReadableSpan, stored: str) -> bool:
    """Tell whether a span is in the trace of a stored one, and linked to it."""
    _, trace_id, span_id, _ = stored.split("-")
    return trace_of(span) == int(trace_id, 16) and links_of(span)["continues"] == int(span_id, 16)


@pytest.mark.parametrize("how", ["send", "subagent", "parallel"])
async def test_a_run_recovered_elsewhere_continues_its_trace(tmp_path: Path, how: str) -> None:
    """After SIGKILL the run is continued in the same trace, with a link to the span that was cut off."""
    seen, url = Watching(), f"sqlite:///{tmp_path}/a.db"
    async with traced_process.connected(url, seen, how) as sessions:
        chat = await sessions.open("a", AGENT)
        await asyncio.to_thread(run_and_kill, url, chat.id, how)
        first = (await events_of(sessions, chat.id, AgentStart))[0]
        assert first.trace is not None
        with seen.tracer.start_as_current_span("operator"):
            report = await sessions.recover()
        assert not report.failed
        starts = await events_of(sessions, chat.id, AgentStart)
        groups = await events_of(sessions, chat.id, ParallelLoopStart)
    ours = [span for span in seen.spans() if span.name != "operator"]
    assert {trace_of(span) for span in ours} == {int(first.trace.split("-")[1], 16)}
    runs = {told(span).get("perdure.run.id"): span for span in seen.spans("invoke_agent")}
    for start in starts[: len(starts) // 2]:
        assert is_continued(runs[start.loop_id], start.trace)
    if how == "send":
        assert links_of(runs[first.loop_id])["called_by"] == seen.the("operator").get_span_context().span_id
        assert seen.spans("execute_tool") == [], "a call that was completed is not made again"
    elif how == "subagent":
        child = next(span for span in seen.spans("invoke_agent") if span.name == "invoke_agent helper")
        assert "continues" in links_of(child)
    else:
        group = next(span for span in seen.spans("invoke_agent") if "perdure.branches" in told(span))
        assert is_continued(group, groups[0].trace)
        branches = [span for span in seen.spans("invoke_agent") if span is not group]
        assert len(branches) == 2
        assert all(is_beneath(each, group) for each in branches)
    assert sum(point.value for point in seen.points("perdure.run.recoveries")) >= 1


async def test_a_run_that_was_not_traced_can_be_recovered_with_telemetry(tmp_path: Path) -> None:
    """A run without a trace on record gets one when it is continued, without a link."""
    seen, url = Watching(), f"sqlite:///{tmp_path}/a.db"
    async with traced_process.connected(url, seen, "untraced") as sessions:
        chat = await sessions.open("a", AGENT)
        await asyncio.to_thread(run_and_kill, url, chat.id, "untraced")
        assert [start.trace for start in await events_of(sessions, chat.id, AgentStart)] == [None]
        await sessions.recover()
    run = seen.the("invoke_agent")
    assert run.parent is None
    assert list(run.links) == []
    assert told(run)["perdure.run.status"] == "completed"


async def test_a_workers_run_is_linked_to_the_sender(tmp_path: Path) -> None:
    """A worker's run of a message from another process begins a trace with a link to its sender."""
    seen, url = Watching(), f"sqlite:///{tmp_path}/a.db"
    async with perdure.connect(url, driver=ScriptedDriver([]), telemetry=seen.telemetry) as sessions:
        chat = await sessions.open("a", AGENT)
        with seen.tracer.start_as_current_span("request") as request:
            await sessions.enqueue(chat.id, "go")
        (depth,) = await asyncio.to_thread(seen.points, "perdure.queue.depth")
        assert depth.value == 1
    with started(url, "a", "worker") as worker:
        spans = [json.loads(line) for line in worker.communicate()[0].splitlines()]
    sender = request.get_span_context()
    (run,) = [span for span in spans if span["operation"] == "invoke_agent"]
    assert run["links"] == [[sender.trace_id, sender.span_id]]
    assert run["trace"] != sender.trace_id
    assert {span["trace"] for span in spans} == {run["trace"]}
    assert sorted(span["operation"] for span in spans) == ["chat", "chat", "execute_tool", "invoke_agent"]
