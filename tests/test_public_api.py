"""What `import perdure` offers, and what it costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

ROOT = Path(__file__).parents[1]

OPTIONAL = {
    "anthropic",
    "click",
    "genai_prices",
    "google.genai",
    "openai",
    "opentelemetry",
    "psycopg",
    "pydantic_ai",
    "rich",
}


def test_all_is_sorted() -> None:
    """A reader finds a name where the alphabet puts it, and each name once."""
    assert list(perdure.__all__) == sorted(set(perdure.__all__))


@pytest.mark.parametrize("name", perdure.__all__)
def test_a_name_resolves(name: str) -> None:
    """Every public name is there for getattr and for dir."""
    assert getattr(perdure, name) is not None
    assert name in dir(perdure)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it would on any module."""
    with pytest.raises(AttributeError, match="SessionRuntimes"):
        perdure.SessionRuntimes  # noqa: B018  # looking the name up is the test


def test_import_brings_in_no_optional_dependency() -> None:
    """`import perdure` works and stays quick on an install without extras."""
    code = f"import perdure, sys; print(*sorted(sys.modules.keys() & {OPTIONAL!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_the_reference_has_every_public_name() -> None:
    """`make docs` generates the reference from the names on its pages, so a name must be on one."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in perdure.__all__ if not re.search(rf"^::: perdure\..*\b{name}$", pages, re.MULTILINE)] == []
