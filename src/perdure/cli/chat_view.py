"""The views of a run while it lasts: drawn in a terminal, or as plain lines elsewhere.

The texts of models and tools are not trusted: they pass `safe()`, and are never read as rich's markup.
"""

from __future__ import annotations

import time
from asyncio import TimerHandle, get_running_loop
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.segment import SegmentLines
from rich.text import Text

from perdure.cli.chat_markdown import Answer
from perdure.cli.terminal import counted, line, safe, written
from perdure.model.execution import PendingCall
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    Compaction,
    MessageEnd,
    MessageUpdate,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
)
from perdure.model.message import ToolCall
from perdure.model.step import ToolExecution
from perdure.model.value import JSON

_ARGUMENTS, _RESULT = 72, 120
_PAUSE = 1 / 12
"""Seconds between two drawings."""
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# The terminal may take a character for wider than we do. It must not wrap the lines that change: each of them has to be
# one row, or the wrong rows are erased.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class View(Protocol):
    """A view that receives a run's events, and shows them."""

    def hear(self, event: object) -> None: ...

    def finish(self) -> None:
        """Tidy the screen up, however the run has ended. It is called after every run."""
        ...


def described(call: ToolCall) -> str:
    """Return a call on one short line: `charge(customer="Ada", amount=12)`."""
    arguments = ", ".join(f"{name}={written(value)}" for name, value in call.arguments.items())
    return line(f"{call.name}({line(arguments, _ARGUMENTS)})")


def described_in_full(call: PendingCall) -> str:
    """Return a call that waits, with what a sub-agent wants to do: `clerk(…), which wants charge(amount=12)`."""
    below = " and ".join(described_in_full(each) for each in call.waits_for)
    shown = f"{described(call)} ({call.warning})" if call.warning else described(call)
    return f"{shown}, which wants {below}" if below else shown


def outcome_of(execution: ToolExecution) -> str:
    """Return the outcome of a call on one short line, with the time it took."""
    said = execution.error.message if execution.error else _plain(execution.result)
    took = "" if execution.duration is None else f"  {execution.duration:.1f} s"
    return f"{line(said, _RESULT)}{took}"


def _plain(value: JSON) -> str:
    return value if isinstance(value, str) else written(value)


class PlainView:
    """A view that writes an answer's text as it comes. Calls and notes go to a stream of their own."""

    def __init__(self, answers: TextIO, notes: TextIO) -> None:
        self._answers = answers
        self._notes = notes
        self._heard = ""
        self._is_open = False

    def hear(self, event: object) -> None:
        match event:
            case MessageUpdate(kind="text"):
                self._heard = event.message_id
                self._write(safe(event.text))
            case MessageUpdate(kind="restart"):
                self._end_line()
                self._note("the model begins its answer again")
            case MessageEnd() if event.message.role == "assistant" and not event.message.is_superseded:
                if event.message.id != self._heard:  # a model that does not stream: the text has not been written yet
                    self._write(safe(event.message.text))
                self._end_line()
            case ToolExecutionStart():
                self._note(f"→ {described(event.call)}")
            case ToolExecutionEnd():
                sign = "✗" if event.execution.error else "✓"
                self._note(f"{sign} {line(event.execution.call.name)}: {outcome_of(event.execution)}")
            case Compaction():
                self._note(f"compacted: {counted(event.block.covered, 'message')} covered")

    def finish(self) -> None:
        self._end_line()

    def _write(self, text: str) -> None:
        if text:
            self._answers.write(text)
            self._answers.flush()
            self._is_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._is_open:
            self._write("\n")

    def _note(self, text: str) -> None:
        self._end_line()
        self._notes.write(f"  {text}\n")
        self._notes.flush()


