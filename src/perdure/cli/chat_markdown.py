"""An answer in Markdown while it is streamed: whole blocks are printed once, the last one is drawn as it grows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from perdure.cli.terminal import safe

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def settled(text: str) -> int:
    """How much of a text is whole blocks, which no later text can change: up to a blank line, outside of code.

    A block that is followed by an indented line may go on with it, as an item of a list does.
    """
    end = position = 0
    fence = ""
    after_blank = False
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if after_blank and not fence and line.strip() and not line[0].isspace():
            end = position
        if found and (not fence or found[1].startswith(fence)):
            fence = "" if fence else found[1]
        after_blank = not line.strip()
        position += len(line)
    return end


class Answer:
    """The text of one message as it comes."""

    def __init__(self, console: Console) -> None:
        self.tail = ""
        self.message_id = ""
        self._console = console
        self._has_blocks = False

    def settle(self, length: int) -> None:
        """Print the first so many characters for good."""
        block, self.tail = self.tail[:length], self.tail[length:]
        if block.strip():
            if self._has_blocks:
                self._console.print()
            self._console.print(_Clean(_markdown(block)))
            self._has_blocks = True

    def end(self) -> None:
        """The message is whole."""
        self.settle(len(self.tail))
        self.tail, self._has_blocks = "", False

    def unfinished(self) -> RenderableType:
        """The block that still grows: of one that is higher than the screen, its end."""
        return _Clean(_markdown(self.tail), most=max(self._console.height - 4, 1))


def _markdown(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False, code_theme="ansi_dark")


class _Clean:
    """A renderable whose text is made safe after it was laid out: Markdown can spell characters as `&#x202e;`."""

    def __init__(self, inner: RenderableType, *, most: int | None = None) -> None:
        self._inner = inner
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self._inner, options, pad=False)
        for line in lines if self._most is None else lines[-self._most :]:
            for segment in line:
                if not segment.control:
                    yield Segment(safe(segment.text), segment.style)
            yield Segment.line()
