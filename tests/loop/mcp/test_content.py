"""Results of MCP tools, as values that models read and stores keep."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import CallToolResult

from perdure.loop.mcp.content import said_in, value_of


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(*content: dict[str, Any], structured: Any = None) -> CallToolResult:
    return CallToolResult.model_validate({"content": list(content), "structuredContent": structured})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (result(), ""),
        (result(text("hello")), "hello"),
        (result(text("a"), text("b")), "a\nb"),
        (result(text('{"a": 1}')), '{"a": 1}'),
        (result(structured={"a": 1}), {"a": 1}),
        (result(text('{"a":1}'), structured={"a": 1}), {"a": 1}),
        (result(text('{"result": 3}'), structured={"result": 3}), {"result": 3}),
        (result(text("3"), structured={"result": 3}), 3),
        (result(text("hello"), structured={"result": "hello"}), "hello"),
        (result(text("3"), structured={"result": "3"}), "3"),
        (result(text("a"), text("b"), structured={"result": ["a", "b"]}), ["a", "b"]),
        (result(text('{"a":1}'), structured={"result": [{"a": 1}]}), [{"a": 1}]),
        (result(structured={"result": []}), {"result": []}),
        (result(text("more"), structured={"a": 1}), {"content": "more", "structuredContent": {"a": 1}}),
    ],
)
def test_text_and_structure_become_one_value(given: CallToolResult, value: Any) -> None:
    """A text that comes twice is kept once, and no text is lost."""
    assert value_of(given) == value


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (
            {"type": "image", "data": "eHh4", "mimeType": "image/png"},
            "[not shown: an image, image/png, 3 bytes]",
        ),
        ({"type": "audio", "data": "eHh4", "mimeType": "audio/wav"}, "[not shown: a sound, audio/wav, 3 bytes]"),
        ({"type": "resource", "resource": {"uri": "file:///a", "text": "the page"}}, "file:///a:\nthe page"),
        (
            {"type": "resource", "resource": {"uri": "file:///a", "blob": "eHh4"}},
            "[not shown: the resource file:///a, of an unknown type, 3 bytes]",
        ),
        ({"type": "resource_link", "uri": "file:///a", "name": "A"}, "[A](file:///a)"),
        (
            {"type": "resource_link", "uri": "file:///a", "name": "A", "description": "all of it"},
            "[A](file:///a): all of it",
        ),
    ],
)
def test_what_a_result_cannot_carry_is_told(block: dict[str, Any], told: str) -> None:
    """The model gets a note of a picture, rather than nothing."""
    assert value_of(result(text("look:"), block)) == f"look:\n{told}"
    assert said_in(result(block)) == told