class TerminalView:
    """A view that shows Markdown while it is streamed, and a turning sign for tools that run.

    Final text is printed once. Only the part that still changes is drawn again and again, at the bottom. It draws in
    the thread of the event loop: between the events of a run, and by the loop's own timer.
    """

    def __init__(self, console: Console) -> None:
        self._screen = Screen(console)
        self._answer = Answer()
        self._running: dict[str, tuple[ToolCall, float, str]] = {}
        self._timer: TimerHandle | None = None

    def hear(self, event: object) -> None:
        match event:
            case AgentStart():
                self._keep_drawing()
            case MessageUpdate(kind="text"):
                if event.message_id != self._answer.message_id:
                    self._print(*self._answer.rest())
                self._answer.hear(event.message_id, event.text)
                self._keep_drawing()
            case MessageUpdate(kind="restart"):
                self._answer.begin_again()
                self._note("the model begins its answer again")
            case MessageEnd() if event.message.role == "assistant" and not event.message.is_superseded:
                self._answer.hear_whole(event.message.id, event.message.text)
                self._print(*self._answer.rest())
            case ToolExecutionStart():
                self._running[event.call.id] = (event.call, time.monotonic(), "")
                self._keep_drawing()
            case ToolExecutionUpdate() if event.call_id in self._running:
                call, since, _ = self._running[event.call_id]
                self._running[event.call_id] = (call, since, line(_plain(event.progress)))
            case ToolExecutionEnd():
                self._running.pop(event.execution.call.id, None)
                self._show_outcome(event.execution)
            case Compaction():
                self._note(f"compacted: {counted(event.block.covered, 'message')} covered")
            case AgentEnd():
                self.finish()

    def finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stopped = [_outcome("■", "yellow", call, "stopped") for call, _, _ in self._running.values()]
        self._running.clear()
        self._screen.show([*self._answer.rest(), *stopped])

    def refresh(self) -> None:
        """Print the blocks that are complete by now, and draw the rest."""
        self._print(*self._answer.settled())

    def _keep_drawing(self) -> None:
        """Start to refresh the screen by the loop's timer, unless it has started."""
        if self._timer is None:
            self._wait(_PAUSE)

    def _wait(self, seconds: float) -> None:
        with suppress(RuntimeError):  # without a running loop, nothing changes until the next event
            self._timer = get_running_loop().call_later(seconds, self._draw_again)

    def _draw_again(self) -> None:
        began = time.monotonic()
        self.refresh()
        # To write to a slow terminal takes long. At most a fifth of the loop's time goes into drawing.
        self._wait(max(_PAUSE, 4 * (time.monotonic() - began)))

    def _print(self, *final: RenderableType) -> None:
        self._screen.show(final, self._changing())

    def _changing(self) -> RenderableType | None:
        """Return the part that is not final yet: the last block of the answer, and the tools that run."""
        if self._timer is None:
            return None
        running = []
        for call, since, progress in self._running.values():
            text = f"{described(call)}  {_elapsed(since)} {progress}"
            running.append(Text.assemble((_frame(), "cyan"), " ", text, no_wrap=True, overflow="ellipsis"))
        unfinished = self._answer.unfinished(self._screen.console.height)
        if unfinished is not None:
            return Group(unfinished, *running)
        return Group(*running) if running else Text(_frame(), style="cyan")

    def _show_outcome(self, execution: ToolExecution) -> None:
        sign, style = ("✗", "red") if execution.error else ("✓", "green")
        self._print(_outcome(sign, style, execution.call, outcome_of(execution)))

    def _note(self, text: str) -> None:
        self._print(Text(text, style="dim"))


def _outcome(sign: str, style: str, call: ToolCall, outcome: str) -> RenderableType:
    return Text.assemble((f"{sign} ", style), (described(call), "bold"), (f"  {outcome}", "dim"))


def _elapsed(since: float) -> str:
    seconds = time.monotonic() - since
    return f"{seconds:.0f} s" if seconds >= 1 else ""


def _frame() -> str:
    """Return the present frame of the sign that turns while something is under way."""
    return _FRAMES[int(time.monotonic() * 12) % len(_FRAMES)]


class Screen:
    """A terminal as a chat draws it: the final text, and below it a few lines that still change.

    It writes from one thread, that of the event loop. Each change is one write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._changing = 0

    def show(self, final: Iterable[RenderableType] = (), changing: RenderableType | None = None) -> None:
        """Print the final parts in place of the lines that changed so far, and draw the new ones below."""
        text = self._erased() + "".join(map(self._rendered, final)) + self._drawn(changing)
        if text:
            self.console.file.write(text)
            self.console.file.flush()

    def _erased(self) -> str:
        """Return the sequence that moves the cursor back to the first of the lines that change, and clears them."""
        rows, self._changing = self._changing, 0
        return f"\x1b[{rows}A\r\x1b[J" if rows else ""

    def _drawn(self, changing: RenderableType | None) -> str:
        if changing is None or self.console.is_dumb_terminal:  # without a movable cursor, only final text can be shown
            return ""
        # A row that has scrolled off the screen cannot be erased. One row is the cursor's.
        rows = self.console.render_lines(changing, pad=False)[-max(self.console.height - 2, 1) :]
        self._changing = len(rows)
        return _NO_WRAP + self._rendered(SegmentLines(rows, new_lines=True)) + _WRAP

    def _rendered(self, each: RenderableType) -> str:
        with self.console.capture() as captured:
            self.console.print(each)
        return captured.get()
