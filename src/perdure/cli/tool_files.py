"""Tools, and the function that makes their context, from a Python file of the user's. The file is imported."""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from perdure.errors import ConfigurationError
from perdure.loop.factory import MakeContext
from perdure.loop.tools import FunctionTool
from perdure.model.definition import AgentDefinition
from perdure.model.value import brief
from perdure.protocols import Tool, Toolset

MAKES_CONTEXT = "context"
"""The name of the function, in a file of tools, that makes the context of a run."""
SUBAGENTS = "subagents"
"""The name of the list, in a file of tools, of the agents that others may call."""


class ToolFile(NamedTuple):
    """The contents of a file for agents: tools, sub-agents, and perhaps a function that makes the context of tools."""

    file: str
    tools: list[Any]
    make_context: MakeContext | None
    subagents: list[AgentDefinition]


def context_of(files: Iterable[ToolFile]) -> MakeContext | None:
    """Return the function that makes contexts. Raise ConfigurationError if several files have one."""
    having = [each for each in files if each.make_context is not None]
    if len(having) > 1:
        named = " and ".join(each.file for each in having)
        raise ConfigurationError(f"Both {named} have a function {MAKES_CONTEXT}(). Leave it to one of them.")
    return having[0].make_context if having else None


def read_tool_file(file: str) -> ToolFile:
    """Return what a file marks with `@tool`, and its toolsets. If there are none, return its functions with docstrings.

    A function `context(session, data)` without the mark is not a tool: it makes the context of a run. The agents in a
    list `subagents` are sub-agents.
    """
    path = Path(file)
    if not path.exists():
        raise ConfigurationError(f"The file {file} does not exist. Give --tools the path of a Python file.")
    if not path.is_file() or path.suffix != ".py":
        raise ConfigurationError(f"{file} is not a Python file. Give --tools the path of one.")
    module = _imported(path)
    make_context = _maker_in(module)
    public = [value for name, value in vars(module).items() if not name.startswith("_") and value is not make_context]
    marked = [value for value in public if isinstance(value, Tool | Toolset) and not inspect.isclass(value)]
    found = marked or [FunctionTool(value) for value in public if _is_described(value, module)]
    agents = _agents_in(file, module)
    if not found and make_context is None and not agents:
        raise ConfigurationError(f"{file} has no tools. Write a function with a docstring, or mark one with @tool.")
    return ToolFile(file, found, make_context, agents)


def _agents_in(file: str, module: ModuleType) -> list[AgentDefinition]:
    found = getattr(module, SUBAGENTS, ())
    if not isinstance(found, list | tuple):
        return []
    for each in found:
        if not isinstance(each, AgentDefinition):
            raise ConfigurationError(f"{file}: {SUBAGENTS} lists agents, and {brief(each)} is not an AgentDefinition.")
    return list(found)


def _maker_in(module: ModuleType) -> MakeContext | None:
    found = getattr(module, MAKES_CONTEXT, None)
    if not callable(found) or inspect.isclass(found) or isinstance(found, Tool | Toolset):
        return None
    return cast(MakeContext, found)


def _is_described(value: object, module: ModuleType) -> bool:
    # Only functions of this very file: those that it imports from other modules are not meant as tools.
    return inspect.isfunction(value) and value.__module__ == module.__name__ and bool(inspect.getdoc(value))


def _imported(path: Path) -> ModuleType:
    top, parts = _place_of(path)
    _find_modules_in(path.resolve().parent, top)
    try:
        if len(parts) == 1 or not all(part.isidentifier() for part in parts):
            return _loaded(path)
        if not _is_found_in(top, parts[0]):
            parts = [_of_its_own(top / parts[0]), *parts[1:]]
        return import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    except Exception as error:  # whatever the user's own code raises
        what = f"{path} cannot be imported{_line_in(path, error)}: {_said(error)}."
        is_alone = isinstance(error, ImportError) and len(parts) == 1 and _imports_beside_it(path)
        raise ConfigurationError(what + (_IN_PACKAGE if is_alone else "")) from error


_IN_PACKAGE = " To import modules beside it with `from .`, put an empty __init__.py into its directory."


def _place_of(path: Path) -> tuple[Path, list[str]]:
    """Return the directory above a file's package, and the way from there, such as `orders`, `tools`."""
    top, parts = path.resolve().parent, [path.stem]
    while (top / "__init__.py").is_file():
        top, parts = top.parent, [top.name, *parts]
    return top, parts


def _imports_beside_it(path: Path) -> bool:
    """Tell whether a file has an import such as `from .prices import PEN`, which only a package may have."""
    statements = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(each, ast.ImportFrom) and each.level > 0 for each in statements)


def _is_found_in(top: Path, package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == top / package


def _of_its_own(package: Path) -> str:
    """Import a package whose name another one has, such as its installed copy. Return the name that it has here."""
    name = f"perdure_tools_{package.name}"
    if name not in sys.modules:
        _loaded(package / "__init__.py", name, [str(package)])
    return name


def _loaded(path: Path, name: str | None = None, modules: list[str] | None = None) -> ModuleType:
    name = name or f"perdure_tools_{path.stem}"
    spec = spec_from_file_location(name, path.resolve(), submodule_search_locations=modules)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} cannot be imported as Python.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: the type hints of its functions are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def _find_modules_in(*directories: Path) -> None:
    """Have the modules of these directories found, for good: a tool may import one when it is called.

    Python puts a script's directory first. Here it comes last, so a file named as a package that perdure imports later,
    such as mcp.py, does not take its place.
    """
    sys.path.extend(each for each in dict.fromkeys(map(str, directories)) if each not in sys.path)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _line_in(path: Path, error: Exception) -> str:
    # The last frame in the user's own file: an error inside a library is still caused by a line there.
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path.resolve())]
    return f" (line {lines[-1]})" if lines else ""
