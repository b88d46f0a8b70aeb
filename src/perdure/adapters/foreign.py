"""Foreign items as messages: what can be read becomes typed parts, and an `Envelope` keeps the rest with holes in it.

An envelope's body is the item's JSON as a text. It is a stored format, which every later release has to read. A text
in it that is enclosed by two DEL characters is a hole, and says what fills it:

| hole | what fills it |
|---|---|
| `0` | the content of part 0: a text, a call's arguments, a tool's result |
| `0.id` | a field of part 0 |
| `0a` and a name | one of a call's arguments |
| `0n1` | one of the pieces that a result is made of |
| `0j1` | a call's arguments as JSON text, in one of several styles |
| `0o`, `0l` | the content of part 0, which has to be an object, or a list |
| `f` | what the frame has under the same key; the message's metadata has the frame under the format's name |
| `f` and a name | what the object of that name in the frame has under the same key |
| nothing | the message's id |

A key that is a hole stands for several keys: `0:8` for the first eight of the frame with their values, and `0:3` and a
name for three of the object of that name in the frame.

A body that begins with a space has something that perdure's own JSON cannot express, such as NaN. One that begins with
two spaces is the whole item: it has no holes, even if it contains a DEL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.ids import mark_of, new_id
from perdure.model.message import Envelope, Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.value import EMPTY, JSON, MAX_DEPTH, FrozenDict, clean_text, thawed

MARK = "\x7f"
"""The character that encloses a hole. An item that has it anywhere but in lifted text is kept whole."""
_MARK, _MARK_IN_PYTHONS = MARK.encode(), json.dumps(MARK)[1:-1].encode()
_BY_PYTHON, _WHOLE = b" ", b"  "
INVALID_JSON = "INVALID_JSON"
"""The only argument of a call whose arguments are not a JSON object that perdure can keep. Drivers use it too."""
_DEEPEST = MAX_DEPTH - 10
_FEW_BRACKETS = 60
"""The most brackets of an item whose depth is not measured: it cannot be too deep."""
_LONGEST_ID = _LONGEST_NAME = 200
_SHORT = 1_000
"""The longest body whose template is remembered. A longer one has content of its own in it."""
_AS_TEXT = "$json"
"""The only key of a metadata value that is kept as a JSON text, because perdure's own JSON cannot express it."""
# An item may have any shape: these are the errors of a form, or of a hole, that does not fit it.
_NOT_OURS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError, msgspec.MsgspecError)

Frame = Mapping[str, Any]
Fill = Callable[[Message, Frame], JSON]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_check_range = msgspec.msgpack.Encoder().encode


