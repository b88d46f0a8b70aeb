"""The first words of a text, as a list shows them."""

from __future__ import annotations

import re

# Control characters that are not blanks, marks that turn the direction of text, characters without width, and
# surrogates. Those that join letters and emoji stay.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_LOOKED_AT = 16
"""The characters that are read for each one shown. A text may have any length, and begin with blanks."""


def first_words(text: str, most: int) -> str | None:
    """Return the first words of a text on one line, in at most `most` characters. None if it has no words.

    A longer text is cut after a word, if it has a place for that, and ends with an ellipsis.
    """
    seen = text.lstrip()[: most * _LOOKED_AT]
    flat = " ".join(_UNSEEN.sub("", seen).split())
    if len(flat) <= most:
        return flat or None
    cut = flat[:most]
    if " " in cut and flat[most - 1] != " ":
        cut = cut[: cut.rindex(" ")]
    return f"{cut.rstrip()[: most - 1]}…"
