"""Metadata by which lists can be narrowed: which values can be indexed, and the mark of a value in an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.value import brief

Indexable = str | int | bool
LONGEST = 200
"""The most characters of a key or a text: a row of an index has limited room."""
MARK = "\x1f"
"""The beginning of the mark of an indexed value. No tag begins with it."""


def mark_of(key: str, value: Indexable) -> str:
    """Return the mark of a value among a session's tags. 1, True and "1" are three values."""
    return f"{MARK}{key}{MARK}{msgspec.json.encode(value).decode()}"


def marks_of(indexed: Mapping[str, Indexable]) -> tuple[str, ...]:
    return tuple(mark_of(key, value) for key, value in indexed.items())


def indexed_in(metadata: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Indexable]:
    """Return the values under these keys that can be indexed: whole numbers, booleans, and texts that are not long."""
    found = {key: metadata[key] for key in keys if key in metadata}
    return {key: value for key, value in found.items() if is_indexable(value)}


def is_indexable(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST
    return isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def check_keys(keys: object) -> tuple[str, ...]:
    """Return the keys of metadata that were declared for lists. Raise InvalidData if they cannot be keys."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        problem = f"expected several keys of metadata, got one {type(keys).__name__}; write ('customer',)"
        raise InvalidData("$.filters", problem)
    declared = tuple(dict.fromkeys(keys))
    for place, key in enumerate(declared):
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST or MARK in key:
            problem = f"a key is a text of 1 to {LONGEST} characters without U+001F; got {brief(key)}"
            raise InvalidData(f"$.filters[{place}]", problem)
    return declared


def check_asked(asked: Mapping[str, Any]) -> None:
    """Raise InvalidData if a value is asked for that cannot be indexed."""
    for key, value in asked.items():
        if not is_indexable(value):
            known = f"a text of up to {LONGEST} characters, a whole number of 64 bits, or a bool"
            raise InvalidData(f"$.metadata[{key!r}]", f"a list can be narrowed to {known}; got {brief(value)}")
