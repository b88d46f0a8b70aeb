"""Messages of Pydantic AI, as `ModelMessagesTypeAdapter` writes them: requests and responses made of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.adapters.foreign import Form, Lifter
from perdure.model.message import Media, Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.value import JSON, thawed

_FRAME = ("timestamp", "run_id", "conversation_id", "model_name", "provider_name")
_FAILED = ("failed", "retried")


class PydanticForm(Form):
    """The form of Pydantic AI."""

    name = "pydantic-ai"
    may_need_no_envelope = False

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        parts, kind = item["parts"], item["kind"]
        skeleton = {**item, **lifter.keep_all(item, _FRAME)}
        if kind == "response":
            skeleton["parts"] = [_response_part(part, lifter) for part in parts]
            return "assistant", skeleton
        kinds = [part["part_kind"] for part in parts]
        reads_system = all(each == "system-prompt" for each in kinds)
        skeleton["parts"] = [_request_part(part, lifter, reads_system=reads_system) for part in parts]
        return _role(lifter, reads_system=reads_system), skeleton

    def give(self, message: Message) -> list[JSON]:
        """Return a request or a response, or both for an answer that has results beside its calls."""
        frame = self.framed(message)
        if message.role != "assistant":
            said = "system-prompt" if message.role == "system" else "user-prompt"
            return [_request(message.parts, frame, said)]
        parts = [given for part in message.parts if (given := _answered(part)) is not None]
        response = {"parts": parts, **frame, "kind": "response"}
        return [response, *([_request(message.tool_results, frame)] if message.tool_results else [])]


FORM = PydanticForm()


def _request(parts: Sequence[Part], frame: Mapping[str, Any], said: str = "user-prompt") -> JSON:
    asked = [given for part in parts if (given := _asked(part, said)) is not None]
    kept = {key: frame[key] for key in ("timestamp", "run_id", "conversation_id") if key in frame}
    return {"parts": asked, **kept, "kind": "request"}


def _role(lifter: Lifter, *, reads_system: bool) -> Role:
    parts = lifter.parts
    if parts and all(isinstance(part, ToolResult) for part in parts):
        return "tool"
    return "system" if reads_system else "user"


def _request_part(part: dict[str, Any], lifter: Lifter, *, reads_system: bool) -> JSON:
    """Lift a part of a request. A system prompt beside a user's words is not the user's, and stays in the envelope."""
    match part["part_kind"]:
        case "user-prompt":
            return {**part, "content": _prompt(part["content"], lifter)}
        case "system-prompt" if reads_system:
            return {**part, "content": lifter.text(part["content"])}
        case "tool-return":
            is_error = part.get("outcome") in _FAILED
            left, call_id = lifter.result(
                part["tool_call_id"], part["content"], name=part["tool_name"], is_error=is_error
            )
            return {**part, "content": left, "tool_call_id": call_id}
        case "retry-prompt" if part.get("tool_name"):
            left, call_id = lifter.result(part["tool_call_id"], part["content"], name=part["tool_name"], is_error=True)
            return {**part, "content": left, "tool_call_id": call_id}
        case "retry-prompt":
            return {**part, "content": lifter.text(part["content"])}
    return part


def _prompt(content: Any, lifter: Lifter) -> JSON:
    if not isinstance(content, list):
        return lifter.text(content)
    return [_prompt_piece(piece, lifter) for piece in content]


def _prompt_piece(piece: Any, lifter: Lifter) -> JSON:
    if isinstance(piece, dict) and piece.get("kind") == "text" and "content" in piece:
        return {**piece, "content": lifter.text(piece["content"])}
    return lifter.text(piece)


def _response_part(part: dict[str, Any], lifter: Lifter) -> JSON:
    match part["part_kind"]:
        case "text":
            return {**part, "content": lifter.text(part["content"])}
        case "thinking":
            provider = part.get("provider_name")
            text, signature = lifter.thought(
                part["content"], part.get("signature"), provider if isinstance(provider, str) else None, part.get("id")
            )
            return {**part, "content": text, **({"signature": signature} if "signature" in part else {})}
        case "tool-call" | "builtin-tool-call":
            return _call(part, lifter)
        case "builtin-tool-return":
            left, call_id = lifter.result(part["tool_call_id"], part["content"], name=part["tool_name"])
            return {**part, "content": left, "tool_call_id": call_id}
    return part


def _call(part: dict[str, Any], lifter: Lifter) -> JSON:
    given = part.get("args")
    arguments, call_id = lifter.call(part["tool_name"], {} if given in (None, "") else given, part["tool_call_id"])
    return {**part, "tool_call_id": call_id, **({} if given in (None, "") else {"args": arguments})}


def _answered(part: Any) -> Mapping[str, Any] | None:
    match part:
        case Text():
            return {"content": part.text, "part_kind": "text"}
        case Thinking() if part.provider:
            named = {"id": part.id, "signature": part.signature, "provider_name": part.provider}
            return {"content": part.text, **named, "part_kind": "thinking"}
        case ToolCall():
            told = {"tool_name": part.name, "args": thawed(part.arguments), "tool_call_id": part.id}
            return {**told, "part_kind": "tool-call"}
        case Media():
            return {"content": described(part), "part_kind": "text"}
    return None


def _asked(part: Any, said: str) -> Mapping[str, Any] | None:
    match part:
        case Text():
            return {"content": part.text, "part_kind": said}
        case ToolResult():
            told = {"tool_name": part.name or "tool", "content": thawed(part.content), "tool_call_id": part.call_id}
            return {**told, "outcome": "failed" if part.is_error else "success", "part_kind": "tool-return"}
        case Media():
            return {"content": _files(part), "part_kind": "user-prompt"}
    return None


def _files(part: Media) -> list[JSON]:
    if part.url is not None and part.media_type.startswith("image/"):
        return [{"url": part.url, "kind": "image-url"}]
    return [described(part)]
