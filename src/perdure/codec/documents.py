"""A value as a document: plain data with a format number, which contains each of its messages once."""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from perdure.codec.json_checks import check_document
from perdure.codec.messages import encode_message
from perdure.codec.pieces import LogName
from perdure.codec.values import converted, decode_plain, encode, invalid
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.transcript import LogRef, Span, Tape
from perdure.model.value import Value, brief

FORMAT = 1

V = TypeVar("V")


def to_dict(value: Value) -> dict[str, Any]:
    """Return a document: the value's fields, a format number, and `logs`, which contain each of its messages once."""
    met: list[Span] = []

    def meet(span: Span) -> str:
        met.append(span)
        return ""

    # Encoded twice: the first time finds all spans, since the names of logs depend on all of them.
    encode(value, meet)
    logs = _Logs(met)
    document = {"format": FORMAT, **decode_plain(encode(value, logs.name))}
    if _is_record(type(value)):
        document = _record_form().with_messages_once(document)
    return {**document, "logs": logs.plain()} if met else document


def _is_record(kind: type) -> bool:
    """Tell whether a type is that of records. Their module is not imported for this, since a save does not need it."""
    records = sys.modules.get("perdure.model.record")
    return records is not None and issubclass(kind, records.SessionRecord)


def _record_form() -> ModuleType:
    from perdure.model import record_form

    return record_form


def from_dict(kind: type[V], document: Mapping[str, Any]) -> V:
    """Return the value of a document that `to_dict` has made."""
    if not isinstance(document, Mapping):
        raise InvalidData("$", f"expected an object, got {type(document).__name__}")
    plain = dict(document)
    check_document(plain)
    check_format(plain.pop("format", None))
    if _is_record(kind):
        plain = _record_form().with_messages_whole(plain)
    logs = plain.pop("logs", {})
    if not isinstance(logs, Mapping):
        raise InvalidData("$.logs", f"expected an object, got {type(logs).__name__}")
    tapes = {name: _tape(name, log) for name, log in logs.items()}
    return converted(kind, plain, functools.partial(_span_on, tapes))


def check_format(number: object, newest: int = FORMAT) -> None:
    """Raise InvalidData unless this release reads a document's format number."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= newest:
        raise InvalidData(
            "$.format", f"format {brief(number)} is not one this release reads (1 to {newest}); a newer perdure may"
        )


class _Logs:
    """The logs of one document: the stretches of tape that its spans name, in order of mention and without overlaps."""

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
        raise _under(f"$.logs.{name}", invalid(error)) from None
    if log.base < 0 or (log.messages is None and log.ref is None):
        raise InvalidData(f"$.logs.{name}", "a log has a base of at least 0, and messages or a ref")
    ref = LogRef(*log.ref) if log.ref else None
    if log.messages is None:
        return Tape(None, ref, log.base)
    messages = [_message_at(f"$.logs.{name}.messages[{place}]", plain) for place, plain in enumerate(log.messages)]
    return Tape(messages, ref, log.base)


def _message_at(path: str, plain: object) -> Message:
    try:
        return converted(Message, plain)
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
