"""The drawing of a chat: whole answers, each block once, for any pieces, width and speed."""

from __future__ import annotations

import asyncio
import io
import re
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from perdure import Message, MessageEnd, MessageUpdate, ToolCall
from perdure.cli.chat_view import TerminalView
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import now
from perdure.model.loop_events import AgentEnd, AgentStart, ToolExecutionEnd, ToolExecutionStart
from perdure.model.step import ToolExecution

sys.path.insert(0, str(Path(__file__).parent))

from answers import ANSWERS, INFO_STRINGS
from screen_model import ScreenModel

HEIGHT = 12


class Written(io.StringIO):
    """A file that notes when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


class Terminal:
    """A terminal with a view in it, and the output that it got."""

    def __init__(self, width: int = 60, height: int = HEIGHT) -> None:
        self.file = Written()
        console = Console(file=self.file, force_terminal=True, width=width, height=height, markup=False)
        self.view = TerminalView(console)
        self._size = (width, height)

    @property
    def screen(self) -> str:
        return ScreenModel(*self._size).feed(self.file.getvalue()).text

    async def stream(self, text: str, size: int, *, id: str = "m") -> None:
        """Say a text in pieces, and draw after each."""
        self.view.hear(AgentStart())
        for start in range(0, len(text), size):
            self.view.hear(MessageUpdate(message_id=id, kind="text", text=text[start : start + size]))
            self.view.refresh()


def characters(text: str) -> Counter[str]:
    """Return the letters and digits of a text, however they are laid out."""
    return Counter(re.sub(r"[\W_]", "", text))


def expected(source: str) -> Counter[str]:
    """Return the letters and digits that an answer has to show."""
    return characters(re.sub(rf"(?m)^( *)```({'|'.join(INFO_STRINGS)})$", "", source))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("width", "size"), [(24, 3), (60, 1), (60, 100_000), (100, 11)])
@pytest.mark.parametrize("name", ANSWERS)
async def test_everything_is_on_the_screen_once(name: str, width: int, size: int) -> None:
    """Each letter is there as often as the model said it, with the same layout for any pieces."""
    source = ANSWERS[name]
    size = max(size, len(source) // 60)
    terminal, at_once = Terminal(width), Terminal(width)
    await terminal.stream(source, size)
    terminal.view.hear(MessageEnd(message=Message.assistant(source, id="m")))
    terminal.view.hear(AgentEnd(status=ExecutionStatus.COMPLETED))
    terminal.view.finish()
    at_once.view.hear(MessageEnd(message=Message.assistant(source, id="m")))
    assert terminal.screen == at_once.screen
    assert characters(terminal.screen) == expected(source)


async def test_an_answer_that_is_stopped_is_shown_once() -> None:
    """Ctrl-C ends the view in mid-answer; the kept message comes later, and is not printed again."""
    terminal = Terminal()
    await terminal.stream("First block.\n\nSecond, which is br", 4)
    terminal.view.finish()
    terminal.view.hear(MessageEnd(message=Message.assistant("First block.\n\nSecond, which is br", id="m")))
    terminal.view.hear(AgentEnd(status=ExecutionStatus.STOPPED))
    terminal.view.finish()
    assert terminal.screen == "First block.\n\nSecond, which is br"


async def test_what_was_not_streamed_is_shown_at_the_end() -> None:
    """A driver may stream a part of its message, or nothing of it."""
    terminal = Terminal()
    await terminal.stream("Hello", 2)
    terminal.view.hear(MessageEnd(message=Message.assistant("Hello, world.", id="m")))
    terminal.view.hear(MessageEnd(message=Message.assistant("And more.", id="n")))
    terminal.view.finish()
    assert terminal.screen == "Hello, world.\nAnd more."


async def test_an_answer_that_begins_again() -> None:
    """Finished blocks stay, with a note; the rest is gone, and the new answer comes once."""
    terminal = Terminal()
    await terminal.stream("Kept.\n\nDrop\nped", 3)
    terminal.view.hear(MessageUpdate(message_id="m", kind="restart", text=""))
    await terminal.stream("All of it.", 3)
    terminal.view.hear(MessageEnd(message=Message.assistant("All of it.", id="m")))
    terminal.view.finish()
    assert terminal.screen == "Kept.\nthe model begins its answer again\nAll of it."


async def test_tools_and_answers_take_turns() -> None:
    """Each call has a line in its place between the answers, and nothing is left of the moving signs."""
    terminal = Terminal()
    call, slow = ToolCall("add", {"a": 1}, id="c1"), ToolCall("wait", id="c2")
    await terminal.stream("I add.", 2)
    terminal.view.hear(MessageEnd(message=Message.assistant("I add.", tool_calls=[call], id="m")))
    for each in (call, slow):
        terminal.view.hear(ToolExecutionStart(call=each, step_id="s"))
        terminal.view.refresh()
    terminal.view.hear(ToolExecutionEnd(execution=ToolExecution(call, now(), now(), result=2), step_id="s"))
    terminal.view.refresh()
    terminal.view.finish()
    assert terminal.screen == "I add.\n✓ add(a=1)  2  0.0 s\n■ wait()  stopped"


async def test_only_the_loops_own_thread_draws() -> None:
    """The loop's timer draws changes; after the end of the run nothing is drawn."""
    terminal = Terminal()
    threads = threading.active_count()
    terminal.view.hear(AgentStart())
    terminal.view.hear(MessageUpdate(message_id="m", kind="text", text="Hello"))
    terminal.file.written.clear()
    await asyncio.wait_for(terminal.file.written.wait(), 10)
    assert terminal.screen == "Hello"
    assert threading.active_count() == threads
    terminal.view.finish()
    sent = terminal.file.getvalue()
    await asyncio.sleep(0.3)
    assert terminal.file.getvalue() == sent


async def test_a_terminal_that_cannot_go_back_gets_what_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn twice where nothing can be erased."""
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    await terminal.stream(ANSWERS["paragraphs"], 3)
    terminal.view.finish()
    assert "\x1b[" not in re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue())
    assert characters(terminal.screen) == expected(ANSWERS["paragraphs"])
