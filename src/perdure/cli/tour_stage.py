"""The output of the tour: headings, the agent's runs while they last, and at the end the tree, the diff, the costs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from perdure.cli.chat_view import PlainView, TerminalView, View, described
from perdure.cli.terminal import console, counted, line
from perdure.cli.tree import print_tree
from perdure.model.loop_events import MessageUpdate, ToolExecutionStart
from perdure.model.message import Message
from perdure.model.record import LoopRecord, SessionRecord
from perdure.model.usage import Usage
from perdure.sessions.chat import Chat
from perdure.sessions.family_tree import Node
from perdure.sessions.lineage import Diff

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100
READING = 0.03
"""Seconds after each word of an answer: without the pause, the offline model is quicker than the eye."""


class Stage:
    """The terminal that the tour is shown in, or a pipe, which gets plain text."""

    def __init__(self) -> None:
        self._console = console()
        self._is_terminal = self._console.is_terminal
        if not self._is_terminal:
            self._console.width = WIDTH
        self._scenes = 0

    def open(self, url: str) -> None:
        self._print(Text("A tour of perdure", style="bold"))
        self._print(Text("The model is “offline”: no key, no network. The sessions are kept in", style="dim"))
        self._console.print(Text(url, style="dim"), soft_wrap=True)

    def scene(self, title: str, about: str) -> None:
        self._scenes += 1
        self._print(Text.assemble("\n", (f"{self._scenes}  {title}", "bold cyan"), (f" – {about}", "dim")))

    def user(self, message: str) -> None:
        self._print(Text.assemble(("> ", "bold green"), line(message)))

    def fact(self, text: str) -> None:
        self._print(Text.assemble(("  • ", "cyan"), line(text)))

    @contextmanager
    def watching(self, chat: Chat) -> Iterator[None]:
        """Show a session's runs while the block lasts."""
        view: View = TerminalView(self._console) if self._is_terminal else PlainView(sys.stdout, sys.stdout)

        async def hear(event: object) -> None:
            view.hear(event)
            if self._is_terminal and isinstance(event, MessageUpdate):
                await asyncio.sleep(READING)

        subscription = chat.subscribe(hear)
        try:
            yield
        finally:
            subscription.cancel()
            view.finish()

    def heard(self, event: ToolExecutionStart) -> None:
        """Show an event of a run in another process."""
        self._print(Text(f"  → {described(event.call)}  (on record, seen from here)"))

    def ledger(self, path: Path) -> None:
        """Show what the tools have really done."""
        self.fact(f"the ledger, {path.name}: " + " | ".join(path.read_text().splitlines()))

    def branches(self, names: Sequence[str], loops: Sequence[LoopRecord]) -> None:
        """Show the answers of the branches of a group, and which one was selected."""
        for name, loop in zip(names, loops, strict=True):
            answer = loop.messages[-1].text if loop.messages else ""
            mark = "selected" if loop.parallel_group and loop.parallel_group.is_selected else "kept on record"
            self.fact(f"“{name}” {answer} {loop.usage.total_tokens} tokens: {mark}")

    def shown(self, when: str, shown: int, said: int) -> None:
        self.fact(f"{when}: the model is shown {counted(shown, 'message')} of {said} that were said")

    def summary(self, text: str) -> None:
        self._print(Text(f"    {line(text, 3 * WIDTH)}", style="dim"))

    def tree(self, root: Node) -> None:
        print_tree(root)

    def diff(self, diff: Diff, left: str, right: str) -> None:
        table = Table(title="Where the two branches part", title_justify="left", title_style="bold", width=self._width)
        table.add_column(f"left  {left}", ratio=1)
        table.add_column(f"right  {right}", ratio=1)
        table.add_row(*[Text(f"{counted(len(diff.common), 'message')} in common", style="dim")] * 2)
        for place in range(max(len(diff.left), len(diff.right))):
            table.add_row(_said(diff.left, place), _said(diff.right, place))
        self._print(table)

    def costs(self, records: Sequence[tuple[str, SessionRecord]]) -> None:
        table = Table(title="What it cost", title_justify="left", title_style="bold", width=self._width)
        table.add_column("session")
        for column in ("runs", "input", "output", "cost", "seconds"):
            table.add_column(column, justify="right")
        total = Usage()
        for title, record in records:
            used = record.total_usage()
            total = total + used
            table.add_row(title, *_cells(len(record.loops), used, sum(map(_seconds, record.loops))))
        table.add_section()
        loops = [loop for _, record in records for loop in record.loops]
        table.add_row("all", *_cells(len(loops), total, sum(map(_seconds, loops))), style="bold")
        self._print(table)
        self._print(Text("The offline model is free; others are priced from an installed list.", style="dim"))

    def close(self, command: str, url: str, chat: str, left: str, right: str) -> None:
        self._print(Text("\nLook around. This store is yours:", style="bold"))
        for typed, about in (
            (f"export PERDURE_STORE={url}", ""),
            (f"{command} chat -s {chat}", "continue talking"),
            (f"{command} tree {chat}", "its runs"),
            (f"{command} diff {left} {right}", "the two branches"),
            (f"{command} show {chat} --all", "all that was said"),
            (f"{command} serve", "all of it in a browser"),
        ):
            self._console.print(
                Text.assemble("  ", (typed, "cyan"), (f"   # {about}" if about else "", "dim")), soft_wrap=True
            )

    @property
    def _width(self) -> int:
        return min(self._console.width, WIDTH)

    def _print(self, shown: RenderableType) -> None:
        self._console.print(shown, soft_wrap=False)


def _said(messages: Sequence[Message], place: int) -> Text:
    if place >= len(messages):
        return Text()
    message = messages[place]
    calls = ", ".join(map(described, message.tool_calls))
    results = ", ".join(result.text for result in message.tool_results)
    return Text.assemble((f"{message.role}: ", "cyan"), line(message.text or calls or results))


def _cells(runs: int, used: Usage, seconds: float) -> tuple[str, ...]:
    return str(runs), str(used.input_tokens), str(used.output_tokens), f"${used.cost:.4f}", f"{seconds:.1f}"


def _seconds(loop: LoopRecord) -> float:
    return loop.duration or 0.0
