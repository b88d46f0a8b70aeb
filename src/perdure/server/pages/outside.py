"""Results of calls that are made outside, as a person types them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


def result_of(text: str) -> tuple[Any, Literal["value", "text"]]:
    """Return what was typed, and what it was taken for: a value if it is JSON, or else a text."""
    try:
        return msgspec.json.decode(text), "value"
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text, "text"