class Form:
    """A translation between the items of one framework and messages. Each framework has a subclass."""

    name: str
    """The envelope's format, and the key in a message's metadata of its frame."""

    may_need_no_envelope = True
    """False if every item of the framework has more in it than `give` returns. Then `give` is not tried."""

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        """Lift what can be read out of an item. Return the role it speaks in, and the item with holes."""
        raise NotImplementedError

    def give(self, message: Message) -> list[JSON]:
        """Return a message as items that the framework accepts, without using an envelope.

        It is called for messages that perdure has made: summaries, injected and redacted messages. It is also called
        for items that need no envelope, so its result for a message must not change from release to release.
        """
        raise NotImplementedError

    def message(self, item: JSON, *, message_id: str | None = None) -> Message:
        """Return the message that keeps an item. `items` gives the same item back, with its key order and types.

        The message has `message_id`, or else the item's own id if that is usable.
        """
        raw = _plain_json(item)
        spelled = _python_json(item) if raw is None else raw
        lifter = Lifter(is_plain=raw is not None, names_itself=message_id is None)
        try:
            role, skeleton = self.take(item, lifter)
        except _NOT_OURS:
            return self._sealed(item, message_id)
        metadata = {self.name: lifter.frame} if lifter.frame else EMPTY
        bare = Message(role, tuple(lifter.parts), message_id or lifter.message_id or new_id(), metadata)
        if raw is not None and lifter.parts and self.may_need_no_envelope and self._gives_back(bare, raw):
            return bare
        body = _encode(skeleton) if raw is not None else _python_json(skeleton).replace(_MARK_IN_PYTHONS, _MARK)
        made = Message(role, (*bare.parts, Envelope(self.name, body.decode())), bare.id, bare.metadata)
        # Read it back before it is relied on: an item may contain what looks like a hole.
        return made if self._is_kept(made, body, spelled) else self._sealed(item, message_id)

    def items(self, message: Message) -> list[JSON]:
        """Return a message as the framework's items: the item that was kept in it, or else what `give` returns."""
        envelope = message.parts[-1] if message.parts else None
        if type(envelope) is Envelope and envelope.format == self.name:
            try:
                return [_item_of(envelope.body, message, self.frame(message))]
            except _NOT_OURS:
                pass  # a compaction shows less of a result than the item has places for
        return self.give(message)

    def frame(self, message: Message) -> Mapping[str, Any]:
        """Return the ids, times and links of an item. They are not content, and a redaction leaves them."""
        frame = message.metadata.get(self.name)
        return frame if isinstance(frame, Mapping) else EMPTY

    def framed(self, message: Message) -> dict[str, Any]:
        """Return the frame as a plain dict for a new item, without the id that is kept for a copy."""
        return {key: thawed(value) for key, value in self.frame(message).items() if key}

    def id_of(self, message: Message) -> str:
        """Return the id of a message's item. A message that a compaction shows for another has that one's id."""
        named = self.frame(message).get("", message.id)
        return named if isinstance(named, str) else message.id

    def _gives_back(self, message: Message, raw: bytes) -> bool:
        try:
            given = self.give(message)
        except _NOT_OURS:
            return False
        return len(given) == 1 and _encode(given[0]) == raw

    def _is_kept(self, message: Message, body: bytes, spelled: bytes) -> bool:
        try:
            return _filled(body, message, self.frame(message)) == spelled
        except _NOT_OURS:
            return False

    def _sealed(self, item: JSON, message_id: str | None) -> Message:
        """Return a message that keeps an item whole and shows none of it."""
        body = _WHOLE + _python_json(item).removeprefix(_BY_PYTHON)
        return Message("system", (Envelope(self.name, body.decode()),), message_id or new_id())


