"""The only way between the model and bytes, or plain data.

Bytes are one canonical form: UTF-8 JSON, defaults left out. Fields and parts that this release does not know are
kept on the value they came with and written back where they stood. What a stored byte may hold is settled here,
once: finite numbers, whole characters, bounded depth and size. Nothing is written that could not be read again.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from perdure.errors import InvalidData, PerdureError
from perdure.model.ids import SessionId
from perdure.model.message import Message, Text, UnknownPart
from perdure.model.record import SessionRecord
from perdure.model.record_form import with_messages_once, with_messages_whole
from perdure.model.transcript import Block, LogRef, Piece, Span, Tape, Transcript
from perdure.model.value import EMPTY, FrozenDict, Value, brief

FORMAT = 1
MAX_DEPTH = 100
MAX_BYTES = 64 * 1024 * 1024
_MAX_POSITION = 2**40  # so that the length of any view is a number that len() can give

V = TypeVar("V")
LogName = int | str
NameOf = Callable[[Span], LogName]
SpanOf = Callable[[LogName, int, int], Span]
DumpBlock = Callable[[Block], Any]
"""A block of a view as plain data, or the name under which it is stored apart."""
BlockOf = Callable[[str], Block]
"""The block that is stored apart under a name."""

_DECODE_ERRORS = (msgspec.MsgspecError, PerdureError, RecursionError, ValueError, TypeError, OverflowError)


def encode(value: object, name_of: NameOf | None = None, dump_block: DumpBlock | None = None) -> bytes:
    """Canonical bytes. Transcripts become pieces over the log names that `name_of` gives their spans."""
    hook = _write_hook(name_of, dump_block)
    _check_fields(value, "$")
    try:
        raw = msgspec.json.encode(value, enc_hook=hook)
        if _is_marked(raw):
            raw = msgspec.json.encode(_restored(value, msgspec.json.decode(raw)))
    except PerdureError:
        raise
    except (msgspec.MsgspecError, UnicodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidData("$", f"{type(value).__name__} cannot be stored: {error}") from None
    if len(raw) > MAX_BYTES:
        raise InvalidData("$", f"a {type(value).__name__} of {len(raw):,} bytes is over the cap of {MAX_BYTES:,}")
    if isinstance(value, Value):
        _check_readable(type(value), raw)
    return raw


_message_encoder = msgspec.json.Encoder()


def _is_plain(message: Message) -> bool:
    """Whether a message is nothing but text, as most are: then its types are all there is to check."""
    if message.metadata is not EMPTY or message.unknown or type(message.id) is not str:
        return False
    return all(type(part) is Text and type(part.text) is str and not part.unknown for part in message.parts)


def encode_message(message: Message) -> bytes:
    """A message's bytes, after what callers put into it has been checked."""
    if type(message) is not Message:
        raise InvalidData("$", f"expected a Message, got {type(message).__name__}")
    is_plain = _is_plain(message)
    if not is_plain:
        _check_fields(message, "$")
    try:
        raw = _message_encoder.encode(message)
        if len(raw) <= MAX_BYTES and not _is_marked(raw):
            if not is_plain:
                _message_decoder.decode(raw)
            return raw
    except (*_DECODE_ERRORS, UnicodeError):
        pass  # the long way finds out what is wrong, and says where
    return encode(message)


def encode_json(value: object, path: str = "$") -> bytes:
    """The bytes of callers' own data, which comes back as it goes in; InvalidData where it would not."""
    _check_json(value, path)
    raw = msgspec.json.encode(value)
    if len(raw) > MAX_BYTES:
        raise InvalidData(path, f"{len(raw):,} bytes are over the cap of {MAX_BYTES:,}")
    return raw


def join(parts: Mapping[str, Any]) -> bytes:
    """The bytes of an object whose parts are bytes already, or were checked by whoever put them together."""
    return msgspec.json.encode(parts)


_message_decoder = msgspec.json.Decoder(Message)


def decode_message(raw: bytes) -> Message:
    try:
        return _message_decoder.decode(raw)
    except _DECODE_ERRORS:
        return decode(Message, raw)


