"""Any value as its canonical bytes, and back. Nothing is written that could not be read again."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from perdure.codec.field_checks import check_fields
from perdure.codec.json_checks import MAX_DEPTH, check_document, check_lossless
from perdure.codec.pieces import BlockOf, DumpBlock, LogName, NameOf, SpanOf, dump_pieces, load_pieces
from perdure.codec.unknown import is_marked, restored, stashed, type_info
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.model.ids import SessionId
from perdure.model.secrets import without_secrets
from perdure.model.transcript import Block, Span, Tape, Transcript
from perdure.model.value import Value

MAX_BYTES = 64 * 1024 * 1024

V = TypeVar("V")

DECODE_ERRORS = (msgspec.MsgspecError, PerdureError, RecursionError, ValueError, TypeError, OverflowError)


def encode(value: object, name_of: NameOf | None = None, dump_block: DumpBlock | None = None) -> bytes:
    """Return a value's canonical bytes. `name_of` gives the names of logs for the spans of transcripts."""
    if name_of is None and isinstance(value, Value):
        raw = encode_if_sound(value)
        if raw is not None:
            return raw
    hook = _write_hook(name_of, dump_block)
    check_fields(value, "$")
    try:
        raw = msgspec.json.encode(value, enc_hook=hook)
        if is_marked(raw):
            raw = msgspec.json.encode(restored(value, msgspec.json.decode(raw)))
    except PerdureError:
        raise
    except (msgspec.MsgspecError, UnicodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidData("$", f"{type(value).__name__} cannot be stored: {error}") from None
    if len(raw) > MAX_BYTES:
        raise InvalidData("$", f"a {type(value).__name__} of {len(raw):,} bytes is over the cap of {MAX_BYTES:,}")
    if isinstance(value, Value):
        _check_readable(type(value), raw)
    return raw


def encode_if_sound(value: Value) -> bytes | None:
    """Return the bytes of a value if they are read back as an equal value, and None if a closer look is needed.

    Compiled code does here what `check_fields` does in Python, which takes several times as long. A value that comes
    back equal can have only two faults: see `is_in_bounds`.
    """
    try:
        raw = _encoder.encode(value)
        is_whole = len(raw) <= MAX_BYTES and not is_marked(raw) and _reader(type(value)).decode(raw) == value
        return raw if is_whole and is_in_bounds(value, raw) else None
    except (*DECODE_ERRORS, UnicodeError):
        return None  # the closer look says what is wrong, and where


def is_in_bounds(value: Value, raw: bytes) -> bool:
    """Tell whether JSON that comes back equal is surely within the bounds of what may be stored.

    Equal values may still contain integers of more than 64 bits, which MessagePack refuses. They may also nest too
    deep, but not with few brackets.
    """
    _range_checker.encode(value)
    return raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH


def encode_json(value: object, path: str = "$") -> bytes:
    """Return the bytes of callers' own data. Raise InvalidData if it would not be read back unchanged."""
    check_lossless(value, path)
    raw = msgspec.json.encode(value)
    if len(raw) > MAX_BYTES:
        raise InvalidData(path, f"{len(raw):,} bytes are over the cap of {MAX_BYTES:,}")
    return raw


def join(parts: Mapping[str, Any]) -> bytes:
    """Return the bytes of an object. Its parts are bytes already, or the caller has checked them."""
    return msgspec.json.encode(parts)


def decode(kind: type[V], raw: bytes, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    """Return a value from its bytes, with its unknown fields. Raise InvalidData if anything else is wrong."""
    try:
        if not is_marked(raw):
            value = msgspec.json.decode(raw, type=kind, dec_hook=_read_hook(span_of, block_of))
            check_fields(value, "$")
            return value
    except DECODE_ERRORS:  # the slow way keeps unknown fields, and says what is wrong and where
        pass
    return convert(kind, decode_plain(raw), span_of, block_of)


def decode_plain(raw: bytes | str) -> Any:
    """Return plain data from JSON."""
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS as error:
        raise InvalidData("$", f"this is not JSON that perdure reads: {error}") from None


def convert(kind: type[V], plain: object, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    """Return a value from plain data, with its unknown fields."""
    check_document(plain)
    return converted(kind, plain, span_of, block_of)


def converted(kind: type[V], plain: object, span_of: SpanOf | None = None, block_of: BlockOf | None = None) -> V:
    """Return a value from plain data that has been checked already, with its unknown fields."""
    hook = _read_hook(span_of, block_of)
    try:
        kept = stashed(type_info(kind), plain)  # type: ignore[arg-type]  # every type is hashable
        try:
            value = msgspec.convert(kept, kind, dec_hook=hook)
        except ConfigurationError:  # an earlier release has stored the key in an address
            value = msgspec.convert(_without_keys(kept), kind, dec_hook=hook)
    except DECODE_ERRORS as error:
        raise invalid(error) from None
    check_fields(value, "$")
    return value


def _without_keys(plain: Any) -> Any:
    """Return plain data without the secrets in models' addresses."""
    if isinstance(plain, list):
        return [_without_keys(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    return {
        name: without_secrets(each) if name == "base_url" and isinstance(each, str) else _without_keys(each)
        for name, each in plain.items()
    }


_AT = re.compile(r"^(?P<problem>.*) - at `(?P<path>[^`]*)`$", re.DOTALL)


def invalid(error: BaseException) -> InvalidData:
    """Return the InvalidData to raise for an error in reading, with the path if the error has one."""
    if isinstance(error, InvalidData):
        return error
    found = _AT.match(str(error))
    if found:
        return InvalidData(found["path"], found["problem"])
    return InvalidData("$", str(error) or type(error).__name__)


def _check_readable(kind: type[Value], raw: bytes) -> None:
    # msgspec does not check types when a value is made, only when it is read.
    try:
        _reader(kind).decode(raw)
    except DECODE_ERRORS:
        convert(kind, decode_plain(raw), _span_nowhere, _block_nowhere)


@functools.cache
def _reader(kind: type[Value]) -> msgspec.json.Decoder[Any]:
    read = _read_hook(_span_nowhere, _block_nowhere)

    def hook(kind: type, plain: Any) -> Any:
        if kind is Transcript and not any(type(piece) is dict for piece in plain):
            return _BLANK  # `dump_pieces` wrote them a moment ago, so they need no check
        return read(kind, plain)

    return msgspec.json.Decoder(kind, dec_hook=hook)


_NOWHERE = Tape(None)
_BLANK = Transcript()


def _span_nowhere(log: LogName, start: int, stop: int) -> Span:
    """Return a span for pieces that are only checked, and not used."""
    return Span(_NOWHERE, start, stop)


def _block_nowhere(name: str) -> Block:
    return Block(covered=(), shown=())


def _plain_text(value: object) -> str:
    """Return an id as a plain text. Ids have a type of their own, which msgspec does not know."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


_encoder = msgspec.json.Encoder(enc_hook=_plain_text)
_range_checker = msgspec.msgpack.Encoder(enc_hook=_plain_text)


def _write_hook(name_of: NameOf | None, dump_block: DumpBlock | None) -> Callable[[object], Any]:
    def hook(value: object) -> Any:
        if isinstance(value, Transcript):
            if name_of is None:
                raise InvalidData("$", "a transcript is stored by its pieces, and its logs were not named")
            return dump_pieces(value.pieces, name_of, dump_block)
        return _plain_text(value)

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
