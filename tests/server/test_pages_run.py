"""The page of a run: its steps, what was sent, and what became of it."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.server.html_page import CANARY, Page
from tests.server.serving import Served, looking

import perdure
from perdure import AgentDefinition, ExecutionBudget, SendParallel
from perdure.model.ids import use
from perdure.model.loop_events import AgentStart, TurnStart
from perdure.model.message import Message, Thinking, ToolCall
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.parallel import LongestAnswer
from perdure.protocols import ModelReply, ModelRequest
from perdure.server.pages.timeline import Timeline
from perdure.testing import ScriptedDriver

CLERK = AgentDefinition("clerk", system_prompt="Look before you answer.", budget=ExecutionBudget(max_steps=20))
HELPER = AgentDefinition("helper", description="Helps.")


@perdure.tool
def look(order: int) -> dict[str, Any]:
    """Look an order up."""
    if order < 0:
        raise ValueError(f"there is no order {order}")
    return {"order": order, "state": "on its way"}


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


@perdure.tool
async def hang() -> str:
    """Never come back."""
    await asyncio.sleep(3600)
    return ""


def script(request: ModelRequest) -> Any:
    asked = [each for each in request.messages if each.role == "user"][-1].text
    calls = {
        "look": [ToolCall("look", {"order": 7}), ToolCall("look", {"order": -1})],
        "refund": [ToolCall("refund", {"order": 7})],
        "hang": [ToolCall("look", {"order": 1}), ToolCall("hang")],
        "ask the helper": [ToolCall("helper", {"prompt": "help"})],
    }
    if request.step == 0 and asked in calls:
        return Message.assistant("One moment.", tool_calls=calls[asked])
    if asked == "fail":
        return RuntimeError("the model is down")
    if asked == "many" and request.step < 54:
        return Message.assistant(tool_calls=[ToolCall("look", {"order": request.step})])
    return Message.assistant(f"Done: {asked}.")


def serving(tmp_path: Path, **options: Any) -> Any:
    options = {"driver": ScriptedDriver(script), "tools": [look, refund, hang], "subagents": [HELPER], **options}
    return looking(f"sqlite:///{tmp_path}/s.db", **options)


async def run_page(served: Served, name: str, query: str = "", run: int = -1) -> Page:
    record = await served.sessions.of("ada").record(name)
    return await Page.get(served.ada, f"/sessions/{name}/runs/{record.loops[run].loop_id}{query}")


async def test_a_call_is_one_row_with_its_outcome(tmp_path: Path) -> None:
    """A step is a model call and its tools, each with a bar; what was sent is shown only on request."""
    async with serving(tmp_path) as served:
        chat = await served.sessions.of("ada").open("a", CLERK)
        await chat.send("look", instructions="In one sentence.", key="evt-1", metadata={"from": "a test"})
        page = await run_page(served, "a")
    assert page.has("step") == 2
    assert page.has("lane", "done") == page.has("lane", "failed") == 1
    assert page.has("when") == 4 + 1  # two model calls, two tools, and the budget
    for told in ("One moment.", "on its way", "ValueError: there is no order -1", "Done: look.", "2 of 20", "evt-1"):
        assert told in page.text
    assert "Look before you answer." not in page.text


async def test_an_opened_step_tells_what_was_sent(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await served.sessions.of("ada").open("a", CLERK)
        await chat.send("hello")
        await chat.send("look", instructions="In one sentence.")
        page = await run_page(served, "a", "?step=2")
    for told in ("Look before you answer.", "In one sentence.", "hello", "Give the money back.", "Raw JSON"):
        assert told in page.text
    assert page.has("counted") == 4
    assert '"finish_reason": "stop"' in page.text


async def test_a_long_run_has_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await served.sessions.of("ada").open("a", AgentDefinition("clerk"))
        await chat.send("many")
        first, second = await run_page(served, "a"), await run_page(served, "a", "?after=50")
        opened_step = await run_page(served, "a", "?step=53")
        far = await run_page(served, "a", "?step=9999")
    assert (first.has("step"), second.has("step"), opened_step.has("step")) == (50, 5, 5)
    assert "Done: many." not in first.text
    assert "Done: many." in second.text
    assert opened_step.has("sent-whole") == 1
    assert far.has("sent-whole") == 0


async def test_a_decision_stands_where_it_was_made(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        for name in ("yes", "no", "open"):
            await (await ada.open(name, CLERK)).send("refund")
        later = datetime.now(UTC) + timedelta(hours=1)
        with use(clock=lambda: later):
            waiting = await run_page(served, "open")
        await ada.approve("open", wait=False)
        left = await run_page(served, "open")
        await ada.approve("yes")
        await ada.deny("no", "Not on a Sunday.")
        approved, denied = await run_page(served, "yes"), await run_page(served, "no")
    assert waiting.has("lane", "waits") == 1
    assert waiting.has("pill", "waiting") == 1
    assert "1 h" not in waiting.text  # which it has waited, and not worked
    assert left.has("pill", "left") == 1
    assert "1 call decided on" in approved.text
    assert approved.text.index("1 call decided on") < approved.text.index("order 7 is refunded")
    assert "denied: Not on a Sunday." in denied.text
    assert denied.has("lane", "denied") == 1


async def test_a_run_that_was_handed_over_is_not_called_killed(tmp_path: Path) -> None:
    async with serving(tmp_path, grace=0.0) as served:
        chat = await served.sessions.of("ada").open("a", CLERK)
        await chat.start("hang")
        await until_one_call_is_made(served, chat.id)
        running = await run_page(served, "a")
    async with serving(tmp_path) as served:
        left = await run_page(served, "a")
        await served.sessions.recover()
        recovered = await run_page(served, "a")
    assert running.has("pill", "running") == running.has("lane", "running") == 1
    assert left.has("pill", "left") == 1
    assert "handed over, and continued by another process" in recovered.text
    assert "killed" not in recovered.text


async def until_one_call_is_made(served: Served, session_id: str) -> None:
    async for event in served.sessions.events(session_id, follow=True):
        if isinstance(event, perdure.ToolExecutionEnd):
            return


DYING = """
import asyncio, os, sys
from tests.server import test_pages_run as told
import perdure

