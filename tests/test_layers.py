"""Imports point down, as the layers are drawn in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "perdure"

LEVELS = (
    {"errors"},  # below the model, which raises them; they import nothing
    {"model"},
    {"codec", "protocols", "redaction", "redactors", "paging", "aio", "events", "sketching", "keys"},
    {"stores", "run_journal", "recorder", "records", "definition_files", "telemetry"},
    {"loop", "runtime"},
    {"actions", "parallel", "archive", "backups", "copying", "fsck"},
    {"sessions"},
    {"workflow", "adapters", "workers", "replay", "server", "testing", "cli", "__init__", "__main__"},
)
HEIGHT = {unit: height for height, level in enumerate(LEVELS) for unit in level}
# The units of one level do not import each other, except for these.
NEIGHBOURS = {
    "redaction": {"codec", "protocols"},
    "redactors": {"redaction"},
    "paging": {"protocols"},
    "sketching": {"protocols"},
    "keys": {"protocols"},
    "records": {"stores", "recorder"},
    "testing": {"workers"},  # the contract for dispatchers drives a worker
    "parallel": {"actions"},
    "backups": {"archive"},
    "copying": {"archive"},
    "fsck": {"archive"},
    "cli": {
        "__init__",
        "adapters",
        "workers",
        "replay",
        "server",
    },  # it runs them; adapters import the sessions of other libraries
    "server": {"__init__"},  # it shows the version
    "__main__": {"cli"},
    "__init__": {"workers", "workflow", "replay"},
}
# `to_dict` and `from_dict` are on the values, and only the codec knows the form.
MAY_DEFER_UPWARD = PACKAGE / "model" / "value.py"
IMPURE = {"asyncio", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}

FILES = sorted(PACKAGE.rglob("*.py"))
MODEL = [path for path in FILES if path.is_relative_to(PACKAGE / "model")]


class Import(NamedTuple):
    unit: str
    line: int
    deferred: bool


def unit_of(path: Path) -> str:
    """Return the part of the package a file belongs to: its folder under src/perdure, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def import_nodes(path: Path) -> list[ast.AST]:
    """Return the imports in a file, those at the top first."""
    # Trees of the whole package take hundreds of megabytes, so they are not kept.
    return [*_import_statements(tree_of(path))]


def _import_statements(tree: ast.Module) -> Iterator[ast.AST]:
    blocks: list[list[ast.stmt]] = [tree.body]
    # The list grows in the loop. Expressions are skipped: they are most of a tree, and import nothing.
    for block in blocks:
        for node in block:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            for name in ("body", "orelse", "finalbody"):
                blocks.append(getattr(node, name, []))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                blocks.append(part.body)


def imports(path: Path) -> Iterator[Import]:
    """Return the parts of perdure that a file imports, at any depth of the file."""
    for node in import_nodes(path):
        for name in imported_names(node, path):
            deferred = node.col_offset > 0  # type: ignore[attr-defined]
            yield Import(unit_named(name), node.lineno, deferred)  # type: ignore[attr-defined]


def imported_names(node: ast.AST, path: Path) -> list[list[str]]:
    """Return each perdure module that a statement imports, as the parts of its dotted name after `perdure`."""
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
    """Return the part of the package that a name leads to; a name without a file is one of perdure's root names."""
    return parts[0] if parts and _is_part(parts[0]) else "__init__"


