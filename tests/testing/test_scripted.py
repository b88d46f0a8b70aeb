"""The driver for tests gives its scripted replies, each at its step."""

from __future__ import annotations

import asyncio

import pytest

from perdure.errors import DriverError
from perdure.model.definition import ModelConfig
from perdure.model.message import Message, Text, Thinking, ToolCall
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.protocols import Delta, ModelReply, ModelRequest
from perdure.testing.scripted import Chunks, Delay, ScriptedDriver


async def ask(driver: ScriptedDriver, step: int = 0) -> tuple[ModelReply, list[Delta]]:
    deltas: list[Delta] = []

    async def keep(delta: Delta) -> None:
        deltas.append(delta)

    reply = await driver.respond(ModelRequest(ModelConfig("scripted"), [Message.user("Hi")], step=step), keep)
    return reply, deltas


async def test_a_text_is_said_and_streamed_whole() -> None:
    """A text becomes the assistant's message, in one piece."""
    reply, deltas = await ask(ScriptedDriver(["Hello"]))
    assert (reply.message.role, reply.message.text) == ("assistant", "Hello")
    assert deltas == [Delta("text", "Hello")]
    assert (reply.response.finish_reason, reply.response.usage) == ("stop", Usage(input_tokens=10, output_tokens=5))


async def test_calls_are_made_one_or_several() -> None:
    """A tool call is given alone or in a list, and keeps its id."""
    one, two = ToolCall("add", {"a": 1}, "call-1"), ToolCall("now", id="call-2")
    driver = ScriptedDriver([one, [one, two]])
    reply, deltas = await ask(driver)
    assert reply.message.tool_calls == (one,)
    assert reply.response.finish_reason == "tool_call"
    assert deltas == [Delta("tool_call", '{"a":1}', "call-1", "add")]
    reply, _ = await ask(driver, step=1)
    assert [call.name for call in reply.message.tool_calls] == ["add", "now"]


async def test_a_message_and_a_reply_are_given_as_they_are() -> None:
    """An assistant's message keeps its parts, and a whole reply its usage and finish reason."""
    message = Message.assistant(Thinking("Hm.", signature="s"), Text("Yes."))
    whole = ModelReply(message, InferenceResponse("length", Usage(1, 2)))
    reply, deltas = await ask(ScriptedDriver([message]))
    assert reply.message == message
    assert deltas == [Delta("thinking", "Hm."), Delta("text", "Yes.")]
    assert (await ask(ScriptedDriver([whole])))[0] == whole


async def test_an_exception_is_raised() -> None:
    """An exception in the script is raised, and the request is still kept."""
    driver = ScriptedDriver([DriverError("scripted", "overloaded")])
    with pytest.raises(DriverError, match="overloaded"):
        await ask(driver)
    assert len(driver.requests) == 1


async def test_a_delay_waits_and_can_be_cancelled() -> None:
    """A delayed reply comes after its time, and waiting for it can be cancelled."""
    reply, _ = await ask(ScriptedDriver([Delay(0.001, Delay(0.001, "late"))]))
    assert reply.message.text == "late"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(ScriptedDriver([Delay(60, "never")])), 0.01)


async def test_chunks_are_streamed_as_given() -> None:
    """Pieces are streamed one by one, and add up to the message."""
    reply, deltas = await ask(ScriptedDriver([Chunks(["Hel", Delay(0.001, "lo")])]))
    assert reply.message.text == "Hello"
    assert [delta.text for delta in deltas] == ["Hel", "lo"]


async def test_a_stream_can_break_off() -> None:
    """An exception among the pieces is raised after those before it were streamed."""
    heard: list[str] = []

    async def hear(delta: Delta) -> None:
        heard.append(delta.text)

    request = ModelRequest(ModelConfig("scripted"), [])
    with pytest.raises(ConnectionError):
        await ScriptedDriver([Chunks(["Hel", ConnectionError("gone")])]).respond(request, hear)
    assert heard == ["Hel"]


async def test_the_step_decides_which_reply() -> None:
    """A run that was recovered at its second step gets the second reply."""
    driver = ScriptedDriver(["first", "second"])
    assert (await ask(driver, step=1))[0].message.text == "second"
    assert [request.step for request in driver.requests] == [1]


async def test_running_past_the_end_says_so() -> None:
    """A step without a scripted reply is an AssertionError that names the step."""
    with pytest.raises(AssertionError, match=r"no reply for step 1 .* after 'Hi'"):
        await ask(ScriptedDriver(["only"]), step=1)


async def test_a_function_scripts_several_attempts() -> None:
    """A function of the request may fail at first, and answer when the step is tried again."""
    replies = iter([ConnectionError("gone"), "here"])
    driver = ScriptedDriver(lambda _: next(replies), usage=Usage(1, 1))
    with pytest.raises(ConnectionError):
        await ask(driver)
    reply, _ = await ask(driver)
    assert (reply.message.text, reply.response.usage.total_tokens) == ("here", 2)


async def test_a_reply_given_again_has_ids_of_its_own() -> None:
    """A second run of the same script repeats no id of a message or of a call."""
    driver = ScriptedDriver([Message.assistant(tool_calls=[ToolCall("add", id="call")], id="message")])
    first, second = (await ask(driver))[0].message, (await ask(driver))[0].message
    assert (first.id, first.tool_calls[0].id) == ("message", "call")
    assert (second.id, second.tool_calls[0].id) == ("message-2", "call-2")
