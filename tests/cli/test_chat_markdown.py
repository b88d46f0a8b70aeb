"""The final part of a streamed answer."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from perdure import Message, MessageEnd, MessageUpdate
from perdure.cli.chat_markdown import whole_blocks
from perdure.cli.chat_view import PlainView, TerminalView


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("one", []),
        ("one\n\n", []),
        ("one\n\ntwo", []),
        ("one\n\ntwo\n", ["one\n\n"]),
        ("one\n\ntwo\n\nthree\n", ["one\n\n", "two\n\n"]),
        ("# one\ntwo\n", ["# one\n"]),
        ("1. one\n\n   goes on\n", []),
        ("- one\n\n- two\n", []),
        ("- one\n\ntwo\n", ["- one\n\n"]),
        ("> one\n#two\n", []),
        ("```\none\n\ntwo\n", []),
        ("```\none\n\ntwo\n```\n\nthree\n", ["```\none\n\ntwo\n```\n\n"]),
        ("```\n```no end\n\ntwo\n", []),
        ("~~~\n```\n\ntwo\n", []),
        ("- ```\n  one\n  ```\n\ntwo\n", ["- ```\n  one\n  ```\n\n"]),
    ],
)
def test_whole_blocks_are_final(text: str, final: list[str]) -> None:
    """All blocks but the last are final, as far as lines are complete: nothing that follows can change them."""
    assert whole_blocks(text) == final


def drawn(view_text: str, *, pieces: int = 3) -> str:
    """Return the output for an answer that is streamed to a terminal in small pieces."""
    screen = io.StringIO()
    view = TerminalView(Console(file=screen, force_terminal=True, width=60, height=10, markup=False))
    for place in range(0, len(view_text), pieces):
        view.hear(MessageUpdate(message_id="m", kind="text", text=view_text[place : place + pieces]))
    view.hear(MessageEnd(message=Message.assistant(view_text, id="m")))
    view.finish()
    return screen.getvalue()


def test_markdown_cannot_spell_what_a_terminal_obeys() -> None:
    """Entities, links and sequences that are cut in two while they are streamed come out in writing."""
    text = drawn("&#x202e;evil &#27;[2J \x1b]0;pwned\x07 [link](http://example.com/\x1b]8;;x) [red]no markup[/red]")
    assert "\u202e" not in text
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "[red]no markup[/red]" in text


def test_every_block_is_printed_once() -> None:
    """This holds for any pieces."""
    text = "# Title\n\nfirst words\n\n```python\nx = 1\n\ny = 2\n```\n\n- item\n- other\n\nlast words\n"
    for pieces in (1, 7, 1000):
        got = drawn(text, pieces=pieces)
        for words in ("Title", "first words", "item", "other", "last words"):
            assert got.count(words) == 1


def test_an_answer_that_was_not_streamed_is_shown_whole() -> None:
    """A driver may give its message at once."""
    screen = io.StringIO()
    view = PlainView(screen, screen)
    view.hear(MessageEnd(message=Message.assistant("All at once.")))
    view.finish()
    assert screen.getvalue() == "All at once.\n"
