"""Entries of Claude Code's transcripts, which the Claude Agent SDK keeps in its session stores, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.adapters.foreign import Form, Lifter
from perdure.model.message import Media, Message, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.value import JSON, thawed

_ANTHROPIC = "anthropic"
_FRAME = frozenset(
    (
        "parentUuid",
        "logicalParentUuid",
        "isSidechain",
        "isMeta",
        "isCompactSummary",
        "userType",
        "cwd",
        "sessionId",
        "version",
        "gitBranch",
        "agentId",
        "requestId",
        "timestamp",
        "type",
        "subtype",
        "operation",
        "mode",
        "leafUuid",
        "sourceToolAssistantUUID",
    )
)
"""The keys that tie entries together. Each entry follows its parent, and the chain would break without them."""
_MESSAGE_FRAME = ("id", "model", "type")
_TEXTS = {"system": "content", "summary": "summary", "queue-operation": "content", "last-prompt": "lastPrompt"}
"""The key of the text in entries of other types than user and assistant."""
_COPIES = ("queue-operation", "last-prompt")
"""The entries that repeat a prompt that is an entry of its own. They are hidden, and redacted with that entry."""


class ClaudeForm(Form):
    """The form of the Claude Agent SDK."""

    name = "claude"
    may_need_no_envelope = False

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        skeleton = lifter.keep_stretches(item, _FRAME)
        if "uuid" in item:
            skeleton["uuid"] = lifter.own_id(item["uuid"])
        kind, said = item["type"], item.get("message")
        if kind in ("user", "assistant") and isinstance(said, dict):
            skeleton["message"] = _message(said, lifter)
            if "toolUseResult" in item:
                skeleton["toolUseResult"] = _said_again(item["toolUseResult"], _results(lifter), lifter)
            return ("assistant" if kind == "assistant" else lifter.asks_as), skeleton
        key = _TEXTS.get(kind)
        if key is not None and key in item and kind not in _COPIES:
            skeleton[key] = lifter.text(item[key])
        return "system", skeleton

    def give(self, message: Message) -> list[JSON]:
        frame, own_id = self.framed(message), self.id_of(message)
        beside, kind = frame.pop("message", {}), frame.pop("type", None)
        key = _TEXTS.get(kind)
        if key is not None:
            return [{"type": kind, **frame, key: message.text, "uuid": own_id}]
        role = "assistant" if message.role == "assistant" else "user"
        content = [block for part in message.parts if (block := _given(part)) is not None]
        # The model's API refuses a message without content.
        said = {**beside, "role": role, "content": content or [{"type": "text", "text": "…"}]}
        return [{"parentUuid": None, "type": role, **frame, "message": said, "uuid": own_id}]


FORM = ClaudeForm()


def _message(said: dict[str, Any], lifter: Lifter) -> JSON:
    skeleton = lifter.keep_stretches(said, _MESSAGE_FRAME, "message")
    content = said["content"]
    if isinstance(content, list):
        skeleton["content"] = [_block(block, lifter) for block in content]
    else:
        skeleton["content"] = lifter.text(content)
    return skeleton


def _results(lifter: Lifter) -> dict[str, int]:
    """Return the texts of tools' answers, each with the index of its part."""
    parts = enumerate(lifter.parts)
    return {part.content: at for at, part in parts if isinstance(part, ToolResult) and isinstance(part.content, str)}


def _said_again(value: Any, results: Mapping[str, int], lifter: Lifter) -> JSON:
    """Return Claude's own copy of a tool's answer, with holes for the texts that have been lifted."""
    match value:
        case str() if value and value in results:
            return lifter.again(results[value])
        case dict():
            return {key: _said_again(each, results, lifter) for key, each in value.items()}
        case list():
            return [_said_again(each, results, lifter) for each in value]
    return value


def _block(block: Any, lifter: Lifter) -> JSON:
    if not isinstance(block, dict):
        return block
    match block:
        case {"type": "text", "text": text}:
            return {**block, "text": lifter.text(text)}
        case {"type": "thinking", "thinking": text}:
            left, signature = lifter.thought(text, block.get("signature"), _ANTHROPIC)
            return {**block, "thinking": left, **({"signature": signature} if "signature" in block else {})}
        case {"type": "tool_use", "id": call_id, "name": name, "input": arguments}:
            left, named = lifter.call(name, arguments, call_id)
            return {**block, "id": named, "input": left}
        case {"type": "tool_result", "tool_use_id": call_id}:
            return _result(block, call_id, lifter)
    return block


def _result(block: dict[str, Any], call_id: Any, lifter: Lifter) -> JSON:
    is_error, content = block.get("is_error") is True, block.get("content")
    if not isinstance(content, list):
        left, named = lifter.result(call_id, content if "content" in block else "", is_error=is_error)
        return {**block, "tool_use_id": named, **({"content": left} if "content" in block else {})}
    blocks, named = lifter.result_in(call_id, content, ("text",), is_error=is_error)
    return {**block, "tool_use_id": named, "content": blocks}


def _given(part: Any) -> Mapping[str, Any] | None:
    """Return a block for a part, or None. Thinking goes back only if it has a signature."""
    match part:
        case Text():
            return {"type": "text", "text": part.text} if part.text else None
        case Thinking() if part.signature and part.provider == _ANTHROPIC:
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ToolCall():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": thawed(part.arguments)}
        case ToolResult():
            failed = {"is_error": True} if part.is_error else {}
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": part.text, **failed}
        case Media():
            return {"type": "text", "text": described(part)}
    return None
