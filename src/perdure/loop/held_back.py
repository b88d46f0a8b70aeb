"""Streams the pieces of an answer to listeners, without what redactors find in the whole."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from msgspec.structs import replace

from perdure.protocols import Delta, ModelReply, OnDelta
from perdure.redaction.streams import Stream
from perdure.redaction.texts import Redaction


class HeldBack:
    """A filter between a driver and its listeners, for one answer.

    What may become part of a secret is held back. The arguments of a call are told once they are whole: they may spell
    a secret with escapes. What is still held back when an answer is cut off is never told.
    """

    def __init__(self, redaction: Redaction, tell: OnDelta) -> None:
        self._redaction = redaction
        self._tell = tell
        self._streams: dict[str, Stream] = {}
        self._told: defaultdict[str, list[str]] = defaultdict(list)
        self._last: str | None = None
        """The kind of the last text."""
        self._calls: dict[str | None, tuple[Delta, list[str]]] = {}

    async def __call__(self, delta: Delta) -> None:
        if delta.kind == "restart":
            self._streams, self._calls, self._last = {}, {}, None
            self._told.clear()
            await self._tell(delta)
        elif delta.kind == "tool_call":
            await self._take_arguments(delta)
        else:
            await self._take_text(delta)

    async def _take_text(self, delta: Delta) -> None:
        await self._turn_to(delta.kind)
        stream = self._streams.get(delta.kind)
        if stream is None:
            stream = self._streams[delta.kind] = self._redaction.stream()
        await self._tell_text(delta.kind, stream.feed(delta.text))

    async def _turn_to(self, kind: str) -> None:
        """Tell the few characters held back of another kind. Otherwise they would come after what follows them."""
        last, self._last = self._last, kind
        if last is not None and last != kind:
            await self._tell_text(last, self._streams[last].fragment())

    async def _take_arguments(self, delta: Delta) -> None:
        if self._last is not None:
            await self._tell_text(self._last, self._streams[self._last].fragment())
        if delta.call_id in self._calls:
            self._calls[delta.call_id][1].append(delta.text)
            return
        self._calls[delta.call_id] = delta, [delta.text]
        name = None if delta.name is None else self._redaction.text(delta.name)
        await self._tell(replace(delta, text="", name=name))

    async def _tell_text(self, kind: str, text: str) -> None:
        if text:
            self._told[kind].append(text)
            await self._tell(Delta("text" if kind == "text" else "thinking", text))

    async def end(self, reply: ModelReply) -> ModelReply:
        """Tell the rest, now that the answer is whole, and return the answer as redactors leave it."""
        for kind, stream in self._streams.items():
            await self._tell_text(kind, stream.flush())
            # The message has the same text, and need not be searched for it again.
            self._redaction.learn("".join(self._told[kind]))
        message = self._redaction.message(reply.message)
        given = {call.id: call for call in reply.message.tool_calls}
        for call in message.tool_calls:
            first, pieces = self._calls.pop(call.id, (None, []))
            if first is not None:
                is_changed = call is not given[call.id]
                # Unless something was replaced, listeners get the arguments as the model has spelled them.
                told = msgspec.json.encode(call.arguments).decode() if is_changed else "".join(pieces)
                await self._tell(replace(first, text=told, name=call.name))
        return reply if message is reply.message else replace(reply, message=message)
