"""`perdure chat` with a model that streams Markdown, in a real pseudo-terminal: the contents of the screen."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.loop.drivers import wire
from tests.loop.drivers.loopback import Loopback, Stream

from perdure import Message, MessageEnd

pytest.importorskip("pydantic_ai")
sys.path.insert(0, str(Path(__file__).parent))

from answers import ANSWERS
from screen_model import ScreenModel
from terminal_session import CTRL_C, CTRL_D, PROMPT, TerminalSession, clean_environment, command
from test_chat_view import Terminal, characters, expected

PIECES = 15
AGENT = """---
name: writer
model:
  name: openai:any
  base_url: {url}/v1
  api_key_env: LOOPBACK_KEY
---
Write.
"""


@asynccontextmanager
async def chatting(home: Path, *replies: Stream, columns: int, pause: float) -> AsyncIterator[TerminalSession]:
    """Start a chat in a terminal with a model that gives these replies."""
    async with Loopback(*replies) as server:
        (home / "agent.md").write_text(AGENT.format(url=server.url))
        env = clean_environment(home, LOOPBACK_KEY="sk-loopback-0123456789")
        call = command("chat", "--agent", "agent.md")
        with TerminalSession(call, cwd=home, env=env, columns=columns, pause=pause) as terminal:
            yield terminal


def streamed(text: str, *, is_broken: bool = False) -> Stream:
    """Return an answer that takes a while, so that it is drawn again and again."""

    def events() -> Iterator[bytes]:
        size = len(text) // PIECES + 1
        deltas = [{"content": text[start : start + size]} for start in range(0, len(text), size)]
        whole = wire.chat(*deltas)
        for event in whole[: len(deltas)] if is_broken else whole:
            time.sleep(0.01)
            yield event

    return Stream(events(), "never" if is_broken else "whole")


SCREENS = {"slow and narrow": (40, 0.002)}
if os.environ.get("PERDURE_TORTURE"):
    SCREENS["quick"] = (100, 0.0)


def screens(terminal: TerminalSession, columns: int) -> list[str]:
    """Return the screen between a typed message and the next prompt, for each message."""
    _, *asked = terminal.raw.replace(b"\r\n", b"\n").split(PROMPT)
    shown = [each.decode().partition("\n")[2] for each in asked[:-1]]
    return [ScreenModel(columns, 40).feed(each).text for each in shown]


@pytest.mark.parametrize(("columns", "pause"), SCREENS.values(), ids=SCREENS)
async def test_every_answer_stands_on_the_screen_once(tmp_path: Path, columns: int, pause: float) -> None:
    """Nothing is lost or doubled, even if the terminal is slower than the model."""

    def talk() -> None:
        for number in range(len(ANSWERS)):
            terminal.prompted(number + 1)
            terminal.enter(f"number {number}")
        terminal.prompted(len(ANSWERS) + 1)
        terminal.type(CTRL_D)
        assert terminal.ends() == 0

    replies = [streamed(text) for text in ANSWERS.values()]
    async with chatting(tmp_path, *replies, columns=columns, pause=pause) as terminal:
        await asyncio.to_thread(talk)
    shown = screens(terminal, columns)
    assert len(shown) == len(ANSWERS)
    for (name, source), screen in zip(ANSWERS.items(), shown, strict=True):
        at_once = Terminal(columns, 40)
        at_once.view.hear(MessageEnd(message=Message.assistant(source)))
        assert screen == at_once.screen, name
        assert characters(screen) == expected(source), name


async def test_ctrl_c_shows_the_part_that_came_once(tmp_path: Path) -> None:
    """The streamed text is shown once, and below it that the run was stopped."""
    text = "A first block.\n\n- one\n- two, which is br"

    def talk() -> None:
        terminal.prompted(1)
        terminal.enter("Go")
        terminal.expect("which is br")
        terminal.type(CTRL_C)
        terminal.prompted(2)
        terminal.type(CTRL_D)
        assert terminal.ends() == 0

    async with chatting(tmp_path, streamed(text, is_broken=True), columns=80, pause=0.0) as terminal:
        await asyncio.to_thread(talk)
    (screen,) = screens(terminal, 80)
    assert screen.startswith("A first block.\n\n • one\n • two, which is br\nStopped.")
    assert screen.count("which is br") == 1
