"""LangChain's messages in a transcript: what a graph has in its channel of messages, kept as a view over the log.

A view is compared with what the graph has by value, so that a message which was changed in place is noticed, and only
what is new is serialized and stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from perdure.adapters.forms.langchain import FORM
from perdure.adapters.langgraph_values import PLAIN, is_readable, kept, plain_data, value_of
from perdure.model.ids import new_id
from perdure.model.message import Envelope, Message, Role, Text
from perdure.model.transcript import Transcript
from perdure.model.value import clean_text

FORMAT = "langgraph"
"""The envelopes of messages that are kept as LangGraph's serializer writes them."""

_KINDS: Mapping[str, type[BaseMessage]] = {
    kind.model_fields["type"].default: kind
    for kind in (
        HumanMessage,
        AIMessage,
        SystemMessage,
        ToolMessage,
        FunctionMessage,
        ChatMessage,
        RemoveMessage,
        HumanMessageChunk,
        AIMessageChunk,
        SystemMessageChunk,
        ToolMessageChunk,
        FunctionMessageChunk,
        ChatMessageChunk,
    )
}
_FIELDS: Mapping[type[BaseMessage], tuple[str, ...]] = {kind: tuple(kind.model_fields) for kind in _KINDS.values()}
"""In the order in which pydantic has them."""
_NAMES: Mapping[type[BaseMessage], set[str]] = {kind: set(names) for kind, names in _FIELDS.items()}
_ROLES: tuple[tuple[type[BaseMessage], Role], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
    (ChatMessage, "user"),
)
_LONGEST_ID = 200
_MOST = 100_000
"""How many messages are remembered. Those of a thread that is used come first."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_NOT_JSON = (TypeError, ValueError, OverflowError, RecursionError)
_set = object.__setattr__


def are_messages(value: Any) -> bool:
    """Return whether a channel has what a transcript can keep: a list of messages and nothing else."""
    return type(value) is list and all(type(each) in _NAMES or isinstance(each, BaseMessage) for each in value)


class Mold:
    """One message as bytes: equal ones are made of it quickly, and others compared with it.

    pydantic would take ten times as long to make one, and LangGraph wants all of a thread's for each turn.
    """

    __slots__ = ("_names", "extra", "fields", "id", "kind")

    def __init__(self, kind: type[BaseMessage], data: Mapping[str, Any]) -> None:
        self.kind = kind
        self.fields = _pack({key: data[key] for key in _FIELDS[kind]})
        self.extra = {key: value for key, value in data.items() if key not in _NAMES[kind]}
        self._names = _NAMES[kind] | self.extra.keys() if self.extra else _NAMES[kind]
        self.id: str | None = data["id"]

    def make(self) -> BaseMessage:
        """Return a message of its own, which its receiver may change."""
        made = self.kind.__new__(self.kind)
        _set(made, "__dict__", _unpack(self.fields))
        # One for all of a kind: it has every field in it, so that a message which is changed leaves it as it is.
        _set(made, "__pydantic_fields_set__", self._names)
        _set(made, "__pydantic_extra__", copy.deepcopy(self.extra) if self.extra else {})
        _set(made, "__pydantic_private__", None)
        return made

    def is_of(self, message: BaseMessage) -> bool:
        """Return whether a message says just this: the same in the same order, and 1 is not 1.0."""
        if type(message) is not self.kind:
            return False
        try:
            if _pack(message.__dict__) == self.fields:
                return (message.__pydantic_extra__ or {}) == self.extra
        except _NOT_JSON:
            pass
        # An enum, say, is a text once it has been stored. Few get here: what is new has another id.
        data = _data_of(message) if message.id == self.id else None
        return data is not None and Mold(self.kind, data).says_what(self)

    def says_what(self, other: Mold) -> bool:
        return self.fields == other.fields and self.extra == other.extra


class Original:
    """A message that is more than JSON, such as one of a class of the user's own: the same, by copies."""

    __slots__ = ("_message",)

    def __init__(self, message: BaseMessage) -> None:
        self._message = message

    @property
    def id(self) -> str | None:
        return self._message.id

    def make(self) -> BaseMessage:
        return copy.deepcopy(self._message)

    def is_of(self, message: BaseMessage) -> bool:
        if type(message) is not type(self._message) or message.id != self.id:
            return False
        return message == self._message or PLAIN.dumps_typed(message) == PLAIN.dumps_typed(self._message)


Cast = Mold | Original


class View(NamedTuple):
    """A view to be saved, and the messages at its end that are not in the log yet."""

    transcript: Transcript
    new: Sequence[BaseMessage]


