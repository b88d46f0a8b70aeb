"""The types that a caller of a tool's function sees. mypy checks them, and test_tools.py runs them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

import perdure


@perdure.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@perdure.tool(idempotent=True)
async def ship(item: str) -> str:
    """Ship an item."""
    return f"{item} is sent"


def calls() -> None:
    """A tool is called as the function that it was made of."""
    assert_type(add(1, b=2), int)
    sent = ship("A pen")
    assert_type(sent, Coroutine[Any, Any, str]).close()
    perdure.connect("memory://", tools=[add, ship])


def mistakes() -> None:
    """Hold the mistakes that a type checker finds: each exception to it would be an error if it were not needed."""
    add("1", 2)  # type: ignore[arg-type]
    ship().close()  # type: ignore[call-arg]
