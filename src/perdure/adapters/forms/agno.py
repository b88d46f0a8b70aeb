"""Messages of Agno, as `Message.to_dict()` writes them: those of a chat, and what Agno notes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.adapters.foreign import Form, Lifter, json_text
from perdure.model.message import Media, Message, Role, Text, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.value import JSON

_ROLES: Mapping[Any, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_FRAME = ("name", "created_at", "from_history")


class AgnoForm(Form):
    """The form of Agno."""

    name = "agno"
    may_need_no_envelope = False

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        skeleton = {**item, **lifter.keep_all(item, _FRAME)}
        if "id" in item:
            skeleton["id"] = lifter.own_id(item["id"])
        if item["role"] == "tool":
            skeleton["content"], skeleton["tool_call_id"] = lifter.result(
                item["tool_call_id"],
                item.get("content"),
                name=item.get("tool_name"),
                is_error=item.get("tool_call_error") is True,
            )
            return "tool", skeleton
        if isinstance(item.get("reasoning_content"), str):
            skeleton["reasoning_content"], _ = lifter.thought(item["reasoning_content"])
        if isinstance(item.get("content"), str):
            skeleton["content"] = lifter.text(item["content"])
        if isinstance(item.get("tool_calls"), list):
            skeleton["tool_calls"] = [_call(call, lifter) for call in item["tool_calls"]]
        return _ROLES[item["role"]], skeleton

    def give(self, message: Message) -> list[JSON]:
        frame = {**self.framed(message), "id": self.id_of(message)}
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        if results and message.role == "tool":
            return [{**frame, **_result(part)} for part in results]
        said = "".join(_said(part) for part in message.parts if isinstance(part, Text | Media))
        calls = [_called(part) for part in message.parts if isinstance(part, ToolCall)]
        return [{**frame, "role": message.role, "content": said, **({"tool_calls": calls} if calls else {})}]


FORM = AgnoForm()


def _call(call: Any, lifter: Lifter) -> JSON:
    function = call["function"]
    arguments, call_id = lifter.call(function["name"], function["arguments"], call["id"])
    return {**call, "id": call_id, "function": {**function, "arguments": arguments}}


def _said(part: Text | Media) -> str:
    return part.text if isinstance(part, Text) else described(part)


def _called(part: ToolCall) -> JSON:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": json_text(part.arguments)}}


def _result(part: ToolResult) -> dict[str, Any]:
    named = {"tool_name": part.name} if part.name else {}
    return {"role": "tool", "content": part.text, "tool_call_id": part.call_id, **named}
