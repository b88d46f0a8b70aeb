"""Imports point down, as the layers are drawn in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "perdure"

LAYERS = (
    {"errors"},  # below the model, which raises them; they import nothing
    {"model"},
    {"codec", "protocols", "run_journal", "redaction", "aio"},
    {"loop", "runtime", "recorder"},
    {
        "archive",
        "archive_lines",
        "copying",
        "fsck",
        "sessions",
        "workflow",
        "definition_files",
        "actions",
        "adapters",
        "stores",
    },
    {"__init__", "__main__", "cli", "server", "testing"},
)
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}
STRANGERS = {"loop", "runtime", "recorder"}  # they stand side by side and do not know each other
BELOW_STORES = {"errors", "model", "codec", "protocols", "redaction", "aio"}
# `to_dict` and `from_dict` stand on the values, and the codec alone knows the form.
MAY_DEFER_UPWARD = PACKAGE / "model" / "value.py"
IMPURE = {"asyncio", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}

FILES = sorted(PACKAGE.rglob("*.py"))
MODEL = [path for path in FILES if path.is_relative_to(PACKAGE / "model")]


class Import(NamedTuple):
    unit: str
    line: int
    deferred: bool


def unit_of(path: Path) -> str:
    """The part of the package a file belongs to: its folder under src/perdure, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[Import]:
    """The parts of perdure that a file imports, wherever in it the import stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_top = set(map(id, tree.body))
    for node in ast.walk(tree):
        for name in imported_names(node, path):
            yield Import(unit_named(name), node.lineno, id(node) not in at_top)  # type: ignore[attr-defined]


def imported_names(node: ast.AST, path: Path) -> list[list[str]]:
    """Each perdure module that a statement imports, as the parts of its dotted name after `perdure`."""
    if isinstance(node, ast.Import):
        dotted = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        package = ["perdure", *path.relative_to(PACKAGE).parent.parts]
        prefix = package[: len(package) - node.level + 1] if node.level else []
        base = [*prefix, *(node.module.split(".") if node.module else [])]
        dotted = [[*base, alias.name] for alias in node.names]
    else:
        dotted = []
    return [parts[1:] for parts in dotted if parts[0] == "perdure"]


def unit_named(parts: list[str]) -> str:
    """The part of the package that a name leads to; a name that no file bears is one of perdure's daily names."""
    is_part = parts and ((PACKAGE / parts[0]).is_dir() or (PACKAGE / f"{parts[0]}.py").is_file())
    return parts[0] if is_part else "__init__"


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer == "stores":
        return imported in BELOW_STORES
    if {importer, imported} <= STRANGERS:
        return False
    return HEIGHT.get(imported, len(LAYERS)) <= HEIGHT[importer]


def external_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    """A file imports its own layer and those below it: at the top, in functions and under TYPE_CHECKING alike."""
    unit = unit_of(path)
    assert unit in HEIGHT, f"{unit} has no layer yet: give it one in LAYERS"
    wrong = [
        f"line {found.line}: {unit} imports {found.unit}"
        for found in imports(path)
        if not may_import(unit, found.unit) and not (found.deferred and path == MAY_DEFER_UPWARD)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODEL, ids=name_of)
def test_the_model_is_pure(path: Path) -> None:
    """Values do no I/O, wait for nothing, and take time and ids from `model/ids.py` alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert IMPURE.isdisjoint(external_imports(tree))
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
    if path.name != "ids.py":
        clocks = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "now"]
        assert clocks == [], "the time comes from perdure.model.ids.now"
        assert "uuid_utils" not in external_imports(tree)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("actions", "loop", True),
        ("sessions", "actions", True),
        ("codec", "model", True),
        ("model", "codec", False),
        ("runtime", "loop", False),
        ("recorder", "runtime", False),
        ("runtime", "run_journal", True),
        ("stores", "run_journal", False),
        ("run_journal", "loop", False),
        ("stores", "runtime", False),
        ("stores", "actions", False),
        ("runtime", "__init__", False),
        ("errors", "model", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    """The rule tells a legal import from an illegal one."""
    assert may_import(importer, imported) is allowed
