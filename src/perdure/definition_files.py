"""Agent definitions kept in files: Markdown with front matter, YAML, TOML or JSON.

Each reader gives the same plain data and notes the line of every value, so that one set of checks serves all formats.
YAML is read as its harmless part: no tags, anchors or aliases, and `no`, `off` and dates are text.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml

from perdure.codec import MAX_DEPTH, check_json
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.definition import AgentDefinition, ModelConfig, refuse_secrets
from perdure.model.execution import ExecutionBudget
from perdure.model.value import clean_text

MAX_BYTES = 1024 * 1024
MAX_VALUES = 10_000
_MAX_DIGITS = 1_000  # int() refuses to read some thousands, and cannot say where they stand

V = TypeVar("V")
Where = tuple[str | int, ...]
"""The keys and list places that lead to a value: `("budget", "max_steps")`."""


def load_definition(path: str | PathLike[str]) -> AgentDefinition:
    """The agent that a file defines. An agent without a name is called as its file, less the suffix."""
    return _definition(_read(Path(path)))


def load_definitions(directory: str | PathLike[str]) -> dict[str, AgentDefinition]:
    """The agents of a directory by name: of its .md, .markdown, .yaml, .yml, .toml and .json files, but hidden ones."""
    found: dict[str, AgentDefinition] = {}
    files: dict[str, str] = {}
    for path in _definition_files(Path(directory)):
        source = _read(path)
        definition = _definition(source)
        if definition.name in found:
            raise source.invalid(
                ("name",), f"the agent {definition.name!r} is defined in {files[definition.name]} too; rename one"
            )
        found[definition.name] = definition
        files[definition.name] = source.file
    return found


class _Source:
    """One file being read: its text, its fields, and the line on which each value stands."""

    def __init__(self, path: Path) -> None:
        self.file = clean_text(str(path))
        self.text = ""
        self.fields: dict[str, Any] = {}
        self.lines: dict[Where, int] = {}

    def note(self, where: Where, line: int) -> None:
        """Remember a value's line, and refuse a second value in the same place."""
        if where in self.lines:
            raise self.invalid(where, f"given twice, first on line {self.lines[where]}; keep one of them", line)
        if len(where) > MAX_DEPTH:
            raise self.invalid(where, f"nested deeper than {MAX_DEPTH} levels", line)
        if len(self.lines) >= MAX_VALUES:
            raise self.invalid(where, f"a definition holds at most {MAX_VALUES:,} values", line)
        self.lines[where] = line

    def at(self, where: Where, line: int | None = None) -> str:
        """`file:line: field`."""
        return f"{self.file}:{line or self._line(where)}" + (f": {_dotted(where)}" if where else "")

    def invalid(self, where: Where, problem: str, line: int | None = None) -> InvalidData:
        return InvalidData(self.at(where, line), problem)

    def expected(self, where: Where, allowed: str, value: object) -> InvalidData:
        """What to raise for a value of the wrong type; the value itself is not shown, for it may be private."""
        hint = ""
        if value is None:
            hint = "; fill it in, or leave the field out"
        elif allowed == "text" and isinstance(value, int | float):
            hint = "; put it in quotes"
        return self.invalid(where, f"expected {allowed}, got {_kind(value)}{hint}")

    def _line(self, where: Where) -> int:
        for end in range(len(where), 0, -1):
            within = [line for noted, line in self.lines.items() if noted[:end] == where[:end]]
            if within:
                return min(within)
        return 1


def _dotted(where: Where) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{clean_text(part)}" for part in where)
    return name.removeprefix(".")[:200]


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "a mapping"


def _definition_files(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"{clean_text(str(directory))} cannot be read as a directory of agent definitions: {error.strerror}."
        ) from None
    return [p for p in entries if p.suffix.lower() in _READERS and not p.name.startswith(".") and not p.is_dir()]


