"""Readers of the four formats. Each returns a file's plain data, and refuses what perdure does not read.

Errors name the line if the parser tells it: for bad syntax in every format, and for every value in YAML.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

import yaml

from perdure.codec import MAX_DEPTH, check_json
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.secrets import refuse_secrets
from perdure.model.value import clean_text

MAX_VALUES = 10_000
MAX_DIGITS = 1_000  # int() refuses more than a few thousand digits, and cannot say in which field they are
TOO_MANY = f"a definition holds at most {MAX_VALUES:,} values"
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"

Where = tuple[str | int, ...]
"""The keys and list places that lead to a value: `("budget", "max_steps")`."""


class Source:
    """One file being read: its text, its values, and their lines, if these are known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = clean_text(str(path))
        self.text = ""
        self.lines: dict[Where, int | None] = {}

    def note(self, where: Where, line: int | None = None) -> None:
        """Remember a value, and refuse a second one in the same place."""
        if where in self.lines:
            first = f", first on line {self.lines[where]}" if self.lines[where] else ""
            raise self.invalid(where, f"given twice{first}; keep one of them", line)
        if len(where) > MAX_DEPTH:
            raise self.invalid(where, TOO_DEEP, line)
        if len(self.lines) >= MAX_VALUES:
            raise self.invalid(where, TOO_MANY, line)
        self.lines[where] = line

    def refuse_secret(self, where: Where, key: str, value: object) -> None:
        if where == ("model", "api_key_env") or where[0] == "output":  # these name a variable, or fields to fill in
            return
        try:
            refuse_secrets({key: bool(value)}, "$")  # not the value itself: the keys in it were checked before this one
        except ConfigurationError:
            raise ConfigurationError(
                f"{self.at(where)}: this looks like a secret, and would be stored with every session. Leave it out and "
                "name the environment variable that holds it in model.api_key_env."
            ) from None

    def checked(self, where: Where, value: Any) -> Any:
        """Return a value if JSON can represent it. Refuse any other."""
        try:
            check_json(value)
        except InvalidData as error:
            raise self.invalid(where, error.problem) from None
        return value

    def at(self, where: Where, line: int | None = None) -> str:
        """Return `file:line: field`, or `file: field` if no line is known."""
        if not where:
            return f"{self.file}:{line or 1}"
        known = (self.lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in self.lines)
        line = line or next(known, None)
        return f"{self.file}:{line}: {_dotted(where)}" if line else f"{self.file}: {_dotted(where)}"

    def invalid(self, where: Where, problem: str, line: int | None = None) -> InvalidData:
        return InvalidData(self.at(where, line), problem)


def _dotted(where: Where) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{clean_text(part)}" for part in where)
    return name.removeprefix(".")[:200]


def read_json(source: Source) -> Any:
    try:
        raw = _JSON.decode(source.text)
    except json.JSONDecodeError as error:
        raise source.invalid((), f"bad JSON: {error.msg}", error.lineno) from None
    except RecursionError:
        raise source.invalid((), TOO_DEEP) from None
    return _plain(source, (), raw)


def read_toml(source: Source) -> Any:
    text = source.text
    # Before tomllib, whose time and memory grow with the square of a dotted key's length.
    deep = next((token for token in _TOML_TOKEN.finditer(text) if token["deep"]), None)
    if deep is not None:
        raise source.invalid((), TOO_DEEP, _line_at(text, deep.start()))
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = _TOML_LINE.search(str(error))
        line = int(told[1]) if told and told[1] else _line_at(text, len(text))
        raise source.invalid((), f"bad TOML: {str(error)[: told.start() if told else None]}", line) from None
    except RecursionError:
        raise source.invalid((), TOO_DEEP) from None
    except ValueError:  # from int()
        digits = re.search(rf"[0-9]{{{MAX_DIGITS}}}", text)
        line = _line_at(text, digits.start() if digits else 0)
        raise source.invalid((), "an integer must fit into 64 bits; pass larger ones as text", line) from None
    return _plain(source, (), raw)


def read_markdown(source: Source) -> Any:
    """Return the fields of YAML front matter, with the text below it as the system prompt."""
    first, _, rest = source.text.partition("\n")
    end = re.search(r"^---[ \t]*$", rest, re.MULTILINE)
    if first.rstrip() != "---":
        raise source.invalid((), "expected front matter: a line ---, the fields, a line ---, then the system prompt")
    if end is None:
        raise source.invalid((), "the front matter is not closed; end it with a line ---")
    fields = read_yaml(source, "\n" + rest[: end.start()])  # a blank line for the first ---, so that line numbers fit
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