class Lifter:
    """A collector of what can be read in an item. Each method returns what the item's skeleton has in its place."""

    __slots__ = ("_is_plain", "_names_itself", "frame", "message_id", "parts")

    def __init__(self, *, is_plain: bool = True, names_itself: bool = True) -> None:
        self.parts: list[Part] = []
        self.frame: dict[str, Any] = {}
        self.message_id: str | None = None
        self._is_plain = is_plain
        self._names_itself = names_itself

    def text(self, text: Any) -> JSON:
        """Lift a text that is said."""
        return self._spoken(text, Text)

    def thought(
        self, text: Any, signature: Any = None, provider: str | None = None, thought_id: Any = None
    ) -> tuple[JSON, JSON]:
        """Lift a thought. Return what is left of its text and of its signature."""
        signed = signature if isinstance(signature, str) and self.is_sound(signature) else None
        named = thought_id if isinstance(thought_id, str) and self.is_sound(thought_id) else None
        if not isinstance(text, str) or not (text or signed):
            return text, signature
        left = self._spoken(text, lambda said: Thinking(said, signed, provider, named)) if text else text
        if not text:
            self.parts.append(Thinking("", signed, provider, named))
        return left, signature if signed is None else self._field("signature")

    def _spoken(self, text: Any, make: Callable[[str], Part]) -> JSON:
        if type(text) is not str or not text:
            return text
        if self.is_sound(text):
            self.parts.append(make(text))
            return _hole(len(self.parts) - 1)
        self.parts.append(make(clean_text(text)))  # the part is readable; the item keeps the lone surrogates
        return text

    def call(self, name: Any, arguments: Any, call_id: Any) -> tuple[JSON, JSON]:
        """Lift a tool call, whose arguments are an object or JSON text. Return what is left of arguments and id."""
        if not (isinstance(name, str) and name and isinstance(call_id, str) and self.is_sound([name, call_id])):
            return arguments, call_id
        place = len(self.parts)
        if isinstance(arguments, dict) and self.is_sound(arguments):
            self.parts.append(ToolCall(name, arguments, call_id))
            return _hole(place), self._field("id")
        if isinstance(arguments, str):
            read = _object_in(arguments)
            if read is not None:
                self.parts.append(ToolCall(name, read, call_id))
                style = _style_of(arguments, read)
                return arguments if style is None else _hole(place, f"j{style}"), self._field("id")
        unread = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self.parts.append(ToolCall(name, {INVALID_JSON: clean_text(unread)}, call_id))
        is_hole = isinstance(arguments, str) and self.is_sound(arguments)
        return _hole(place, f"a{INVALID_JSON}") if is_hole else arguments, self._field("id")

    def argument(self, name: str, key: str, value: Any, call_id: Any) -> tuple[JSON, JSON]:
        """Lift a call of a tool that has one argument. Return what is left of it and of the id."""
        left, named = self.call(name, {key: value}, call_id)
        return (_hole(len(self.parts) - 1, f"a{key}") if isinstance(left, str) else value), named

    def result(self, call_id: Any, content: Any, *, name: Any = None, is_error: bool = False) -> tuple[JSON, JSON]:
        """Lift a tool's answer. Return what is left of it, and of the id of its call."""
        (left,), named = self.results(call_id, [content], name=name, is_error=is_error)
        return left, named

    def results(
        self, call_id: Any, pieces: Sequence[Any], *, name: Any = None, is_error: bool = False
    ) -> tuple[list[JSON], JSON]:
        """Lift an answer of several pieces. Return what is left of each, and of the id of its call."""
        if not isinstance(call_id, str) or not self.is_sound(call_id):
            return list(pieces), call_id
        named = name if isinstance(name, str) and name and self.is_sound(name) else None
        place, is_sound = len(self.parts), self.is_sound(list(pieces))
        told = list(pieces) if is_sound else [clean_text(_as_text(each)) for each in pieces]
        content = told[0] if len(told) == 1 else told or ""
        self.parts.append(ToolResult(call_id, content, named, is_error))
        if not is_sound:
            return list(pieces), self._field("call_id")
        if len(told) == 1:
            return [_hole(place, _required(content))], self._field("call_id")
        return [_hole(place, f"n{at}") for at in range(len(told))], self._field("call_id")

    def result_in(
        self, call_id: Any, blocks: list[Any], keys: Sequence[str], *, name: Any = None, is_error: bool = False
    ) -> tuple[list[JSON], JSON]:
        """Lift an answer of blocks that have a piece under one of `keys`. Other blocks, such as images, stay.

        Return the blocks with what is left of them, and of the id of the call.
        """
        objects = [(at, block) for at, block in enumerate(blocks) if isinstance(block, dict)]
        places = [(at, key) for at, block in objects for key in keys if key in block]
        pieces = [blocks[at][key] for at, key in places]
        holes, named = self.results(call_id, pieces, name=name, is_error=is_error)
        left = list(blocks)
        for (at, key), hole in zip(places, holes, strict=True):
            left[at] = {**left[at], key: hole}
        return left, named

    @property
    def asks_as(self) -> Role:
        """The role of a message that a framework calls a user's: "tool" if it has nothing but results."""
        results = [part for part in self.parts if isinstance(part, ToolResult)]
        return "tool" if results and len(results) == len(self.parts) else "user"

    def again(self, place: int) -> JSON:
        """Return a hole for the content of a part that was lifted before. Some items say it twice."""
        return _hole(place)

    def keep(self, key: str, value: Any) -> JSON:
        """Put a value into the frame under the item's own key. It must not be content: a redaction leaves it there."""
        if value is None or not self.is_sound(value):
            return value
        self.frame[key] = value
        return f"{MARK}f{MARK}"

    def keep_all(self, item: dict[str, Any], keys: Sequence[str]) -> dict[str, JSON]:
        """Put those of `keys` that an object has into the frame. Return what is left in their places."""
        return {key: self.keep(key, item[key]) for key in keys if key in item}

    def keep_stretches(self, item: dict[str, Any], keys: Collection[str], name: str = "") -> dict[str, JSON]:
        """Put those of `keys` that an object has into the frame, or into its object `name`, in the item's order.

        Return the object with one hole for each stretch of adjacent keys.
        """
        kept: dict[str, Any] = self.frame.setdefault(name, {}) if name else self.frame

        def may_be_kept(entry: tuple[str, Any]) -> bool:
            key, value = entry
            return key in keys and key not in kept and value is not None and self.is_sound(value)

        left: dict[str, JSON] = {}
        for is_kept, entries in groupby(item.items(), may_be_kept):
            start = len(kept)
            (kept if is_kept else left).update(entries)
            if is_kept:
                left[f"{MARK}{start}:{len(kept)}{name}{MARK}"] = 0
        if name and not kept:
            del self.frame[name]
        return left

    def keep_in(self, name: str, item: dict[str, Any], keys: Sequence[str]) -> dict[str, JSON]:
        """Put those of `keys` that an object has into the frame's object `name`. Return what takes their places."""
        kept = {key: item[key] for key in keys if item.get(key) is not None}
        if not kept or not self.is_sound(kept):
            return {}
        self.frame[name] = kept
        return dict.fromkeys(kept, f"{MARK}f{name}{MARK}")

    def own_id(self, value: Any) -> JSON:
        """Use the item's id as the message's, if it is a valid one."""
        if not self._names_itself or not isinstance(value, str):
            return value
        if not 0 < len(value) <= _LONGEST_ID or not value.isprintable():
            return value
        # A subclass of str becomes a plain str.
        self.message_id = str.__str__(value)
        return MARK + MARK

    def is_sound(self, value: Any) -> bool:
        """Tell whether a value can be kept in a part as it is."""
        return self._is_plain or _plain_json(value) is not None

    def _field(self, name: str) -> JSON:
        return _hole(len(self.parts) - 1, f".{name}")


