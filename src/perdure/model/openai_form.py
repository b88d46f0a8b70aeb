"""Messages as OpenAI's chat completions have them.

The form has no place for thinking, for what only another provider understands, for ids of messages, and for whether a
tool failed. Files that it has no place for are named in a text.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from perdure.model.given_messages import AUDIO, BESIDE
from perdure.model.message import Media, Message, Opaque, Text, ToolCall

_MEDIA_TYPE = re.compile(r"[^\s,;]+/[^\s,]+")
"""The media types that fit into a `data:` URL, in which a comma ends them."""
_FORMATS = {media_type: form for form, media_type in AUDIO.items()}


def openai_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat completions. Calls are paired with results if they are in the given ones."""
    return [each for message in messages for each in _forms(message)]


def _forms(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        for result in message.tool_results:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        return
    beside = message.metadata.get(BESIDE)
    beside = beside if isinstance(beside, Mapping) else {}
    form = _assistant(message, beside) if message.role == "assistant" else _asked(message, beside)
    if form is not None:
        name = beside.get("name")
        yield {**form, "name": name} if isinstance(name, str) else form


def _asked(message: Message, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    content = [_part(part, message.role, of) for part, of in _with_beside(message, beside)]
    if not content:
        return None
    role = "developer" if message.role == "system" and beside.get("role") == "developer" else message.role
    return {"role": role, "content": _short(content)}


def _assistant(message: Message, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    said = [_part(part, "assistant", of) for part, of in _with_beside(message, beside)]
    form: dict[str, Any] = {"role": "assistant"}
    if said and all(part["type"] == "refusal" for part in said):
        form |= {"content": None, "refusal": "".join(part["refusal"] for part in said)}
    elif said or message.tool_calls:
        form["content"] = _short(said) if said else None
    else:
        return None
    calls = [_call(call) for call in message.tool_calls]
    return form | ({"tool_calls": calls} if calls else {})


def _with_beside(message: Message, beside: Mapping[str, Any]) -> Iterator[tuple[Text | Media, Mapping[str, Any]]]:
    """Yield the texts and files, each with what OpenAI says beside it."""
    of_parts = beside.get("parts")
    for place, part in enumerate(message.parts):
        if isinstance(part, Text | Media) and not _belongs_to_opaque(message, place):
            of = of_parts.get(str(place)) if isinstance(of_parts, Mapping) else None
            yield part, of if isinstance(of, Mapping) else {}


def _belongs_to_opaque(message: Message, place: int) -> bool:
    """Tell whether a part is a blank text that an answer has only for the opaque part before it. Both are left out."""
    part, before = message.parts[place], message.parts[place - 1] if place else None
    is_blank = isinstance(part, Text) and not part.text.strip()
    return is_blank and isinstance(before, Opaque) and message.role == "assistant"


def _short(content: list[dict[str, Any]]) -> Any:
    """Return content as a plain text if it is one text."""
    return content[0]["text"] if len(content) == 1 and content[0]["type"] == "text" else content


def _part(part: Text | Media, role: str, beside: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part, Text):
        is_refusal = role == "assistant" and beside.get("refusal") is True
        return {"type": "refusal", "refusal": part.text} if is_refusal else {"type": "text", "text": part.text}
    made = attached(part, beside) if role == "user" else None
    return {"type": "text", "text": described(part)} if made is None else made


def attached(media: Media, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an image or a file in the form for a user's attachment; None if none fits it."""
    if media.url is not None and not media.url.startswith(("https://", "http://")):
        return None
    if media.media_type.startswith("image/"):
        detail = beside.get("detail")
        image = {"url": media.url or _data_url(media), **({"detail": detail} if isinstance(detail, str) else {})}
        return {"type": "image_url", "image_url": image}
    if media.data is None:
        return None
    if media.media_type in _FORMATS:
        return {
            "type": "input_audio",
            "input_audio": {"data": _base64(media.data), "format": _FORMATS[media.media_type]},
        }
    return {"type": "file", "file": {"filename": media.name or "file", "file_data": _data_url(media)}}


def described(media: Media) -> str:
    """Return a line that names an image or a file."""
    what = media.url or (f"{len(media.data):,} bytes" if media.data is not None else "")
    return f"[{': '.join(filter(None, (media.name, media.media_type, what)))}]"


def _data_url(media: Media) -> str:
    kind = media.media_type if _MEDIA_TYPE.fullmatch(media.media_type) else "application/octet-stream"
    return f"data:{kind};base64,{_base64(media.data or b'')}"


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
