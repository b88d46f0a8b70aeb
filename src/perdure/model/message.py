"""A message: who said it, and the parts it is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from perdure.errors import InvalidData
from perdure.model.checks import expect, expect_several
from perdure.model.ids import new_id
from perdure.model.value import EMPTY, JSON, Value, brief, clean_text, freeze, freeze_alike, freeze_json

Role = Literal["system", "user", "assistant", "tool"]
"""The sender of a message."""
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
REDACTIONS = "redactions"
"""The key in a message's metadata for the number of replacements by each redactor before it was stored."""
CONTINUES = "continues_run"
"""The key in the metadata of a note that lists the calls of a run which was stopped: the run's id."""


class Text(Value, frozen=True, tag="text"):
    """Plain text."""

    text: str
    """The text."""


class Thinking(Value, frozen=True, tag="thinking"):
    """The thoughts of a model before it answered. The signature goes back to its provider as it came."""

    text: str
    """The thoughts, as far as the provider shows them."""
    signature: str | None = None
    """The provider's signature."""
    provider: str | None = None
    """The provider that the thoughts go back to."""
    id: str | None = None
    """The provider's own id."""


class Media(Value, frozen=True, tag="media"):
    """An image or a file: its bytes, where they are on the web, or what a store keeps them under.

    `perdure.attach` makes one from a path, an address or bytes. In messages that were loaded from a store, bytes of
    more than a few KB are named by their `hash`, their SHA-256 in hex. `await chat.read(part)` gets them.
    """

    media_type: str
    """The MIME type, such as `image/png`."""
    data: bytes | None = None
    """The bytes."""
    url: str | None = None
    """The address on the web."""
    name: str | None = None
    """The name of the file, which the model is told."""
    hash: str | None = None
    """The SHA-256 of the bytes, in hex."""
    size: int | None = None
    """The number of bytes that the `hash` stands for."""

    def __post_init__(self) -> None:
        if (self.data is None) + (self.url is None) + (self.hash is None) != 2:
            problem = "an image or file has one of `data`, `url` and `hash`, exactly one of them"
            raise InvalidData("$.media", problem)
        expect(self.media_type, str, "$.media_type")
        if self.name is not None:
            expect(self.name, str, "$.name")
        if self.data is not None:
            expect(self.data, bytes, "$.data")
        elif self.url is not None:
            expect(self.url, str, "$.url")
        else:
            self._check_hash()
        if self.size is not None and self.hash is None:
            raise InvalidData("$.size", "only a file that is named by its `hash` has a `size`")

    def _check_hash(self) -> None:
        if not _HASH.fullmatch(expect(self.hash, str, "$.hash")):
            raise InvalidData("$.hash", "it is not a SHA-256 in hex")
        if type(self.size) is not int or self.size < 0:
            raise InvalidData("$.size", "a file that is named by its `hash` has a `size`, the number of its bytes")

    @property
    def length(self) -> int | None:
        """The number of its bytes; None if they are somewhere on the web."""
        return self.size if self.data is None else len(self.data)

    @property
    def label(self) -> str:
        """A few words in place of what cannot be shown: `image plot.png, 5.0 MB`."""
        kind = self.media_type.partition("/")[0]
        words = [kind if kind in ("image", "audio", "video") else "file", *([self.name] if self.name else [])]
        return " ".join(words) + ("" if self.length is None else f", {_in_words(self.length)}")


_HASH = re.compile("[0-9a-f]{64}")


def _in_words(size: int) -> str:
    """Return a number of bytes for people."""
    if size < 1_000:
        return f"{size} bytes"
    return f"{size / 1_000:.1f} KB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"


class ToolCall(Value, frozen=True, tag="tool_call"):
    """A model's request to call a tool."""

    name: str
    """The name of the tool."""
    arguments: Mapping[str, Any] = EMPTY
    """The arguments, as plain data."""
    id: str = msgspec.field(default_factory=new_id)
    """The id that the result refers to."""
    provider: str | None = None
    """The provider that `opaque` belongs to."""
    opaque: JSON = None
    """Data that only that provider understands, which goes back to it."""

    def __post_init__(self) -> None:
        # One test for the usual case; `expect` finds the field that is wrong.
        if not (isinstance(self.name, str) and isinstance(self.id, str)):
            expect(self.name, str, "$.name")
            expect(self.id, str, "$.id")
        freeze(self, "arguments")
        if self.opaque is not None:
            freeze_json(self, "opaque")


