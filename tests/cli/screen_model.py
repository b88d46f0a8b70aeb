"""A model of a terminal's screen: what a person sees after bytes were written to it."""

from __future__ import annotations

import re

from rich.cells import cell_len

_TOKEN = re.compile(r"\x1b\[(?P<given>[?0-9;]*)(?P<verb>[A-Za-z])|(?P<plain>.)", re.DOTALL)


class ScreenModel:
    """A screen whose rows stay as they are once they have left it, as in a real terminal: no cursor reaches them."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._wraps = True

    @property
    def text(self) -> str:
        """Return all rows, those that have left the screen first."""
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip("\n")

    def feed(self, text: str) -> ScreenModel:
        for found in _TOKEN.finditer(text):
            if found["verb"]:
                self._obey(found["verb"], found["given"])
            elif found["plain"] == "\n":  # a terminal's driver makes it a carriage return and a line feed
                self._down()
            elif found["plain"] == "\r":
                self._column = 0
            else:
                self._put(found["plain"])
        return self

    def _obey(self, verb: str, given: str) -> None:
        match verb, given:
            case "A", _:
                self._row = max(self._top, self._row - int(given or 1))
            case "J", "":
                del self._rows[self._row + 1 :]
                del self._rows[self._row][self._column :]
            case "K", "2":
                self._rows[self._row].clear()
            case "h" | "l", "?7":
                self._wraps = verb == "h"
            case ("m", _) | ("h" | "l", "?25"):  # colours, and whether the cursor is shown
                pass
            case _:
                raise AssertionError(f"the model knows no ESC [ {given} {verb}")

    @property
    def _top(self) -> int:
        return max(0, len(self._rows) - self._height)

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append([])

    def _put(self, character: str) -> None:
        wide = cell_len(character)
        if self._column + wide > self._width:
            if not self._wraps:
                return
            self._down()
        row = self._rows[self._row]
        row.extend(" " * (self._column - len(row)))
        row[self._column : self._column + wide] = [character, *[""] * (wide - 1)] if wide else []
        if not wide and row:
            row[self._column - 1] += character
        self._column += wide
