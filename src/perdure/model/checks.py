"""Checks of what callers give. Each raises InvalidData, with the path, if the value cannot be what is meant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from inspect import isclass
from typing import Any, TypeVar

from perdure.errors import InvalidData
from perdure.model.value import brief, clean_text, with_article

T = TypeVar("T")
_LARGEST = 2**63 - 1


def expect(value: object, kind: type[T], path: str) -> T:
    """Return a value that is of a kind."""
    if not isinstance(value, kind):
        raise InvalidData(path, f"expected {_named(kind)}, got {brief(value)}")
    return value


def expect_method(value: T, method: str, path: str) -> T:
    """Return an object, not a class, that has a method."""
    if isclass(value) or not callable(getattr(value, method, None)):
        raise InvalidData(path, f"expected an object with a method {method}(), got {brief(value)}")
    return value


def expect_function(value: T, path: str) -> T:
    if not callable(value):
        raise InvalidData(path, f"expected a function, plain or async, got {brief(value)}")
    return value


def expect_several(value: Iterable[T], path: str) -> tuple[T, ...]:
    """Return the items of a list as a tuple. One text or one mapping is refused."""
    if type(value) is tuple:
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidData(path, f"expected a list, got {brief(value)}")
    return tuple(value)


def expect_text(value: object, path: str, *, blank: bool = True) -> str:
    """Return a text that UTF-8 can carry; with `blank=False`, one that is not blank."""
    text = expect(value, str, path)
    if clean_text(text) != text:
        raise InvalidData(path, "the text holds half of a surrogate pair, which UTF-8 cannot carry")
    if not blank and not text.strip():
        raise InvalidData(path, "the text is blank; say something in it")
    return text


def expect_count(value: object, path: str, *, least: int = 0) -> int:
    """Return a whole number that a store can hold."""
    if type(value) is not int or not least <= value <= _LARGEST:
        raise InvalidData(path, f"expected a whole number of at least {least}, got {brief(value)}")
    return value


def expect_number(value: object, path: str, *, least: float = 0) -> float:
    """Return a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:  # type: ignore[arg-type,operator]  # as was asked
        raise InvalidData(path, f"expected a number of at least {least:g}, got {brief(value)}")
    return value  # type: ignore[return-value]


def expect_wait(value: object, path: str) -> float:
    """Return how many seconds to wait; infinity waits without end."""
    # Not `value < 0`, which would let NaN pass.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidData(path, f"expected a time in seconds of at least 0, got {brief(value)}")
    return value


def expect_priority(value: object, path: str) -> float:
    """Return a number to sort by; infinities put something first or last."""
    # NaN, which differs from itself, cannot be sorted.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidData(path, f"expected a number, got {brief(value)}")
    return value


def text_of(value: object, path: str) -> str:
    """Return the text of a str, or of an object that has a text form of its own."""
    if isinstance(value, str):
        return str.__str__(value)
    if type(value).__str__ is object.__str__ or isinstance(value, bytes | bytearray):
        raise InvalidData(path, f"expected a text, got {brief(value)}")
    return str(value)


def _named(kind: Any) -> str:
    return with_article(getattr(kind, "__name__", str(kind)))
