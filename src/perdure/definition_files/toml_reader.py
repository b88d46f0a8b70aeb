"""TOML, with the line of every key, which the decoder does not tell."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from typing import Any

from perdure.codec import MAX_DEPTH
from perdure.definition_files.source import MAX_DIGITS, Source, Where, line_at


def read_toml(source: Source) -> Any:
    _TomlLines(source).scan()
    try:
        return _dates_as_text(tomllib.loads(source.text))
    except RecursionError:
        raise source.invalid((), f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        found = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(found[1]) if found else line_at(source.text, len(source.text))
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

    def __init__(self, source: Source) -> None:
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
            if len(self.token) > MAX_DIGITS and self.token[0] not in "\"'":
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
