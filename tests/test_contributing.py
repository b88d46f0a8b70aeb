"""CONTRIBUTING.md and the README name files, commands and layers that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_layers import HEIGHT, LEVELS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("", "src/perdure", "src/perdure/stores", "src/perdure/adapters", "tests", "tests/adapters", "tests/crash")
NOT_SHOWN = {"events", "parallel", "copying", "fsck", "backups", "__init__", "__main__"}
"""The modules of a level that the picture leaves out: the text below it names them."""


def named_files() -> list[str]:
    """Return the names in backticks that look like files, without those that a reader is to make."""
    found = set(re.findall(r"`(?:python )?([\w./*-]+(?:\.py|\.md|\.toml|\.txt|/))`", TEXT))
    return sorted(found - {"bench_TOPIC.py", "benchmarks/bench_TOPIC.py", "migrations/", "postgres/"})


@pytest.mark.parametrize("name", named_files())
def test_a_file_that_is_named_exists(name: str) -> None:
    """A recipe that says "copy this file" can be followed. Names are relative to the root, or to the usual folders."""
    places = [*FOLDERS, "tests/pairs"]
    assert any((ROOT / folder / name).exists() for folder in places), f"CONTRIBUTING.md names {name}"


@pytest.mark.parametrize("text", [TEXT, README], ids=["CONTRIBUTING", "README"])
def test_every_link_leads_to_a_file(text: str) -> None:
    """Links are relative to the root."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("text", [TEXT, README], ids=["CONTRIBUTING", "README"])
def test_every_make_target_exists(text: str) -> None:
    """Every command that a reader is told to type is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_every_command_is_described() -> None:
    """A target for daily work has its row in the table."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert shown - {"help", "browser"} <= set(re.findall(r"^\| `make ([a-z-]+)", TEXT, re.MULTILINE))


def test_the_layers_are_drawn_as_they_are_held() -> None:
    """Each line of the picture has the units of its level, and the test of the layers checks the code against them."""
    drawn = {
        int(level): set(re.findall(r"\w+", units)) for level, units in re.findall(r"^(\d)  (.+?)(?:   |$)", TEXT, re.M)
    }
    assert drawn == {height: level - NOT_SHOWN for height, level in enumerate(LEVELS)}
    assert set(HEIGHT) >= NOT_SHOWN
