"""Checks of the fields of a value that may contain any JSON. The fields to check are found once for each type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec import inspect

from perdure.codec.json_checks import check_lossless
from perdure.errors import InvalidData
from perdure.model.value import Value


def check_fields(value: object, path: str) -> None:
    """Raise InvalidData unless all free fields of a value contain JSON that is read back unchanged."""
    if isinstance(value, Value):
        plan = _plan(type(value))
        for field, where, default, check in plan.fields:
            item = getattr(value, field)
            if item is not default:
                check(item, path + where)
        if value.unknown:
            _check_unknown(value.unknown, plan.names, path)
    elif isinstance(value, _SEVERAL):
        for place, item in enumerate(value):
            check_fields(item, f"{path}[{place}]")
    elif isinstance(value, Mapping):
        check_lossless(value, path)


def _check_unknown(unknown: Mapping[str, Any], names: frozenset[str], path: str) -> None:
    check_lossless(unknown, path)
    for name in names.intersection(unknown):
        raise InvalidData(f"{path}.{name}", "this field is known, and cannot stand among the unknown ones as well")


class _Plan(NamedTuple):
    """The plan for one kind of value: all field names, and name, path, default and check of each field to check."""

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
    """Return the check for a field of some type: as JSON, as values, or None for no check."""
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if any(isinstance(member, _FREE) for member in members):
        return check_lossless
    return check_fields if any(isinstance(member, _HOLDS_VALUES) for member in members) else None


_SEVERAL = (tuple, list)  # `tuple | list` would make a new union at each of many calls
_FREE = (inspect.AnyType, inspect.DictType, inspect.IntType, inspect.FloatType)
_HOLDS_VALUES = (inspect.StructType, inspect.VarTupleType, inspect.ListType)