class MessageViews:
    """The channel of messages as views, with what was found out about the messages of a store so far."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Message, tuple[Cast, ...]]] = {}
        """By the identity of a stored message, which is kept with it so that no other takes its place."""

    def messages(self, view: Transcript, serde: SerializerProtocol) -> list[BaseMessage]:
        """Return the messages that a view shows. They are the caller's own."""
        return [cast.make() for casts in self._all_casts(view, serde) for cast in casts]

    def view(self, base: Transcript, wanted: Sequence[BaseMessage], serde: SerializerProtocol) -> View:
        """Return a view of these messages that takes from another what it has of them. Only what is new is stored."""
        stored = list(base)
        place, at = self._common(stored, wanted, serde)
        if at == len(wanted):
            return View(base.cut(0, place), ())
        pieces = list(base.cut(0, place).pieces)
        is_clear = is_readable(serde)
        new: Sequence[BaseMessage] = ()
        for found, new in self._found(stored, place, wanted[at:], serde):
            pieces += base.cut(*found).pieces
            pieces += Transcript.of(_stored(each, serde, is_clear=is_clear) for each in new).pieces
        return View(Transcript(pieces), new)

    def remember(self, saved: Transcript, new: Sequence[BaseMessage]) -> None:
        """Take note of what the last messages of a view stand for, once it is saved: they need not be read then."""
        for stored, message in zip(reversed(saved), reversed(new), strict=False):
            cast = _mold_of(message)
            if cast is not None:
                self._keep(stored, (cast,))

    def _common(
        self, stored: list[Message], wanted: Sequence[BaseMessage], serde: SerializerProtocol
    ) -> tuple[int, int]:
        """Return how many of the stored messages come first in what is wanted, and how many of these they are."""
        at = end = 0
        for place, casts in enumerate(self._all_casts(stored, serde)):
            at = end
            for cast in casts:
                if end == len(wanted) or not cast.is_of(wanted[end]):
                    return place, at
                end += 1
        return len(stored), end

    def _found(
        self, stored: list[Message], place: int, wanted: Sequence[BaseMessage], serde: SerializerProtocol
    ) -> Iterator[tuple[tuple[int, int], list[BaseMessage]]]:
        """Yield stretches of stored messages that are wanted, each with the new messages that come after it."""
        ahead = self._places(stored, place, serde)
        start = stop = place
        new: list[BaseMessage] = []
        for message in wanted:
            found = next(
                (at for at in ahead.get(message.id, ()) if at >= stop and self._is_at(at, stored, message)), None
            )
            if found is None:
                new.append(message)
            elif found == stop and not new:
                stop += 1
            else:
                yield (start, stop), new
                start, stop, new = found, found + 1, []
        yield (start, stop), new

    def _places(self, stored: list[Message], place: int, serde: SerializerProtocol) -> dict[str | None, list[int]]:
        """Return where messages are, by their ids, from a place on. One that stands for several is left out."""
        places: dict[str | None, list[int]] = {}
        for at in range(place, len(stored)):
            casts = self._casts(stored[at], serde)
            if len(casts) == 1:
                places.setdefault(casts[0].id, []).append(at)
        return places

    def _is_at(self, at: int, stored: list[Message], message: BaseMessage) -> bool:
        return self._known[id(stored[at])][1][0].is_of(message)

    def _all_casts(self, view: Sequence[Message], serde: SerializerProtocol) -> Iterator[tuple[Cast, ...]]:
        known = self._known
        for stored in view:
            found = known.get(id(stored))  # not by a call for each: there may be very many
            yield self._casts(stored, serde) if found is None else found[1]

    def _casts(self, stored: Message, serde: SerializerProtocol) -> tuple[Cast, ...]:
        known = self._known.get(id(stored))
        return self._keep(stored, _casts_of(stored, serde)) if known is None else known[1]

    def _keep(self, stored: Message, casts: tuple[Cast, ...]) -> tuple[Cast, ...]:
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[id(stored)] = stored, casts
        return casts


def _stored(message: BaseMessage, serde: SerializerProtocol, *, is_clear: bool) -> Message:
    """Return a message as it goes to the log: in readable parts if it can be, and its serializer does not hide it."""
    data = _data_of(message) if is_clear else None
    if data is not None:
        return FORM.message({"type": message.type, "data": data})
    role: Role = next((role for kind, role in _ROLES if isinstance(message, kind)), "system")
    shown = (Text(clean_text(message.text)),) if is_clear and message.text else ()
    own_id = message.id if message.id and len(message.id) <= _LONGEST_ID and message.id.isprintable() else new_id()
    return Message(role, (*shown, Envelope(FORMAT, kept(message, serde))), own_id)


def _casts_of(stored: Message, serde: SerializerProtocol) -> tuple[Cast, ...]:
    """Return what a stored message stands for: several messages, if perdure has put several results into one."""
    envelope = stored.parts[-1] if stored.parts else None
    if type(envelope) is Envelope and envelope.format == FORMAT:
        return (_cast_of(value_of(envelope.body, serde)),)
    return tuple(_mold(item) for item in FORM.items(stored))


def _cast_of(message: Any) -> Cast:
    if not isinstance(message, BaseMessage):  # a serializer that may not make it gives its data
        return _mold({"type": message["type"], "data": message})
    return _mold_of(message) or Original(message)


def _mold_of(message: BaseMessage) -> Mold | None:
    data = _data_of(message)
    return None if data is None else Mold(type(message), data)


def _data_of(message: BaseMessage) -> dict[str, Any] | None:
    """Return a message's data, if that is all there is to it: a class of LangChain's own, and JSON."""
    if _KINDS.get(message.type) is not type(message):
        return None
    data: dict[str, Any] | None = plain_data(message.model_dump())
    return data


def _mold(item: Any) -> Mold:
    """Return an item's mold. One that is not as LangChain writes it today goes through its validation once."""
    kind = _KINDS.get(item["type"], ChatMessage)
    data = item["data"]
    if not data.keys() >= _NAMES[kind]:
        data = kind(**data).model_dump()
    return Mold(kind, data)
