"""Foreign items as messages: what can be read becomes typed parts, and an `Envelope` keeps the rest with holes in it.

The skeleton in an envelope is a stored format: what it says now, every later release has to read. A hole is an object
with the key `$`. Its value says what fills it:

| value | what fills the hole |
|---|---|
| a number | the content of the part at that place, or what the keys below say of it |
| a text | that value of the message's frame, of an object the one under `k`; the empty text is the message's id |
| a list | the one object in it, which itself has a key `$` |
| an object | the JSON text under its key `json`: a value that perdure's JSON cannot say, such as NaN |

Beside a number, `.` names a field of the part, `a` one of a call's arguments, `n` one of a result's pieces, `j` the
style of arguments that are JSON text, and `o` says that the content has to be an object (1) or a list (2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.ids import new_id
from perdure.model.message import Envelope, Message, Part, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.value import EMPTY, JSON, MAX_DEPTH, clean_text, thawed

HOLE = "$"
INVALID_JSON = "INVALID_JSON"
"""The one argument of a call whose arguments are not a JSON object that perdure can keep, as drivers name it."""
_DEEPEST = MAX_DEPTH - 10
_FEW_BRACKETS = 60
"""What has no more brackets than this is not deep, and need not be measured."""
_LONGEST_ID = 200
_SCALARS = frozenset({str, int, float, bool, type(None)})
_NOT_OURS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, InvalidData)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_check_range = msgspec.msgpack.Encoder().encode


class Form:
    """How the items of one framework become messages, and messages its items. Make a subclass for each framework."""

    name: str
    """The envelope's format, and the key in a message's metadata of its frame."""

    def take(self, item: Any, lifter: Lifter) -> tuple[Role, JSON]:
        """Lift what can be read out of an item. Return the role it speaks in, and the item with holes."""
        raise NotImplementedError

    def give(self, message: Message) -> list[JSON]:
        """Return a message as items that the framework takes, without the help of an envelope.

        It is asked for what perdure itself has made: summaries, injected and redacted messages. It is also asked for
        items that need no envelope, so what it returns for a message must not change from release to release.
        """
        raise NotImplementedError

    def message(self, item: JSON, *, message_id: str | None = None) -> Message:
        """Return the message that keeps an item. `items` gives back the same item: keys in order, types and all.

        The message has the item's own id if it has a usable one, unless another is given.
        """
        raw = _plain_json(item)
        lifter = Lifter(is_plain=raw is not None, names_itself=message_id is None)
        try:
            role, skeleton = self.take(item, lifter)
        except _NOT_OURS:
            return self._sealed(item, message_id)
        made_id = message_id or lifter.message_id or new_id()
        metadata = {self.name: lifter.frame} if lifter.frame else EMPTY
        bare = Message(role, tuple(lifter.parts), made_id, metadata)
        if raw is not None and lifter.parts and self._gives_back(bare, raw):
            return bare
        if raw is None or b'"$"' in raw:
            skeleton = _kept(skeleton)
        try:
            made = Message(role, (*bare.parts, Envelope(self.name, skeleton)), made_id, bare.metadata)
            if self._is_kept(made, item, raw):
                return made
        except _NOT_OURS:
            pass
        return self._sealed(item, message_id)

    def items(self, message: Message) -> list[JSON]:
        """Return a message as the framework's items: the one that was kept in it, or else what `give` makes of it."""
        envelope = message.parts[-1] if message.parts else None
        if type(envelope) is Envelope and envelope.format == self.name:
            try:
                return [_filled(envelope.body, message, self.frame(message))]
            except _NOT_OURS:
                pass  # a compaction shows less of a result than the item has places for
        return self.give(message)

    def frame(self, message: Message) -> Mapping[str, Any]:
        """Return what of an item is neither content nor form: ids, times and links, which a redaction leaves."""
        frame = message.metadata.get(self.name)
        return frame if isinstance(frame, Mapping) else EMPTY

    def framed(self, message: Message) -> dict[str, Any]:
        """Return the same for an item to be made: plain, and without the id that it keeps for a copy."""
        return {key: thawed(value) for key, value in self.frame(message).items() if key}

    def id_of(self, message: Message) -> str:
        """Return the id of a message's item; a message that a compaction shows in place of another has that one's."""
        named = self.frame(message).get("", message.id)
        return named if isinstance(named, str) else message.id

    def _gives_back(self, message: Message, raw: bytes) -> bool:
        try:
            given = self.give(message)
        except _NOT_OURS:
            return False
        return len(given) == 1 and _encode(given[0]) == raw

    def _is_kept(self, message: Message, item: JSON, raw: bytes | None) -> bool:
        """Return whether the item comes back from a message, before anybody relies on it."""
        back = _filled(message.parts[-1].body, message, self.frame(message))  # type: ignore[union-attr]  # an envelope
        return _encode(back) == raw if raw is not None else same(back, item)

    def _sealed(self, item: JSON, message_id: str | None) -> Message:
        """Return a message that keeps an item whole, and shows nothing of it."""
        return Message("system", (Envelope(self.name, _kept(item)),), message_id or new_id())


