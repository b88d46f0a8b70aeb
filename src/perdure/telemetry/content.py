"""Messages in the form that the conventions give them in attributes. Used only if content is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from perdure.model.message import Media, Message, Part, Text, Thinking, ToolCall, ToolResult
from perdure.protocols import ModelRequest
from perdure.telemetry import attributes as names


def asked_of(request: ModelRequest) -> dict[str, str]:
    """Return the content of a request: messages, instructions and tools."""
    told = {names.INPUT_MESSAGES: said(request.messages)}
    if request.system_prompt:
        told[names.INSTRUCTIONS] = as_text([{"type": "text", "content": request.system_prompt}])
    if request.tools:
        told[names.TOOL_DEFINITIONS] = as_text(
            [
                {"type": "function", "name": each.name, "description": each.description, "parameters": each.parameters}
                for each in request.tools
            ]
        )
    return told


def said(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """Return messages as the JSON of the conventions. A model's message also has the reason why it ended."""
    end = {} if finish_reason is None else {"finish_reason": finish_reason}
    return as_text([{"role": each.role, "parts": list(_parts(each)), **end} for each in messages])


def as_text(value: Any) -> str:
    """Return a value as JSON. A text is returned as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    for part in message.parts:
        found = _part(part)
        if found is not None:
            yield found


def _part(part: Part) -> dict[str, Any] | None:
    match part:
        case Text():
            return {"type": "text", "content": part.text}
        case Thinking():
            return {"type": "reasoning", "content": part.text}
        case ToolCall():
            return {"type": "tool_call", "id": part.id, "name": part.name, "arguments": part.arguments}
        case ToolResult():
            return {"type": "tool_call_response", "id": part.call_id, "response": part.content}
        case Media():
            # Without the bytes: most exporters drop a span of megabytes.
            return {"type": "media", "mime_type": part.media_type, "name": part.name, "size": part.length}
    return None
