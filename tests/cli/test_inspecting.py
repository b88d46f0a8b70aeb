"""The command that writes the inspector's pages into files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")


def test_pages_are_written(perdure: Callable[..., Any], home: Path) -> None:
    perdure("send", "--new", "hello", "--model", "offline")
    assert perdure("inspect", "--static", "site", "@").lines == ["site/index.html"]
    assert "hello" in "".join(path.read_text() for path in Path("site").glob("*.html"))


def test_a_directory_that_has_something_in_it_is_left_alone(perdure: Callable[..., Any], home: Path) -> None:
    """With --force, the pages are written beside what is there."""
    perdure("send", "--new", "hello", "--model", "offline")
    Path("site").mkdir()
    Path("site/mine.txt").write_text("keep me")
    assert "--force" in perdure("inspect", "--static", "site", "@", code=2).err
    assert [path.name for path in Path("site").iterdir()] == ["mine.txt"]
    perdure("inspect", "--static", "site", "@", "--force")
    assert Path("site/index.html").is_file()
    assert Path("site/mine.txt").read_text() == "keep me"
    assert "is a file" in perdure("inspect", "--static", "site/mine.txt", "@", "--force", code=2).err


def test_it_says_where_the_inspector_is(perdure: Callable[..., Any], home: Path) -> None:
    perdure("send", "--new", "hello", "--model", "offline")
    assert "perdure serve" in perdure("inspect", "@", code=2).err
    assert "SESSION" in perdure("inspect", "--static", "site", code=2).err
    perdure("inspect", "--static", "site", "nobody", code=3)
    assert not Path("site").exists()
