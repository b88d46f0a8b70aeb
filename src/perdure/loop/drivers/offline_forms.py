"""Values for a JSON schema out of plain text: the arguments of a tool, or an answer in a given form.

Schemas come from anywhere, so nothing about them is taken for granted: what cannot be read counts as not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.loop.drivers.offline_text import Number, Reading, as_number, shortened, split_name, vocabulary
from perdure.model.ids import now
from perdure.model.value import JSON

MISSING: Any = object()

_DEEPEST, _MOST_VALUES, _MOST_OPTIONS = 12, 2_000, 50
_QUERY_WORDS = vocabulary(
    "query q text term terms question prompt input message topic keywords search task key item phrase"
)
_HINTS = (
    ({"from", "origin", "source", "start", "departure"}, {"from"}),
    ({"to", "destination", "target", "recipient", "arrival"}, {"to"}),
    ({"city", "location", "place", "country", "town", "region", "timezone", "zone"}, {"in", "at", "for"}),
    ({"topic", "subject"}, {"about", "on", "regarding"}),
    ({"name", "title"}, {"named", "called", "of", "for"}),
)
_TRUE, _FALSE = frozenset(("true", "yes", "on")), frozenset(("false", "no", "off"))


def fill_arguments(schema: Mapping[str, Any], text: str, ignored: set[str]) -> tuple[dict[str, JSON], list[str]]:
    """The arguments that a text gives, and the names of those that are required and not found in it."""
    properties = {str(name): options(given, schema) for name, given in mapping(schema.get("properties")).items()}
    reading = Reading(text, names=properties)
    found = {name: _stated(name, kinds, reading) for name, kinds in properties.items()}
    required = required_names(schema)
    for name in required:
        if found.get(name, MISSING) is MISSING:
            found[name] = _guessed(name, properties.get(name, []), reading, ignored)
    given = {name: value for name, value in found.items() if value is not MISSING}
    return given, [name for name in required if name not in given]


def required_names(schema: Mapping[str, Any]) -> list[str]:
    """The names of the properties that a schema requires, in the order in which it lists the properties."""
    required = dict.fromkeys(name for name in sequence(schema.get("required")) if isinstance(name, str))
    properties = mapping(schema.get("properties"))
    return [*(name for name in properties if name in required), *(name for name in required if name not in properties)]


def options(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The simple schemas that a schema comes down to: references followed, unions taken apart, null left out."""
    simple: list[Mapping[str, Any]] = []
    todo = [mapping(schema)]
    for _ in range(_MOST_OPTIONS):
        if not todo:
            break
        first = todo.pop(0)
        union = [*sequence(first.get("anyOf")), *sequence(first.get("oneOf"))]
        if "$ref" in first:
            union = [resolve(first["$ref"], root)]
        if union:
            todo = [*map(mapping, union), *todo]
        else:
            kinds = sequence(first.get("type")) or [first.get("type")]
            simple.extend({**first, "type": kind} for kind in kinds if kind != "null")
    return simple


def is_number(kinds: Sequence[Mapping[str, Any]]) -> bool:
    return any(kind.get("type") in ("integer", "number") for kind in kinds)


def coerce(text: str | Number, kind: Mapping[str, Any]) -> JSON:
    """A piece of text as a value of this kind, or MISSING."""
    raw = str(text).strip()
    if "enum" in kind:
        return next((member for member in sequence(kind["enum"]) if str(member).lower() == raw.lower()), MISSING)
    match kind.get("type"):
        case "integer" | "number":
            return _as_numeric(text, kind)
        case "boolean":
            return raw.lower() in _TRUE if raw.lower() in _TRUE | _FALSE else MISSING
        case "string" | None:
            return raw or MISSING
        case "array":
            items = [coerce(item, mapping(kind.get("items"))) for item in raw.strip("[]").split(",")]
            return MISSING if MISSING in items else items
    return MISSING


