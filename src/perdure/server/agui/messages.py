"""Messages of a front end as messages of a session, and the other way round."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.given_messages import messages_of
from perdure.model.message import Media, Message, Text, Thinking, ToolCall
from perdure.server.agui.inputs import (
    AssistantMessage,
    ContentPart,
    FileSource,
    Said,
    TextPart,
    ToolMessage,
    UrlSource,
    UserMessage,
)
from perdure.sessions.attaching import attach

BESIDE = "agui"
"""The metadata key, in messages and runs, for what the protocol has and perdure has no field for."""


def session_messages(given: Sequence[tuple[str, Said]]) -> list[Message]:
    """Return messages of a front end, each given with its path, as those of a session. They keep their ids."""
    plain = [_plain(message, path) for path, message in given]
    return messages_of(plain, "$.messages", [path for path, _ in given])


def _plain(message: Said, path: str) -> dict[str, Any]:
    """Return a message in the form of OpenAI's chat completions, which AG-UI's messages follow."""
    plain: dict[str, Any] = {"id": message.id, "role": message.__struct_config__.tag}
    if message.metadata:
        plain["metadata"] = {BESIDE: message.metadata}
    if isinstance(message, ToolMessage):
        return {**plain, **_result_of(message)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        plain["content"] = message.content
        calls = [{"id": each.id, "type": each.type, "function": _function(each)} for each in message.tool_calls or ()]
        return {**plain, "tool_calls": calls} if calls else plain
    if isinstance(message, UserMessage) and not isinstance(message.content, str):
        return {**plain, "content": _parts(message.content, path)}
    return {**plain, "content": message.content}


def _function(call: Any) -> dict[str, str]:
    return {"name": call.function.name, "arguments": call.function.arguments}


def _result_of(message: ToolMessage) -> dict[str, Any]:
    content = text_of(message)
    if message.error is None:
        return {"tool_call_id": message.tool_call_id, "content": content}
    return {"tool_call_id": message.tool_call_id, "content": message.error, "is_error": True}


def text_of(message: ToolMessage) -> str:
    """Return the text of a front end's tool result. Raise InvalidData if it has images or files."""
    if isinstance(message.content, str):
        return message.content
    if not all(isinstance(part, TextPart) for part in message.content):
        raise InvalidData("$.messages", "the result of a tool is text here; leave images and files out")
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def _parts(content: Sequence[ContentPart], path: str) -> list[Text | Media]:
    return [_part(part, f"{path}.content[{place}]") for place, part in enumerate(content)]


def _part(part: ContentPart, path: str) -> Text | Media:
    if isinstance(part, TextPart):
        return Text(part.text)
    source = part.source
    if isinstance(source, FileSource):
        raise InvalidData(f"{path}.source", "files at a provider cannot be used here; send their bytes or an address")
    try:
        if isinstance(source, UrlSource):
            if not source.value.lower().startswith(("https://", "http://", "data:")):  # never a file of this machine
                raise InvalidData(f"{path}.source.value", "expected an address: https://…")
            return attach(source.value, media_type=source.mime_type)
        return attach(b64decode(source.value, validate=True), media_type=source.mime_type)
    except binascii.Error:
        raise InvalidData(f"{path}.source.value", "it is not base64") from None
    except InvalidData as error:
        raise InvalidData(f"{path}.source", error.problem) from None


def front_end_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages of a session as a front end shows them."""
    return [shown for message in messages for shown in _shown(message)]


def _shown(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        for result in message.tool_results:
            yield {"id": message.id, "role": "tool", "content": result.text, "toolCallId": result.call_id}
    elif message.role == "assistant":
        thoughts = thoughts_in(message)
        if thoughts:
            yield {"id": reasoning_id(message), "role": "reasoning", "content": thoughts}
        calls = [_call(call) for call in message.tool_calls]
        yield {"id": message.id, "role": "assistant", "content": message.text} | ({"toolCalls": calls} if calls else {})
    else:
        yield {"id": message.id, "role": message.role, "content": _content(message)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as a JSON text."""
    return msgspec.json.encode(call.arguments).decode()


def thoughts_in(message: Message) -> str:
    """Return what a model thought before it wrote a message."""
    return "".join(part.text for part in message.parts if isinstance(part, Thinking))


def reasoning_id(message: Message) -> str:
    """Return the id under which a front end keeps a message's thoughts."""
    return f"{message.id}-reasoning"


def _content(message: Message) -> str | list[dict[str, Any]]:
    media = [part for part in message.parts if isinstance(part, Media)]
    # AG-UI takes parts in messages of users only.
    if not media or message.role != "user":
        return message.text
    return [{"type": "text", "text": message.text}, *map(_media, media)]


def _media(part: Media) -> dict[str, Any]:
    """Return an image or a file by its address. One whose bytes are in the store is shown as its name and size."""
    if part.url is None:
        return {"type": "text", "text": f"[{part.label}]"}
    kind = part.media_type.partition("/")[0]
    source = {"type": "url", "value": part.url, "mimeType": part.media_type}
    return {"type": kind if kind in ("image", "audio", "video") else "document", "source": source}
