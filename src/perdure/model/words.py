"""The first words of a text, as a list shows them."""

from __future__ import annotations

import re

# Control characters that are no blanks, what turns the direction of text, what has no width, surrogates. What joins
# letters and emoji stays.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_LOOKED_AT = 16
"""How many characters are looked at for each that is shown: a text may be of any length, and begin with blanks."""


def first_words(text: str, most: int) -> str | None:
    """Return the first words of a text on one line, of at most so many characters; None if it has none.

    A text that is longer is cut behind a word, where there is one to be cut behind, and ends with an ellipsis.
    """
    seen = text.lstrip()[: most * _LOOKED_AT]
    flat = " ".join(_UNSEEN.sub("", seen).split())
    if len(flat) <= most:
        return flat or None
    cut = flat[:most]
    if " " in cut and flat[most - 1] != " ":
        cut = cut[: cut.rindex(" ")]
    return f"{cut.rstrip()[: most - 1]}…"
