"""A message: who said it, and the parts it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from perdure.errors import InvalidData
from perdure.model.checks import expect, expect_several
from perdure.model.ids import new_id
from perdure.model.value import EMPTY, JSON, Value, brief, clean_text, freeze, freeze_alike, freeze_json

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


class Text(Value, frozen=True, tag="text"):
    """Plain text."""

    text: str


class Thinking(Value, frozen=True, tag="thinking"):
    """What a model thought before it answered; the signature goes back to its provider as it came."""

    text: str
    signature: str | None = None
    provider: str | None = None
    id: str | None = None


class Media(Value, frozen=True, tag="media"):
    """An image or a file: its bytes, or where they are."""

    media_type: str
    data: bytes | None = None
    url: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.url is None):
            raise InvalidData("$.media", "an image or file has either `data` or `url`, exactly one of them")
        expect(self.media_type, str, "$.media_type")
        if self.data is None:
            expect(self.url, str, "$.url")
        else:
            expect(self.data, bytes, "$.data")


class ToolCall(Value, frozen=True, tag="tool_call"):
    """A model's wish to have a tool called."""

    name: str
    arguments: Mapping[str, Any] = EMPTY
    id: str = msgspec.field(default_factory=new_id)
    provider: str | None = None
    opaque: JSON = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and isinstance(self.id, str)):
            expect(self.name, str, "$.name")
            expect(self.id, str, "$.id")
        freeze(self, "arguments")
        if self.opaque is not None:
            freeze_json(self, "opaque")


class ToolResult(Value, frozen=True, tag="tool_result"):
    """What came of a tool call."""

    call_id: str
    content: JSON = None
    name: str | None = None
    is_error: bool = False

    def __post_init__(self) -> None:
        if type(self.content) is not str:
            freeze_json(self, "content")

    @property
    def text(self) -> str:
        """The result as a model reads it."""
        return self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()


class Opaque(Value, frozen=True, tag="opaque"):
    """Something only its provider understands; kept, and sent back to that provider alone."""

    provider: str
    body: JSON = None

    def __post_init__(self) -> None:
        freeze_json(self, "body")


class UnknownPart(Value, frozen=True, tag="~part"):
    """A part of a kind that a newer release has written: kept as it stands."""

    body: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze(self, "body")
        kind = self.body.get("type")
        if not isinstance(kind, str) or kind in _KINDS:
            raise InvalidData("$.body", "an unknown part is an object with a type that this release does not know")


_KINDS = ("text", "thinking", "media", "tool_call", "tool_result", "opaque")
Part = Text | Thinking | Media | ToolCall | ToolResult | Opaque | UnknownPart


class Message(Value, frozen=True):
    """One thing that was said. Messages are never changed once they are in a log."""

    role: Role
    parts: tuple[Part, ...] = ()
    id: str = msgspec.field(default_factory=new_id)
    metadata: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidData("$.role", f"{brief(self.role)} is not a role; use one of {', '.join(ROLES)}")
        if type(self.parts) is not tuple:  # the caller may go on to change a list
            msgspec.structs.force_setattr(self, "parts", _parts(expect_several(self.parts, "$.parts")))
        if self.metadata is not EMPTY:
            freeze_alike(self, "metadata")

    @classmethod
    def user(cls, *content: str | Part, id: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> Message:
        return cls("user", _parts(content), _id(id), metadata)

    @classmethod
    def system(cls, text: str, *, id: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> Message:
        return cls("system", _parts((text,)), _id(id), metadata)

    @classmethod
    def assistant(
        cls,
        *content: str | Part,
        tool_calls: Iterable[ToolCall] = (),
        id: str | None = None,
        metadata: Mapping[str, Any] = EMPTY,
    ) -> Message:
        said = _parts([part for part in content if part != ""])
        if tool_calls != ():
            said += tuple(expect(call, ToolCall, "$.tool_calls") for call in expect_several(tool_calls, "$.tool_calls"))
        return cls("assistant", said, _id(id), metadata)

    @classmethod
    def tool(
        cls,
        call_id: str,
        content: JSON = "",
        *,
        name: str | None = None,
        is_error: bool = False,
        id: str | None = None,
        metadata: Mapping[str, Any] = EMPTY,
    ) -> Message:
        settled = clean_text(content) if isinstance(content, str) else content
        result = ToolResult(expect(call_id, str, "$.call_id"), settled, name, is_error)
        return cls("tool", (result,), _id(id), metadata)

    @classmethod
    def of(cls, value: object, *, role: Role = "user") -> Message:
        """A message from what a caller has at hand: a message, a text, or a `{role, content, …}` dict."""
        if isinstance(value, Message):
            return value
        if isinstance(value, Mapping):
            return _from_mapping(value)
        if isinstance(value, str):
            return cls(role, _parts((value,)))
        if type(value).__str__ is not object.__str__ and not isinstance(value, bytes | bytearray):
            return cls(role, _parts((str(value),)))
        kind = type(value).__name__
        raise InvalidData("$", f"a {kind} is not a message; give a text, a dict with a role, or a Message")

    @property
    def text(self) -> str:
        """All that is text in this message, tool results included."""
        return "".join(part.text for part in self.parts if isinstance(part, Text | ToolResult))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolResult)])

    @property
    def is_trace(self) -> bool:
        """Whether this message belongs to the working of a run rather than to the conversation."""
        return bool(self.metadata.get("is_trace"))

    @property
    def is_incomplete(self) -> bool:
        """Whether the message was cut off: by its length, by a filter, or because the run was stopped."""
        return bool(self.metadata.get("incomplete"))

    @property
    def is_superseded(self) -> bool:
        """Whether it is what a killed process had of an answer, and the model was asked again: nobody is shown it."""
        return self.role == "assistant" and self.is_incomplete and bool(self.metadata.get("superseded"))

    def with_metadata(self, **values: JSON) -> Message:
        return msgspec.structs.replace(self, metadata={**self.metadata, **values})


