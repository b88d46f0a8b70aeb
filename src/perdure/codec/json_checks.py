"""The rules for JSON that may be stored: finite numbers, whole characters, bounded depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from perdure.errors import InvalidData
from perdure.model.value import MAX_DEPTH as MAX_DEPTH
from perdure.model.value import FrozenDict, FrozenList, brief, kind_of


def check_json(value: object, path: str = "$", depth: int = 0) -> None:
    """Raise InvalidData with the path unless a value is JSON. Bytes and datetimes pass, for fields of those types."""
    if not _is_sound(value, depth):
        _find_fault(value, path, depth, (bool, bytes, datetime))


def check_document(plain: object) -> None:
    """Check a whole document in the same way. It may nest deeper, since callers' own data is at some depth in it."""
    check_json(plain, depth=-MAX_DEPTH)


def check_lossless(value: object, path: str) -> None:
    """Check data that has to be read back unchanged. Nothing passes that JSON would turn into something else."""
    if not _is_sound(value, 0):
        _find_fault(value, path, 0, (bool, msgspec.Raw))


def check_text(text: str, path: str) -> None:
    """Raise InvalidData unless UTF-8 can carry a text."""
    if not _is_whole(text):
        raise InvalidData(path, "the text holds half of a surrogate pair, which UTF-8 cannot carry")


def _is_sound(value: Any, depth: int) -> bool:
    """Tell whether data is surely JSON. This is quick, since nearly all data is. Doubtful data gets a closer look."""
    kind = type(value)
    if kind is str:
        return _is_whole(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(-(2**63) <= value < 2**64)  # 64 bits, with a sign or without
    if kind is float:
        return math.isfinite(value)
    if depth >= MAX_DEPTH:
        return False
    if kind is FrozenDict or kind is dict:
        return all(type(key) is str and _is_whole(key) and _is_sound(item, depth + 1) for key, item in value.items())
    return kind in (FrozenList, list, tuple) and all(_is_sound(item, depth + 1) for item in value)


def _is_whole(text: str) -> bool:
    """Tell whether a text is free of lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_fault(value: object, path: str, depth: int, plain: tuple[type, ...]) -> None:
    """Raise InvalidData for the first fault, with its path."""
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
        raise InvalidData(path, f"{kind_of(value)} is not JSON; use text, numbers, lists and dicts")
