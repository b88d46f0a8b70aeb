"""LangChain's messages in a transcript: a graph's channel of messages is kept as a view over the log.

A view is compared by value with what the graph has, so a message that was changed in place is noticed. Only what is
new is serialized and stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
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
from pydantic import BaseModel

from perdure.adapters.forms.langchain import FORM
from perdure.adapters.langgraph_values import PLAIN, is_readable, kept, plain_data, value_of
from perdure.model.ids import new_id
from perdure.model.message import Envelope, Message, Role, Text
from perdure.model.transcript import Transcript
from perdure.model.value import clean_text
from perdure.stores.cache import LRU

FORMAT = "langgraph"
"""The format of envelopes with a message as LangGraph's serializer writes it."""

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
"""The fields of each class, in pydantic's order."""
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
"""The number of messages that are remembered. The ones remembered first are dropped first."""
_MOST_VIEWS = 32
_STRETCH = 128
"""The number of messages that are compared in one call."""
_EXTRA = attrgetter("__pydantic_extra__")

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_SCALARS = frozenset({str, int, float, bool, type(None)})
# The attributes that pydantic sets on a model that it makes without validation.
_set_fields, _set_names, _set_extra, _set_private = (
    vars(BaseModel)[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def are_messages(value: Any) -> bool:
    """Tell whether a channel's value can be kept in a transcript: a list of messages and nothing else."""
    return type(value) is list and all(issubclass(kind, BaseMessage) for kind in set(map(type, value)))


class Mold:
    """One message taken apart. Equal ones are made of it quickly, and others are compared with it.

    pydantic would take ten times as long to make one, and LangGraph wants all of a thread's for each turn. All that are
    made share their texts, which cannot be changed.
    """

    __slots__ = ("_empty", "_extra", "_kind", "_names", "_nested", "_packed", "fields", "plain_kind")

    def __init__(self, kind: type[BaseMessage], data: Mapping[str, Any]) -> None:
        self._kind = kind
        self.fields = {key: data[key] for key in _FIELDS[kind]}
        self._extra = {key: value for key, value in data.items() if key not in _NAMES[kind]}
        self._names = _NAMES[kind] | self._extra.keys() if self._extra else _NAMES[kind]
        self.plain_kind = None if self._extra else kind
        """Its class, or None if it has more than its fields."""
        nested = {key: value for key, value in self.fields.items() if type(value) not in _SCALARS}
        self._empty = tuple((key, type(value)) for key, value in nested.items() if not value)
        """The fields that are empty lists and objects, as most nested ones are. They are made, not unpacked."""
        full = {key: value for key, value in nested.items() if value}
        self._nested = _pack(full) if full else b""
        self._packed = _pack(self._extra)

    @property
    def id(self) -> str | None:
        own_id: str | None = self.fields["id"]
        return own_id

    def make(self) -> BaseMessage:
        """Return a new message, which the receiver may change."""
        made: BaseMessage = object.__new__(self._kind)
        own = self.fields.copy()
        for key, kind in self._empty:
            own[key] = kind()
        if self._nested:
            own |= _unpack(self._nested)
        _set_fields(made, own)
        # All of a kind share one set. It has every field already, so no change of a message adds to it.
        _set_names(made, self._names)
        _set_extra(made, _unpack(self._packed) if self._extra else {})
        _set_private(made, None)
        return made

    def is_of(self, message: BaseMessage) -> bool:
        """Tell whether a message is equal to this one."""
        if type(message) is not self._kind:
            return False
        if message.__dict__ == self.fields:
            return (message.__pydantic_extra__ or {}) == self._extra
        # A tuple, for example, has become a list in the store. Few messages get here: a new one has another id.
        data = _data_of(message) if message.id == self.id else None
        return data == self.fields | self._extra


class Original:
    """A message that is more than JSON, such as one of a user's own class. It is copied, and not taken apart."""

    __slots__ = ("_message",)
    plain_kind = None
    fields: Mapping[str, Any] = {}

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


class Replaced:
    """A message of which a store that redacts has kept something else.

    The run that has made it still has the message as it was said, and a later run has what is stored. Both are this
    message: neither has to be stored again.
    """

    __slots__ = ("_said", "_stored")
    plain_kind = None
    fields: Mapping[str, Any] = {}

    def __init__(self, said: Cast, stored: Cast) -> None:
        self._said, self._stored = said, stored

    @property
    def id(self) -> str | None:
        return self._stored.id

    def make(self) -> BaseMessage:
        return self._stored.make()

    def is_of(self, message: BaseMessage) -> bool:
        return self._said.is_of(message) or self._stored.is_of(message)


Cast = Mold | Original | Replaced
Casts = tuple[Cast, ...]
"""The messages that a stored one stands for: several, if perdure has put several results of tools into it."""


class Shown:
    """The casts of a view's messages, in columns: very many are compared in a few calls."""

    __slots__ = ("_fields", "_kinds", "casts")

    def __init__(self, casts: Sequence[Casts] = ()) -> None:
        self.casts: list[Casts] = []
        self._kinds: list[type[BaseMessage] | None] = []
        self._fields: list[Mapping[str, Any]] = []
        self.extend(casts)

    def extend(self, casts: Sequence[Casts]) -> None:
        self.casts += casts
        self._kinds += [each[0].plain_kind if len(each) == 1 else None for each in casts]
        self._fields += [each[0].fields if each else {} for each in casts]

    def first(self, count: int) -> Shown:
        """Return a copy of the first of these, which may be extended."""
        shown = Shown()
        shown.casts, shown._kinds, shown._fields = self.casts[:count], self._kinds[:count], self._fields[:count]
        return shown

    def common(self, wanted: Sequence[BaseMessage]) -> int:
        """Return how many of these come first in `wanted`. It may be a few less, since whole stretches are compared."""
        place, most = 0, min(len(self.casts), len(wanted))
        while place < most and self._has(place, wanted[place : min(place + _STRETCH, most)]):
            place += _STRETCH
        return min(place, most)

    def _has(self, place: int, given: Sequence[BaseMessage]) -> bool:
        stop = place + len(given)
        return (
            list(map(type, given)) == self._kinds[place:stop]
            and [message.__dict__ for message in given] == self._fields[place:stop]
            and not any(map(_EXTRA, given))
        )


class View(NamedTuple):
    """A view to be saved, and the casts of those messages at its end that are not in the log yet."""

    transcript: Transcript
    new: Sequence[Cast] = ()
    shown: Shown | None = None
    """The casts of all its messages, if they had to be found."""


class MessageViews:
    """The channel of messages as views, with what is known so far about the messages of a store."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Message, Casts]] = {}
        """By the identity of a stored message, which is kept here too: no other object can get its identity."""
        self._shown: LRU[int, tuple[Transcript, Shown]] = LRU(_MOST_VIEWS)
        """By the identity of a view, in the same way."""

    def messages(self, view: Transcript, serde: SerializerProtocol) -> list[BaseMessage]:
        """Return the messages that a view shows. The caller may change them."""
        return [cast.make() for casts in self._shown_by(view, serde).casts for cast in casts]

    def view(self, base: Transcript, wanted: Sequence[BaseMessage], serde: SerializerProtocol) -> View:
        """Return a view of these messages that reuses what `base` has of them. Only what is new is stored."""
        known = self._shown_by(base, serde)
        place, at = _common(known, wanted)
        beginning = base.cut(0, place)
        shown = known.first(place)
        if at == len(wanted):
            return View(beginning, (), shown)
        pieces, new = list(beginning.pieces), list[Cast]()
        for found, unknown in _found(known.casts, place, wanted[at:]):
            drawn = [_drawn(message, serde) for message in unknown]
            pieces += base.cut(*found).pieces
            pieces += Transcript.of(stored for stored, _ in drawn).pieces
            new = [cast for _, cast in drawn]
            shown.extend([*known.casts[slice(*found)], *((cast,) for cast in new)])
        return View(Transcript(pieces), new, shown)

    def remember(self, saved: Transcript, view: View, serde: SerializerProtocol) -> None:
        """Remember the casts of a view that has been saved, so that its messages need not be read."""
        is_redacted = False
        # The new messages are the last ones of the view.
        for stored, drawn, cast in zip(reversed(saved), reversed(view.transcript), reversed(view.new), strict=False):
            if stored.parts != drawn.parts:
                is_redacted = True
                cast = Replaced(cast, *_casts_of(stored, serde))
            self._keep(stored, (cast,))
        if view.shown is not None and not is_redacted:
            self._shown.keep(id(saved), (saved, view.shown))

    def _shown_by(self, view: Transcript, serde: SerializerProtocol) -> Shown:
        remembered = self._shown.recall(id(view))
        if remembered is not None:
            return remembered[1]
        shown = Shown([self._casts(stored, serde) for stored in view])
        self._shown.keep(id(view), (view, shown))
        return shown

    def _casts(self, stored: Message, serde: SerializerProtocol) -> Casts:
        known = self._known.get(id(stored))
        return self._keep(stored, _casts_of(stored, serde)) if known is None else known[1]

    def _keep(self, stored: Message, casts: Casts) -> Casts:
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[id(stored)] = stored, casts
        return casts


def _common(known: Shown, wanted: Sequence[BaseMessage]) -> tuple[int, int]:
    """Return how many of the known casts come first in `wanted`, and how many messages they stand for."""
    place = at = end = known.common(wanted)
    for casts in known.casts[place:]:
        for cast in casts:
            if end == len(wanted) or not cast.is_of(wanted[end]):
                return place, at
            end += 1
        place, at = place + 1, end
    return place, at


def _found(
    known: Sequence[Casts], place: int, wanted: Sequence[BaseMessage]
) -> Iterator[tuple[tuple[int, int], list[BaseMessage]]]:
    """Yield the stretches of `known` from a place on that are wanted, each with the new messages that follow."""
    ahead = _places(known, place)
    start = stop = place
    new: list[BaseMessage] = []
    for message in wanted:
        places = (at for at in ahead.get(message.id, ()) if at >= stop)
        found = next((at for at in places if known[at][0].is_of(message)), None)
        if found is None:
            new.append(message)
        elif found == stop and not new:
            stop += 1
        else:
            yield (start, stop), new
            start, stop, new = found, found + 1, []
    yield (start, stop), new


def _places(known: Sequence[Casts], place: int) -> dict[str | None, list[int]]:
    """Return the places of messages by their ids, from a place on. One that stands for several is left out."""
    places: dict[str | None, list[int]] = {}
    for at in range(place, len(known)):
        if len(known[at]) == 1:
            places.setdefault(known[at][0].id, []).append(at)
    return places


def _drawn(message: BaseMessage, serde: SerializerProtocol) -> tuple[Message, Cast]:
    """Return a message for the log and its cast. Its parts are readable if it is JSON and not encrypted."""
    data, is_clear = _data_of(message), is_readable(serde)
    # A copy, since the graph may change its own message later.
    cast: Cast = Original(copy.deepcopy(message)) if data is None else Mold(type(message), data)
    if data is not None and is_clear:
        return FORM.message({"type": message.type, "data": data}), cast
    role: Role = next((role for kind, role in _ROLES if isinstance(message, kind)), "system")
    shown = (Text(clean_text(message.text)),) if is_clear and message.text else ()
    own_id = message.id if message.id and len(message.id) <= _LONGEST_ID and message.id.isprintable() else new_id()
    return Message(role, (*shown, Envelope(FORMAT, kept(message, serde))), own_id), cast


def _casts_of(stored: Message, serde: SerializerProtocol) -> Casts:
    """Return the casts of a stored message: several, if perdure has put several results into it."""
    envelope = stored.parts[-1] if stored.parts else None
    if type(envelope) is Envelope and envelope.format == FORMAT:
        return (_cast_of(value_of(envelope.body, serde)),)
    return tuple(_mold(item) for item in FORM.items(stored))


def _cast_of(message: Any) -> Cast:
    if not isinstance(message, BaseMessage):  # a serializer that must not make its class returns its data
        return _mold({"type": message["type"], "data": message})
    data = _data_of(message)
    return Original(message) if data is None else Mold(type(message), data)


def _data_of(message: BaseMessage) -> dict[str, Any] | None:
    """Return a message's data, or None if it is not JSON or its class is not LangChain's own."""
    if _KINDS.get(message.type) is not type(message):
        return None
    data: dict[str, Any] | None = plain_data(message.model_dump())
    return data


def _mold(item: Any) -> Cast:
    """Return an item's mold. LangChain validates it once if it lacks fields that LangChain writes today."""
    kind = _KINDS.get(item["type"], ChatMessage)
    data = item["data"]
    if not data.keys() >= _NAMES[kind]:
        data = kind(**data).model_dump()
    try:
        return Mold(kind, data)
    except (ValueError, OverflowError):  # a lone surrogate, or a huge number
        return Original(kind(**data))
