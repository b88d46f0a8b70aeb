"""A file being read, and where in it each value stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.codec import MAX_DEPTH
from perdure.errors import InvalidData
from perdure.model.value import clean_text

MAX_VALUES = 10_000
MAX_DIGITS = 1_000  # int() refuses to read some thousands, and cannot say where they stand

Where = tuple[str | int, ...]
"""The keys and list places that lead to a value: `("budget", "max_steps")`."""


class Source:
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
        return self.invalid(where, f"expected {allowed}, got {kind_of(value)}{hint}")

    def _line(self, where: Where) -> int:
        for end in range(len(where), 0, -1):
            within = [line for noted, line in self.lines.items() if noted[:end] == where[:end]]
            if within:
                return min(within)
        return 1


def _dotted(where: Where) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{clean_text(part)}" for part in where)
    return name.removeprefix(".")[:200]


def kind_of(value: object) -> str:
    """A value's type in the words of a person who writes such files."""
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


def line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def whole(digits: str) -> int:
    """An integer from its digits, however many."""
    return int(digits[:MAX_DIGITS])  # enough to be refused by the checks, which name the field