class ToolResult(Value, frozen=True, tag="tool_result"):
    """The result of a tool call."""

    call_id: str
    """The id of the call."""
    content: JSON = None
    """The result: a text, or any JSON value."""
    name: str | None = None
    """The name of the tool."""
    is_error: bool = False
    """True if the call failed. The content is then the error's text."""

    def __post_init__(self) -> None:
        if type(self.content) is not str:
            freeze_json(self, "content")

    @property
    def text(self) -> str:
        """The result as a model reads it."""
        return self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()


class Opaque(Value, frozen=True, tag="opaque"):
    """Data that only its provider understands. It is kept, and sent back to that provider alone."""

    provider: str
    """The provider."""
    body: JSON = None
    """The data, as it came."""

    def __post_init__(self) -> None:
        freeze_json(self, "body")


class Envelope(Value, frozen=True, tag="envelope"):
    """The rest of another framework's item without the parts before it. With these, it gives the item back whole.

    `perdure.adapters` writes and reads it. Only the framework's own adapter needs it. It is not shown, sent, counted or
    searched, and it is removed when its message is redacted.
    """

    format: str
    """The name of the framework's format."""
    body: JSON = None
    """The rest of the item, as plain data."""

    def __post_init__(self) -> None:
        freeze_json(self, "body")


class UnknownPart(Value, frozen=True, tag="~part"):
    """A part of a kind that a newer release has written. It is kept as it is."""

    body: Mapping[str, Any] = EMPTY
    """The part as it is stored."""

    def __post_init__(self) -> None:
        freeze(self, "body")
        kind = self.body.get("type")
        if not isinstance(kind, str) or kind in _KINDS:
            raise InvalidData("$.body", "an unknown part is an object with a type that this release does not know")


_KINDS = ("text", "thinking", "media", "tool_call", "tool_result", "opaque", "envelope")
Part = Text | Thinking | Media | ToolCall | ToolResult | Opaque | Envelope | UnknownPart
"""A part of a message."""


