"""LangChain's messages, as `messages_to_dict` or `model_dump` writes them; LangGraph keeps them in its threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.adapters.foreign import Form, Lifter, same
from perdure.model.message import Media, Message, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import attached, described
from perdure.model.value import JSON, thawed

_ROLES: Mapping[Any, Role] = {
    "human": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "system": "system",
    "SystemMessageChunk": "system",
    "tool": "tool",
    "ToolMessageChunk": "tool",
    "function": "tool",
    "chat": "user",
}
_KINDS: Mapping[Role, str] = {"user": "human", "assistant": "ai", "system": "system", "tool": "tool"}
_THOUGHTS = {"thinking": "thinking", "reasoning": "reasoning", "reasoning_content": "text"}
_CALL_BLOCKS = {"tool_use": "input", "tool_call": "args"}
_FLAT = "flat"
"""The frame's key of an item that is the message itself, and not a type with data."""


class LangChainForm(Form):
    """The form of LangChain, in either of its two shapes."""

    name = "langchain"

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        if isinstance(item.get("data"), dict):
            role, data = _take(item["data"], item["type"], lifter)
            return role, {**item, "data": data}
        lifter.keep(_FLAT, True)
        return _take(item, item["type"], lifter)

    def give(self, message: Message) -> list[JSON]:
        own_id = self.id_of(message)
        results = message.tool_results
        data = [_result(part, own_id if len(results) == 1 else f"{own_id}-{part.call_id}") for part in results]
        data = data or [_said(message, own_id)]
        if self.frame(message).get(_FLAT):
            return data
        return [{"type": each["type"], "data": each} for each in data]


FORM = LangChainForm()


def _take(data: dict[str, Any], kind: Any, lifter: Lifter) -> tuple[Role, JSON]:
    role = _ROLES[kind]
    skeleton = dict(data)
    if "id" in data:
        skeleton["id"] = lifter.own_id(data["id"])
    if kind in ("tool", "ToolMessageChunk"):
        return role, {**skeleton, **_take_result(data, lifter)}
    content = data["content"]
    if isinstance(content, list):
        skeleton["content"] = [_block(block, lifter) for block in content]
    else:
        skeleton["content"] = lifter.text(content)
    if isinstance(data.get("tool_calls"), list):
        skeleton["tool_calls"] = [_call(call, lifter) for call in data["tool_calls"]]
        _say_once(data, skeleton, lifter)
    return role, skeleton


def _take_result(data: dict[str, Any], lifter: Lifter) -> dict[str, JSON]:
    content, is_error = data["content"], data.get("status") == "error"
    call_id, name = data["tool_call_id"], data.get("name")
    if isinstance(content, list):
        left, named = lifter.result_in(call_id, content, ("text",), name=name, is_error=is_error)
    else:
        left, named = lifter.result(call_id, content, name=name, is_error=is_error)
    return {"content": left, "tool_call_id": named}


def _block(block: Any, lifter: Lifter) -> JSON:
    if isinstance(block, str):
        return lifter.text(block)
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and "text" in block:
        return {**block, "text": lifter.text(block["text"])}
    key = _THOUGHTS.get(kind) if isinstance(kind, str) else None
    if key is None or key not in block:
        return block
    text, signature = lifter.thought(block[key], block.get("signature"), _thinker(kind))
    return {**block, key: text, **({"signature": signature} if "signature" in block else {})}


def _thinker(kind: Any) -> str | None:
    """Return the provider that writes blocks of this kind. No other can use their signature."""
    return "anthropic" if kind == "thinking" else None


def _call(call: Any, lifter: Lifter) -> JSON:
    if not isinstance(call, dict) or not {"name", "args", "id"} <= call.keys():
        return call
    arguments, call_id = lifter.call(call["name"], call["args"], call["id"])
    return {**call, "args": arguments, "id": call_id}


def _say_once(data: dict[str, Any], skeleton: dict[str, Any], lifter: Lifter) -> None:
    """Replace calls in the content by holes. Anthropic's answers have each call twice."""
    places = {part.id: place for place, part in enumerate(lifter.parts) if isinstance(part, ToolCall)}
    calls = [call for call in data["tool_calls"] if isinstance(call, dict) and _is_in(call.get("id"), places)]
    given = {call["id"]: call["args"] for call in calls}
    blocks = skeleton["content"] if isinstance(skeleton["content"], list) else []
    for at, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        key = _CALL_BLOCKS.get(kind) if isinstance(kind, str) else None
        if key is not None and _is_in(block.get("id"), given) and same(block.get(key), given[block["id"]]):
            blocks[at] = {**block, key: lifter.again(places[block["id"]])}


def _is_in(key: Any, known: Mapping[str, Any]) -> bool:
    return isinstance(key, str) and key in known


def _said(message: Message, own_id: str) -> dict[str, JSON]:
    role: Role = "user" if message.role == "tool" else message.role
    form = {**_common(_content(message, role), _KINDS[role]), "id": own_id}
    if role != "assistant":
        return form
    calls = [
        {"name": call.name, "args": thawed(call.arguments), "id": call.id, "type": "tool_call"}
        for call in message.tool_calls
    ]
    return {**form, "tool_calls": calls, "invalid_tool_calls": [], "usage_metadata": None}


def _common(content: JSON, kind: str, name: str | None = None) -> dict[str, JSON]:
    return {"content": content, "additional_kwargs": {}, "response_metadata": {}, "type": kind, "name": name}


def _content(message: Message, role: Role) -> JSON:
    """Return what a message says, as a text if it has nothing else. Thinking goes back to its provider only."""
    said = [part for part in message.parts if isinstance(part, Text | Media)]
    thoughts = [part for part in message.parts if isinstance(part, Thinking) and part.signature and part.provider]
    if not thoughts and all(isinstance(part, Text) for part in said):
        return "".join(part.text for part in said if isinstance(part, Text))
    blocks: list[JSON] = [
        {"type": "thinking", "thinking": part.text, "signature": part.signature}
        for part in thoughts
        if part.provider == "anthropic"
    ]
    return blocks + [_shown(part, role) for part in said]


def _shown(part: Text | Media, role: Role) -> JSON:
    form = attached(part, {}) if isinstance(part, Media) and role == "user" else None
    if form is not None and form["type"] == "image_url":
        return form
    return {"type": "text", "text": part.text if isinstance(part, Text) else described(part)}


def _result(part: ToolResult, own_id: str) -> dict[str, JSON]:
    content = part.content if isinstance(part.content, str) else part.text
    told = {"tool_call_id": part.call_id, "artifact": None, "status": "error" if part.is_error else "success"}
    return {**_common(content, "tool", part.name), "id": own_id, **told}