def _hole(place: int, what: str = "") -> str:
    return f"{MARK}{place}{what}{MARK}"


def same(left: JSON, right: JSON) -> bool:
    """Tell whether two values are the same JSON: the same keys in the same order, and 1 is not 1.0."""
    return json.dumps(left) == json.dumps(right)


def is_plain(item: JSON) -> bool:
    """Tell whether an item is JSON that perdure keeps as it is."""
    return _plain_json(item) is not None


def _plain_json(item: Any) -> bytes | None:
    """Return an item's JSON, or None if it would not come back the same or is too deep to be stored."""
    try:
        raw = _encode(item)
        if _decode(raw) != item:  # NaN has become null, or a tuple a list
            return None
        # Integers of more than 64 bits are JSON too, but perdure does not store them.
        _check_range(item)
    except _NOT_OURS:
        return None
    return None if raw.count(b"{") + raw.count(b"[") > _FEW_BRACKETS and _depth(item) > _DEEPEST else raw


def as_name(name: str | None, session_id: str, owner: str | None = None) -> str | None:
    """Return the name to show for a framework's name of a session, or None if the id says the same.

    The id of an owner's session says the same behind the owner's mark.
    """
    mark = "" if owner is None else mark_of(owner)
    shown = None if name is None or mark + name == session_id else clean_text(name)[:_LONGEST_NAME]
    return shown if shown and not shown.isspace() else None


def as_metadata(value: JSON) -> JSON:
    """Return any JSON as a session's metadata can keep it: the value itself, or else its text."""
    is_ambiguous = isinstance(value, Mapping) and _AS_TEXT in value
    return value if is_plain(value) and not is_ambiguous else {_AS_TEXT: json.dumps(value)}


def of_metadata(kept: Any) -> Any:
    """Return the value that `as_metadata` was given. The caller may change it."""
    return json.loads(kept[_AS_TEXT]) if isinstance(kept, Mapping) and _AS_TEXT in kept else thawed(kept)


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list) and each]:
        deepest += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return deepest


def _python_json(value: Any) -> bytes:
    """Return JSON in ASCII, which can express what perdure's own cannot: NaN, huge numbers, lone surrogates."""
    try:
        return _BY_PYTHON + json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidData("$", f"this item is not JSON: {error}") from None