def read_yaml(source: Source, text: str | None = None) -> Any:
    """Return the plain data of a YAML text. Tags, anchors and aliases are refused. `no`, `off` and dates are text."""
    text = source.text if text is None else text
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        raise source.invalid((), f"bad YAML: {error.reason}", _line_at(text, error.position)) from None
    try:
        node = loader.get_node() if loader.check_node() else None
        is_more = loader.check_node()
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line if error.problem_mark else loader.line) + 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise source.invalid((), f"bad YAML: {problem}", line) from None
    except RecursionError:
        raise source.invalid((), TOO_DEEP, loader.line + 1) from None
    except (ValueError, OverflowError) as error:  # PyYAML lets these out for an escape such as "\UFFFFFFFF"
        raise source.invalid((), f"bad YAML: {error}", loader.line + 1) from None
    if is_more:
        line = _line(loader.peek_event())  # type: ignore[no-untyped-call]  # the stubs leave it untyped
        raise source.invalid((), "a file defines one agent; put the second document into its own", line)
    plain = None if node is None else _plain(source, (), node)
    return {} if plain is None else plain


class _Loader(yaml.SafeLoader):
    """A loader that reads YAML into nodes, and no further: its constructors would guess types."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it untyped
        problem = None
        self.nodes += 1
        if self.nodes > 2 * MAX_VALUES + 1:  # each value with its key, and the mapping of all: the rest is not read
            problem = TOO_MANY
        elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors (&) and aliases (*) are not read; write it out"
        elif getattr(event, "tag", None) is not None:
            problem = "tags (!) are not read; leave it out"
        if problem is not None:
            raise yaml.composer.ComposerError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON that still has keys which were given twice."""


def _whole(digits: str) -> int:
    """Return an integer from its digits, however many."""
    return int(digits[:MAX_DIGITS])  # enough to be refused by the checks, which name the field


_JSON = json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=_whole)
_KEY = r"""(?:[\w-]++|"(?:\\[^\n]|[^"\\\n])*+"|'[^'\n]*+')"""
_TOML_TOKEN = re.compile(
    r"""\"\"\"(?:\\.|[^\\])*?"{3,5}|'''.*?'{3,5}|\#[^\n]*"""
    rf"|(?P<deep>{_KEY}(?:[ \t]*+\.[ \t]*+{_KEY}){{{MAX_DEPTH}}})|{_KEY}|\\.|.",
    re.DOTALL,
)
_TOML_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_YAML_NUMBER = re.compile(r"(?P<whole>-?(?:0|[1-9][0-9]*))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_YAML_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain(source: Source, where: Where, value: Any) -> Any:
    """Return the result of a parser as plain data. Refuse values that no definition may contain."""
    if isinstance(value, dict | _Pairs | yaml.MappingNode):
        fields: dict[str, Any] = {}
        for key, item, line in _pairs(source, where, value):
            place = (*where, key)
            source.note(place, line)
            source.checked(place, key)
            fields[key] = _plain(source, place, item)
            source.refuse_secret(place, key, fields[key])
        return fields
    if isinstance(value, list | yaml.SequenceNode):
        items: list[Any] = []
        for item in value if isinstance(value, list) else value.value:
            source.note((*where, len(items)), _line(item))
            items.append(_plain(source, (*where, len(items)), item))
        return items
    if isinstance(value, yaml.ScalarNode):
        value = _scalar(value)
    return source.checked(where, value.isoformat() if isinstance(value, date | time) else value)


def _pairs(source: Source, where: Where, value: Any) -> Iterator[tuple[str, Any, int | None]]:
    if isinstance(value, yaml.MappingNode):
        for key, item in value.value:
            if not isinstance(key, yaml.ScalarNode):
                raise source.invalid(where, "expected text as a key, got a list or a mapping", _line(key))
            yield key.value, item, _line(key)
    else:
        for key, item in value.items() if isinstance(value, dict) else value:
            yield key, item, None


def _scalar(node: yaml.ScalarNode) -> Any:
    """Return the value of a scalar in YAML 1.2. One that looks like JSON is read as JSON, and any other is text."""
    text: str = node.value
    if node.style is not None:
        return text
    if text.lower() in _YAML_WORDS:
        return _YAML_WORDS[text.lower()]
    number = _YAML_NUMBER.fullmatch(text)
    if number is None:
        return text
    return _whole(text) if number["whole"] == text else float(text)


def _line(value: Any) -> int | None:
    """Return the line on which a YAML node begins. The other parsers tell no line."""
    mark = getattr(value, "start_mark", None)
    return mark.line + 1 if isinstance(mark, yaml.Mark) else None


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
