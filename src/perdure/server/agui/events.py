"""A session's events as those of AG-UI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perdure.errors import PerdureError
from perdure.model.execution import PendingCall
from perdure.model.loop_events import AgentStart, MessageEnd
from perdure.model.message import Message
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.server.agui.messages import BESIDE, arguments_of, reasoning_id, thoughts_in
from perdure.server.feeds import News, Piece
from perdure.server.problems import problem_of
from perdure.sessions.reply import Reply

VERSION = "1.0"
"""The version of the protocol that is spoken here."""
SNAPSHOT = "MESSAGES_SNAPSHOT"
_APPROVAL = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}
Event = dict[str, Any]


class Teller:
    """A translator of one run's events: of the run with an id, or of the one that answers the message with a key.

    `known` are the ids of the messages that the front end has.
    """

    def __init__(self, *, run: str | None = None, key: str | None = None, known: Iterable[str] = ()) -> None:
        self.run = run
        self._key = key
        self._known = set(known)
        self._open: str | None = None
        """The message that is being written."""
        self._text = ""
        """The text of it that was told so far."""

    def hear(self, news: News) -> Iterator[Event]:
        """Yield the AG-UI events for something that happened."""
        if isinstance(news, Piece):
            if news.run == self.run and news.message not in self._known:
                yield from self._grow(news)
            return
        if isinstance(news, AgentStart) and self.run is None and news.key is not None and news.key[0] == self._key:
            self.run = news.loop_id
        if news.loop_id == self.run and isinstance(news, MessageEnd) and news.message.id not in self._known:
            self._known.add(news.message.id)
            yield from self._tell(news.message)

    def end(self) -> Iterator[Event]:
        """Yield the event that closes a message which was never finished."""
        if self._open is not None:
            yield {"type": "TEXT_MESSAGE_END", "messageId": self._open}
            self._open, self._text = None, ""

    def _grow(self, piece: Piece) -> Iterator[Event]:
        if self._open != piece.message or (piece.start == 0 and self._text):
            yield from self._begin(piece.message)
        if piece.start <= len(self._text):  # else the whole message comes later
            yield from self._say(piece.text[len(self._text) - piece.start :])

    def _begin(self, message_id: str, role: str = "assistant") -> Iterator[Event]:
        yield from self._take_back()
        self._open, self._text = message_id, ""
        yield {"type": "TEXT_MESSAGE_START", "messageId": message_id, "role": role}

    def _take_back(self) -> Iterator[Event]:
        """Take back an unfinished message by a snapshot without it. The caller fills the snapshot in."""
        if self._open is not None:
            yield from self.end()
            # AG-UI has no event that takes text back.
            yield {"type": SNAPSHOT}

    def _say(self, text: str) -> Iterator[Event]:
        if text and self._open is not None:
            self._text += text
            yield {"type": "TEXT_MESSAGE_CONTENT", "messageId": self._open, "delta": text}

    def _tell(self, message: Message) -> Iterator[Event]:
        if message.is_superseded:
            yield from self._take_back()
        elif message.role == "tool":
            for result in message.tool_results:
                ids = {"messageId": message.id, "toolCallId": result.call_id}
                yield {"type": "TOOL_CALL_RESULT", **ids, "content": result.text, "role": "tool"}
        elif message.role == "assistant":
            yield from self._answer(message)
        else:  # a message that steers the run
            yield from self._begin(message.id, message.role)
            yield from self._say(message.text)
            yield from self.end()

    def _answer(self, message: Message) -> Iterator[Event]:
        is_streamed = self._open == message.id and message.text.startswith(self._text)
        if not is_streamed:
            yield from self._take_back()
            yield from _reasoning(message)
        if not is_streamed and message.text:
            yield from self._begin(message.id)
        yield from self._say(message.text[len(self._text) :])
        yield from self.end()
        if is_streamed:
            # Thoughts are known once the answer is whole, so they come after text that was streamed.
            yield from _reasoning(message)
        for call in message.tool_calls:
            named = {"toolCallId": call.id, "toolCallName": call.name, "parentMessageId": message.id}
            yield {"type": "TOOL_CALL_START", **named}
            yield {"type": "TOOL_CALL_ARGS", "toolCallId": call.id, "delta": arguments_of(call)}
            yield {"type": "TOOL_CALL_END", "toolCallId": call.id}


def _reasoning(message: Message) -> Iterator[Event]:
    thoughts, name = thoughts_in(message), {"messageId": reasoning_id(message)}
    if not thoughts:
        return
    yield {"type": "REASONING_START", **name}
    yield {"type": "REASONING_MESSAGE_START", **name, "role": "reasoning"}
    yield {"type": "REASONING_MESSAGE_CONTENT", **name, "delta": thoughts}
    yield {"type": "REASONING_MESSAGE_END", **name}
    yield {"type": "REASONING_END", **name}


def finished(reply: Reply[Any], *, thread: str, run: str) -> Event:
    """Return the event that ends a run which has an answer, or waits for a decision."""
    session, execution = reply.session, reply.session.state.execution
    ours = {"session": session.id, "version": session.version, "run": execution.execution_id if execution else None}
    event: Event = {"type": "RUN_FINISHED", "threadId": thread, "runId": run, "outcome": _outcome(reply)}
    model = session.state.model_for(session.definition)
    if reply.usage != Usage():
        event["usage"] = [_usage(reply.usage, None if model is None else model.name)]
    return {**event, "metadata": {BESIDE: ours}}


def failed(error: PerdureError) -> Event:
    """Return the event that ends a run which has failed."""
    problem = problem_of(error)
    return {"type": "RUN_ERROR", "message": problem.detail, "code": problem.title}


def _outcome(reply: Reply[Any]) -> Event:
    calls = reply.pending_calls
    if calls and all(call.external for call in calls):  # a front end answers these by messages
        return {"type": "success", "pendingToolCallIds": [call.id for call in calls]}
    if calls:
        return {"type": "interrupt", "interrupts": [interrupt for call in calls for interrupt in _interrupts(call)]}
    if reply.stop_reason is StopReason.USER_REQUESTED:
        return {"type": "cancelled"}
    return {"type": "success"}


def _interrupts(call: PendingCall) -> Iterator[Event]:
    """Yield the interrupts of a call. The id is the call's digest, which binds an answer to what was shown."""
    outside = [leaf for leaf in call.leaves if leaf.external]
    if len(outside) < len(call.leaves):
        wanted = ", ".join(_asked(leaf) for leaf in call.leaves if not leaf.external)
        yield {**_interrupt(call, call, f"May this be done? {wanted}"), "responseSchema": _APPROVAL}
    for leaf in outside:
        yield _interrupt(call, leaf, f"What is the result of {leaf.name}({arguments_of(leaf)})?")


def _asked(leaf: PendingCall) -> str:
    asked = f"{leaf.name}({arguments_of(leaf)})"
    return f"{asked} ({leaf.warning})" if leaf.warning else asked


def _interrupt(call: PendingCall, leaf: PendingCall, message: str) -> Event:
    wanted = {"name": leaf.name, "arguments": leaf.arguments}
    facts = {"reason": "tool_call", "message": message, "toolCallId": call.id}
    return {"id": leaf.digest, **facts, "metadata": {BESIDE: wanted}}


def _usage(usage: Usage, model: str | None) -> Event:
    provider, _, name = (model or "").rpartition(":")
    counted = {
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_tokens,
        "reasoningTokens": usage.reasoning_tokens,
        "cachedInputTokens": usage.cache_read_tokens,
        "cacheWriteInputTokens": usage.cache_write_tokens,
    }
    named = {"provider": provider, "model": name}
    return {**{each: value for each, value in named.items() if value}, **counted}
