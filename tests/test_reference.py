"""The reference: `make docs` generates it from the entries on its pages, and from docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import perdure

PAGES = {
    page.stem: re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for page in (Path(__file__).parents[1] / "docs" / "reference").glob("*.md")
}
FRAMEWORKS = "adapters"
"""The page for classes that need other frameworks, and have their verbs."""
OWN = sorted((page, path) for page, paths in PAGES.items() if page != FRAMEWORKS for path in paths)
MODULES = [
    "archive",
    "backups",
    "copying",
    "errors",
    "events",
    "fsck",
    "parallel",
    "protocols",
    "records",
    "redactors",
    "replay",
    "testing",
    "workers",
]
"""The public modules beside the root."""
VERBS = [
    "actions",
    "agents",
    "blocking",
    "connect",
    "events",
    "loop",
    "memory",
    "messages",
    "moving",
    "record",
    "redaction",
    "replay",
    "sessions",
    "workers",
    "workflows",
]
"""The pages that explain every parameter. The others are for readers who extend perdure."""
OF_PROTOCOLS = ["execute_on", "install", "respond", "select"]
"""The methods that a protocol explains, for all classes that have them."""
MADE_BY_PERDURE = [
    "BlockingChat",
    "BlockingQueued",
    "BlockingRun",
    "BlockingSessions",
    "Chat",
    "LiveSubscription",
    "Queued",
    "Sessions",
    "SharedStore",
    "StartedRun",
    "Subscription",
]
"""The classes that users do not call: a verb returns their objects."""


def found(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(import_module(home), name)


def test_every_entry_is_on_one_page_once() -> None:
    """A link to a name leads to one place."""
    paths = Counter(path for paths in PAGES.values() for path in paths)
    objects = Counter(id(found(path)) for _, path in OWN if inspect.isclass(found(path)))
    assert [path for path, count in paths.items() if count > 1] == []
    assert [path for _, path in OWN if objects[id(found(path))] > 1] == []


def test_every_public_name_has_an_entry() -> None:
    """The public names are those of the root, shown or not, and those that other public modules show."""
    there = [found(path) for _, path in OWN]
    wanted = {f"perdure.{name}": getattr(perdure, name) for name in perdure._HOME_OF}
    for module in map(import_module, (f"perdure.{name}" for name in MODULES)):
        wanted |= {f"{module.__name__}.{name}": getattr(module, name) for name in getattr(module, "__all__", ())}
    assert [name for name, value in wanted.items() if not any(value is each for each in there)] == []


def test_every_adapter_is_where_its_entry_says() -> None:
    """The source is read as text: some frameworks may not be installed."""
    for path in PAGES[FRAMEWORKS]:
        home, _, name = path.rpartition(".")
        base = Path(perdure.__file__).parents[1].joinpath(*home.split("."))
        source = (base / "__init__.py" if base.is_dir() else base.with_suffix(".py")).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async def|def|class) {name}\b", source, re.MULTILINE), path


@pytest.mark.parametrize("path", [path for _, path in OWN])
def test_every_field_has_a_text(path: str) -> None:
    """The text is behind the field, or in the docstring of its class."""
    value = found(path)
    assert not inspect.isclass(value) or list(fields_without_text(value)) == []


@pytest.mark.parametrize("path", [path for page, path in OWN if page in VERBS])
def test_every_parameter_has_a_text(path: str) -> None:
    """It is in the docstring of its function, or of the class for several of its methods."""
    value = found(path)
    if inspect.isclass(value):
        assert [each for name, verb in verbs_of(value) for each in without_text(name, verb, value)] == []
    elif inspect.isfunction(value):
        assert list(without_text(path, value, None)) == []


def fields_without_text(cls: type) -> Iterator[str]:
    for base in own_bases(cls):
        body = definition_of(base).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if is_field(name, kind):
                    if not is_text(following) and name not in named_in(base.__doc__) | named_in(cls.__doc__):
                        yield f"{base.__name__}.{name}"


def is_field(name: str, kind: ast.expr) -> bool:
    return not name.startswith("_") and "ClassVar" not in ast.unparse(kind)


def verbs_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the constructor, if users call it, the public methods, and the properties, each by its last definition."""
    seen = set(OF_PROTOCOLS)
    for base in own_bases(cls):
        for name, member in vars(base).items():
            verb = getattr(member, "__func__", member)
            is_verb = not name.startswith("_") or (name == "__init__" and has_constructor(base, cls))
            if is_verb and name not in seen and (inspect.isfunction(verb) or isinstance(verb, property)):
                seen.add(name)
                yield f"{base.__name__}.{name}", verb


def has_constructor(base: type, cls: type) -> bool:
    """Tell whether users call a constructor that is written in `base`, and not made from its fields."""
    is_written = base.__init__.__qualname__.startswith(base.__qualname__) and not is_dataclass(base)
    return is_written and cls.__name__ not in MADE_BY_PERDURE


def without_text(name: str, verb: Any, cls: type | None) -> Iterator[str]:
    """Yield the parameters that no docstring names, or the verb itself if it has no docstring."""
    if not verb.__doc__ and not name.endswith(".__init__"):
        yield name
    if isinstance(verb, property):
        return
    known = named_in(verb.__doc__) | named_in(cls.__doc__ if cls else "") | named_in(shared_with(verb))
    for each in inspect.signature(verb).parameters.values():
        # The options of a TypedDict are fields, which have texts of their own.
        if each.name not in {"self", "cls", *known} and not str(each.annotation).startswith("Unpack["):
            yield f"{name}({each.name})"


def shared_with(verb: Any) -> str:
    """Return the docstring of the function whose options a verb has, as its own docstring says."""
    other = re.search(r"options are those of `(\w+)`", verb.__doc__ or "")
    return (getattr(sys.modules[verb.__module__], other[1], None).__doc__ or "") if other else ""


def own_bases(cls: type) -> list[type]:
    """Return a class and its bases that have a definition in perdure."""
    return [base for base in cls.__mro__ if base.__module__.startswith("perdure.")]


def definition_of(cls: type) -> ast.ClassDef:
    return next(
        node
        for node in ast.walk(tree_of(cls.__module__))
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def is_text(node: ast.stmt | None) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def named_in(docstring: str | None) -> set[str]:
    """Return the words between backticks."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", docstring or ""))))


def test_the_check_notices_what_is_missing() -> None:
    """It names a field, a parameter and a docstring that are missing."""

    class Verbs:
        """A class whose `shared` parameter is explained here."""

        def __init__(self, kept: int) -> None: ...

        def send(self, shared: int, message: str, **options: typing.Unpack[dict]) -> None:  # type: ignore[misc]
            """Send something."""

        def stop(self) -> None: ...

    Verbs.__module__ = "perdure.verbs"
    missing = [each for name, verb in verbs_of(Verbs) for each in without_text(name, verb, Verbs)]
    assert missing == ["Verbs.__init__(kept)", "Verbs.send(message)", "Verbs.send(options)", "Verbs.stop"]
