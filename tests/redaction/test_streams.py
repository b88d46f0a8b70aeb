"""A text in pieces is redacted like the whole text, and no piece shows a part of a secret."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import RedactionFailed, Redactor
from perdure.redaction.texts import Redaction
from perdure.redactors import DEFAULT, EMAILS, PHONES

SECRETS = [
    "sk-abcdefghijklmnopqrstuvwx",
    "AKIAIOSFODNN7EXAMPLE",
    "Bearer abcdefghijklmnop1234",
    "4111 1111 1111 1111",
    "378282246310005",
    "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefghijk",
    "a@b.co",
    "+47 22 12 34 56",
    "CASE-123456",
]
WORDS = [
    " ",
    "s",
    "sk-",
    " the files ",
    "4",
    "1 ",
    "-----",
    " Be",
    "ask-abc",
    "eyJ",
    ".",
    "@",
    "+4",
    "\n",
    "CASE-12",
    "x",
]
SETS = {
    "default": Redaction(DEFAULT),
    "all": Redaction((*DEFAULT, EMAILS, PHONES)),
    "span": Redaction((Redactor("case", r"\bCASE-\d{6}\b", span=12), *DEFAULT)),
    "whole": Redaction((Redactor("case", r"\bCASE-\d{6}\b"), str.strip)),
}
texts = st.lists(st.sampled_from(SECRETS + WORDS), max_size=8).map("".join)
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@pytest.mark.parametrize("name", SETS)
@given(text=texts, sizes=cuts)
def test_the_pieces_add_up_to_the_whole(name: str, text: str, sizes: list[int]) -> None:
    """The output for any cuts is the redacted whole, and at no time more than that."""
    redaction = SETS[name]
    stream, told, place, turn = redaction.stream(), "", 0, 0
    whole = redaction.text(text)
    while place < len(text):
        size = sizes[turn % len(sizes)]
        told += stream.feed(text[place : place + size])
        assert whole.startswith(told)
        place, turn = place + size, turn + 1
    assert told + stream.flush() == whole


def test_plain_text_is_not_held_back() -> None:
    """Words that cannot begin a secret are returned at once."""
    stream = SETS["default"].stream()
    assert [stream.feed(piece) for piece in ("Here are", " the files", ", 12 of them")] == [
        "Here are",
        " the files",
        ", 12 of them",
    ]


def test_a_secret_is_held_back_until_it_is_known_to_be_one() -> None:
    """A possible beginning of a secret is held back, and returned if no secret follows."""
    stream = SETS["default"].stream()
    assert [stream.feed(piece) for piece in ("use s", "k-abcdefgh", "ijklmnop", "qrst")] == ["use ", "", "", ""]
    assert stream.feed(" now") == "[redacted:api-key] now"
    assert [stream.feed(piece) for piece in (" s", "k-", "i lift")] == [" ", "", "sk-i lift"]


def test_a_fragment_that_was_told_is_still_part_of_a_secret() -> None:
    """A fragment that was returned early counts as part of the secret, and the rest is held back."""
    stream = SETS["default"].stream()
    assert stream.feed("use sk-") == "use "
    assert stream.fragment() == "sk-"
    assert stream.feed("abcdefghijklmnopqrst") == ""
    assert stream.fragment() == ""
    assert stream.feed(". Good") == "[redacted:api-key]. Good"


def test_a_function_sees_whole_texts_only() -> None:
    """A plain function may need any amount of context, so it gets the whole text."""
    seen: list[str] = []

    def shout(text: str) -> str:
        seen.append(text)
        return text.upper()

    stream = Redaction([shout]).stream()
    assert stream.feed("one ") + stream.feed("two") == ""
    assert stream.flush() == "ONE TWO"
    assert seen == ["one two"]


def test_a_long_secret_is_not_looked_at_for_each_character() -> None:
    """100,000 characters of a key, one by one, are searched a few hundred times."""
    looks = 0

    def count(found: str) -> bool:
        nonlocal looks
        looks += 1
        return True

    pattern = Redactor("run", "a{4,}", check=count, span=100_000)
    stream = Redaction([pattern]).stream()
    assert "".join(stream.feed("a") for _ in range(100_000)) == ""
    assert looks < 2_000
    assert stream.flush() == "[redacted:run]"


@pytest.mark.parametrize("bad", [lambda text: None, lambda text: 1 / 0, lambda text: b"x"])
def test_a_redactor_that_fails_is_a_typed_error(bad: Callable[[str], str]) -> None:
    """The error names the redactor, and quotes neither the text nor the redactor's own error."""
    with pytest.raises(RedactionFailed) as caught:
        Redaction([bad]).text("my secret")
    assert "secret" not in str(caught.value)
    assert caught.value.redactor == "<lambda>"
    assert (caught.value.__cause__ is None and caught.value.__suppress_context__) or caught.value.__context__ is None