class Lifter:
    """Takes what can be read out of an item. Each method returns what the item's skeleton has in its place."""

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
            return _Hole({HOLE: len(self.parts) - 1})
        self.parts.append(make(clean_text(text)))  # people read it without the half characters, which the item keeps
        return text

    def call(self, name: Any, arguments: Any, call_id: Any) -> tuple[JSON, JSON]:
        """Lift a tool call, whose arguments are an object or JSON text. Return what is left of arguments and id."""
        if not (isinstance(name, str) and name and isinstance(call_id, str) and self.is_sound([name, call_id])):
            return arguments, call_id
        place = len(self.parts)
        if isinstance(arguments, dict) and self.is_sound(arguments):
            self.parts.append(ToolCall(name, arguments, call_id))
            return _Hole({HOLE: place}), self._field("id")
        if isinstance(arguments, str):
            read = _object_in(arguments)
            if read is not None:
                self.parts.append(ToolCall(name, read, call_id))
                style = _style_of(arguments, read)
                return arguments if style is None else _Hole({HOLE: place, "j": style}), self._field("id")
        unread = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self.parts.append(ToolCall(name, {INVALID_JSON: clean_text(unread)}, call_id))
        is_hole = isinstance(arguments, str) and self.is_sound(arguments)
        return _Hole({HOLE: place, "a": INVALID_JSON}) if is_hole else arguments, self._field("id")

    def argument(self, name: str, key: str, value: Any, call_id: Any) -> tuple[JSON, JSON]:
        """Lift a call of a tool that has one argument. Return what is left of it and of the id."""
        left, named = self.call(name, {key: value}, call_id)
        if type(left) is not _Hole or HOLE not in left or len(left) != 1:
            return value, named
        return _Hole({**left, "a": key}), named

    def result(self, call_id: Any, content: Any, *, name: Any = None, is_error: bool = False) -> tuple[JSON, JSON]:
        """Lift what a tool has answered. Return what is left of it, and of the id of its call."""
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
            return [_Hole({HOLE: place, **_required(content)})], self._field("call_id")
        return [_Hole({HOLE: place, "n": at}) for at in range(len(told))], self._field("call_id")

    def again(self, place: int) -> JSON:
        """Return what stands for the content of a part that was lifted before: some items say it twice."""
        return _Hole({HOLE: place})

    def keep(self, key: str, value: Any) -> JSON:
        """Put a value into the frame, which outlasts a redaction: never content."""
        if value is None or not self.is_sound(value):
            return value
        self.frame[key] = value
        return _Hole({HOLE: key})

    def keep_all(self, item: dict[str, Any], keys: Sequence[str]) -> dict[str, JSON]:
        """Put those keys of an object that it has into the frame. Return what is left in their places."""
        return {key: self.keep(key, item[key]) for key in keys if key in item}

    def framed(self, key: str, inner: str) -> JSON:
        """Return what stands for one key of an object that is in the frame."""
        return _Hole({HOLE: key, "k": inner})

    def own_id(self, value: Any) -> JSON:
        """Take the item's id for the message's, if it may be one."""
        if not self._names_itself or not isinstance(value, str):
            return value
        if not 0 < len(value) <= _LONGEST_ID or not value.isprintable():
            return value
        self.message_id = str.__str__(value)
        return _Hole({HOLE: ""})

    def is_sound(self, value: Any) -> bool:
        """Return whether a value can be kept in a part as it is."""
        return self._is_plain or _plain_json(value) is not None

    def _field(self, name: str) -> JSON:
        return _Hole({HOLE: len(self.parts) - 1, ".": name})


class _Hole(dict[str, Any]):
    """A hole in a skeleton under construction: of a type of its own, since an item may have what looks like one."""

    __slots__ = ()


def same(left: JSON, right: JSON) -> bool:
    """Return whether two values are the same JSON: the same keys in the same order, and 1 is not 1.0."""
    return json.dumps(left) == json.dumps(right)


