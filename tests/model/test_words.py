"""The first words of a text, as a list shows them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.model.words import first_words


def test_a_text_is_cut_behind_a_word() -> None:
    """The cut is behind a word if there is one; a text that fits is shown whole."""
    assert first_words("one two three", 13) == "one two three"
    assert first_words("one two three", 12) == "one two…"
    assert first_words("one two three", 8) == "one two…"
    assert first_words("one two three", 7) == "one…"
    assert first_words("onetwothree", 7) == "onetwo…"
    assert first_words("一二三四五六七八", 5) == "一二三四…"


def test_a_title_stands_on_one_line() -> None:
    """Runs of blanks become one, and invisible characters are dropped."""
    assert first_words(" \n a\r\n\tb\u2028c\x00\x1b\u202ed\ufeff ", 60) == "a b cd"
    assert first_words("\u200b \n", 60) is None
    assert first_words("", 60) is None
    assert first_words("👩\u200d👩 می\u200cخواهم", 60) == "👩\u200d👩 می\u200cخواهم"


def test_the_beginning_of_a_long_text_is_enough() -> None:
    """A text of megabytes, or one that begins with blanks, has a title as well."""
    assert first_words(" " * 10**6 + "word " * 10**6, 60) == "word " * 11 + "word…"


@given(st.text(), st.integers(2, 80))
def test_first_words_are_short_and_plain(text: str, most: int) -> None:
    """This holds for any text."""
    words = first_words(text, most)
    assert words is None or (0 < len(words) <= most and words == " ".join(words.split()) and "\x1b" not in words)
