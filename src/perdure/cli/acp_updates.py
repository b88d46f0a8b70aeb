"""The updates that show an editor messages and events of a session, and the messages made from its prompts."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from acp.helpers import (
    ContentBlock,
    SessionUpdate,
    start_tool_call,
    text_block,
    tool_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_tool_call,
    update_user_message_text,
)
from acp.schema import (
    AudioContentBlock,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    ResourceContentBlock,
    TextContentBlock,
    TextResourceContents,
    ToolCallUpdate,
)

from perdure.errors import InvalidData
from perdure.model.execution import PendingCall
from perdure.model.loop_events import AgentStart, MessageEnd, ToolExecutionStart
from perdure.model.message import Media, Message, Text, Thinking, ToolCall, ToolResult
from perdure.model.value import thawed
from perdure.server.feeds import News, Piece
from perdure.sessions.attaching import attach

Block = ContentBlock
_LONGEST = 200
"""The most characters of a call in a title."""


def message_of(prompt: Sequence[Block]) -> Message:
    """Return a prompt as a message."""
    return Message.user(*[_part(block, f"$.prompt[{place}]") for place, block in enumerate(prompt)])


def _part(block: Block, path: str) -> Text | Media:
    match block:
        case TextContentBlock():
            return Text(block.text)
        case ResourceContentBlock():
            return Text(f"[{block.name}]({block.uri})")
        case ImageContentBlock():
            return attach(_bytes(block.data, path), media_type=block.mime_type)
        case EmbeddedResourceContentBlock(resource=TextResourceContents() as resource):
            return Text(f"\n{resource.uri}:\n```\n{resource.text}\n```\n")
        case EmbeddedResourceContentBlock(resource=resource):
            name = resource.uri.rpartition("/")[2] or None
            return attach(_bytes(resource.blob, path), media_type=resource.mime_type, name=name)
        case AudioContentBlock():
            raise InvalidData(path, "audio cannot be sent to this agent")


def _bytes(data: str, path: str) -> bytes:
    try:
        return b64decode(data, validate=True)
    except binascii.Error:
        raise InvalidData(path, "it is not base64") from None


class Updates:
    """The updates for an editor about one run: the run of an id, or the one that answers the message with a key."""

    def __init__(self, *, run: str | None = None, key: str | None = None) -> None:
        self.run = run
        """The id of the run. None until it has begun."""
        self._key = key
        self._open: str | None = None
        self._text = ""
        """The text that the editor has of the message being written."""

    def hear(self, news: News) -> Iterator[SessionUpdate]:
        """Yield the updates for an event or a piece of an answer."""
        if isinstance(news, Piece):
            if news.run == self.run:
                yield from self._grow(news)
            return
        if isinstance(news, AgentStart) and self.run is None and news.key is not None and news.key[0] == self._key:
            self.run = news.loop_id
        if news.loop_id != self.run:
            return
        if isinstance(news, ToolExecutionStart):
            yield update_tool_call(news.call.id, status="in_progress")
        elif isinstance(news, MessageEnd) and not news.message.is_superseded:
            yield from self._tell(news.message)

    def _grow(self, piece: Piece) -> Iterator[SessionUpdate]:
        if self._open != piece.message or (piece.start == 0 and self._text):
            # An editor cannot take text back. If an answer begins again, the new text comes after the old one.
            yield from () if self._open != piece.message else (said("\n\n"),)
            self._open, self._text = piece.message, ""
        if piece.start <= len(self._text):
            yield from self._say(piece.text[len(self._text) - piece.start :])

    def _say(self, text: str) -> Iterator[SessionUpdate]:
        if text:
            self._text += text
            yield said(text)

    def _tell(self, message: Message) -> Iterator[SessionUpdate]:
        for result in message.tool_results:
            yield _ended(result)
        if message.role != "assistant":
            return
        yield from _thoughts(message)
        told = self._text if self._open == message.id else ""
        yield from self._say(message.text[len(told) :] if message.text.startswith(told) else f"\n\n{message.text}")
        self._open, self._text = None, ""
        for call in message.tool_calls:
            yield _begun(call)


def said(text: str) -> SessionUpdate:
    """Return a piece of what the agent says."""
    return update_agent_message_text(text)


def replayed(messages: Iterable[Message], *, is_over: bool) -> Iterator[SessionUpdate]:
    """Yield the updates that show a whole conversation to an editor that has just opened it.

    A call without a result is shown as failed if none can come any more: another message follows, or the run is over.
    """
    unanswered: dict[str, None] = {}
    for message in messages:
        for result in message.tool_results:
            unanswered.pop(result.call_id, None)
            yield _ended(result)
        if message.role == "user":
            yield from map(_given_up, unanswered)
            unanswered.clear()
            yield update_user_message_text(_shown(message))
        elif message.role == "assistant":
            yield from _thoughts(message)
            if message.text:
                yield said(message.text)
            for call in message.tool_calls:
                unanswered[call.id] = None
                yield _begun(call)
    if is_over:
        yield from map(_given_up, unanswered)


def _shown(message: Message) -> str:
    media = [f"[{part.label}]" for part in message.parts if isinstance(part, Media)]
    return " ".join(filter(None, (message.text, *media)))


def _thoughts(message: Message) -> Iterator[SessionUpdate]:
    for part in message.parts:
        if isinstance(part, Thinking) and part.text:
            yield update_agent_thought_text(part.text)


def _begun(call: ToolCall) -> SessionUpdate:
    return start_tool_call(call.id, _title(call), kind="other", status="pending", raw_input=thawed(call.arguments))


def _ended(result: ToolResult) -> SessionUpdate:
    status: Any = "failed" if result.is_error else "completed"
    return update_tool_call(result.call_id, status=status, content=[tool_content(text_block(result.text))])


def _given_up(call_id: str) -> SessionUpdate:
    why = text_block("The run was stopped before there was a result.")
    return update_tool_call(call_id, status="failed", content=[tool_content(why)])


def waiting_call(call: PendingCall) -> ToolCallUpdate:
    """Return the form of a call for an editor's question. A sub-agent's call shows what the sub-agent wants to do."""
    title = ", ".join(f"{_title(leaf)} ({leaf.warning})" if leaf.warning else _title(leaf) for leaf in call.leaves)
    return ToolCallUpdate(
        tool_call_id=call.id, title=title, kind="other", status="pending", raw_input=thawed(call.arguments)
    )


def _title(call: ToolCall) -> str:
    title = f"{call.name}({msgspec.json.encode(call.arguments).decode()})"
    return title if len(title) <= _LONGEST else title[: _LONGEST - 1] + "…"