def is_plain(item: JSON) -> bool:
    """Return whether an item is JSON that perdure keeps as it is."""
    return _plain_json(item) is not None


def _plain_json(item: Any) -> bytes | None:
    """Return an item's JSON; None if something in it would not come back the same, or is too deep to be stored."""
    try:
        raw = _encode(item)
        if _decode(raw) != item:  # NaN has become null, or a tuple a list
            return None
        _check_range(item)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None
    return None if raw.count(b"{") + raw.count(b"[") > _FEW_BRACKETS and _depth(item) > _DEEPEST else raw


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list) and each]:
        deepest += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return deepest


def _kept(skeleton: Any) -> JSON:
    """Return a skeleton in which nothing but holes looks like one, and all is JSON that can be stored."""
    try:
        kept = _escaped(skeleton)
        if _depth(kept) <= _DEEPEST:
            return kept
    except RecursionError:
        pass
    return {HOLE: {"json": _as_json(skeleton)}}


def _escaped(value: Any) -> JSON:
    if type(value) is _Hole:
        return value
    if isinstance(value, dict):
        if any(_plain_json(key) is None for key in value):
            return {HOLE: {"json": _as_json(value)}}
        escaped = {key: _escaped(each) for key, each in value.items()}
        return {HOLE: [escaped]} if HOLE in value else escaped
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return value if _plain_json(value) is not None else {HOLE: {"json": _as_json(value)}}


def _as_json(value: Any) -> str:
    """Return a value as JSON text of ASCII letters, which can say what perdure's JSON cannot."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidData("$", f"this item is not JSON: {error}") from None


def _filled(skeleton: Any, message: Message, frame: Mapping[str, Any]) -> JSON:
    """Return the item again, of plain dicts and lists that its framework may change."""
    if isinstance(skeleton, dict):
        if HOLE in skeleton:
            return _filling(skeleton, message, frame)
        return {
            key: each if type(each) in _SCALARS else _filled(each, message, frame) for key, each in skeleton.items()
        }
    if isinstance(skeleton, list):
        return [each if type(each) in _SCALARS else _filled(each, message, frame) for each in skeleton]
    return skeleton


def _filling(hole: Mapping[str, Any], message: Message, frame: Mapping[str, Any]) -> JSON:
    what = hole[HOLE]
    if type(what) is int:
        return _from_part(hole, message.parts[what])
    if type(what) is str:
        return _from_frame(hole, what, frame) if what else frame.get("", message.id)
    if isinstance(what, list):
        return {key: _filled(each, message, frame) for key, each in what[0].items()}
    return json.loads(what["json"])


def _from_frame(hole: Mapping[str, Any], key: str, frame: Mapping[str, Any]) -> JSON:
    return thawed(frame[key][hole["k"]] if "k" in hole else frame[key])


def _from_part(hole: Mapping[str, Any], part: Any) -> JSON:
    if "." in hole:
        return getattr(part, hole["."])
    if "n" in hole:
        if not isinstance(part.content, list):
            raise TypeError("the result was made of several pieces, and is not any more")
        return thawed(part.content[hole["n"]])
    if "j" in hole:
        return _STYLES[hole["j"]](part.arguments)
    if "a" in hole:
        return thawed(part.arguments[hole["a"]])
    kind = type(part)
    if kind is Text or kind is Thinking:
        return part.text
    content = part.arguments if kind is ToolCall else part.content
    if "o" in hole and _required(content).get("o") != hole["o"]:
        raise TypeError("the result was an object or a list, and is not any more")
    return thawed(content)


def _required(content: Any) -> dict[str, Any]:
    """Return the mark of a hole that takes nothing but an object, 1, or a list, 2."""
    return {"o": 1} if isinstance(content, dict) else {"o": 2} if isinstance(content, list) else {}


def _object_in(text: str) -> dict[str, Any] | None:
    """Return the object that is written in a JSON text; None if it is not one that perdure can keep."""
    try:
        read = _decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return read if isinstance(read, dict) and _plain_json(read) is not None else None


def json_text(value: Any) -> str:
    """Return JSON as frameworks write arguments that are texts."""
    return _encode(value).decode()


_STYLES: tuple[Callable[[Any], str], ...] = (
    json_text,
    json.dumps,
    partial(json.dumps, ensure_ascii=False),
    partial(json.dumps, separators=(",", ":")),
)
"""How JSON texts are written, by the number that stands for it in a skeleton."""


def _style_of(text: str, read: dict[str, Any]) -> int | None:
    return next((style for style, write in enumerate(_STYLES) if write(read) == text), None)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
