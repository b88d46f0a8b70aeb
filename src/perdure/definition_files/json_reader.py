"""JSON, with the line of every value, which the decoder does not tell."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

from perdure.codec import MAX_DEPTH
from perdure.definition_files.source import Source, Where, whole

_JSON = json.JSONDecoder(parse_int=whole)
_JSON_GAP = re.compile(r"[\s,:]*")


def read_json(source: Source) -> Any:
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

    def __init__(self, source: Source) -> None:
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