def _read(spelled: bytes) -> JSON:
    return json.loads(spelled) if spelled.startswith(_BY_PYTHON) else _decode(spelled)


def _item_of(body: str, message: Message, frame: Frame) -> JSON:
    """Return the item that a body and a message's parts make together."""
    fill = _template(body) if len(body) <= _SHORT else None
    return _read(_filled(body.encode(), message, frame)) if fill is None else fill(message, frame)


@lru_cache(maxsize=512)
def _template(body: str) -> Fill | None:
    """Return a function that fills the holes of a body, or None if `_filled` has to do it.

    It is remembered, since a history has many calls of the same tools and many answers of the same form.
    """
    # `_decode` does not read what only Python's JSON can express.
    if body.startswith(" "):
        return None
    template = _Template()
    made = template.of(_decode(body), "")
    # Otherwise something that looks like a hole is part of a text, or a key.
    return made if template.marks == body.count(MARK) else None


class _Template:
    """A builder of functions that return a value of the same form with its holes filled."""

    marks = 0
    """The number of marks met so far that enclose a hole."""

    def of(self, value: Any, key: str) -> Fill:
        if type(value) is dict:
            return self._object(value)
        if type(value) is list:
            places = [self._entry(inner, "") for inner in value]
            return lambda message, frame: [inner if fill is None else fill(message, frame) for inner, fill in places]
        _, fill = self._entry(value, key)
        return fill or (lambda message, frame: value)

    def _object(self, value: dict[str, Any]) -> Fill:
        entries = [(name, *self._entry(inner, name)) for name, inner in value.items()]
        stretches = {name: stretch for name in value if (stretch := _stretch(name)) is not None}
        if not stretches:
            return lambda message, frame: {
                name: inner if fill is None else fill(message, frame) for name, inner, fill in entries
            }
        self.marks += 2 * len(stretches)

        def filled(message: Message, frame: Frame) -> JSON:
            made: dict[str, JSON] = {}
            for name, inner, fill in entries:
                if name in stretches:
                    made.update((key, _fresh(each)) for key, each in _entries(stretches[name], frame))
                else:
                    made[name] = inner if fill is None else fill(message, frame)
            return made

        return filled

    def _entry(self, value: Any, key: str) -> tuple[Any, Fill | None]:
        if type(value) in (dict, list):
            return None, self.of(value, key)
        if type(value) is not str or value[:1] != MARK or value[-1] != MARK or value.count(MARK) != 2:
            return value, None
        self.marks += 2
        return None, _filler(value[1:-1], key)


def _filler(hole: str, key: str) -> Fill:
    if hole[:1] == "f":
        name = hole[1:]
        return lambda message, frame: _fresh((frame[name] if name else frame)[key])
    digits = _DIGITS.match(hole)
    if digits is None:
        return lambda message, frame: _fresh(_filling(hole, message, frame))
    place, what = int(digits[0]), hole[digits.end() :]
    if not what:
        return lambda message, frame: _fresh(_content_of(message.parts[place]))
    return lambda message, frame: _fresh(_from_part(message.parts[place], what))


def _fresh(value: Any) -> JSON:
    """Return a value that its reader may change."""
    return value if type(value) is str else _decode(_encode(value))


def _filled(body: bytes, message: Message, frame: Mapping[str, Any]) -> bytes:
    """Return a body with its holes filled."""
    if _MARK not in body or body.startswith(_WHOLE):
        return body
    spelled = _spelled_by_python if body.startswith(_BY_PYTHON) else _encode
    pieces = body.split(_MARK)
    for place in range(1, len(pieces), 2):  # the quotes of a hole belong to it, and so does the 0 of a stretch
        hole = pieces[place].decode()
        before, after = pieces[place - 1][:-1], pieces[place + 1][1:]
        stretch = _stretch(f"{MARK}{hole}{MARK}")
        if stretch is not None:
            pieces[place] = spelled(dict(_entries(stretch, frame)))[1:-1]
            after = after[after.index(b"0") + 1 :]
        else:
            value = _framed(hole, pieces[place - 1], frame) if hole[:1] == "f" else _filling(hole, message, frame)
            pieces[place] = spelled(value)
        pieces[place - 1], pieces[place + 1] = before, after
    return b"".join(pieces)


