"""Items of OpenAI's Responses API, which the OpenAI Agents SDK keeps in its sessions. One item is one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perdure.adapters.foreign import Form, Lifter, json_text
from perdure.model.given_messages import BESIDE, PROVIDER
from perdure.model.message import Media, Message, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import attached, described
from perdure.model.value import JSON

_ROLES: Mapping[Any, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_FRAME = ("id", "status")


class OpenAIForm(Form):
    """The form of the OpenAI Agents SDK."""

    name = BESIDE

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        kind = item.get("type", "message")
        take = _TAKES.get(kind) or (_hosted if kind in _HOSTED else None)
        if kind in _REPLACED:
            # After a redaction the frame alone tells the kind, and a call needs an output of its own kind.
            lifter.keep("type", kind)
        return ("system", item) if take is None else take(item, lifter)

    def give(self, message: Message) -> list[JSON]:
        parts = message.parts
        if len(parts) == 1 and type(parts[0]) is Text and self.name not in message.metadata:  # as most are
            return [{"role": message.role, "content": parts[0].text}]
        frame = self.frame(message)
        if frame.get("type") == "reasoning" and all(isinstance(part, Text) for part in message.parts):
            return [_reasoning_item(frame, [part.text for part in message.parts if isinstance(part, Text)])]
        replaced = _REPLACED.get(str(frame.get("type")))
        if replaced is not None and len(message.parts) == 1 and isinstance(message.parts[0], ToolCall | ToolResult):
            return [{**replaced(message.parts[0], frame), "type": frame["type"]}]
        return [*_given(message, frame)]


FORM = OpenAIForm()


def _message(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    role = _ROLES[item["role"]]
    skeleton = {**item, **lifter.keep_all(item, _FRAME)}
    if item["role"] == "developer":
        # The message's role is "system", so the frame has to tell the two apart.
        skeleton["role"] = lifter.keep("role", "developer")
    content = item["content"]
    if isinstance(content, str):
        skeleton["content"] = lifter.text(content)
    elif isinstance(content, list):
        skeleton["content"] = [_content_part(part, lifter) for part in content]
    return role, skeleton


def _content_part(part: Any, lifter: Lifter) -> JSON:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    return part if key is None or key not in part else {**part, key: lifter.text(part[key])}


def _function_call(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    arguments, call_id = lifter.call(item["name"], item["arguments"], item["call_id"])
    return "assistant", {**item, **lifter.keep_all(item, _FRAME), "arguments": arguments, "call_id": call_id}


def _custom_call(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    given, call_id = lifter.argument(item["name"], "input", item["input"], item["call_id"])
    return "assistant", {**item, **lifter.keep_all(item, _FRAME), "input": given, "call_id": call_id}


def _action_call(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    """Lift a call of a tool that OpenAI defines and the caller carries out: a shell, a computer, a patch."""
    key = "operation" if "operation" in item else "action"
    name = str(item["type"]).removesuffix("_call")
    action, call_id = lifter.argument(name, key, item[key], item["call_id"])
    return "assistant", {**item, **lifter.keep_all(item, _FRAME), key: action, "call_id": call_id}


def _output(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    skeleton = {**item, **lifter.keep_all(item, _FRAME)}
    output = item["output"]
    if isinstance(output, list) and output and all(_is_text(piece) for piece in output):
        texts, call_id = lifter.results(item["call_id"], [piece["text"] for piece in output])
        left: JSON = [{**piece, "text": text} for piece, text in zip(output, texts, strict=True)]
    elif _has_file(output):
        left, (_, call_id) = output, lifter.result(item["call_id"], "[file]")
    else:
        left, call_id = lifter.result(item["call_id"], output)
    return "tool", {**skeleton, "output": left, "call_id": call_id}


def _is_text(piece: Any) -> bool:
    return isinstance(piece, dict) and piece.get("type") in _TEXT_KEYS and isinstance(piece.get("text"), str)


def _has_file(output: Any) -> bool:
    """Tell whether an output has an image or a file, whose bytes cannot be read, counted or searched."""
    pieces = output if isinstance(output, list) else [output]
    return any(isinstance(piece, dict) and {"image_url", "file_data", "file_id"} & piece.keys() for piece in pieces)


def _reasoning(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    lifter.keep("type", "reasoning")
    skeleton = {**item, **lifter.keep_all(item, _FRAME)}
    signature = item.get("encrypted_content")
    for key in ("summary", "content"):
        if isinstance(item.get(key), list):
            skeleton[key] = [_thought(each, item, lifter) for each in item[key]]
    if isinstance(signature, str) and not lifter.parts:
        _, skeleton["encrypted_content"] = lifter.thought("", signature, PROVIDER, item.get("id"))
    return "assistant", skeleton


def _thought(piece: Any, item: dict[str, Any], lifter: Lifter) -> JSON:
    if not isinstance(piece, dict) or "text" not in piece:
        return piece
    # An item has one signature, which goes with its first thought.
    signature = None if lifter.parts else item.get("encrypted_content")
    left, _ = lifter.thought(piece["text"], signature, PROVIDER, item.get("id"))
    return {**piece, "text": left}


def _hosted(item: dict[str, Any], lifter: Lifter) -> tuple[Role, JSON]:
    """Lift a call that OpenAI has carried out itself. It is answered by its own output, or else by its status."""
    name, key, answer = _HOSTED[item["type"]]
    skeleton = {**item, **lifter.keep_all(item, ("id",))}
    if key not in item:
        return "assistant", skeleton
    if name is None:
        skeleton[key], _ = lifter.call(item["name"], item[key], item["id"])
    else:
        skeleton[key], _ = lifter.argument(name, key, item[key], item["id"])
    if not lifter.parts:
        return "assistant", skeleton
    error = item.get("error")
    told = "error" if error is not None else answer
    if told in item:
        skeleton[told], _ = lifter.result(item["id"], item[told], is_error=error is not None)
    elif "status" in item:
        lifter.result(item["id"], item["status"])  # one of a few words, which the item keeps
    return "assistant", skeleton


_HOSTED: Mapping[str, tuple[str | None, str, str]] = {
    "mcp_call": (None, "arguments", "output"),
    "web_search_call": ("web_search", "action", "results"),
    "file_search_call": ("file_search", "queries", "results"),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
}
"""For each kind: the tool's name, unless the item has it, the key of its input and the key of its output."""
_TAKES: Mapping[str, Callable[[dict[str, Any], Lifter], tuple[Role, JSON]]] = {
    "message": _message,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "computer_call": _action_call,
    "local_shell_call": _action_call,
    "shell_call": _action_call,
    "apply_patch_call": _action_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "computer_call_output": _output,
    "shell_call_output": _output,
    "apply_patch_call_output": _output,
    "reasoning": _reasoning,
}


