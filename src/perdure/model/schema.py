"""JSON schemas of types: the form of answer that a caller asks for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, get_args

import msgspec

from perdure.errors import ConfigurationError, InvalidData
from perdure.model.value import JSON, FrozenDict, brief, frozen

_NEVER_A_TYPE = (str, bytes, bytearray, int, float, list, tuple, set, frozenset)


class TypeSchema(FrozenDict):
    """The JSON schema of a type. It remembers the type in the process where it was given. Only JSON is stored."""

    __slots__ = ("kind",)
    kind: Any

    @classmethod
    def of(cls, kind: Any) -> TypeSchema:
        made = cls(frozen(schema_of(kind)))
        made.kind = kind
        return made


def schema_of(wanted: object) -> Mapping[str, Any] | None:
    """Return a JSON schema from a type (msgspec, dataclass, TypedDict, pydantic…) or from a schema itself.

    `wanted` is the type or the schema. For None, None is returned.
    """
    if wanted is None or isinstance(wanted, Mapping):
        return wanted
    try:
        return type_adapter(wanted).json_schema() if is_pydantic(wanted) else msgspec.json.schema(wanted)
    except (TypeError, NameError, RuntimeError) as error:  # pydantic's own are RuntimeErrors
        raise ConfigurationError(f"{wanted!r} is neither a JSON schema nor a type that has one: {error}.") from None


def output_schema(wanted: object, path: str) -> FrozenDict:
    """Return the schema of what a caller gives as `output`. That of a type remembers the type."""
    if isinstance(wanted, _NEVER_A_TYPE):
        raise InvalidData(path, f"expected a type or a JSON schema, got {brief(wanted)}")
    if isinstance(wanted, TypeSchema):
        return wanted
    if not isinstance(wanted, Mapping):
        return TypeSchema.of(wanted)
    made = frozen(wanted)
    # What nests too deep is not copied; the codec refuses it, and it is a frozen mapping until then.
    return made if isinstance(made, FrozenDict) else FrozenDict(wanted)


def require_validators() -> None:
    """Raise ConfigurationError unless the package that checks values against a JSON schema is installed."""
    if find_spec("jsonschema") is None:
        raise ConfigurationError("JSON schemas need the package jsonschema.", "pip install 'perdure[schema]'")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless a mapping is a JSON schema that contains all that it refers to."""
    require_validators()
    from jsonschema import Draft202012Validator, SchemaError  # heavy, and used only where a form is asked for

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(f"The response format is not a JSON schema: {error.message[:500]}.") from None
    except RecursionError:
        raise ConfigurationError("The response format is not a JSON schema: it refers to itself.") from None
    for reference in _references(schema):
        if not reference.startswith("#"):  # nothing is ever fetched to check an answer
            raise ConfigurationError(
                f"The response format refers to {reference[:200]!r}, which is not in it. Put that under $defs, and "
                "refer to it as '#/$defs/…'."
            )


def is_pydantic(kind: object) -> bool:
    """Tell whether a type is one of pydantic's, or made of such types: then pydantic has been imported already."""
    return hasattr(kind, "__pydantic_validator__") or any(map(is_pydantic, get_args(kind)))


def type_adapter(kind: Any) -> Any:
    """Return pydantic's reader of a type. Nothing here imports pydantic: its types have done that."""
    return sys.modules["pydantic"].TypeAdapter(kind)


def _references(schema: JSON) -> list[str]:
    if isinstance(schema, Mapping):
        own = schema.get("$ref")
        inner = [each for item in schema.values() for each in _references(item)]
        return [own, *inner] if isinstance(own, str) else inner
    return [each for item in schema for each in _references(item)] if isinstance(schema, list | tuple) else []
