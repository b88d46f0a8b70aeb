"""Messages as items of OpenAI's form."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from perdure.model.execution import PendingCall
from perdure.model.given_messages import BESIDE
from perdure.model.message import Media, Message, Text, Thinking, ToolCall, ToolResult
from perdure.model.step import ToolExecution
from perdure.server.openai.inputs import APPROVAL

SERVER = "perdure"
"""The label of the server that runs the agent's own tools."""
Item = dict[str, Any]
IsOutside = Callable[[Message, ToolCall], bool]
"""A function that tells whether a call of a message was made by the client."""


def text_item(message_id: str, text: str, status: str = "completed") -> Item:
    """Return the item of an agent's text. Without a text it has no content yet."""
    content = [text_part(text)] if text else []
    return {"id": f"msg_{message_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_items(message: Message) -> Iterator[Item]:
    """Yield the items of a model's thoughts. A thought without a text is only for its provider."""
    for place, part in enumerate(message.parts):
        if isinstance(part, Thinking) and part.text:
            content = [{"type": "reasoning_text", "text": part.text}]
            yield {"id": f"rs_{message.id}_{place}", "type": "reasoning", "summary": [], "content": content}


def function_item(call: ToolCall, call_id: str | None = None, status: str = "completed") -> Item:
    """Return a call that the client has to make."""
    facts = {"call_id": call_id or call.id, "name": call.name, "arguments": arguments_of(call)}
    return {"id": f"fc_{call_id or call.id}", "type": "function_call", **facts, "status": status}


def request_item(call: PendingCall) -> Item:
    """Return a call that waits for an approval. A sub-agent's shows the calls that would be made."""
    arguments = dict(call.arguments)
    if call.waits_for:
        arguments["waits_for"] = [{"name": leaf.name, "arguments": leaf.arguments} for leaf in call.leaves]
    warning = ", ".join(dict.fromkeys(leaf.warning for leaf in call.leaves if leaf.warning))
    if warning:
        arguments["warning"] = warning
    return {
        # The digest binds the approval to the call as it is shown.
        "id": APPROVAL + call.digest,
        "type": "mcp_approval_request",
        "name": call.name,
        "arguments": _json(arguments),
        "server_label": SERVER,
    }


def call_item(call: ToolCall, status: str = "in_progress", approval: str | None = None) -> Item:
    """Return a call of a tool that the agent has here."""
    return {
        "id": f"mcp_{call.id}",
        # Clients would make a `function_call` themselves.
        "type": "mcp_call",
        "name": call.name,
        "arguments": arguments_of(call),
        "server_label": SERVER,
        "output": None,
        "error": None,
        "status": status,
        "approval_request_id": None if approval is None else APPROVAL + approval,
    }


def done_item(execution: ToolExecution, approval: str | None = None) -> Item:
    """Return a call with its result or its error."""
    item = call_item(execution.call, "completed", approval)
    if execution.error is None:
        return {**item, "output": _told(execution.result)}
    return {**item, "status": "failed", "error": _failed(execution.error.message)}


def pending_items(calls: Iterable[PendingCall]) -> Iterator[Item]:
    """Yield the calls that a run waits with: those that the client makes, and those that a person decides on."""
    for call in calls:
        if call.external:
            yield function_item(call)
            continue
        outside = [leaf for leaf in call.leaves if leaf.external]
        yield from (function_item(leaf, leaf.digest) for leaf in outside)
        if len(outside) < len(call.leaves):
            yield request_item(call)


def arguments_of(call: ToolCall) -> str:
    return _json(call.arguments)


def input_items(message: Message, is_outside: IsOutside, results: Mapping[str, ToolResult]) -> Iterator[Item]:
    """Yield the items of a message. The result of an agent's own tool is part of the item of its call."""
    if message.role == "tool":
        return
    if message.role != "assistant":
        yield _said(message)
        return
    if text := "".join(part.text for part in message.parts if isinstance(part, Text)):
        yield text_item(message.id, text, "incomplete" if message.is_incomplete else "completed")
    yield from thought_items(message)
    for call in message.tool_calls:
        result = results.get(call.id)
        if is_outside(message, call):
            yield function_item(call)
            yield from () if result is None else (output_item(call.id, result.content),)
        else:
            yield _called(call, result)


def _called(call: ToolCall, result: ToolResult | None) -> Item:
    item = call_item(call, "completed" if result is not None else "incomplete")
    if result is None:
        return item
    return (
        {**item, "status": "failed", "error": _failed(result.text)}
        if result.is_error
        else {
            **item,
            "output": result.text,
        }
    )


def output_item(call_id: str, result: Any) -> Item:
    """Return the result of a call as the client has given it."""
    return {
        "id": f"fco_{call_id}",
        "type": "function_call_output",
        "call_id": call_id,
        "output": _told(result),
        "status": "completed",
    }


def decision_item(digest: str, reason: str | None = None) -> Item:
    """Return a decision on a call: an approval, or with a reason a denial."""
    return {
        "id": f"mcpa_{digest}",
        "type": "mcp_approval_response",
        "approval_request_id": APPROVAL + digest,
        "approve": reason is None,
        "reason": reason,
    }


def _said(message: Message) -> Item:
    beside = message.metadata.get(BESIDE)
    role = beside.get("role", message.role) if isinstance(beside, Mapping) else message.role
    content = [made for part in message.parts if (made := _part(part)) is not None]
    return {"id": f"msg_{message.id}", "type": "message", "role": role, "status": "completed", "content": content}


def _part(part: object) -> Item | None:
    if isinstance(part, Text):
        return {"type": "input_text", "text": part.text}
    if not isinstance(part, Media):
        return None
    if part.media_type.startswith("image/"):
        return {"type": "input_image", "detail": "auto", "image_url": _address(part)}
    if part.url is not None:
        return {"type": "input_file", "filename": part.name, "file_url": part.url}
    return {"type": "input_file", "filename": part.name, "file_data": _address(part)}


def _address(media: Media) -> str | None:
    """Return the address of an image or a file, or its bytes as an address. Return None if they are stored apart."""
    if media.data is None:
        return media.url
    return f"data:{media.media_type};base64,{binascii.b2a_base64(media.data, newline=False).decode()}"


def _failed(message: str) -> Item:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": message}]}


def _told(result: Any) -> str:
    return result if isinstance(result, str) else _json(result)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