def _told(part: ToolCall | ToolResult) -> str:
    """Return what is left of a call or a result, as a text."""
    if isinstance(part, ToolResult):
        return part.text
    texts = [each for each in part.arguments.values() if isinstance(each, str)]
    return texts[0] if texts else json_text(part.arguments)


def _shell_output(part: Any, frame: Mapping[str, Any]) -> dict[str, Any]:
    piece = {"stdout": _told(part), "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    return {"call_id": part.call_id, "output": [piece]}


def _local_shell_call(part: Any, frame: Mapping[str, Any]) -> dict[str, Any]:
    action = {"type": "exec", "command": [_told(part)], "env": {}}
    return {"id": frame.get("id", part.id), "call_id": part.id, "action": action, "status": "completed"}


def _patch_call(part: Any, frame: Mapping[str, Any]) -> dict[str, Any]:
    operation = {"type": "delete_file", "path": _told(part)}
    return {"call_id": part.id, "operation": operation, "status": "completed"}


def _computer_call(part: Any, frame: Mapping[str, Any]) -> dict[str, Any]:
    beside = {"pending_safety_checks": [], "status": "completed"}
    return {"id": frame.get("id", part.id), "call_id": part.id, "action": {"type": "wait"}, **beside}


_BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
"""A screenshot of one pixel, in place of one that is gone."""
_REPLACED: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "custom_tool_call": lambda part, _: {"call_id": part.id, "name": part.name, "input": _told(part)},
    "custom_tool_call_output": lambda part, _: {"call_id": part.call_id, "output": _told(part)},
    "shell_call": lambda part, _: {"call_id": part.id, "action": {"commands": [_told(part)]}},
    "shell_call_output": _shell_output,
    "local_shell_call": _local_shell_call,
    "apply_patch_call": _patch_call,
    "apply_patch_call_output": lambda part, _: {
        "call_id": part.call_id,
        "output": _told(part),
        "status": "completed",
    },
    "computer_call": _computer_call,
    "computer_call_output": lambda part, _: {
        "call_id": part.call_id,
        "output": {"type": "computer_screenshot", "image_url": _BLANK},
    },
}
"""Builders of OpenAI's own calls and outputs once their content is gone. A call needs an output of its own kind."""


