"""The base of every stored value: it is frozen, and it keeps the fields that a newer release has added."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn, Self

import msgspec

from perdure.errors import InvalidData

JSON = Any
"""None, bool, int, float, str, or a list or string-keyed dict of these."""
MAX_DEPTH = 100
"""The deepest nesting of JSON that is stored."""


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed. `{**frozen, "key": value}` makes a changed copy."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping is frozen; build a new one with {**mapping, key: value}")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: object) -> FrozenDict:
        return self

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


class FrozenList(list[Any]):
    """A list that cannot be changed. `[*frozen, item]` makes a changed copy."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this list is frozen; build a new one with [*items, item]")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __copy__(self) -> FrozenList:
        return self

    def __deepcopy__(self, memo: object) -> FrozenList:
        return self

    def __reduce__(self) -> tuple[type[FrozenList], tuple[list[Any]]]:
        return FrozenList, (list(self),)


EMPTY = FrozenDict()
_last = EMPTY
"""The mapping that was frozen last. If threads take turns here, less is shared."""


class Value(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    kw_only=True,
    forbid_unknown_fields=True,
    gc=False,  # frozen values form no cycles, and a collector that visits every message of every session is slow
):
    """A frozen value with a place for fields that it does not know. The codec puts them back where they were."""

    unknown: Mapping[str, Any] = msgspec.field(default=EMPTY, name="~")
    """Fields that a newer release has written. They are kept."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data that has every message once."""
        from perdure import codec  # a layer above, and the only one that knows the form; hence not at the top

        return codec.to_dict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Return the value that `to_dict` made `plain` of. Raise InvalidData, with the path, for anything else."""
        from perdure import codec

        return codec.from_dict(cls, plain)


def freeze(owner: msgspec.Struct, field: str) -> None:
    """Make a mapping field of a value under construction a deep, frozen copy of plain JSON."""
    mapping = getattr(owner, field)
    if type(mapping) is not FrozenDict:
        if type(mapping) is not dict and not isinstance(mapping, Mapping):
            raise InvalidData(f"$.{field}", f"expected a mapping, got {type(mapping).__name__}")
        made = frozen(mapping) if mapping else EMPTY
        # What nests too deep is not copied; the codec refuses it, and it is a frozen mapping until then.
        msgspec.structs.force_setattr(owner, field, made if type(made) is FrozenDict else FrozenDict(mapping))


def freeze_alike(owner: msgspec.Struct, field: str) -> None:
    """Do the same for a field that is much the same in one value after the other, and share what is the same.

    All messages of a run have the same ids. Sharing them saves a sixth of the memory of a session of 10,000 messages.
    """
    global _last
    mapping = getattr(owner, field)
    if type(mapping) is dict and mapping:
        _last = made = _alike(mapping, _last)
        msgspec.structs.force_setattr(owner, field, made)
    else:
        freeze(owner, field)


def _alike(mapping: dict[str, Any], last: FrozenDict) -> FrozenDict:
    """Return a frozen copy that shares equal texts with `last`. Return `last` itself if all are equal."""
    made: dict[str, Any] = {}
    is_same = len(mapping) == len(last)
    for given, value in mapping.items():
        key = plain_text(given)
        known = last.get(key)
        if type(value) is str and value == known and type(known) is str:
            made[key] = known
        else:
            made[key] = frozen(value)
            is_same = is_same and value is known
    return last if is_same and list(made) == list(last) else FrozenDict(made)


def freeze_json(owner: msgspec.Struct, field: str) -> None:
    """Make a field of a value under construction, which holds any JSON, a deep, frozen copy of it."""
    value = getattr(owner, field)
    if type(value) not in _SETTLED:
        msgspec.structs.force_setattr(owner, field, frozen(value))


def frozen(value: Any) -> Any:
    """Return a deep copy in plain JSON types that cannot be changed, as every store gives it back.

    What is not JSON stays as it is. The codec refuses it, with its path, when it is written.
    """
    try:
        return _frozen(value, 0)
    except RecursionError:
        return value


_SCALARS = frozenset({str, int, float, bool, type(None)})
_SETTLED = _SCALARS | {FrozenDict, FrozenList}


def _frozen(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _SETTLED:
        return value
    if depth > MAX_DEPTH:
        raise RecursionError  # a structure that holds itself would be copied without end
    if kind is dict or isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            text = key if type(key) is str else plain_text(key)
            # Most items are settled, and a call for each would take longer than all else here.
            copy[text] = item if type(item) in _SETTLED else _frozen(item, depth + 1)
        return FrozenDict(copy)
    if isinstance(value, list | tuple):
        return FrozenList([item if type(item) in _SETTLED else _frozen(item, depth + 1) for item in value])
    if isinstance(value, Enum):
        return _frozen(value.value, depth + 1)
    if isinstance(value, str | int | float):
        return plain_text(value) if isinstance(value, str) else _plain_number(value)
    return value


def plain_text(text: Any) -> Any:
    """Return a text of a subclass of str as plain str; anything else as it is."""
    return text if type(text) is str or not isinstance(text, str) else str.__str__(text)


def _plain_number(number: int | float) -> int | float:
    return int.__int__(number) if isinstance(number, int) else float.__float__(number)


def thawed(value: Any) -> Any:
    """Return a copy of JSON for code that may change it: of plain dicts and lists, however deep."""
    if isinstance(value, dict):
        return {key: item if type(item) in _SCALARS else thawed(item) for key, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, list) else value


_BRIEF = 50
"""The characters of a value that an error shows."""


def brief(value: object) -> str:
    """Return any value as an error message shows it, in short. A quote that is cut is closed."""
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a huge {type(value).__name__}"
    quote = shown[-1] if isinstance(value, str | bytes) else ""
    return shown if len(shown) <= _BRIEF else f"{shown[: _BRIEF - 1]}…{quote}"


def kind_of(value: object) -> str:
    """Return what a value is, for an error message: "a str", "an int"."""
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def clean_text(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot carry, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ErrorRecord(Value, frozen=True):
    """An error on record: the name of its class, and its message. It is never made into an exception again."""

    type: str
    """The name of the error's class."""
    message: str
    """The error's message."""
    traceback: str | None = None
    """The traceback as a text, if it was kept."""
    code: int | str | None = None
    """The provider's code for it: the HTTP status of its answer."""

    @classmethod
    def of(cls, error: BaseException, *, traceback: str | None = None) -> ErrorRecord:
        told = traceback and clean_text(traceback)
        return cls(type(error).__name__, clean_text(str(error)), told, _code_of(error))


def _code_of(error: BaseException) -> int | None:
    """Return the HTTP status of a provider's answer, if the error has one. After retries, it is that of the last."""
    code = getattr(getattr(error, "last", error), "status", None)
    return code if isinstance(code, int) and not isinstance(code, bool) else None
