"""Messages from the dicts that callers have: our own form, OpenAI's chat completions, items of its Responses API.

Nothing in a dict is ignored. What has a place in a message goes there. What OpenAI says beside it is kept in the
message's metadata under `openai`. Everything else is InvalidData with its path.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from perdure.errors import InvalidData
from perdure.model.ids import new_id
from perdure.model.message import ROLES, Media, Message, Opaque, Part, Text, Thinking, ToolCall
from perdure.model.value import EMPTY, JSON, brief, clean_text, kind_of

BESIDE = "openai"
"""The key in a message's metadata for data of OpenAI's forms that has no place in ours."""
PROVIDER = "openai"
"""The provider that understands ids and encrypted reasoning of Responses items, as drivers name it."""
_SAID_BY_ASSISTANT = ("tool_calls", "refusal", "reasoning_content", "audio", "function_call")
"""The fields that an assistant's message may have without content."""
_OUTPUT_ITEMS = ("reasoning", "function_call", "message")


def messages_of(given: Sequence[object], path: str, places: Sequence[str] | None = None) -> list[Message]:
    """Return several messages. Responses items that are parts of one answer become one message.

    An error has the path of the fault: the place behind `path`, or the one that `places` gives.
    """
    messages: list[Message] = []
    answer: set[str] = set()
    for place, item in enumerate(given):
        where = f"{path}[{place}]" if places is None else places[place]
        message = message_of(item, where) if isinstance(item, Mapping) else Message.of(item)
        kind = _output_kind(item)
        if kind is not None and answer and not _begins_answer(kind, answer):
            messages[-1] = _joined(messages[-1], message, is_named=kind == "message")
        else:
            messages.append(message)
            answer = set()
        answer = answer | {kind} if kind is not None else set()
    return messages


def message_of(given: Mapping[Any, Any], path: str = "$") -> Message:
    """Return the message that one dict stands for."""
    kind = given.get("type")
    if kind is None or kind == "message":
        return _from_role(_Fields(given, path))
    reader = _ITEMS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(("message", *_ITEMS))
        raise InvalidData(f"{path}.type", f"an item of type {brief(kind)} cannot be taken in; these can: {known}")
    return reader(_Fields(given, path))