@perdure.tool
def hang() -> str:
    os._exit(9)

async def main():
    driver = told.ScriptedDriver(told.script)
    async with perdure.connect(sys.argv[1], driver=driver, tools=[told.look, hang]) as sessions:
        await (await sessions.of("ada").open("a", told.CLERK)).send("hang")

asyncio.run(main())
"""


async def test_a_killed_run_shows_what_is_unknown(tmp_path: Path) -> None:
    """It says that the run was killed and, after the recovery, that the outcome of its call is unknown."""
    url = f"sqlite:///{tmp_path}/s.db"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, url, cwd=Path(__file__).parents[2])
    assert await process.wait() == 9
    async with serving(tmp_path) as served:
        killed = await run_page(served, "a")
        await served.sessions.recover()
        recovered = await run_page(served, "a")
    assert killed.has("pill", "killed") == 1
    assert killed.has("lane", "unknown") >= 1  # the other call's outcome may be unknown too
    assert "killed, and recovered after" in recovered.text
    assert recovered.has("lane", "unknown") >= 1
    assert "2 starts" in recovered.text


async def test_runs_that_belong_together_are_linked(tmp_path: Path) -> None:
    """Links lead to sub-agents' runs, branches, and the runs before and after one."""
    async with serving(tmp_path) as served:
        ada = served.sessions.of("ada")
        chat = await ada.open("a", CLERK)
        await chat.send("hello")
        await chat.send("ask the helper")
        await ada.execute("a", SendParallel("which?", ada.loops, configs=["x", "y"], strategy=LongestAnswer()))
        helped, branch = await run_page(served, "a", run=1), await run_page(served, "a", run=2)
        child = next(link for link in helped.links() if ".sub-" in link)
        assert (await Page.get(served.ada, child)).has("step") == 1
        for link in (each for each in branch.links() if "/runs/" in each):
            await Page.get(served.ada, link)
    assert "continues" in helped.text
    assert sum("/runs/" in link for link in branch.links()) >= 2
    assert "selected" in branch.text