def instance(schema: Any, reading: Reading) -> JSON:
    """A small value that validates against a schema, with words of the text where text is asked for."""
    return _Form(mapping(schema), reading).made("", schema)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference such as `#/$defs/Order` points at."""
    found: Any = root
    for step in str(reference).removeprefix("#").split("/")[1:20]:
        found = mapping(found).get(step.replace("~1", "/").replace("~0", "~"), {})
    return found


def _stated(name: str, kinds: Sequence[Mapping[str, Any]], reading: Reading) -> JSON:
    """What the text says of a parameter by name, or by one of the values it may have."""
    said = reading.named(name)
    for kind in kinds:
        if "const" in kind:
            return kind["const"]
        value = MISSING if said is None else _said(said, kind)
        if value is MISSING:
            value = _mentioned(name, kind, reading)
        if value is not MISSING:
            reading.use_up(value)
            return value
    return MISSING


def _said(said: str, kind: Mapping[str, Any]) -> JSON:
    whole = coerce(said, kind)
    first = said.split(" ", 1)[0]
    return coerce(first, kind) if whole is MISSING and kind.get("type") != "array" else whole


def _mentioned(name: str, kind: Mapping[str, Any], reading: Reading) -> JSON:
    if "enum" in kind:
        members = (member for member in sequence(kind["enum"]) if isinstance(member, str | int))
        return next((member for member in members if reading.mentions(str(member))), MISSING)
    if is_number([kind]):
        count = reading.count_of(name)
        return MISSING if count is None else coerce(count, kind)
    words = " ".join(split_name(name))
    if kind.get("type") == "boolean" and reading.mentions(words):
        return not any(reading.mentions(f"{word} {words}") for word in ("no", "not", "without"))
    return MISSING


def _guessed(name: str, kinds: Sequence[Mapping[str, Any]], reading: Reading, ignored: set[str]) -> JSON:
    """What in the text may be meant for a required parameter that it does not name."""
    for kind in kinds:
        value = MISSING
        match kind.get("type"):
            case "integer" | "number":
                value = _next_number(kind, reading)
            case "string" | None if "enum" not in kind:
                value = coerce(_next_text(name, reading, ignored), kind)
            case "array":
                value = _next_list(mapping(kind.get("items")), reading)
        if value is not MISSING:
            return value
    return MISSING


def _next_number(kind: Mapping[str, Any], reading: Reading) -> JSON:
    for number in reading.numbers:
        value = coerce(number, kind)
        if value is not MISSING:
            reading.numbers.remove(number)
            return value
    return MISSING


def _next_text(name: str, reading: Reading, ignored: set[str]) -> str:
    if reading.quoted:
        return reading.quoted.pop(0)
    words = set(split_name(name))
    if words & _QUERY_WORDS:
        return reading.take_subject(ignored)
    preferred = [hint for names, hints in _HINTS if words & names for hint in hints]
    return reading.take_tail(preferred) or reading.rest(ignored)


def _next_list(items: Mapping[str, Any], reading: Reading) -> JSON:
    if items.get("type") in ("integer", "number"):
        values = [coerce(number, items) for number in reading.numbers]
    else:
        values = [coerce(quoted, items) for quoted in reading.quoted]
    return values if values and MISSING not in values else MISSING


def _as_numeric(text: str | Number, kind: Mapping[str, Any]) -> JSON:
    try:
        value = as_number(text) if isinstance(text, str) else text
    except ValueError:
        return MISSING
    if kind.get("type") == "integer":
        value = int(value) if math.isfinite(value) and value == int(value) else math.nan
    return value if _is_within(value, kind) else MISSING


def _is_within(value: Number, kind: Mapping[str, Any]) -> bool:
    low, high, step = _bounds(kind)
    return math.isfinite(value) and abs(value) < 2**63 and low <= value <= high and (not step or value % step == 0)


def _bounds(kind: Mapping[str, Any]) -> tuple[Number, Number, Number]:
    """The least and greatest value that a schema allows, and its step; an exclusive bound is moved by a little."""
    nudge = 1 if kind.get("type") == "integer" else 1e-3
    low = max(_limit(kind, "minimum", -math.inf), _limit(kind, "exclusiveMinimum", -math.inf) + nudge)
    high = min(_limit(kind, "maximum", math.inf), _limit(kind, "exclusiveMaximum", math.inf) - nudge)
    return low, high, _limit(kind, "multipleOf", 0)


def _limit(kind: Mapping[str, Any], key: str, default: Number) -> Number:
    value = kind.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


class _Form:
    """A form under way: the whole schema, the text to fill it from, and how many more values it may take."""

    def __init__(self, root: Mapping[str, Any], reading: Reading) -> None:
        self._root = root
        self._reading = reading
        self._left = _MOST_VALUES

    def made(self, name: str, schema: Any, depth: int = 0) -> JSON:
        """A value for one schema within the whole one; None where references go in circles without an end."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            return None
        schema = _merged(mapping(schema), self._root)
        if "const" in schema:
            return schema["const"]
        if sequence(schema.get("enum")):
            stated = _mentioned(name, schema, self._reading)
            return schema["enum"][0] if stated is MISSING else stated
        union = [*sequence(schema.get("anyOf")), *sequence(schema.get("oneOf"))]
        if union:
            rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
            return self.made(name, _joined(rest, _simplest(union, depth)), depth + 1)
        return self._of_kind(_kind(schema), name, schema, depth)

    def _of_kind(self, kind: str, name: str, schema: Mapping[str, Any], depth: int) -> JSON:
        match kind:
            case "object":
                properties = mapping(schema.get("properties"))
                return {key: self.made(key, properties.get(key), depth + 1) for key in required_names(schema)}
            case "array":
                count = max(0, min(int(_limit(schema, "minItems", 0)), _MOST_VALUES))
                kinds = [*sequence(schema.get("prefixItems")), *[schema.get("items")] * count][:count]
                return [self.made(name, item, depth + 1) for item in kinds]
            case "string":
                return _made_text(name, schema, self._reading)
            case "integer" | "number":
                return _made_number(name, {**schema, "type": kind}, self._reading)
            case "boolean":
                stated = _stated(name, [schema], self._reading)
                return stated if isinstance(stated, bool) else False
        return None