class _Fields:
    """The fields of a dict, each taken by its name. A field that is not taken by the end is an error."""

    def __init__(self, given: object, path: str) -> None:
        if not isinstance(given, Mapping):
            raise InvalidData(path, f"expected an object, got {type(given).__name__}")
        self.path = path
        self._left = dict(given)
        self._known: list[str] = []

    def has(self, *keys: str) -> bool:
        return not self._left.keys().isdisjoint(keys)

    def are_null(self, *keys: str) -> bool:
        return all(self._left.get(key) is None for key in keys)

    def at(self, key: str) -> str:
        return f"{self.path}.{key}"

    def take(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return a field. Null counts as left out: OpenAI's client dumps it for what is not set."""
        self._known.append(key)
        value = self._left.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise InvalidData(self.at(key), f"expected {_named(kind)}, got {type(value).__name__}")
        return value

    def need(self, key: str, kind: Any, problem: str) -> Any:
        value = self.take(key, kind)
        if value is None:
            raise InvalidData(self.at(key), problem)
        return value

    def refuse(self, key: str, problem: str) -> None:
        """Raise InvalidData for a field that cannot be kept, unless it is null."""
        if self.take(key, object) is not None:
            raise InvalidData(self.at(key), problem)

    def end(self, what: str) -> None:
        for key in self._left:
            where = self.at(key) if isinstance(key, str) else self.path
            raise InvalidData(where, f"unknown key; {what} has {', '.join(self._known)}")


def _named(kind: Any) -> str:
    return " or ".join(each.__name__ for each in (get_args(kind) or (kind,)))


def _from_role(fields: _Fields) -> Message:
    is_item = fields.take("type", str) is not None
    role = fields.take("role", object)
    if role is None:
        raise InvalidData(fields.at("role"), f"a message needs a role: one of {', '.join(ROLES)}")
    if role not in (*ROLES, "developer"):
        raise InvalidData(fields.at("role"), f"{brief(role)} is not a role; use one of {', '.join(ROLES)}")
    if role == "tool":
        return _tool_message(fields)
    beside: dict[str, Any] = {"role": role} if role == "developer" else {}
    is_silent = _is_silent(fields, role)  # before the fields are taken
    parts, of_parts = _content(fields)
    if role == "assistant":
        parts, of_parts = _with_assistants_own(fields, parts, of_parts, beside)
    name = fields.take("name", str)
    beside |= ({"name": clean_text(name)} if name is not None else {}) | ({"parts": of_parts} if of_parts else {})
    calls = _calls(fields)
    message_id, metadata = fields.take("id", str), dict(fields.take("metadata", Mapping, EMPTY))
    if is_item and _status(fields) == "incomplete":
        metadata["incomplete"] = True
    if is_item and role == "assistant" and message_id:
        parts = _under_id(parts, message_id, beside)
    fields.end(f"a message of role {role}")
    if is_silent:
        problem = f"a message of role {role} needs content: a text or a list of parts"
        raise InvalidData(fields.at("content"), problem)
    if beside:
        metadata = {**metadata, BESIDE: beside}
    return Message("system" if role == "developer" else role, (*parts, *calls), message_id or new_id(), metadata)


def _under_id(parts: tuple[Part, ...], item_id: str, beside: dict[str, Any]) -> tuple[Part, ...]:
    """Put the provider's id of an item before its text: reasoning goes back only with the item that it led to."""
    if "parts" in beside:
        beside["parts"] = _moved(beside["parts"], 1)
    return (Opaque(PROVIDER, {"next": {"id": item_id}}), *parts)


def _tool_message(fields: _Fields) -> Message:
    problem = "a tool message needs the id of the call it answers"
    call_id = fields.take("tool_call_id", object)
    if not isinstance(call_id, str):
        raise InvalidData(fields.at("tool_call_id"), problem)
    content = _result(fields.take("content", object, ""))
    name, is_error = fields.take("name", str), fields.take("is_error", bool, False)
    message_id, metadata = fields.take("id", str), fields.take("metadata", Mapping, EMPTY)
    fields.end("a message of role tool")
    return Message.tool(call_id, content, name=name, is_error=is_error, id=message_id, metadata=metadata)


def _result(content: Any) -> JSON:
    """Return what a tool has answered. A list of texts becomes one text, and other JSON stays as it is."""
    is_texts = isinstance(content, Sequence) and not isinstance(content, str) and bool(content)
    if not is_texts or not all(_is_text(each) for each in content):
        return content
    return "".join(each["text"] for each in content)


def _is_text(item: object) -> bool:
    if not isinstance(item, Mapping) or item.keys() != {"type", "text"}:
        return False
    return item["type"] in ("text", "input_text", "output_text") and isinstance(item["text"], str)


def _is_silent(fields: _Fields, role: str) -> bool:
    """Tell whether content is missing. An assistant's may be null, and may be missing beside calls or thoughts."""
    if role == "assistant":
        return not fields.has("content", "parts", *_SAID_BY_ASSISTANT)
    return fields.are_null("content", "parts")


def _content(fields: _Fields) -> tuple[tuple[Part, ...], dict[str, Any]]:
    """Return the parts of a message, and what OpenAI says beside them, by their place."""
    content, parts = fields.take("content", object), fields.take("parts", object)
    if content is not None and parts is not None:
        raise InvalidData(fields.at("parts"), "give `content` or `parts`, not both")
    key = "content" if parts is None else "parts"
    content = parts if content is None else content
    if content is None:
        return (), {}
    if isinstance(content, str):
        return ((Text(clean_text(content)),) if content else ()), {}
    if not isinstance(content, list | tuple):
        raise InvalidData(fields.at(key), f"content is a text or a list of parts, not {kind_of(content)}")
    read = [_part(item, f"{fields.at(key)}[{place}]") for place, item in enumerate(content)]
    return tuple(part for part, _ in read), {str(place): beside for place, (_, beside) in enumerate(read) if beside}


def _with_assistants_own(
    fields: _Fields, parts: tuple[Part, ...], of_parts: dict[str, Any], beside: dict[str, Any]
) -> tuple[tuple[Part, ...], dict[str, Any]]:
    """Take the fields that only an assistant's message has. Return its parts, and what is said beside them."""
    refusal, thought = fields.take("refusal", str), fields.take("reasoning_content", str)
    if refusal:
        of_parts = {**of_parts, str(len(parts)): {"refusal": True}}
        parts = (*parts, Text(clean_text(refusal)))
    if thought:
        parts, of_parts = (Thinking(clean_text(thought)), *parts), _moved(of_parts, 1)
    annotations = fields.take("annotations", list)
    if annotations:
        beside["annotations"] = annotations
    fields.refuse("audio", "audio is kept by its provider, and cannot be taken in; leave it out")
    fields.refuse("function_call", "this form is obsolete; give it as one of tool_calls, with an id")
    return parts, of_parts


_Read = tuple[Part, dict[str, Any]]


def _part(item: object, path: str) -> _Read:
    if isinstance(item, Part):
        return item, {}
    kind = item.get("type") if isinstance(item, Mapping) else None
    reader = _PARTS.get(kind) if isinstance(kind, str) else None
    if reader is not None:
        fields = _Fields(item, path)
        fields.take("type", str)
        read = reader(fields)
        fields.end(f"a part of type {kind}")
        return read
    try:
        return msgspec.convert(item, Part), {}
    except msgspec.ValidationError as error:
        raise InvalidData(path, f"this is not a part of a message: {error}") from None


def _text_part(fields: _Fields) -> _Read:
    text = clean_text(fields.need("text", str, "a part of this type has a text"))
    beside = {key: fields.take(key, list) for key in ("annotations", "logprobs")}
    return Text(text), {key: value for key, value in beside.items() if value}


def _refusal_part(fields: _Fields) -> _Read:
    return Text(clean_text(fields.need("refusal", str, "a refusal has a text"))), {"refusal": True}


def _image_part(fields: _Fields) -> _Read:
    """Return an image of chat completions. Its `image_url` is an object with a URL, or the URL itself."""
    given = fields.need("image_url", str | Mapping, "an image has a URL")
    if isinstance(given, str):
        return _at_url(given, fields.at("image_url"), "image/*"), {}
    inner = _Fields(given, fields.at("image_url"))
    url, detail = inner.need("url", str, "an image has a URL"), inner.take("detail", str, "auto")
    inner.end("image_url")
    return _at_url(url, inner.at("url"), "image/*"), _detail(detail)


def _input_image_part(fields: _Fields) -> _Read:
    fields.refuse("file_id", _AT_PROVIDER)
    url, detail = fields.need("image_url", str, "an image has a URL"), fields.take("detail", str, "auto")
    return _at_url(url, fields.at("image_url"), "image/*"), _detail(detail)


def _detail(detail: str) -> dict[str, Any]:
    return {} if detail == "auto" else {"detail": clean_text(detail)}


def _file_part(fields: _Fields) -> _Read:
    inner = _Fields(fields.need("file", Mapping, "a file is an object with file_data"), fields.at("file"))
    read = _input_file_part(inner)
    inner.end("file")
    return read


def _input_file_part(fields: _Fields) -> _Read:
    fields.refuse("file_id", _AT_PROVIDER)
    name, url = fields.take("filename", str), fields.take("file_url", str)
    data = fields.take("file_data", str)
    if (data is None) == (url is None):
        raise InvalidData(fields.path, "a file has either file_data or file_url, exactly one of them")
    kind = _type_by(name or "", "application/octet-stream")
    if url is not None:
        media = _at_url(url, fields.at("file_url"), kind)
    elif data.lower().startswith("data:"):
        media = _in_url(data, fields.at("file_data"))
    else:
        media = Media(kind, data=_decoded(data, fields.at("file_data")))
    return replace(media, name=None if name is None else clean_text(name)), {}


def _audio_part(fields: _Fields) -> _Read:
    inner = _Fields(fields.need("input_audio", Mapping, "audio is an object with data"), fields.at("input_audio"))
    data, form = inner.need("data", str, "audio has data"), inner.need("format", str, "audio has a format")
    inner.end("input_audio")
    if form not in AUDIO:
        raise InvalidData(inner.at("format"), f"{brief(form)} is not one of {', '.join(AUDIO)}")
    return Media(AUDIO[form], data=_decoded(data, inner.at("data"))), {}


_AT_PROVIDER = "a file that is kept by its provider cannot be taken in; give its bytes or a URL"
AUDIO = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_PARTS: Mapping[str, Callable[[_Fields], _Read]] = {
    "input_text": _text_part,
    "output_text": _text_part,
    "refusal": _refusal_part,
    "image_url": _image_part,
    "input_image": _input_image_part,
    "file": _file_part,
    "input_file": _input_file_part,
    "input_audio": _audio_part,
}
_TYPES = {
    "gif": "image/gif",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "csv": "text/csv",
    "html": "text/html",
    "json": "application/json",
    "md": "text/markdown",
    "pdf": "application/pdf",
    "txt": "text/plain",
    "mp3": "audio/mpeg",
    "wav": "audio/wav",
}


def _type_by(name: str, default: str) -> str:
    return _TYPES.get(name.rpartition(".")[2].lower(), default)


def _at_url(url: str, path: str, default: str) -> Media:
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _in_url(url, path)
    if scheme not in ("http", "https") or clean_text(url) != url:
        raise InvalidData(path, "expected a URL that begins with https://, http:// or data:")
    file = url.partition("#")[0].partition("?")[0].rpartition("/")[2]
    return Media(_type_by(file, default), url=url)


def _in_url(url: str, path: str) -> Media:
    """Return the bytes that a `data:` URL contains."""
    head, comma, data = url.partition(",")
    media_type = head[len("data:") :].removesuffix(";base64")
    if not comma or not head.endswith(";base64"):
        raise InvalidData(path, "expected base64: data:image/png;base64,…")
    return Media(clean_text(media_type) or "text/plain", data=_decoded(data, path))


def _decoded(data: str, path: str) -> bytes:
    # Strict: otherwise invalid characters would be skipped, and wrong bytes kept.
    try:
        return binascii.a2b_base64(data.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidData(path, f"this is not base64: {error}") from None


def _calls(fields: _Fields) -> tuple[ToolCall, ...]:
    calls = fields.take("tool_calls", object, ())
    if not isinstance(calls, list | tuple):
        raise InvalidData(fields.at("tool_calls"), f"expected a list, got {type(calls).__name__}")
    return tuple(_call(call, f"{fields.at('tool_calls')}[{place}]") for place, call in enumerate(calls))


def _call(call: object, path: str) -> ToolCall:
    """Return a call: in OpenAI's form, with `function`, or in ours, with name, arguments and id."""
    if isinstance(call, ToolCall):
        return call
    if isinstance(call, Mapping) and call.get("type") == "custom":
        raise InvalidData(f"{path}.type", "calls of custom tools cannot be taken in; those of functions can")
    if isinstance(call, Mapping) and "function" in call:
        fields = _Fields(call, path)
        fields.take("type", str)
        function = _Fields(fields.need("function", Mapping, "a call has a function"), fields.at("function"))
        made = _function_call(function, fields.need("id", str, "a call has an id, which its result names"))
        function.end("function")
        fields.end("a tool call")
        return made
    try:
        return msgspec.convert({**call, "type": "tool_call"}, ToolCall)  # type: ignore[dict-item]  # or it is a TypeError
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidData(path, f"a tool call has name, arguments and id: {error}") from None


def _function_call(fields: _Fields, call_id: str, item_id: str | None = None) -> ToolCall:
    name = clean_text(fields.need("name", str, "a function has a name"))
    arguments = _arguments(fields.take("arguments", str | Mapping, ""), fields.at("arguments"))
    if item_id is None:
        return ToolCall(name, arguments, clean_text(call_id))
    # The item's own id goes back to the provider with the call. Results name the call by its `call_id`.
    return ToolCall(name, arguments, clean_text(call_id), PROVIDER, {"id": clean_text(item_id)})


def _arguments(given: str | Mapping[str, Any], path: str) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    try:
        arguments = msgspec.json.decode(given) if given.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidData(path, f"arguments are a JSON object, as text; this is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidData(path, f"arguments are a JSON object, as text; got {brief(arguments)}")
    return arguments


def _call_item(fields: _Fields) -> Message:
    fields.take("type", str)
    call_id = fields.need("call_id", str, "a function_call has a call_id, which its output names")
    call = _function_call(fields, call_id, fields.take("id", str))
    _require_complete(fields)
    fields.end("a function_call")
    return Message("assistant", (call,))


def _output_item(fields: _Fields) -> Message:
    fields.take("type", str)
    call_id = fields.need("call_id", str, "a function_call_output has the call_id of its call")
    output = _result(fields.need("output", str | list, "a function_call_output has an output"))
    if not isinstance(output, str):
        raise InvalidData(fields.at("output"), "the output of a function is a text, or a list of input_text")
    item_id = fields.take("id", str)
    _require_complete(fields)
    fields.end("a function_call_output")
    return Message.tool(call_id, output, id=item_id)


def _reasoning_item(fields: _Fields) -> Message:
    fields.take("type", str)
    summary, content = _thoughts(fields, "summary", "summary_text"), _thoughts(fields, "content", "reasoning_text")
    signature, item_id = fields.take("encrypted_content", str), fields.take("id", str)
    _status(fields)
    fields.end("a reasoning item")
    return Message("assistant", (Thinking("\n\n".join([*summary, *content]), signature, PROVIDER, item_id),))


def _thoughts(fields: _Fields, key: str, kind: str) -> list[str]:
    thoughts: list[str] = []
    for place, item in enumerate(fields.take(key, list, ())):
        thought = _Fields(item, f"{fields.at(key)}[{place}]")
        if thought.take("type", str) != kind:
            raise InvalidData(thought.at("type"), f"expected {kind}")
        thoughts.append(clean_text(thought.need("text", str, "a thought has a text")))
        thought.end(kind)
    return thoughts


def _status(fields: _Fields) -> str:
    status: str = fields.take("status", str, "completed")
    if status not in ("completed", "incomplete"):
        raise InvalidData(fields.at("status"), f"{brief(status)} is not completed; take it in when it is")
    return status


def _require_complete(fields: _Fields) -> None:
    if _status(fields) != "completed":
        raise InvalidData(fields.at("status"), "a call or a result that is not whole cannot be taken in")


_ITEMS: Mapping[str, Callable[[_Fields], Message]] = {
    "function_call": _call_item,
    "function_call_output": _output_item,
    "reasoning": _reasoning_item,
}


def _output_kind(item: object) -> str | None:
    """Return the type of an item that is a part of a model's answer; None for others."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind not in _OUTPUT_ITEMS or (kind == "message" and item["role"] != "assistant"):  # type: ignore[index]  # a mapping
        return None
    return str(kind)


def _begins_answer(kind: str, answer: set[str]) -> bool:
    """Tell whether an item behind others is the first of another answer."""
    # An answer has one message, and its reasoning comes before all else.
    return (kind == "message" and "message" in answer) or (kind == "reasoning" and answer != {"reasoning"})


def _joined(message: Message, more: Message, *, is_named: bool) -> Message:
    """Return two parts of one answer as one message, which has the id of the `message` among them."""
    beside = dict(more.metadata.get(BESIDE, {}))
    if "parts" in beside:
        # Keyed by the places of parts, which move in the joined message.
        beside["parts"] = _moved(beside["parts"], len(message.parts))
    metadata = {**message.metadata, **more.metadata, **({BESIDE: beside} if beside else {})}
    message_id = more.id if is_named else message.id
    return Message(message.role, (*message.parts, *more.parts), message_id, metadata)


def _moved(of_parts: Mapping[str, Any], places: int) -> dict[str, Any]:
    return {str(int(place) + places): beside for place, beside in of_parts.items()}
