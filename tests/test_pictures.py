"""The pictures of the documentation are drawn from the code."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DRAW = Path(__file__).parents[1] / "docs" / "pictures" / "draw.py"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", DRAW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def layers(draw: ModuleType) -> str:
    drawn: str = draw.layers()
    return drawn


def without_counts(svg: str) -> str:
    """Return a picture without its counts of lines, which change with every commit."""
    return re.sub(r"~[\d,]+ lines", "", svg)


def texts(svg: str) -> list[str]:
    return [found.text or "" for found in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_layers_are_those_of_the_package(layers: str) -> None:
    """Each part is named once, from the errors to the command line."""
    named = texts(layers)
    for part in ("errors", "model", "codec", "stores", "runtime", "loop", "actions", "sessions", "cli"):
        assert named.count(part) == 1


def test_one_send_goes_down_to_the_engine_and_its_threads(draw: ModuleType) -> None:
    """It passes every part between the face and the engine, and the store's threads."""
    steps = draw.trace()
    assert steps[0].name == "Chat.send"
    assert {"sessions", "runtime", "actions", "loop", "run_journal", "stores", "jobs", "engine"} <= {
        step.unit for step in steps
    }
    assert any(step.thread for step in steps)


def test_the_picture_of_the_layers_is_up_to_date(layers: str) -> None:
    """The file has today's parts and imports. `python docs/pictures/draw.py` draws it again."""
    drawn = (DRAW.parent / "layers.svg").read_text(encoding="utf-8")
    assert without_counts(drawn) == without_counts(layers)


def test_the_picture_of_one_send_is_up_to_date(draw: ModuleType) -> None:
    """The file has today's steps, in any order of the threads. `python docs/pictures/draw.py` draws it again."""
    drawn = (DRAW.parent / "send.svg").read_text(encoding="utf-8")
    assert sorted(texts(drawn)) == sorted(texts(draw.send()))
