"""Fields and parts that this release does not know. They are kept on their value, and put back in the same place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from perdure.model.message import UnknownPart
from perdure.model.value import Value


def is_marked(raw: bytes) -> bool:
    """Tell whether bytes contain the marks under which a value keeps unknown fields and parts."""
    # The single character first: it is quick to find, and most bytes have none.
    return b"~" in raw and (b'"~":' in raw or b'"~part"' in raw)


def restored(value: object, plain: Any) -> Any:
    """Return a value's plain data with what was stashed put back in its place."""
    if isinstance(value, UnknownPart):
        return plain["body"]
    if isinstance(value, Value):
        for field in type_info(type(value)).fields:  # type: ignore[attr-defined]  # a Value is a StructType
            if field.encode_name in plain and field.name != "unknown":
                plain[field.encode_name] = restored(getattr(value, field.name), plain[field.encode_name])
        return {**plain.pop("~", {}), **plain}
    if isinstance(value, tuple | list):
        return [restored(item, part) for item, part in zip(value, plain, strict=True)]
    return plain


def stashed(kind: inspect.Type, plain: Any) -> Any:
    """Return plain data with what its type does not know moved to where the type keeps such data."""
    if isinstance(kind, inspect.UnionType):
        return _stashed_in_union(kind, plain)
    if isinstance(kind, inspect.StructType) and isinstance(plain, Mapping):
        return _stashed_struct(kind, plain)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType) and isinstance(plain, list | tuple):
        return [stashed(kind.item_type, item) for item in plain]
    if isinstance(kind, inspect.DictType) and isinstance(plain, Mapping):
        return {key: stashed(kind.value_type, item) for key, item in plain.items()}
    return msgspec.Raw(msgspec.json.encode(plain)) if isinstance(kind, inspect.RawType) else plain


def _stashed_struct(kind: inspect.StructType, plain: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.encode_name: field.type for field in kind.fields if field.encode_name != "~"}
    known = {key: stashed(fields[key], value) for key, value in plain.items() if key in fields}
    if kind.tag_field is not None and kind.tag_field in plain:
        known[kind.tag_field] = plain[kind.tag_field]
    unknown = {key: value for key, value in plain.items() if key not in known}
    return {**known, "~": unknown} if unknown else known


def _stashed_in_union(kind: inspect.UnionType, plain: Any) -> Any:
    structs = [member for member in kind.types if isinstance(member, inspect.StructType)]
    if isinstance(plain, Mapping) and structs:
        if structs[0].tag_field is None:
            return stashed(structs[0], plain)
        tag = plain.get(structs[0].tag_field)
        for member in structs:
            if member.tag == tag and member.cls is not UnknownPart:
                return stashed(member, plain)
        if isinstance(tag, str) and any(member.cls is UnknownPart for member in structs):
            return {structs[0].tag_field: "~part", "body": plain}
        return plain
    for other in kind.types:
        if isinstance(other, inspect.VarTupleType | inspect.ListType):
            return stashed(other, plain)
    return plain


@functools.cache
def type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)
