"""A terminal as a chat draws it: what stands for good, and below it a few lines that still change."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.segment import SegmentLines

# Within the lines that change, a terminal that takes a character for wider than we do must not wrap: each of them
# is one row, or the wrong rows are erased.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class Screen:
    """Writes from one thread, that of the event loop, and each change in one piece."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._changing = 0

    def show(self, final: Iterable[RenderableType] = (), changing: RenderableType | None = None) -> None:
        """Print what is final in place of the lines that changed so far, and below it those that change now."""
        text = self._erased() + "".join(map(self._rendered, final)) + self._drawn(changing)
        if text:
            self.console.file.write(text)
            self.console.file.flush()

    def _erased(self) -> str:
        """What takes the cursor back to the first of the lines that change, and clears them."""
        rows, self._changing = self._changing, 0
        return f"\x1b[{rows}A\r\x1b[J" if rows else ""

    def _drawn(self, changing: RenderableType | None) -> str:
        if changing is None or self.console.is_dumb_terminal:  # one that cannot go back is shown what is final only
            return ""
        # A row that has left the screen cannot be erased. One is the cursor's.
        rows = self.console.render_lines(changing, pad=False)[-max(self.console.height - 2, 1) :]
        self._changing = len(rows)
        return _NO_WRAP + self._rendered(SegmentLines(rows, new_lines=True)) + _WRAP

    def _rendered(self, each: RenderableType) -> str:
        with self.console.capture() as captured:
            self.console.print(each)
        return captured.get()