def decode_messages(raws: Sequence[bytes]) -> list[Message]:
    """Many messages from their bytes, as quickly as can be."""
    try:
        return list(map(_message_decoder.decode, raws))
    except _DECODE_ERRORS:
        return list(map(decode_message, raws))


def decode(kind: type[V], raw: bytes, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    """A value from its bytes. Fields it does not know are kept; anything else that is wrong is InvalidData."""
    try:
        if not _is_marked(raw):
            value = msgspec.json.decode(raw, type=kind, dec_hook=_read_hook(span_of, block_of))
            _check_fields(value, "$")
            return value
    except _DECODE_ERRORS:
        pass
    return convert(kind, decode_plain(raw), span_of, block_of)


def decode_plain(raw: bytes | str) -> Any:
    """Plain data from JSON."""
    try:
        return msgspec.json.decode(raw)
    except _DECODE_ERRORS as error:
        raise InvalidData("$", f"this is not JSON that perdure reads: {error}") from None


def convert(kind: type[V], plain: object, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    """A value from plain data, with its unknown fields kept."""
    _check_document(plain)
    return _converted(kind, plain, span_of, block_of)


def _converted(kind: type[V], plain: object, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    try:
        stashed = _stashed(_type_info(kind), plain)  # type: ignore[arg-type]  # every type is hashable
        value = msgspec.convert(stashed, kind, dec_hook=_read_hook(span_of, block_of))
    except _DECODE_ERRORS as error:
        raise _invalid(error) from None
    _check_fields(value, "$")
    return value


def to_dict(value: Value) -> dict[str, Any]:
    """A document: the value's fields, a format number, and `logs` in which each of its messages stands once."""
    met: list[Span] = []

    def meet(span: Span) -> str:
        met.append(span)
        return ""

    encode(value, meet)
    logs = _Logs(met)
    document = {"format": FORMAT, **decode_plain(encode(value, logs.name))}
    if isinstance(value, SessionRecord):
        document = with_messages_once(document)
    return {**document, "logs": logs.plain()} if met else document


def from_dict(kind: type[V], document: Mapping[str, Any]) -> V:
    """The value of a document that `to_dict` made."""
    if not isinstance(document, Mapping):
        raise InvalidData("$", f"expected an object, got {type(document).__name__}")
    plain = dict(document)
    _check_document(plain)
    check_format(plain.pop("format", None))
    if kind is SessionRecord:
        plain = with_messages_whole(plain)
    logs = plain.pop("logs", {})
    if not isinstance(logs, Mapping):
        raise InvalidData("$.logs", f"expected an object, got {type(logs).__name__}")
    tapes = {name: _tape(name, log) for name, log in logs.items()}
    return _converted(kind, plain, functools.partial(_span_on, tapes))


def check_format(number: object, newest: int = FORMAT) -> None:
    """Raise unless a document's format number is one that this release reads."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= newest:
        raise InvalidData(
            "$.format", f"format {brief(number)} is not one this release reads (1 to {newest}); a newer perdure may"
        )


def check_json(value: object, path: str = "$", depth: int = 0) -> None:
    """Raise InvalidData, with the path, unless a value is JSON; bytes and datetimes pass, for fields of those types."""
    _check_json(value, path, depth, (bool, bytes, datetime))


def _check_document(plain: object) -> None:
    """The same for a whole document, in which callers' own data, deep as it may be, stands at some depth."""
    check_json(plain, depth=-MAX_DEPTH)


def _check_json(value: object, path: str, depth: int = 0, plain: tuple[type, ...] = (bool, msgspec.Raw)) -> None:
    """The same for data that is to come back as it goes in: nothing passes that turns into something else."""
    if not _is_sound(value, depth):
        _find_fault(value, path, depth, plain)


def _is_sound(value: Any, depth: int) -> bool:
    """Whether data is surely JSON. Quick, since nearly all is; what is doubtful gets a closer look, with its path."""
    kind = type(value)
    if kind is str:
        return _is_whole(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    if depth >= MAX_DEPTH:
        return False
    if kind is FrozenDict or kind is dict:
        return all(type(key) is str and _is_whole(key) and _is_sound(item, depth + 1) for key, item in value.items())
    return kind in (list, tuple) and all(_is_sound(item, depth + 1) for item in value)


def _is_whole(text: str) -> bool:
    """Whether a text has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_fault(value: object, path: str, depth: int, plain: tuple[type, ...]) -> None:
    """Raise InvalidData at the first thing that is wrong, with its path."""
    if depth > MAX_DEPTH:
        raise InvalidData(path[:200], f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, plain):
        return
    if isinstance(value, str):
        check_text(value, path)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InvalidData(path, "an integer must fit into 64 bits; pass larger ones as text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidData(path, f"{value} is not a JSON number; pass None or a text")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidData(path, f"keys must be text, got {type(key).__name__} {brief(key)}")
            check_text(key, path)
            _find_fault(item, f"{path}.{key}", depth + 1, plain)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _find_fault(item, f"{path}[{place}]", depth + 1, plain)
    else:
        raise InvalidData(path, f"a {type(value).__name__} is not JSON; use text, numbers, lists and dicts")


def check_text(text: str, path: str) -> None:
    """Raise InvalidData unless UTF-8 can carry a text."""
    if not _is_whole(text):
        raise InvalidData(path, "the text holds half of a surrogate pair, which UTF-8 cannot carry")


def _check_fields(value: object, path: str) -> None:
    """Raise InvalidData unless the fields of values in which anything may stand hold JSON that comes back as it is."""
    if isinstance(value, Value):
        plan = _plan(type(value))
        for field, where, default, check in plan.fields:
            item = getattr(value, field)
            if item is not default:
                check(item, path + where)
        if value.unknown:
            _check_unknown(value.unknown, plan.names, path)
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            _check_fields(item, f"{path}[{place}]")
    elif isinstance(value, Mapping):
        _check_json(value, path)


def _check_unknown(unknown: Mapping[str, Any], names: frozenset[str], path: str) -> None:
    _check_json(unknown, path)
    for name in names.intersection(unknown):
        raise InvalidData(f"{path}.{name}", "this field is known, and cannot stand among the unknown ones as well")


class _Plan(NamedTuple):
    """Of one kind of value: the names of its fields, and those to be looked at: name, path, default, and how."""

    names: frozenset[str]
    fields: tuple[tuple[str, str, object, Callable[[object, str], None]], ...]


@functools.cache
def _plan(kind: type[Value]) -> _Plan:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    known = [field for field in info.fields if field.name != "unknown"]
    names = {field.encode_name for field in known} | ({info.tag_field} if info.tag_field else set())
    checks = [(field, _check_for(field.type)) for field in known]
    return _Plan(frozenset(names), tuple((f.name, f".{f.encode_name}", f.default, c) for f, c in checks if c))


def _check_for(kind: inspect.Type) -> Callable[[object, str], None] | None:
    """How to look at a field of some type: as JSON, as values, or (None) not at all."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if any(isinstance(member, _FREE) for member in members):
        return _check_json
    return _check_fields if any(isinstance(member, _HOLDS_VALUES) for member in members) else None


_FREE = (inspect.AnyType, inspect.DictType, inspect.IntType, inspect.FloatType)
_HOLDS_VALUES = (inspect.StructType, inspect.VarTupleType, inspect.ListType)


def dump_pieces(pieces: Sequence[Piece], name_of: NameOf, dump_block: DumpBlock | None = None) -> list[Any]:
    """Pieces as plain data: `[log, start, stop]` for a span, an object for a block, or a name for one stored apart."""
    dump = dump_block or functools.partial(_dump_block_whole, name_of=name_of)
    return [dump_span(piece, name_of) if isinstance(piece, Span) else dump(piece) for piece in pieces]


def load_pieces(plain: object, span_of: SpanOf, block_of: BlockOf | None = None) -> tuple[Piece, ...]:
    """Pieces from plain data; a ValueError says what is wrong with it."""
    return tuple(
        _load_block(item, _load_covered(item.get("covered"), span_of, block_of), span_of)
        if isinstance(item, Mapping)
        else _load_piece(item, span_of, block_of)
        for item in _list(plain)
    )


def dump_span(span: Span, name_of: NameOf) -> list[Any]:
    return [name_of(span), span.start, span.stop]


def dump_block(block: Block, name_of: NameOf, **extent: Any) -> dict[str, Any]:
    """A block without what it covers; `extent` says that."""
    plain = msgspec.to_builtins(msgspec.structs.replace(block, covered=(), shown=(), unknown={}))
    for name in ("~", "covered"):
        plain.pop(name, None)
    plain["shown"] = [dump_span(span, name_of) for span in block.shown]
    return {**block.unknown, **plain, **extent}


def _dump_block_whole(block: Block, name_of: NameOf) -> dict[str, Any]:
    return dump_block(block, name_of, covered=_dump_covered(block.covered, name_of))


def _dump_covered(pieces: Sequence[Piece], name_of: NameOf) -> list[Any]:
    """Blocks in a block would nest without end; so each stands behind the pieces it covers, and says how many."""
    plain: list[Any] = []
    todo: list[tuple[Piece, bool]] = [(piece, False) for piece in reversed(pieces)]
    while todo:
        piece, is_block_behind_its_pieces = todo.pop()
        if isinstance(piece, Span):
            plain.append(dump_span(piece, name_of))
        elif is_block_behind_its_pieces:
            plain.append(dump_block(piece, name_of, covers=len(piece.covered)))
        else:
            todo.append((piece, True))
            todo += [(covered, False) for covered in reversed(piece.covered)]
    return plain


def _load_covered(plain: object, span_of: SpanOf, block_of: BlockOf | None) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for item in _list(plain):
        if not isinstance(item, Mapping):
            pieces.append(_load_piece(item, span_of, block_of))
            continue
        count = item.get("covers")
        if type(count) is not int or not 0 <= count <= len(pieces):
            raise ValueError("a covered block says how many of the pieces before it it covers")
        first = len(pieces) - count
        pieces[first:] = [_load_block(item, tuple(pieces[first:]), span_of)]
    return tuple(pieces)


def _load_block(plain: Mapping[str, Any], covered: tuple[Piece, ...], span_of: SpanOf) -> Block:
    head = {name: item for name, item in plain.items() if name not in _EXTENT}
    if not _BLOCK_FIELDS.issuperset(head):
        head = _stashed(_type_info(Block), head)
    block = msgspec.convert({**head, "covered": (), "shown": ()}, Block)
    shown = tuple([_load_span(item, span_of) for item in _list(plain.get("shown"))])
    return msgspec.structs.replace(block, covered=covered, shown=shown)


_EXTENT = frozenset({"covered", "covers", "shown"})
_BLOCK_FIELDS = frozenset(Block.__struct_encode_fields__) - {"~"}


def _load_piece(plain: object, span_of: SpanOf, block_of: BlockOf | None) -> Piece:
    if isinstance(plain, str) and block_of is not None:
        return block_of(plain)
    return _load_span(plain, span_of)


def _list(plain: object) -> Sequence[Any]:
    if not isinstance(plain, list | tuple):
        raise ValueError("a transcript is a list of pieces")
    return plain


def _load_span(plain: object, span_of: SpanOf) -> Span:
    if not isinstance(plain, list | tuple) or len(plain) != 3:
        raise ValueError("a piece is [log, start, stop] or a block, and a block shows the former alone")
    log, start, stop = plain
    if not isinstance(log, int | str) or isinstance(log, bool) or type(start) is not int or type(stop) is not int:
        raise ValueError("a span is [log, start, stop] with whole numbers")
    if not 0 <= start < stop <= _MAX_POSITION:
        raise ValueError("a span goes from a position in its log to a later one")
    return span_of(log, start, stop)


def _check_readable(kind: type[Value], raw: bytes) -> None:
    try:
        _reader(kind).decode(raw)
    except _DECODE_ERRORS:
        convert(kind, decode_plain(raw), _span_nowhere, _block_nowhere)


@functools.cache
def _reader(kind: type[Value]) -> msgspec.json.Decoder[Any]:
    read = _read_hook(_span_nowhere, _block_nowhere)

    def hook(kind: type, plain: Any) -> Any:
        if kind is Transcript and not any(type(piece) is dict for piece in plain):
            return Transcript()  # they were written by dump_pieces a moment ago
        return read(kind, plain)

    return msgspec.json.Decoder(kind, dec_hook=hook)


_NOWHERE = Tape(None)


def _span_nowhere(log: LogName, start: int, stop: int) -> Span:
    """Stands in for a span where pieces are only looked at."""
    return Span(_NOWHERE, start, stop)


def _block_nowhere(name: str) -> Block:
    return Block(covered=(), shown=())


def _write_hook(name_of: NameOf | None, dump_block: DumpBlock | None) -> Callable[[object], Any]:
    def hook(value: object) -> Any:
        if isinstance(value, Transcript):
            if name_of is None:
                raise InvalidData("$", "a transcript is stored by its pieces, and its logs were not named")
            return dump_pieces(value.pieces, name_of, dump_block)
        if isinstance(value, str):
            return str.__str__(value)
        raise TypeError(f"a {type(value).__name__} is not JSON")

    return hook


def _read_hook(span_of: SpanOf | None, block_of: BlockOf | None = None) -> Callable[[type, Any], Any]:
    def hook(kind: type, plain: Any) -> Any:
        if kind is SessionId:
            try:
                return SessionId(plain)
            except PerdureError as error:
                raise ValueError(str(error)) from None
        if kind is Transcript and span_of is not None:
            return Transcript(load_pieces(plain, span_of, block_of))
        raise TypeError(f"a {kind.__name__} cannot stand here")

    return hook


def _is_marked(raw: bytes) -> bool:
    """Whether bytes hold an unknown field or part, or else the marks under which a value keeps them."""
    return b"~" in raw and (b'"~":' in raw or b'"~part"' in raw)


def _restored(value: object, plain: Any) -> Any:
    if isinstance(value, UnknownPart):
        return plain["body"]
    if isinstance(value, Value):
        for field in _type_info(type(value)).fields:  # type: ignore[attr-defined]  # a Value is a StructType
            if field.encode_name in plain and field.name != "unknown":
                plain[field.encode_name] = _restored(getattr(value, field.name), plain[field.encode_name])
        return {**plain.pop("~", {}), **plain}
    if isinstance(value, tuple | list):
        return [_restored(item, part) for item, part in zip(value, plain, strict=True)]
    return plain


@functools.cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _stashed(kind: inspect.Type, plain: Any) -> Any:
    """Plain data with what its type does not know moved to where the type keeps such things."""
    if isinstance(kind, inspect.UnionType):
        return _stashed_in_union(kind, plain)
    if isinstance(kind, inspect.StructType) and isinstance(plain, Mapping):
        return _stashed_struct(kind, plain)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType) and isinstance(plain, list | tuple):
        return [_stashed(kind.item_type, item) for item in plain]
    if isinstance(kind, inspect.DictType) and isinstance(plain, Mapping):
        return {key: _stashed(kind.value_type, item) for key, item in plain.items()}
    return msgspec.Raw(msgspec.json.encode(plain)) if isinstance(kind, inspect.RawType) else plain


def _stashed_struct(kind: inspect.StructType, plain: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.encode_name: field.type for field in kind.fields if field.encode_name != "~"}
    known = {key: _stashed(fields[key], value) for key, value in plain.items() if key in fields}
    if kind.tag_field is not None and kind.tag_field in plain:
        known[kind.tag_field] = plain[kind.tag_field]
    unknown = {key: value for key, value in plain.items() if key not in known}
    return {**known, "~": unknown} if unknown else known


def _stashed_in_union(kind: inspect.UnionType, plain: Any) -> Any:
    structs = [member for member in kind.types if isinstance(member, inspect.StructType)]
    if isinstance(plain, Mapping) and structs:
        if structs[0].tag_field is None:
            return _stashed(structs[0], plain)
        tag = plain.get(structs[0].tag_field)
        for member in structs:
            if member.tag == tag and member.cls is not UnknownPart:
                return _stashed(member, plain)
        if isinstance(tag, str) and any(member.cls is UnknownPart for member in structs):
            return {structs[0].tag_field: "~part", "body": plain}
        return plain
    for other in kind.types:
        if isinstance(other, inspect.VarTupleType | inspect.ListType):
            return _stashed(other, plain)
    return plain


_AT = re.compile(r"^(?P<problem>.*) - at `(?P<path>[^`]*)`$", re.DOTALL)


def _invalid(error: BaseException) -> InvalidData:
    if isinstance(error, InvalidData):
        return error
    found = _AT.match(str(error))
    if found:
        return InvalidData(found["path"], found["problem"])
    return InvalidData("$", str(error) or type(error).__name__)


class _Logs:
    """The logs of one document: the stretches of tape that its spans name, in order of mention, each message once."""

    def __init__(self, spans: list[Span]) -> None:
        by_tape: dict[Tape, list[Span]] = {}
        for span in spans:
            by_tape.setdefault(span.tape, []).append(span)
        self._stretches = {tape: list(_merged(named)) for tape, named in by_tape.items()}
        self._names: dict[tuple[Tape, tuple[int, int]], str] = {}
        for span in spans:
            self._names.setdefault((span.tape, self._stretch(span)), str(len(self._names)))

    def _stretch(self, span: Span) -> tuple[int, int]:
        stretches = self._stretches[span.tape]
        return stretches[bisect_right(stretches, span.start, key=itemgetter(0)) - 1]

    def name(self, span: Span) -> str:
        return self._names[span.tape, self._stretch(span)]

    def plain(self) -> dict[str, Any]:
        return {name: _dump_log(name, tape, *stretch) for (tape, stretch), name in self._names.items()}


def _dump_log(name: str, tape: Tape, start: int, stop: int) -> dict[str, Any]:
    ref = {"ref": list(tape.ref)} if tape.ref else {}
    if tape.items is None:
        return {"base": start, **ref}
    messages = enumerate(tape.read(start, stop))
    return {"base": start, **ref, "messages": [_dump_message(f"$.logs.{name}.messages[{i}]", m) for i, m in messages]}


def _dump_message(path: str, message: Message) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = decode_plain(encode_message(message))
        return plain
    except InvalidData as error:
        raise _under(path, error) from None


def _merged(spans: list[Span]) -> Iterator[tuple[int, int]]:
    start, stop = -1, -1
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > stop:
            if stop >= 0:
                yield start, stop
            start, stop = span.start, span.stop
        stop = max(stop, span.stop)
    yield start, stop


class _LogDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base: int
    messages: list[Any] | None = None
    ref: tuple[str, int | str] | None = None


def _tape(name: str, plain: object) -> Tape:
    try:
        log = msgspec.convert(plain, _LogDocument)
    except msgspec.ValidationError as error:
        raise _under(f"$.logs.{name}", _invalid(error)) from None
    if log.base < 0 or (log.messages is None and log.ref is None):
        raise InvalidData(f"$.logs.{name}", "a log has a base of at least 0, and messages or a ref")
    ref = LogRef(*log.ref) if log.ref else None
    if log.messages is None:
        return Tape(None, ref, log.base)
    messages = [_message_at(f"$.logs.{name}.messages[{place}]", plain) for place, plain in enumerate(log.messages)]
    return Tape(messages, ref, log.base)


def _message_at(path: str, plain: object) -> Message:
    try:
        return _converted(Message, plain)
    except InvalidData as error:
        raise _under(path, error) from None


def _under(path: str, error: InvalidData) -> InvalidData:
    return InvalidData(path + error.path.removeprefix("$"), error.problem)


def _span_on(tapes: Mapping[str, Tape], name: LogName, start: int, stop: int) -> Span:
    tape = tapes.get(str(name))
    if tape is None:
        raise ValueError(f"no log is named {name!r}")
    if start < tape.base or (tape.items is not None and stop > tape.end):
        raise ValueError(f"log {name!r} does not hold messages {start} to {stop}")
    return Span(tape, start, stop)
