"""The record shows what a model was sent in a step: the same as the driver was really given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import perdure
from perdure import AgentDefinition, SendParallel
from perdure.model.message import Message, ToolCall
from perdure.parallel import LongestAnswer
from perdure.protocols import ModelRequest
from perdure.sessions.sent import sent_in
from perdure.testing import ScriptedDriver

CLERK = AgentDefinition("clerk", system_prompt="Be brief.")


@perdure.tool
def look(order: int) -> str:
    """Look an order up."""
    return f"order {order} is on its way"


@perdure.tool(needs_approval=True)
def refund(order: int) -> str:
    """Give the money back."""
    return f"order {order} is refunded"


def answers(request: ModelRequest) -> Message:
    """Call the tool that the last message of the user names, then say something."""
    asked = [each for each in request.messages if each.role == "user"][-1].text
    if request.step == 0 and asked in ("look", "refund"):
        return Message.assistant("One moment.", tool_calls=[ToolCall(asked, {"order": 7}, id=f"call-{asked}")])
    return Message.assistant(f"{asked}: done {'x' * len(request.messages)}")


async def told(sessions: perdure.Sessions, session_id: str) -> list[tuple[str, list[Message]]]:
    """Return the record's account of every step of every run, in order."""
    found = []
    for header in (await sessions.record(session_id)).loops:
        loop = await sessions.loop(session_id, header.loop_id)
        for turn in loop.turns:
            sent = await sent_in(sessions, loop, turn.step_id)
            assert sent is not None
            found.append((sent.state.system_prompt, list(sent.messages)))
    return found


def given(requests: Sequence[ModelRequest]) -> list[tuple[str, list[Message]]]:
    return [(each.system_prompt, list(each.messages)) for each in requests]


async def test_the_record_tells_what_was_sent(tmp_path: Path) -> None:
    """It works in a plain run, with instructions, after a decision, a trim, a rewind and a compaction."""
    driver = ScriptedDriver(answers)
    async with perdure.connect(f"sqlite:///{tmp_path}/s.db", driver=driver, tools=[look, refund]) as sessions:
        chat = await sessions.open("a", CLERK)
        await chat.send("hello")
        await chat.send("look", instructions="Be polite.")
        assert (await chat.send("refund")).pending_calls
        await chat.trim(3)
        await chat.approve()
        await chat.send("more")
        await chat.rewind(3)
        await chat.send("again")
        await chat.compact(keep_last=2, compact_strategy="truncate")
        await chat.send("last")
        assert await told(sessions, "a") == given(driver.requests)


async def test_a_view_that_was_compacted_in_a_run_is_told_as_it_was_sent(tmp_path: Path) -> None:
    driver = ScriptedDriver(answers)
    model = perdure.ModelConfig("driver:small", context_window=400)
    auto = perdure.AutoCompaction(keep_last=2, compact_strategy="truncate")
    url = f"sqlite:///{tmp_path}/s.db"
    async with perdure.connect(url, driver=driver, model=model, tools=[look], compaction=auto) as sessions:
        chat = await sessions.open("a", CLERK)
        for number in range(8):
            await chat.send(f"{number} " + "many words " * 20)
        events = [event async for event in sessions.events("a")]
        assert any(isinstance(event, perdure.Compaction) for event in events)
        assert await told(sessions, "a") == given(driver.requests)


async def test_branches_and_retries_are_told_apart(tmp_path: Path) -> None:
    """A run that replaces another did not see that one; every branch was sent the same."""
    driver = ScriptedDriver(answers)
    async with perdure.connect(f"sqlite:///{tmp_path}/s.db", driver=driver, tools=[look]) as sessions:
        chat = await sessions.open("a", CLERK)
        await chat.send("hello")
        await chat.retry()
        await sessions.execute(
            "a", SendParallel("which?", sessions.loops, configs=["x", "y"], strategy=LongestAnswer())
        )
        found = await told(sessions, "a")
        assert sorted(map(repr, found)) == sorted(map(repr, given(driver.requests)))
        assert [len(messages) for _, messages in found] == [1, 1, 3, 3]