def _id(given: str | None) -> str:
    return expect(given, str, "$.id") if given else new_id()


def require_distinct(messages: Sequence[Message], path: str) -> None:
    """Raise InvalidData if two of the messages that are given at once have one id: one of them would be lost."""
    seen: set[str] = set()
    for place, message in enumerate(messages):
        if message.id in seen:
            problem = f"the id {brief(message.id)} is used twice; give each message an id of its own, or none"
            raise InvalidData(f"{path}[{place}].id", problem)
        seen.add(message.id)


def _parts(content: Iterable[str | Part]) -> tuple[Part, ...]:
    return tuple([_part(place, given) for place, given in enumerate(content)])


def _part(place: int, given: str | Part) -> Part:
    if isinstance(given, str):
        return Text(clean_text(str.__str__(given)))
    if not isinstance(given, Part):
        raise InvalidData(f"$.parts[{place}]", f"expected a text or a part, got {type(given).__name__}")
    return given


_SHARED_KEYS = ("role", "content", "id", "metadata")
_TOOL_KEYS = (*_SHARED_KEYS, "tool_call_id", "name", "is_error")
_OTHER_KEYS = (*_SHARED_KEYS, "parts", "tool_calls")


def _from_mapping(given: Mapping[Any, Any]) -> Message:
    """A message from the dict form that most chat APIs share, with nothing ignored."""
    role = given.get("role")
    if role is None:
        raise InvalidData("$.role", f"a message needs a role: one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise InvalidData("$.role", f"{brief(role)} is not a role; use one of {', '.join(ROLES)}")
    keys = _TOOL_KEYS if role == "tool" else _OTHER_KEYS
    for key in given:
        if key not in keys:
            where = f"$.{key}" if isinstance(key, str) else "$"
            raise InvalidData(where, f"unknown key; a message of role {role} has {', '.join(keys)}")
    shared = {"id": _expect(given, "id", str, None), "metadata": _expect(given, "metadata", Mapping, EMPTY)}
    if role == "tool":
        call_id = given.get("tool_call_id")
        if not isinstance(call_id, str):
            raise InvalidData("$.tool_call_id", "a tool message needs the id of the call it answers")
        name, is_error = _expect(given, "name", str, None), _expect(given, "is_error", bool, False)
        return Message.tool(call_id, given.get("content", ""), name=name, is_error=is_error, **shared)
    parts = (*_content_parts(given), *_call_parts(given))
    return Message(role, parts, shared["id"] or new_id(), shared["metadata"])


def _expect(given: Mapping[Any, Any], key: str, kind: type, default: Any) -> Any:
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise InvalidData(f"$.{key}", f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _content_parts(given: Mapping[Any, Any]) -> tuple[Part, ...]:
    content, parts = given.get("content"), given.get("parts")
    if content is not None and parts is not None:
        raise InvalidData("$.parts", "give `content` or `parts`, not both")
    content = parts if content is None else content
    if isinstance(content, str):
        return _parts((content,)) if content else ()
    if content is None:
        return ()
    try:
        return msgspec.convert(content, tuple[Part, ...])
    except msgspec.ValidationError as error:
        raise InvalidData("$.content", f"content is a text or a list of parts: {error}") from None


def _call_parts(given: Mapping[Any, Any]) -> tuple[Part, ...]:
    try:
        calls = [{**call, "type": "tool_call"} for call in given.get("tool_calls") or ()]
        return msgspec.convert(calls, tuple[ToolCall, ...])
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidData("$.tool_calls", f"a tool call has name, arguments and id: {error}") from None