def _read(path: Path) -> _Source:
    source = _Source(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        allowed = ", ".join(_READERS)
        raise ConfigurationError(f"{source.file} is not an agent definition by its suffix, which is one of {allowed}.")
    source.text = _text(source, path)
    plain = reader(source)
    if not isinstance(plain, dict):
        raise source.invalid((), f"expected a mapping of fields, got {_kind(plain)}")
    source.fields = {"name": path.stem, **plain}
    return source


def _text(source: _Source, path: Path) -> str:
    raw = _bytes(source, path)
    if len(raw) > MAX_BYTES:
        raise source.invalid((), f"an agent definition holds at most {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise source.invalid((), "this is not UTF-8; save it as UTF-8", line) from None
    if not text.strip():
        raise source.invalid((), f"the file is empty; write at least one of the fields {', '.join(_AGENT)}")
    return text


def _bytes(source: _Source, path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise ConfigurationError(f"There is no file {source.file}. Check the path of the agent definition.")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"The agent definition {source.file} cannot be read: {error.strerror}.") from None


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _definition(source: _Source) -> AgentDefinition:
    _check_values(source, (), source.fields)
    return _built(source, AgentDefinition, _known(source, (), source.fields, _AGENT))


def _check_values(source: _Source, where: Where, value: Any) -> None:
    """Refuse what may stand nowhere in a definition: secrets, and values that JSON does not carry."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_secret(source, (*where, key), key, item)
            _check_values(source, (*where, key), key)
            _check_values(source, (*where, key), item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _check_values(source, (*where, place), item)
    else:
        try:
            check_json(value)
        except InvalidData as error:
            raise source.invalid(where, error.problem) from None


def _refuse_secret(source: _Source, where: Where, key: str, value: object) -> None:
    if where == ("model", "api_key_env"):
        return
    try:
        refuse_secrets({key: bool(value)}, "$")
    except ConfigurationError:
        raise ConfigurationError(
            f"{source.at(where)}: this looks like a secret, and would be stored with every session. Leave it out and "
            "name the environment variable that holds it in model.api_key_env."
        ) from None


def _built(source: _Source, kind: Callable[..., V], fields: dict[str, Any]) -> V:
    try:
        return kind(**fields)
    except InvalidData as error:
        raise source.invalid(tuple(error.path.removeprefix("$.").split(".")), error.problem) from None


def _known(source: _Source, where: Where, value: Any, fields: dict[str, _Field]) -> dict[str, Any]:
    """A mapping whose every field is known and of its type."""
    for key in _mapping(source, where, value):
        if key not in fields:
            raise source.invalid((*where, key), f"there is no such field; the fields are {', '.join(fields)}")
    return {key: fields[key](source, (*where, key), item) for key, item in value.items()}


def _string(source: _Source, where: Where, value: Any) -> str:
    if not isinstance(value, str):
        raise source.expected(where, "text", value)
    return value


def _integer(source: _Source, where: Where, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise source.expected(where, "an integer", value)
    return value


def _number(source: _Source, where: Where, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise source.expected(where, "a number", value)
    return value


def _mapping(source: _Source, where: Where, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise source.expected(where, "a mapping", value)
    return value


def _names(source: _Source, where: Where, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise source.expected(where, "a list of names", value)
    return tuple(_string(source, (*where, place), name) for place, name in enumerate(value))


def _moment(source: _Source, where: Where, value: Any) -> datetime:
    allowed = "a date and time with its time zone, such as 2030-01-31T18:00:00Z"
    if not isinstance(value, str):
        raise source.expected(where, allowed, value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise source.invalid(where, f"expected {allowed}") from None
    if moment.tzinfo is None:
        raise source.invalid(where, f"expected {allowed}; this one has no time zone")
    return moment


def _model(source: _Source, where: Where, value: Any) -> ModelConfig:
    if not isinstance(value, str | dict):
        raise source.expected(where, "the name of a model, or a mapping of its settings", value)
    fields = {"name": value} if isinstance(value, str) else _known(source, where, value, _MODEL)
    try:
        return _built(source, ModelConfig, {"name": "", **fields})
    except ConfigurationError as error:  # secret keys were refused before, which leaves credentials in the address
        raise ConfigurationError(f"{source.at((*where, 'base_url'))}: {error}") from None


def _budget(source: _Source, where: Where, value: Any) -> ExecutionBudget:
    return _built(source, ExecutionBudget, _known(source, where, value, _BUDGET))


_Field = Callable[[_Source, Where, Any], Any]

_BUDGET: dict[str, _Field] = {
    "max_steps": _integer,
    "max_tokens": _integer,
    "max_seconds": _number,
    "max_cost": _number,
    "deadline": _moment,
}
_MODEL: dict[str, _Field] = {
    "name": _string,
    "base_url": _string,
    "api_key_env": _string,
    "temperature": _number,
    "max_tokens": _integer,
    "thinking": _string,
    "context_window": _integer,
    "settings": _mapping,
}
_AGENT: dict[str, _Field] = {
    "name": _string,
    "label": _string,
    "description": _string,
    "system_prompt": _string,
    "model": _model,
    "tools": _names,
    "tools_deny": _names,
    "capabilities": _names,
    "budget": _budget,
    "metadata": _mapping,
}


def _read_markdown(source: _Source) -> Any:
    first, _, rest = source.text.partition("\n")
    end = re.search(r"^---[ \t]*$", rest, re.MULTILINE)
    if first.rstrip() != "---":
        raise source.invalid((), "expected front matter: a line ---, the fields, a line ---, then the system prompt")
    if end is None:
        raise source.invalid((), "the front matter is not closed; end it with a line ---")
    fields = _yaml_document(source, "\n" + rest[: end.start()])
    body = rest[end.end() :]
    if not body.strip() or not isinstance(fields, dict):
        return fields
    line = _line_at(source.text, len(source.text) - len(body.lstrip()))
    if "system_prompt" in fields:
        raise source.invalid(
            ("system_prompt",), f"given twice: here, and as the text from line {line} on; keep one of them"
        )
    source.note(("system_prompt",), line)
    return {**fields, "system_prompt": re.sub(r"\A(?:[ \t]*\n)+", "", body).rstrip()}


def _read_yaml(source: _Source) -> Any:
    return _yaml_document(source, source.text)


def _yaml_document(source: _Source, text: str) -> Any:
    events = _yaml_events(source, text)
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return {}
    plain = _yaml_value(source, events, next(events), ())
    next(events)
    after = next(events)
    if not isinstance(after, yaml.StreamEndEvent):
        raise source.invalid((), "a file defines one agent; put the second document into its own", _yaml_line(after))
    return {} if plain is None else plain


def _yaml_events(source: _Source, text: str) -> Iterator[yaml.Event]:
    """The events of a YAML stream; its composer would unfold aliases and its constructors guess at types."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        raise source.invalid((), f"bad YAML: {error.reason}", _line_at(text, error.position)) from None
    try:
        while loader.check_event():
            yield loader.get_event()  # type: ignore[no-untyped-call]  # the stubs leave it untyped
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line if error.problem_mark else loader.line) + 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise source.invalid((), f"bad YAML: {problem}", line) from None
    except (ValueError, OverflowError) as error:  # PyYAML lets these out for an escape such as "\UFFFFFFFF"
        raise source.invalid((), f"bad YAML: {error}", loader.line + 1) from None


def _yaml_line(event: yaml.Event) -> int:
    return event.start_mark.line + 1  # type: ignore[union-attr]  # a loader marks all that it reads


def _yaml_value(source: _Source, events: Iterator[yaml.Event], event: yaml.Event, where: Where) -> Any:
    _refuse_yaml_extras(source, event, where)
    if isinstance(event, yaml.ScalarEvent):
        return _yaml_scalar(event)
    if isinstance(event, yaml.SequenceStartEvent):
        return _yaml_list(source, events, where)
    return _yaml_mapping(source, events, where)


def _yaml_list(source: _Source, events: Iterator[yaml.Event], where: Where) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        place = (*where, len(items))
        source.note(place, _yaml_line(event))
        items.append(_yaml_value(source, events, event, place))
    return items


def _yaml_mapping(source: _Source, events: Iterator[yaml.Event], where: Where) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        _refuse_yaml_extras(source, key, where)
        if not isinstance(key, yaml.ScalarEvent):
            raise source.invalid(where, "expected text as a key, got a list or a mapping", _yaml_line(key))
        place = (*where, key.value)
        source.note(place, _yaml_line(key))
        fields[key.value] = _yaml_value(source, events, next(events), place)
    return fields


def _refuse_yaml_extras(source: _Source, event: yaml.Event, where: Where) -> None:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise source.invalid(where, "anchors (&) and aliases (*) are not read; write it out", _yaml_line(event))
    if getattr(event, "tag", None) is not None:
        raise source.invalid(where, "tags (!) are not read; leave it out", _yaml_line(event))


_YAML_NUMBER = re.compile(r"(?P<whole>-?(?:0|[1-9][0-9]*))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_YAML_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _yaml_scalar(event: yaml.ScalarEvent) -> Any:
    """YAML 1.2: what looks like JSON is what JSON says, and all the rest is text."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text.lower() in _YAML_WORDS:
        return _YAML_WORDS[text.lower()]
    number = _YAML_NUMBER.fullmatch(text)
    if number is None:
        return text
    return _whole(text) if number["whole"] == text else float(text)


def _whole(digits: str) -> int:
    return int(digits[:_MAX_DIGITS])  # enough to be refused by the checks, which name the field


_JSON = json.JSONDecoder(parse_int=_whole)
_JSON_GAP = re.compile(r"[\s,:]*")


def _read_json(source: _Source) -> Any:
    try:
        plain = _JSON.decode(source.text)
    except json.JSONDecodeError as error:
        raise source.invalid((), f"bad JSON: {error.msg}", error.lineno) from None
    except RecursionError:
        raise source.invalid((), f"nested deeper than {MAX_DEPTH} levels") from None
    _JsonLines(source).value((), _gap_end(source.text, 0))
    return plain


def _gap_end(text: str, at: int) -> int:
    gap = _JSON_GAP.match(text, at)
    return gap.end() if gap else at


class _JsonLines:
    """Notes where the values of a text stand that is known to be JSON."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.line = 1
        self.counted = 0

    def value(self, where: Where, at: int) -> int:
        """Note what lies within the value that begins here; the position after it."""
        text = self.source.text
        opening = text[at]
        if opening not in "{[":
            return int(_JSON.raw_decode(text, at)[1])
        at = _gap_end(text, at + 1)
        for place in count():
            if text[at] in "}]":
                break
            at = _gap_end(text, self._item(where, place, at) if opening == "[" else self._pair(where, at))
        return at + 1

    def _item(self, where: Where, place: int, at: int) -> int:
        self._note((*where, place), at)
        return self.value((*where, place), at)

    def _pair(self, where: Where, at: int) -> int:
        key, end = _JSON.raw_decode(self.source.text, at)
        self._note((*where, key), at)
        return self.value((*where, key), _gap_end(self.source.text, end))

    def _note(self, where: Where, at: int) -> None:
        self.line += self.source.text.count("\n", self.counted, at)
        self.counted = at
        self.source.note(where, self.line)


def _read_toml(source: _Source) -> Any:
    _TomlLines(source).scan()
    try:
        return _dates_as_text(tomllib.loads(source.text))
    except RecursionError:
        raise source.invalid((), f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(found[1]) if found else _line_at(source.text, len(source.text))
        raise source.invalid((), f"bad TOML: {str(error)[: found.start() if found else None]}", line) from None


def _dates_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dates_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


_TOML_TOKEN = re.compile(
    r'[ \t]*("""(?:\\.|[^\\])*?"{3,5}|"(?:\\.|[^"\\\n])*"'
    r"|'''.*?'{3,5}|'[^'\n]*'"
    r"""|\#[^\n]*|[\[\]{}=,.\n]|[^\s\[\]{}=,.#"']+)""",
    re.DOTALL,
)


class _TomlLines:
    """Notes where the keys of a TOML text stand. What is not TOML may end the scan early: tomllib says why.

    It runs before tomllib, whose time and memory grow with the square of a dotted key's length.
    """

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.arrays: dict[Where, int] = {}
        self.tokens = self._tokens()
        self.line = 1
        self.token = next(self.tokens)

    def _tokens(self) -> Iterator[str]:
        at = 0
        while found := _TOML_TOKEN.match(self.source.text, at):
            if not found[1].startswith("#"):
                yield found[1]
            self.line += found[1].count("\n")
            at = found.end()
        while True:
            yield ""

    def _advance(self) -> None:
        self.token = next(self.tokens)

    def scan(self) -> None:
        table: Where = ()
        while self.token:
            if self.token == "[":
                table = self._header()
            elif self.token != "\n":
                self._pair(table)
            while self.token not in ("\n", ""):
                self._advance()
            self._advance()

    def _header(self) -> Where:
        line = self.line
        self._advance()
        is_array = self.token == "["
        if is_array:
            self._advance()
        where = self._table(self._names())
        if is_array:
            self.arrays[where] = self.arrays.get(where, -1) + 1
            where = (*where, self.arrays[where])
        self.source.note(where, line)
        return where

    def _table(self, names: list[str]) -> Where:
        """Where a header leads: on its way, the name of an array of tables means the array's last table."""
        where: Where = ()
        for name in names[:-1]:
            where = (*where, name)
            if where in self.arrays:
                where = (*where, self.arrays[where])
        return (*where, names[-1])

    def _names(self) -> list[str]:
        names = [self._name()]
        while self.token == ".":
            self._advance()
            names.append(self._name())
            if len(names) > MAX_DEPTH:
                raise self.source.invalid(tuple(names), f"nested deeper than {MAX_DEPTH} levels", self.line)
        return names

    def _name(self) -> str:
        name = _toml_key(self.token)
        self._advance()
        return name

    def _pair(self, table: Where) -> None:
        line = self.line
        where = (*table, *self._names())
        if self.token == "=":
            self._advance()
            self.source.note(where, line)
            self._value(where)

    def _value(self, where: Where) -> None:
        if self.token == "[":
            self._items(where)
        elif self.token == "{":
            self._pairs(where)
        else:
            if len(self.token) > _MAX_DIGITS and self.token[0] not in "\"'":
                raise self.source.invalid(
                    where, "an integer must fit into 64 bits; pass larger ones as text", self.line
                )
            while self.token not in (",", "]", "}", "\n", ""):
                self._advance()

    def _items(self, where: Where) -> None:
        self._advance()
        place = 0
        while self.token not in ("]", "}", ""):
            if self.token in ("\n", ","):
                self._advance()
                continue
            self.source.note((*where, place), self.line)
            self._value((*where, place))
            place += 1
        self._advance()

    def _pairs(self, where: Where) -> None:
        self._advance()
        while self.token not in ("}", "]", ""):
            if self.token in ("\n", ","):
                self._advance()
            else:
                self._pair(where)
        self._advance()


def _toml_key(token: str) -> str:
    if not token.startswith('"'):
        return token.strip("'")
    try:
        return next(iter(tomllib.loads(f"{token} = 0")))
    except tomllib.TOMLDecodeError:
        return token


_READERS: dict[str, Callable[[_Source], Any]] = {
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}