class Message(Value, frozen=True):
    """One thing that was said. Messages are never changed once they are in a log."""

    role: Role
    """"system", "user", "assistant" or "tool"."""
    parts: tuple[Part, ...] = ()
    """The parts, in order."""
    id: str = msgspec.field(default_factory=new_id)
    """The id, a UUIDv7 by default."""
    metadata: Mapping[str, Any] = EMPTY
    """JSON values that are stored with the message, and never sent to a model."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidData("$.role", f"{brief(self.role)} is not a role; use one of {', '.join(ROLES)}")
        if type(self.parts) is not tuple:  # the caller may still change a list
            msgspec.structs.force_setattr(self, "parts", _parts(expect_several(self.parts, "$.parts")))
        if self.metadata is not EMPTY:
            freeze_alike(self, "metadata")

    @classmethod
    def user(cls, *content: str | Part, id: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> Message:
        """Return a message of the user. `content` are texts and parts.

        Without an `id` it gets one. `metadata` is stored with it.
        """
        return cls("user", _parts(content), _id(id), metadata)

    @classmethod
    def system(cls, text: str, *, id: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> Message:
        """Return a message of the system, which says a `text`.

        Without an `id` it gets one. `metadata` is stored with it.
        """
        return cls("system", _parts((text,)), _id(id), metadata)

    @classmethod
    def assistant(
        cls,
        *content: str | Part,
        tool_calls: Iterable[ToolCall] = (),
        id: str | None = None,
        metadata: Mapping[str, Any] = EMPTY,
    ) -> Message:
        """Return a message of the assistant. `content` are texts and parts, and `tool_calls` come behind them.

        Without an `id` it gets one. `metadata` is stored with it.
        """
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
        """Return the message with the result of the call `call_id`. `content` is a text or any JSON value.

        `name` is the name of the tool. With `is_error` the content is the reason why the call failed. Without an `id`
        it gets one. `metadata` is stored with it.
        """
        settled = clean_text(content) if isinstance(content, str) else content
        result = ToolResult(expect(call_id, str, "$.call_id"), settled, name, is_error)
        return cls("tool", (result,), _id(id), metadata)

    @classmethod
    def of(cls, value: object, *, role: Role = "user") -> Message:
        """Return a message from a `value` that a caller has: a message, a text, a part, or a dict.

        A dict has a role, content and perhaps tool calls, in our form or in OpenAI's. Or it is an item of OpenAI's
        Responses API. A text or a part gets the `role`.
        """
        if isinstance(value, Message):
            return value
        if isinstance(value, Mapping):
            from perdure.model.given_messages import message_of  # which imports this module

            return message_of(value)
        if isinstance(value, str):
            return cls(role, _parts((value,)))
        if isinstance(value, Part):
            return cls(role, (value,))
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
        """The parts that are tool calls."""
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """The parts that are results of tool calls."""
        return tuple([part for part in self.parts if isinstance(part, ToolResult)])

    @property
    def file_hashes(self) -> frozenset[str]:
        """The hashes of images and files whose bytes are in a store, apart from this message."""
        return frozenset([part.hash for part in self.parts if type(part) is Media and part.hash is not None])

    def with_files(self, bodies: Mapping[str, bytes]) -> Message:
        """Return the message with bytes put back into it. `bodies` has them by their hashes."""
        parts = [
            msgspec.structs.replace(part, data=bodies[part.hash], hash=None, size=None)
            if type(part) is Media and part.hash is not None and part.hash in bodies
            else part
            for part in self.parts
        ]
        return msgspec.structs.replace(self, parts=tuple(parts))

    @property
    def is_sealed(self) -> bool:
        """True if it has nothing but the rest of a foreign item: then there is nothing to show."""
        return bool(self.parts) and all(type(part) is Envelope for part in self.parts)

    @property
    def frame_for_copy(self) -> Mapping[str, Any]:
        """The metadata with which a copy of this message gives the same foreign item, under the same id."""
        envelope = self.parts[-1] if self.parts else None
        if type(envelope) is not Envelope:
            return EMPTY
        frame = self.metadata.get(envelope.format)
        return {envelope.format: {"": self.id, **(frame if isinstance(frame, Mapping) else EMPTY)}}

    @property
    def is_trace(self) -> bool:
        """True if this message belongs to the work of a run rather than to the conversation."""
        return bool(self.metadata.get("is_trace"))

    @property
    def is_incomplete(self) -> bool:
        """True if the message was cut off: by its length, by a filter, or because the run was stopped."""
        return bool(self.metadata.get("incomplete"))

    @property
    def is_superseded(self) -> bool:
        """True if a killed process had this part of an answer. The model was asked again, and this is not shown."""
        return self.role == "assistant" and self.is_incomplete and bool(self.metadata.get("superseded"))

    @property
    def is_note(self) -> bool:
        """True for a note that lists the calls of a run which was stopped."""
        return self.role == "system" and CONTINUES in self.metadata

    def with_metadata(self, **values: JSON) -> Message:
        """Return the message with further metadata, given as the keywords `values`."""
        return msgspec.structs.replace(self, metadata={**self.metadata, **values})


def _id(given: str | None) -> str:
    return expect(given, str, "$.id") if given else new_id()


def redactions_in(messages: Iterable[Message]) -> dict[str, int]:
    """Return how often each redactor has replaced something in messages before they were stored."""
    total: dict[str, int] = {}
    for message in messages:
        found = message.metadata.get(REDACTIONS)
        for name, count in found.items() if isinstance(found, Mapping) else ():
            total[name] = total.get(name, 0) + (count if type(count) is int else 0)
    return total


def several_messages(given: Iterable[object], path: str) -> tuple[Message, ...]:
    """Return messages that are given at once, in any form that `Message.of` takes.

    InvalidData names the place of a dict that is not a message. Responses items that are parts of one answer become one
    message.
    """
    given = tuple(given)
    if not any(isinstance(each, Mapping) for each in given):
        return tuple(map(Message.of, given))
    from perdure.model.given_messages import messages_of  # which imports this module

    return tuple(messages_of(given, path))


def require_distinct(messages: Sequence[Message], path: str) -> None:
    """Raise InvalidData if two messages that are given at once have the same id: one of them would be lost."""
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