def _given(message: Message, frame: Mapping[str, Any]) -> Iterator[JSON]:
    thoughts = [part for part in message.parts if isinstance(part, Thinking) and part.provider == PROVIDER]
    if thoughts:
        named = {"id": thoughts[0].id} if thoughts[0].id else {}
        texts = [part.text for part in thoughts if part.text]
        yield _reasoning_item({**frame, **named}, texts, thoughts[0].signature)
    said = [part for part in message.parts if isinstance(part, Text | Media)]
    if said:
        yield _said(message.role, said, frame)
    only = len(message.parts) == 1
    for part in message.parts:
        if isinstance(part, ToolCall):
            yield _call_item(part, frame if only else {})
        elif isinstance(part, ToolResult):
            yield {"call_id": part.call_id, "output": part.text, "type": "function_call_output"}


def _reasoning_item(frame: Mapping[str, Any], texts: list[str], signature: str | None = None) -> JSON:
    summary = [{"text": text, "type": "summary_text"} for text in texts]
    item = {"id": frame.get("id", ""), "summary": summary, "type": "reasoning"}
    return {**item, **({"encrypted_content": signature} if signature else {})}


def _call_item(call: ToolCall, frame: Mapping[str, Any]) -> JSON:
    item = {
        "arguments": json_text(call.arguments),
        "call_id": call.id,
        "name": call.name,
        "type": "function_call",
    }
    # The API refuses an item whose id has another prefix.
    own = isinstance(frame.get("id"), str) and frame["id"].startswith("fc_")
    return {**item, **({"id": frame["id"], "status": "completed"} if own else {})}


def _said(role: Role, said: list[Text | Media], frame: Mapping[str, Any]) -> JSON:
    if role == "assistant":
        text = "".join(part.text if isinstance(part, Text) else described(part) for part in said)
        if not (isinstance(frame.get("id"), str) and frame["id"].startswith("msg_")):
            return {"role": "assistant", "content": text}
        content = [{"annotations": [], "text": text, "type": "output_text"}]
        return {"id": frame["id"], "content": content, "role": "assistant", "status": "completed", "type": "message"}
    named = "developer" if role == "system" and frame.get("role") == "developer" else role
    if all(isinstance(part, Text) for part in said):
        return {"role": named, "content": "".join(part.text for part in said if isinstance(part, Text))}
    return {"role": named, "content": [_input_part(part, role) for part in said]}


def _input_part(part: Text | Media, role: Role) -> JSON:
    form = attached(part, {}) if isinstance(part, Media) and role == "user" else None
    if form is not None and form["type"] == "image_url":
        return {"type": "input_image", "image_url": form["image_url"]["url"], "detail": "auto"}
    if form is not None and form["type"] == "file":
        return {"type": "input_file", **form["file"]}
    return {"type": "input_text", "text": part.text if isinstance(part, Text) else described(part)}
