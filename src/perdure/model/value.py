"""What every stored value shares: it is frozen, and it keeps the fields that a newer release has added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Self

import msgspec

from perdure.errors import InvalidData

JSON = Any
"""None, bool, int, float, str, or a list or string-keyed dict of these."""


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed. `{**frozen, "key": value}` makes a changed copy."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is frozen; build a new one with {**mapping, key: value}")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


EMPTY = FrozenDict()


class Value(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
    forbid_unknown_fields=True,
    gc=False,  # frozen values form no cycles, and a collector that visits every message of every session is slow
):
    """A frozen value with a place for fields it does not know, which the codec puts back where they stood."""

    unknown: Mapping[str, Any] = msgspec.field(default=EMPTY, name="~")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data in which every message stands once."""
        from perdure import codec  # a layer above, and the only one that knows the form; hence not at the top

        return codec.to_dict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The value that `to_dict` was called on; anything else is InvalidData, with the path."""
        from perdure import codec

        return codec.from_dict(cls, plain)


def freeze(owner: msgspec.Struct, field: str) -> None:
    """Make a mapping field of a value under construction immutable."""
    mapping = getattr(owner, field)
    if type(mapping) is not FrozenDict:
        if not isinstance(mapping, dict | Mapping):
            raise InvalidData(f"$.{field}", f"expected a mapping, got {type(mapping).__name__}")
        msgspec.structs.force_setattr(owner, field, FrozenDict(mapping) if mapping else EMPTY)


def brief(value: object) -> str:
    """A value as an error message shows it: short, and whatever it is."""
    try:
        return repr(value)[:50]
    except ValueError:  # an int of more digits than Python prints
        return f"a huge {type(value).__name__}"


def clean_text(text: str) -> str:
    """The text with lone surrogates, which no UTF-8 can carry, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ErrorRecord(Value, frozen=True):
    """An error on record: what it was called and what it said. Never revived as a class."""

    type: str
    message: str
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, traceback: str | None = None) -> ErrorRecord:
        return cls(type(error).__name__, clean_text(str(error)), traceback and clean_text(traceback))
