"""JSON schemas of types: the form of answer that a caller asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.errors import ConfigurationError


def schema_of(wanted: object) -> Mapping[str, Any] | None:
    """A JSON schema from a type (msgspec, dataclass, TypedDict, pydantic…) or from a schema itself."""
    if wanted is None or isinstance(wanted, Mapping):
        return wanted
    own = getattr(wanted, "model_json_schema", None)
    if callable(own):
        described: Mapping[str, Any] = own()
        return described
    try:
        return msgspec.json.schema(wanted)
    except TypeError as error:
        raise ConfigurationError(f"{wanted!r} is neither a JSON schema nor a type that has one: {error}.") from None