_FORMATS = {
    "email": "someone@example.com",
    "uri": "https://example.com",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "time": "00:00:00Z",
    "duration": "PT0S",
}


def _made_text(name: str, schema: Mapping[str, Any], reading: Reading) -> str:
    form = schema.get("format")
    if form in ("date", "date-time"):
        return now().date().isoformat() if form == "date" else now().isoformat()
    if isinstance(form, str) and form in _FORMATS:
        return _FORMATS[form]
    least, most = int(_limit(schema, "minLength", 0)), int(min(_limit(schema, "maxLength", 10_000), 10_000))
    text = reading.named(name) if name else None
    text = shortened(text or reading.subject, 200)[: max(most, 0)]
    return text if len(text) >= least else text.ljust(min(least, 10_000), ".")


def _made_number(name: str, schema: Mapping[str, Any], reading: Reading) -> Number:
    stated = _stated(name, [schema], reading) if name else MISSING
    number = _next_number(schema, reading) if stated is MISSING else stated
    return _least(schema) if number is MISSING else number


def _least(schema: Mapping[str, Any]) -> Number:
    """A number that a schema allows: nought, or the nearest to it."""
    low, high, step = _bounds(schema)
    value = min(max(0, low), high)
    if step and math.isfinite(value):
        value = math.ceil(value / step) * step
    if schema.get("type") == "integer" and math.isfinite(value):
        return math.ceil(value)
    return value if math.isfinite(value) else 0


def _kind(schema: Mapping[str, Any]) -> str:
    kinds = [kind for kind in sequence(schema.get("type")) or [schema.get("type")] if isinstance(kind, str)]
    stated = next((kind for kind in kinds if kind != "null"), kinds[0] if kinds else None)
    if stated is not None:
        return stated
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


def _simplest(union: Sequence[Any], depth: int) -> Mapping[str, Any]:
    """The branch to take: the first that is something, or far down, where references may go in circles, a plain one."""
    branches = [mapping(branch) for branch in union]
    plain = [branch for branch in branches if "$ref" not in branch]
    if depth > _DEEPEST // 3 and plain:
        return plain[0]
    return next((branch for branch in branches if branch.get("type") != "null"), branches[0])


def _merged(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its references followed and its `allOf` parts put together."""
    for _ in range(_DEEPEST):
        if "$ref" in schema:
            own = {key: value for key, value in schema.items() if key != "$ref"}
            schema = _joined(own, mapping(resolve(schema["$ref"], root)))
        elif sequence(schema.get("allOf")):
            parts = schema["allOf"]
            schema = {key: value for key, value in schema.items() if key != "allOf"}
            for part in parts:
                schema = _joined(schema, mapping(part))
        else:
            break
    return schema


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    both = {**one, **other}
    if "properties" in one and "properties" in other:
        both["properties"] = {**mapping(one["properties"]), **mapping(other["properties"])}
    if "required" in one and "required" in other:
        both["required"] = [*sequence(one["required"]), *sequence(other["required"])]
    return both
