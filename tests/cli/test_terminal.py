"""Texts and tables that are made safe for a terminal."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.terminal import _fitting, counted, line, print_json, safe


@given(st.text())
def test_nothing_that_steers_a_terminal_is_left(text: str) -> None:
    """No control character except newline and tab is left, and none that changes the direction of text."""
    for character in safe(text):
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )


@given(st.text(st.characters(exclude_categories=("C", "Z"))))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert safe(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[31m", "\\x1b[31m"), ("a\r\nb", "a\nb"), ("\u202e", "\\u202e"), ("\x9b", "\\x9b"), ("\x7f", "\\x7f")],
)
def test_what_is_unsafe_stands_there_in_writing(text: str, shown: str) -> None:
    assert safe(text) == shown


@given(st.text(), st.integers(1, 20))
def test_a_line_is_one_line(text: str, width: int) -> None:
    """This holds for any length."""
    assert len(line(text, width)) <= width
    assert "\n" not in line(text)
    assert "\t" not in line(text)


def test_json_survives_what_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Characters that could steer a terminal are escaped as JSON allows, so that a reader gets them back."""
    for text in ("\x1b[2J", "\x7f", "\x9b", "\u202e", "ü🎈", "\u2028"):
        print_json({"text": text})
        shown = capsys.readouterr().out
        assert json.loads(shown) == {"text": text}
        assert safe(shown) == shown


COLUMNS = {"ID": ["0" * 36], "STATUS": ["active"], "AGE": ["2 min ago"], "NAME": ["n" * 30], "TAGS": [""], "COST": [""]}


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (200, {"ID": None, "STATUS": 6, "AGE": 9, "NAME": 30}),
        (80, {"ID": None, "STATUS": 6, "AGE": 9, "NAME": 23}),
        (66, {"ID": None, "AGE": 9, "NAME": 12}),
        (50, {"ID": None, "AGE": 9}),
        (20, {"ID": None}),
    ],
)
def test_a_table_has_the_columns_that_there_is_room_for(room: int, shown: dict[str, int | None]) -> None:
    """The first is always whole; free text is shortened before a column is left out; an empty one is left out."""
    assert _fitting(COLUMNS, room, ("STATUS", "NAME", "AGE"), ("NAME", "TAGS")) == shown


def test_short_free_text_is_left_out_in_its_turn() -> None:
    """Text too short to be shortened stays until the columns before it are left out."""
    columns = {"ID": ["0" * 36], "STATUS": ["active"], "NAME": ["short"]}
    assert _fitting(columns, 46, ("STATUS", "NAME"), ("NAME",)) == {"ID": None, "NAME": 5}


@pytest.mark.parametrize(("count", "said"), [(0, "0 messages"), (1, "1 message"), (2000, "2,000 messages")])
def test_one_thing_is_not_many(count: int, said: str) -> None:
    assert counted(count, "message") == said
    assert counted(count, "branch").endswith("branch" if count == 1 else "branches")
