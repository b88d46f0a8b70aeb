"""Events of Google's Agent Development Kit, as `Event.model_dump(mode="json")` writes them, in either spelling."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

from perdure.adapters.foreign import Form, Lifter
from perdure.model.message import Media, Message, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.value import JSON, thawed

_FRAME = ("invocation_id", "invocationId", "author", "timestamp", "branch")
_CALLS = ("function_call", "functionCall")
_RESPONSES = ("function_response", "functionResponse")
_SIGNATURES = ("thought_signature", "thoughtSignature")
_GOOGLE = "google"


class AdkForm(Form):
    """The form of Google ADK."""

    name = "adk"
    may_need_no_envelope = False

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        skeleton = {**item, **lifter.keep_all(item, _FRAME)}
        if "id" in item:
            skeleton["id"] = lifter.own_id(item["id"])
        content = item.get("content")
        if not isinstance(content, dict) or not isinstance(content.get("parts"), list):
            return "system", skeleton
        skeleton["content"] = {**content, "parts": [_part(part, lifter) for part in content["parts"]]}
        return ("assistant" if content.get("role") == "model" else lifter.asks_as), skeleton

    def give(self, message: Message) -> list[JSON]:
        """Return an event. It keeps its author. A message that perdure has made gets `user` or `model`."""
        is_answer = message.role == "assistant"
        parts = [given for part in message.parts if (given := _given(part)) is not None]
        content = {"content": {"parts": parts, "role": "model" if is_answer else "user"}} if parts else {}
        author = {"author": "model" if is_answer else "user"}
        return [{**content, **author, **self.framed(message), "id": self.id_of(message)}]


FORM = AdkForm()


def _part(part: Any, lifter: Lifter) -> JSON:
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("text"), str):
        return _said(part, lifter)
    for key in _CALLS:
        if isinstance(part.get(key), dict):
            return {**part, key: _call(part[key], lifter)}
    for key in _RESPONSES:
        if isinstance(part.get(key), dict):
            return {**part, key: _response(part[key], lifter)}
    return part


def _said(part: dict[str, Any], lifter: Lifter) -> JSON:
    if part.get("thought") is not True:
        return {**part, "text": lifter.text(part["text"])}
    key = next((key for key in _SIGNATURES if key in part), None)
    text, signature = lifter.thought(part["text"], part.get(key) if key else None, _GOOGLE)
    return {**part, "text": text, **({key: signature} if key else {})}


def _call(call: dict[str, Any], lifter: Lifter) -> JSON:
    """Lift a call. One without an id is known by its tool's name, and so is its response."""
    arguments, call_id = lifter.call(call.get("name"), call.get("args", {}), call.get("id") or call.get("name"))
    return {**call, **({"args": arguments} if "args" in call else {}), **({"id": call_id} if call.get("id") else {})}


def _response(response: dict[str, Any], lifter: Lifter) -> JSON:
    told = response.get("response")
    is_error = isinstance(told, dict) and "error" in told
    known = response.get("id") or response.get("name")
    if "response" not in response:
        return response
    left, call_id = lifter.result(known, told, name=response.get("name"), is_error=is_error)
    return {**response, "response": left, **({"id": call_id} if response.get("id") else {})}


def _given(part: Any) -> JSON:
    """Return a part of an event's content, or None. Thinking goes back only to the provider that wrote it."""
    match part:
        case Text():
            return {"text": part.text}
        case Thinking() if part.provider == _GOOGLE:
            signed = {"thought_signature": part.signature} if part.signature else {}
            return {"text": part.text, "thought": True, **signed}
        case ToolCall():
            return {"function_call": {"id": part.id, "args": thawed(part.arguments), "name": part.name}}
        case ToolResult():
            return {"function_response": {"id": part.call_id, "name": part.name or "tool", "response": _told(part)}}
        case Media():
            return _shown(part)
    return None


def _told(part: ToolResult) -> Mapping[str, Any]:
    """Return a result as an object, which is what ADK takes."""
    if isinstance(part.content, dict):
        told: Mapping[str, Any] = thawed(part.content)
        return told
    return {"error" if part.is_error else "result": thawed(part.content)}


def _shown(part: Media) -> JSON:
    if part.data is not None:
        # Pydantic, which reads the event again, writes and reads bytes in the URL-safe alphabet.
        data = binascii.b2a_base64(part.data, newline=False).decode().replace("+", "-").replace("/", "_")
        return {"inline_data": {"data": data, "mime_type": part.media_type}}
    if part.url is not None:
        return {"file_data": {"file_uri": part.url, "mime_type": part.media_type}}
    return {"text": described(part)}