@cache
def _is_part(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def may_import(importer: str, imported: str) -> bool:
    is_below = HEIGHT.get(imported, len(LEVELS)) < HEIGHT[importer]
    return importer == imported or is_below or imported in NEIGHBOURS.get(importer, ())


def external_imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_imports_point_down() -> None:
    """A file imports its own unit and levels below it: at the top, in functions and under TYPE_CHECKING alike."""
    unknown = {unit_of(path) for path in FILES} - HEIGHT.keys()
    assert not unknown, f"{unknown} have no level yet: give them one in LEVELS"
    wrong = [
        f"{name_of(path)}:{found.line}: {unit_of(path)} imports {found.unit}"
        for path in FILES
        for found in imports(path)
        if not may_import(unit_of(path), found.unit) and not (found.deferred and path == MAY_DEFER_UPWARD)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODEL, ids=name_of)
def test_the_model_is_pure(path: Path) -> None:
    """Values do no I/O, do not wait, and take time and ids only from `model/ids.py`."""
    tree = tree_of(path)
    assert IMPURE.isdisjoint(external_imports(import_nodes(path)))
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
    if path.name != "ids.py":
        clocks = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "now"]
        assert clocks == [], "the time comes from perdure.model.ids.now"
        assert "uuid_utils" not in external_imports(import_nodes(path))


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
        ("stores", "redaction", True),
        ("stores", "recorder", False),
        ("recorder", "stores", False),
        ("recorder", "redaction", True),
        ("definition_files", "stores", False),
        ("archive", "stores", True),
        ("archive", "actions", False),
        ("actions", "stores", True),
        ("loop", "runtime", False),
        ("sessions", "archive", True),
        ("actions", "sessions", False),
        ("testing", "cli", False),
        ("workflow", "sessions", True),
        ("sessions", "workflow", False),
        ("workflow", "cli", False),
        ("codec", "protocols", False),
        ("runtime", "__init__", False),
        ("errors", "model", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    """The rule tells a legal import from an illegal one."""
    assert may_import(importer, imported) is allowed


ENGINES = ("sqlite", "postgres", "file", "memory")
STORES = PACKAGE / "stores"
MAY_OPEN_ENGINES = {"perdure", "perdure.stores.urls"}
"""The package's table of names, and the module that makes a store from a URL."""
ROWS = ("perdure.stores.jobs", "perdure.stores.format")
"""The meaning of a session in rows, and the bytes of rows: without an engine, and without waiting."""
NOT_OF_ROWS = {"asyncio", "threading", "os", "time", "socket"}


def engines_here() -> set[str]:
    """Return the engines that have a folder, or a module beside the port."""
    folders = {name for name in ENGINES if (STORES / name).is_dir()}
    modules = {name for name in ENGINES if (STORES / f"{name}.py").is_file() and (STORES / "engine.py").is_file()}
    return folders | modules


def is_within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def engine_of(module: str) -> str | None:
    """Return the engine that a module belongs to."""
    return next((name for name in ENGINES if is_within(module, f"perdure.stores.{name}")), None)


def store_fault(importer: str, imported: str, engines: set[str] | None = None) -> str | None:
    """Return the rule of the stores' layout that an import breaks, in words; None for a legal one."""
    mine, other = engine_of(importer), engine_of(imported)
    if any(is_within(importer, room) for room in ROWS):
        if other is not None:
            return "jobs and formats know no engine"
        if imported.partition(".")[0] in NOT_OF_ROWS:
            return "jobs and formats neither wait nor look at the clock or the disk"
    here = engines_here() if engines is None else engines
    if mine in here and other not in (None, mine):
        return "an engine knows no other engine"
    # An engine's own address holds the store that users open, over the engine behind it.
    is_address = importer == f"perdure.stores.{mine}"
    if mine in here and not is_address and is_within(imported, "perdure.stores.store"):
        return "an engine does not know the store that drives it"
    if other in here and mine != other and importer not in MAY_OPEN_ENGINES:
        return "an engine is imported by its URL, or by the package's table of names"
    return None


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("perdure", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def modules_imported(path: Path) -> Iterator[str]:
    """Return every module that a file imports, perdure's own by their dotted names."""
    nodes = import_nodes(path)
    yield from (name for name in external_imports(nodes) if name != "perdure")
    for node in nodes:
        yield from (".".join(("perdure", *parts)) for parts in imported_names(node, path))


def test_the_rooms_of_stores() -> None:
    """Jobs import no engine, engines do not import each other, and no other module imports one."""
    here = engines_here()
    faults = {
        (module_of(path), name, store_fault(module_of(path), name, here))
        for path in FILES
        for name in modules_imported(path)
    }
    assert {each for each in faults if each[2] is not None} == set()


@pytest.mark.parametrize(
    ("importer", "imported", "legal"),
    [
        ("perdure.stores.jobs.saving", "perdure.stores.engine", True),
        ("perdure.stores.jobs.saving", "perdure.stores.format.heads", True),
        ("perdure.stores.jobs.saving", "perdure.stores.sqlite.engine", False),
        ("perdure.stores.jobs.saving", "perdure.stores.memory", False),
        ("perdure.stores.jobs.saving", "collections", True),
        ("perdure.stores.jobs.saving", "asyncio", False),
        ("perdure.stores.format.blocks", "zlib", True),
        ("perdure.stores.format.blocks", "os", False),
        ("perdure.stores.format.blocks", "perdure.stores.file", False),
        ("perdure.stores.sqlite.engine", "perdure.stores.sqlite.worker", True),
        ("perdure.stores.sqlite.engine", "perdure.stores.engine", True),
        ("perdure.stores.sqlite.engine", "perdure.stores.jobs.saving", True),
        ("perdure.stores.sqlite.engine", "threading", True),
        ("perdure.stores.sqlite.engine", "perdure.stores.postgres.writer", False),
        ("perdure.stores.file.engine", "perdure.stores.memory", False),
        ("perdure.stores.sqlite.engine", "perdure.stores.store", False),
        ("perdure.stores.memory", "perdure.stores.store.Store", True),
        ("perdure.stores.sqlite", "perdure.stores.store.IndexedStore", True),
        ("perdure.stores.urls", "perdure.stores.sqlite", True),
        ("perdure", "perdure.stores.postgres.engine", True),
        ("perdure.stores.store", "perdure.stores.engine", True),
        ("perdure.stores.store", "perdure.stores.sqlite", False),
        ("perdure.sessions.sessions", "perdure.stores.file.engine", False),
        ("perdure.sessions.sessions", "perdure.stores.urls", True),
        ("perdure.stores.sqlite.engine", "perdure.stores.file_lock", True),
    ],
)
def test_the_rule_of_stores_itself(importer: str, imported: str, legal: bool) -> None:
    """The rule tells a legal import from an illegal one, for all engines."""
    assert (store_fault(importer, imported, set(ENGINES)) is None) is legal
