"""Tables in documents that only a benchmark writes, between two marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

TableOf = Callable[[str], str]
"""A function from a mark's names to the text behind it, with its final line break."""


def rewrite(text: str, kind: str, table_of: TableOf) -> str:
    """Return a document with the text between `<!-- KIND: NAMES -->` and `<!-- end of KIND -->` replaced."""
    end_mark = f"<!-- end of {kind} -->"
    parts, end = [], 0
    for found in re.finditer(rf"<!-- {kind}: ([^>]*?) -->\n", text):
        stop = text.find(end_mark, found.end())
        if stop < 0:
            raise ValueError(f"{found[0].strip()} has no {end_mark} behind it")
        parts += [text[end : found.end()], f"\n{table_of(found[1])}\n"]  # Markdown wants a table to stand apart
        end = stop
    return "".join([*parts, text[end:]])


def write(paths: Iterable[Path], kind: str, table_of: TableOf) -> list[Path]:
    """Write the tables of a kind in documents, in all of them or in none; return the documents that have any."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    written = {path: rewrite(text, kind, table_of) for path, text in texts.items() if f"<!-- {kind}: " in text}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """Lay rows out as a Markdown table; the first is its header."""
    header, *rest = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([header, "|---" * (header.count(" | ") + 1) + "|\n", *rest])