async def test_a_run_that_failed_tells_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await served.sessions.of("ada").open("a", CLERK)
        with pytest.raises(perdure.RunFailed):
            await chat.send("fail")
        page = await run_page(served, "a")
    assert page.has("pill", "failed") == 1
    assert "the model is down" in page.text
    assert "no answer came" in page.text


async def test_another_owners_run_is_no_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        chat = await served.sessions.of("ada").open("a", CLERK)
        await chat.send("hello")
        loop = (await served.sessions.record(chat.id)).loops[0].loop_id
        hers = await served.bob.get(f"/sessions/{chat.id}/runs/{loop}")
        none = await served.bob.get(f"/sessions/{chat.id}x/runs/{loop}")
        assert hers.status_code == none.status_code == 404
        assert hers.text == none.text.replace(f"{chat.id}x", chat.id)
        assert (await served.ada.get(f"/sessions/{chat.id}/runs/{quote('../' + loop, safe='')}")).status_code == 404
        assert (await served.ada.get(f"/sessions/{chat.id}/runs/{loop}?step=x")).status_code == 422


async def test_nothing_that_was_stored_runs_on_the_page(tmp_path: Path) -> None:
    def hostile(request: ModelRequest) -> ModelReply:
        response = InferenceResponse(f"stop {CANARY}", Usage(1, 1), model=f"model {CANARY}", provider=CANARY)
        said = Message.assistant(Thinking(f"thought {CANARY}"), f"said {CANARY}")
        calls = [ToolCall(f"tool {CANARY}", {CANARY: CANARY}, id=CANARY), ToolCall("refund", {"order": 1, CANARY: 2})]
        if request.step == 0:
            said = Message.assistant(*said.parts, tool_calls=calls)
        return ModelReply(said, response)

    agent = AgentDefinition(f"agent {CANARY}", system_prompt=f"prompt {CANARY}", model=f"x:{CANARY}")
    async with serving(tmp_path, driver=ScriptedDriver(hostile)) as served:
        ada = served.sessions.of("ada")
        chat = await ada.open("a", agent, tags=[f"tag {CANARY}"])
        await ada.rename("a", f"name {CANARY}")
        reply = await chat.send(
            f"asked {CANARY}", instructions=f"told {CANARY}", key=CANARY, metadata={CANARY: f"metadata {CANARY}"}
        )
        if reply.pending_calls:
            await chat.deny(f"reason {CANARY}")
        page = await run_page(served, "a", "?step=1")
    for what in ("agent", "model", "asked", "said", "thought", "tool", "prompt", "told", "name", "metadata", "stop"):
        assert f"{what} {CANARY}" in page.text or f"{what} {CANARY}".replace('"', '\\"') in page.text, what


def test_time_that_nobody_worked_takes_no_room() -> None:
    """The time that a run waited for a person is not part of its bars."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    hour = timedelta(hours=1)
    resumed = AgentStart(at=begin + hour, resumed=True, idle=3590.0)
    events = [AgentStart(at=begin), TurnStart(step_id="s", index=0, at=begin), resumed]
    line = Timeline(events, begin + hour + timedelta(seconds=10))
    assert line.total == pytest.approx(20.0)
    assert line.bar(begin, begin + timedelta(seconds=10)).width == pytest.approx(50.0)
    late = line.bar(begin + hour, begin + hour + timedelta(seconds=10))
    assert (late.x, late.width) == (50.0, 50.0)
