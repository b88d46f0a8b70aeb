"""A driver that gives the replies that a test has written down."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from perdure.model.message import Message, Text, Thinking, ToolCall
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta


class Delay(msgspec.Struct, frozen=True):
    """A reply that comes after a delay."""

    seconds: float
    """Seconds."""
    reply: Reply
    """The reply that comes then."""


class Chunks(msgspec.Struct, frozen=True):
    """A text that is streamed in these pieces. An exception among them is raised there, and a Delay waited for."""

    pieces: Sequence[str | Exception | Delay]
    """The pieces."""


Said = str | ToolCall | Sequence[ToolCall] | Message | ModelReply
Reply = Said | Exception | Delay | Chunks

_USAGE = Usage(input_tokens=10, output_tokens=5)


class ScriptedDriver:
    """A driver that replies by the step's index within the run, so that a recovered run continues where it was.

    So each run begins with the first reply of a list.

    Give a function from the request to a reply instead of a list to script several runs, or several attempts
    at one step. `requests` has every request.
    """

    def __init__(self, script: Sequence[Reply] | Callable[[ModelRequest], Reply], *, usage: Usage = _USAGE) -> None:
        self.requests: list[ModelRequest] = []
        self._script = script
        self._usage = usage
        self._given: Counter[str] = Counter()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.requests.append(request)
        reply = await _due(self._script(request) if callable(self._script) else _at(self._script, request))
        if isinstance(reply, Chunks):
            return self._whole(await _stream_chunks(reply, on_delta))
        answer = self._whole(reply)
        await _stream(answer.message, on_delta)
        return answer

    def _whole(self, reply: Said) -> ModelReply:
        """Return the reply as a driver gives it. A reply that is given again gets new ids, as a model's would."""
        if isinstance(reply, ModelReply):
            return ModelReply(self._renewed(reply.message), reply.response)
        message = self._renewed(_message(reply))
        reason = "tool_call" if message.tool_calls else "stop"
        return ModelReply(message, InferenceResponse(reason, self._usage, model="scripted", provider="scripted"))

    def _renewed(self, message: Message) -> Message:
        parts = tuple(
            msgspec.structs.replace(part, id=self._unused(part.id)) if isinstance(part, ToolCall) else part
            for part in message.parts
        )
        return msgspec.structs.replace(message, parts=parts, id=self._unused(message.id))

    def _unused(self, name: str) -> str:
        # The first use keeps the id, since tests name it. Only repetitions are numbered.
        self._given[name] += 1
        return name if self._given[name] == 1 else f"{name}-{self._given[name]}"


def _at(script: Sequence[Reply], request: ModelRequest) -> Reply:
    if request.step < len(script):
        return script[request.step]
    last = request.messages[-1].text[:100] if request.messages else ""
    raise AssertionError(
        f"The script has no reply for step {request.step} (counted from 0) after {last!r}: it ends with reply "
        f"{len(script) - 1}. Add one, or see why the run went on."
    )


async def _due(reply: Reply) -> Said | Chunks:
    """Return the reply once its delays are over, or raise it if it is an exception."""
    while isinstance(reply, Delay):
        await asyncio.sleep(reply.seconds)
        reply = reply.reply
    if isinstance(reply, Exception):
        raise reply
    return reply


def _message(reply: str | ToolCall | Sequence[ToolCall] | Message) -> Message:
    match reply:
        case Message():
            return reply
        case str():
            return Message.assistant(reply)
        case ToolCall():
            return Message.assistant(tool_calls=[reply])
    return Message.assistant(tool_calls=reply)


async def _stream(message: Message, on_delta: OnDelta) -> None:
    for part in message.parts:
        match part:
            case Text(text):
                await on_delta(Delta("text", text))
            case Thinking(text):
                await on_delta(Delta("thinking", text))
            case ToolCall(name, arguments, call_id):
                await on_delta(Delta("tool_call", msgspec.json.encode(arguments).decode(), call_id, name))


async def _stream_chunks(chunks: Chunks, on_delta: OnDelta) -> str:
    said = ""
    for given in chunks.pieces:
        piece = str(await _due(given))
        said += piece
        await on_delta(Delta("text", piece))
    return said
