"""Session messages of Strands Agents, as `SessionMessage.to_dict` writes them."""

from __future__ import annotations

import binascii
from typing import Any

from perdure.adapters.foreign import Form, Lifter
from perdure.model.message import Media, Message, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.value import JSON, thawed

_FRAME = ("message_id", "created_at", "updated_at")
_MESSAGE_FRAME, _COUNTS = ("tracking_id",), ("usage", "metrics")
_IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
_UNTOLD = "1970-01-01T00:00:00+00:00"


class StrandsForm(Form):
    """The form of Strands Agents."""

    name = "strands"

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        # A message that a guardrail has replaced is kept in the envelope, and not shown.
        shown = "message" if item.get("redact_message") is None else "redact_message"
        message = item[shown]
        skeleton = {**item, **lifter.keep_all(item, _FRAME), shown: _message(message, lifter)}
        return ("assistant" if message["role"] == "assistant" else lifter.asks_as), skeleton

    def give(self, message: Message) -> list[JSON]:
        """Return a session message. One that Strands has not numbered gets 0, which the adapter replaces."""
        frame = self.framed(message)
        # Models refuse a message without content.
        content = [block for part in message.parts if (block := _given(part)) is not None] or [{"text": "…"}]
        said = {"role": "assistant" if message.role == "assistant" else "user", "content": content}
        if "metadata" in frame:
            said["metadata"] = frame["metadata"]
        said |= frame.get("message", {})
        created = frame.get("created_at", _UNTOLD)
        return [
            {
                "message": said,
                "message_id": frame.get("message_id", 0),
                "redact_message": None,
                "created_at": created,
                "updated_at": frame.get("updated_at", created),
            }
        ]


FORM = StrandsForm()


def _message(message: dict[str, Any], lifter: Lifter) -> JSON:
    skeleton = {**message, "content": [_block(block, lifter) for block in message["content"]]}
    skeleton |= lifter.keep_in("message", message, _MESSAGE_FRAME)
    metadata = message.get("metadata")
    if isinstance(metadata, dict):
        counted = {key: metadata[key] for key in _COUNTS if _is_counted(metadata.get(key))}
        skeleton["metadata"] = {**metadata, **lifter.keep_in("metadata", counted, _COUNTS)}
    return skeleton


def _is_counted(counts: Any) -> bool:
    """Tell whether a value has only numbers. It cannot contain anything that a redaction has to erase."""
    return isinstance(counts, dict) and all(isinstance(count, int | float) for count in counts.values())


def _block(block: Any, lifter: Lifter) -> JSON:
    if not isinstance(block, dict) or not block:
        return block
    if "text" in block:
        return {**block, "text": lifter.text(block["text"])}
    if isinstance(block.get("toolUse"), dict):
        return {**block, "toolUse": _call(block["toolUse"], lifter)}
    if isinstance(block.get("toolResult"), dict):
        return {**block, "toolResult": _result(block["toolResult"], lifter)}
    thought = block.get("reasoningContent")
    if isinstance(thought, dict) and isinstance(thought.get("reasoningText"), dict):
        return {**block, "reasoningContent": {**thought, "reasoningText": _thought(thought["reasoningText"], lifter)}}
    return block


def _call(call: dict[str, Any], lifter: Lifter) -> JSON:
    if not {"toolUseId", "name", "input"} <= call.keys():
        return call
    arguments, call_id = lifter.call(call["name"], call["input"], call["toolUseId"])
    return {**call, "input": arguments, "toolUseId": call_id}


def _result(result: dict[str, Any], lifter: Lifter) -> JSON:
    content = result.get("content")
    if "toolUseId" not in result or not isinstance(content, list):
        return result
    is_error = result.get("status") == "error"
    left, call_id = lifter.result_in(result["toolUseId"], content, ("text", "json"), is_error=is_error)
    return {**result, "toolUseId": call_id, "content": left}


def _thought(thought: dict[str, Any], lifter: Lifter) -> JSON:
    text, signature = lifter.thought(thought.get("text"), thought.get("signature"))
    left = {"text": text, "signature": signature}
    return {key: left.get(key, value) for key, value in thought.items()}


def _given(part: Any) -> JSON:
    """Return a block for a part, or None. Thinking goes back only with a signature that Strands has given."""
    match part:
        case Text():
            return {"text": part.text} if part.text else None
        # Strands does not name the provider of a signature: one that is named is from elsewhere.
        case Thinking() if part.signature and not part.provider:
            return {"reasoningContent": {"reasoningText": {"text": part.text, "signature": part.signature}}}
        case ToolCall():
            return {"toolUse": {"toolUseId": part.id, "name": part.name, "input": thawed(part.arguments)}}
        case ToolResult():
            piece = {"text": part.content} if isinstance(part.content, str) else {"json": thawed(part.content)}
            status = "error" if part.is_error else "success"
            return {"toolResult": {"toolUseId": part.call_id, "status": status, "content": [piece]}}
        case Media():
            return _shown(part)
    return None


def _shown(part: Media) -> JSON:
    if part.data is None or part.media_type not in _IMAGES:
        return {"text": described(part)}
    encoded = {"__bytes_encoded__": True, "data": binascii.b2a_base64(part.data, newline=False).decode()}
    return {"image": {"format": _IMAGES[part.media_type], "source": {"bytes": encoded}}}