def _spelled_by_python(value: JSON) -> bytes:
    return json.dumps(value).encode()


def _stretch(key: str) -> tuple[int, int, str] | None:
    """Return the start, the end and the object's name of the frame's keys that a key stands for, or None."""
    found = _STRETCH.fullmatch(key)
    return None if found is None else (int(found[1]), int(found[2]), found[3])


def _entries(stretch: tuple[int, int, str], frame: Frame) -> Iterator[tuple[str, JSON]]:
    start, stop, name = stretch
    entries = [*(frame[name] if name else frame).items()]
    first = 1 if not name and "" in frame else 0  # a copy's frame begins with the id of the original
    # A slice does not fail by itself: the item would lack some keys.
    if len(entries) < first + stop:
        raise LookupError("the frame has lost something")
    return iter(entries[first + start : first + stop])


def _framed(hole: str, before: bytes, frame: Mapping[str, Any]) -> JSON:
    """Return what the frame has under the key before a hole."""
    key = before.rstrip(b'": ').rpartition(b'"')[2].decode()
    return (frame[hole[1:]] if len(hole) > 1 else frame)[key]


def _filling(hole: str, message: Message, frame: Mapping[str, Any]) -> JSON:
    if not hole:
        return frame.get("", message.id)
    if hole.isdecimal():
        return _content_of(message.parts[int(hole)])
    digits = _DIGITS.match(hole)
    if digits is None:
        raise ValueError(f"a hole of an unknown kind: {hole}")
    return _from_part(message.parts[int(digits[0])], hole[digits.end() :])


_DIGITS = re.compile("[0-9]+")
_STRETCH = re.compile(f"{MARK}([0-9]+):([0-9]+)([^{MARK}]*){MARK}")


def _from_part(part: Any, what: str) -> JSON:
    kind, name = what[0], what[1:]
    if kind == ".":
        return getattr(part, name)
    if kind == "a":
        return part.arguments[name]
    if kind == "j":
        return _STYLES[int(name)](part.arguments)
    if kind == "n" and isinstance(part.content, list):
        return part.content[int(name)]
    content = _content_of(part)
    if _required(content) != kind:  # a compaction has put a text in its place
        raise TypeError("the result was an object or a list, and is not any more")
    return content


def _content_of(part: Any) -> JSON:
    kind = type(part)
    if kind is Text or kind is Thinking:
        return part.text
    return part.arguments if kind is ToolCall else part.content


def _required(content: Any) -> str:
    """Return the mark of a hole that takes nothing but an object, or a list."""
    return "o" if isinstance(content, dict) else "l" if isinstance(content, list) else ""


def _object_in(text: str) -> dict[str, Any] | None:
    """Return the object in a JSON text, or None if perdure cannot keep it."""
    try:
        read = _decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return read if isinstance(read, dict) and _plain_json(read) is not None else None


def json_text(value: Any) -> str:
    """Return JSON as most frameworks write a call's arguments as text."""
    return _encode(value).decode()


def _dumped(value: Any) -> str:
    """Return the same as `json.dumps`, in a third of the time if all values are texts."""
    if type(value) in (dict, FrozenDict) and all(type(each) is str for each in value.values()):
        return "{" + ", ".join([f"{_quoted(key)}: {_quoted(each)}" for key, each in value.items()]) + "}"
    return json.dumps(value)


_quoted = json.encoder.encode_basestring_ascii
_STYLES: tuple[Callable[[Any], str], ...] = (
    json_text,
    _dumped,
    partial(json.dumps, ensure_ascii=False),
    partial(json.dumps, separators=(",", ":")),
)
"""The styles of JSON texts. A skeleton names one by its index, so the order is part of the stored format."""


def _style_of(text: str, read: dict[str, Any]) -> int | None:
    return next((style for style, write in enumerate(_STYLES) if write(read) == text), None)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
