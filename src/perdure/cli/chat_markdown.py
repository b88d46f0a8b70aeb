"""An answer in Markdown while it is streamed. Complete blocks are printed once. The last one is drawn as it grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown, TableDataElement
from rich.segment import Segment
from rich.text import Text

from perdure.cli.terminal import safe

# Markdown as models write it. HTML is shown as text. So are link definitions, since a later one could change a block
# that was printed already.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
_DEEPEST = 18  # the parser drops what is deeper than 20 levels, so blocks are shown as text before that


def whole_blocks(text: str) -> list[str]:
    """Return the blocks at the beginning of a text that no later text can change.

    Markdown is read line by line, and an outermost block never opens again once the next has begun. So in the complete
    lines, all blocks except the last are final.
    """
    complete = text[: text.rfind("\n") + 1]
    lines = complete.split("\n")
    tokens = _PARSER.parse(complete)
    begins = [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
    edges = [0, *begins[1:]]
    return ["".join(f"{line}\n" for line in lines[start:stop]) for start, stop in pairwise(edges)]


class Answer:
    """The text of one message while it is streamed. Each part of it is given out for printing once."""

    def __init__(self) -> None:
        self.message_id = ""
        self._said = ""
        self._tail = ""
        self._has_blocks = False

    def hear(self, message_id: str, text: str) -> None:
        """Take in a piece of a message."""
        if message_id != self.message_id:
            self.message_id, self._said = message_id, ""
        self._said += text
        self._tail += safe(text)

    def hear_whole(self, message_id: str, text: str) -> None:
        """Take in a complete message. Of one that was streamed, take only the rest."""
        if message_id != self.message_id:
            self.hear(message_id, text)
        elif text.startswith(self._said):
            self.hear(message_id, text[len(self._said) :])

    def begin_again(self) -> None:
        """Drop the text that was not printed yet: the model begins its answer again."""
        self._said, self._tail, self._has_blocks = "", "", False

    def settled(self) -> Iterator[RenderableType]:
        """Yield the blocks that have become complete."""
        for block in whole_blocks(self._tail):
            self._tail = self._tail[len(block) :]
            yield from self._parted(block)

    def rest(self) -> Iterator[RenderableType]:
        """Yield all that is left: no more text will come."""
        yield from self.settled()
        block, self._tail = self._tail, ""
        yield from self._parted(block)
        self._has_blocks = False

    def unfinished(self, rows: int) -> RenderableType | None:
        """Return the block that still grows. If it is much higher than the screen, return its end."""
        if not self._tail.strip():
            return None
        first, *more = self._tail.split("\n")
        # The block is laid out again at each drawing, which would take longer and longer. With its first line, the end
        # of a block of code is still shown as code.
        if len(more) > 2 * rows:
            is_code = first.lstrip().startswith(("```", "~~~"))
            more = [*([first] if is_code else []), *more[-2 * rows :]]
            return _Block("\n".join(more))
        return _Block(self._tail)

    def _parted(self, block: str) -> Iterator[RenderableType]:
        if block.strip():
            if self._has_blocks:
                yield ""
            self._has_blocks = True
            yield _Block(block)


class _Block:
    """A block of Markdown, laid out. If the layout would lose some text, the block is shown as it was written."""

    def __init__(self, source: str) -> None:
        self._source = source.strip("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tokens = _PARSER.parse(self._source)
        lines = console.render_lines(_Markdown(tokens), options, pad=False)
        if not _is_whole(tokens, (segment.text for line in lines for segment in line)):
            lines = console.render_lines(Text(self._source, overflow="fold"), options, pad=False)
        for line in _without_blank_ends(lines):
            # Made safe only after the layout: Markdown can spell any character, as in `&#x202e;`.
            yield from (Segment(safe(each.text), each.style) for each in line if not each.control)
            yield Segment.line()


def _without_blank_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    """Return the lines without blank ones at both ends. rich puts those around some blocks, and not around others."""
    shown = [place for place, line in enumerate(lines) if "".join(each.text for each in line).strip()]
    return lines[shown[0] : shown[-1] + 1] if shown else []


def _is_whole(tokens: Sequence[Token], shown: Iterable[str]) -> bool:
    """Tell whether every character of a block is shown, however it is broken into lines and columns.

    rich cuts narrow tables and deep lists, and leaves out some kinds of block. The parser leaves out what is nested
    more than 20 levels deep.
    """
    if any(token.level >= _DEEPEST for token in tokens):
        return False
    wanted = Counter("".join("".join(_said_by(tokens)).split()))
    return wanted <= Counter("".join("".join(shown).split()))


def _said_by(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        yield from (str(token.attrs[name]) for name in ("href", "src") if name in token.attrs)
        if token.children is not None:
            yield from _said_by(token.children)
        elif token.type != "inline":
            yield token.content


class _FoldedCell(TableDataElement):
    """A cell of a table that breaks long words. rich's own cuts them off."""

    def __init__(self, justify: Any) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class _Markdown(Markdown):
    """Markdown that was parsed already, by our own parser."""

    elements = {**Markdown.elements, "th_open": _FoldedCell, "td_open": _FoldedCell}

    def __init__(self, tokens: list[Token]) -> None:
        # Without hyperlinks: a terminal would hide the address that a link leads to.
        super().__init__("", hyperlinks=False, code_theme="ansi_dark")
        self.parsed = tokens
