"""Turns the result of an MCP tool into JSON, which a tool's result can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.model.value import JSON

if TYPE_CHECKING:
    from mcp_types import CallToolResult


def value_of(result: CallToolResult) -> JSON:
    """Return the structured content, or the text. Both, if the text says something else.

    A result carries JSON: images, audio and binary resources are not carried, and a line says so.
    """
    texts = _texts(result)
    said = "\n".join(texts)
    structured: Any = result.structured_content
    if structured is None:
        return said
    plain = structured["result"] if isinstance(structured, Mapping) and set(structured) == {"result"} else structured
    if not texts or _says(texts, structured):
        return structured
    # Servers wrap what is not an object: {"result": 3} says no more than "3".
    return plain if _says(texts, plain) else {"content": said, "structuredContent": structured}


def said_in(result: CallToolResult) -> str:
    """Return the text of a result."""
    return "\n".join(_texts(result))


def _texts(result: CallToolResult) -> list[str]:
    blocks = [block.model_dump(by_alias=True, mode="json", exclude_none=True) for block in result.content]
    return [_text(block) for block in blocks]


def _text(block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "text", "text": text}:
            return str(text)
        case {"type": "resource", "resource": {"uri": uri, "text": text}}:
            return f"{uri}:\n{text}"
        case {"type": "resource", "resource": {"uri": uri, "blob": blob, **rest}}:
            return _left_out(f"the resource {uri}", rest.get("mimeType"), blob)
        case {"type": "resource_link", "uri": uri, "name": name}:
            about = f": {block['description']}" if "description" in block else ""
            return f"[{name}]({uri}){about}"
        case {"type": "image" | "audio" as kind, "data": data}:
            return _left_out("an image" if kind == "image" else "a sound", block.get("mimeType"), data)
    return f"[not shown: content of the type {block.get('type')}]"


def _left_out(what: str, media_type: object, base64: str) -> str:
    return f"[not shown: {what}, {media_type or 'of an unknown type'}, {len(base64) * 3 // 4:,} bytes]"


def _says(texts: Sequence[str], value: object) -> bool:
    """Tell whether texts are a value in JSON, or each an item of it."""
    if _is_said("\n".join(texts), value):
        return True
    return isinstance(value, list) and len(value) == len(texts) and all(map(_is_said, texts, value))


def _is_said(text: str, value: object) -> bool:
    if text == value:
        return True
    try:
        return bool(msgspec.json.decode(text) == value)
    except (msgspec.DecodeError, RecursionError):
        return False
