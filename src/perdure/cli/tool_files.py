"""Tools from a Python file that the user has named: the file is imported, as the user has asked."""

from __future__ import annotations

import inspect
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from perdure.errors import ConfigurationError
from perdure.loop.tools import FunctionTool
from perdure.protocols import Tool, Toolset


def tools_in(file: str) -> list[Any]:
    """Return what a file marks with `@tool`, and its toolsets; with neither, its functions that have a docstring."""
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigurationError(f"There is no Python file {file}. Give --tools the path of one.")
    module = _imported(path)
    public = [value for name, value in vars(module).items() if not name.startswith("_")]
    marked = [value for value in public if isinstance(value, Tool | Toolset) and not inspect.isclass(value)]
    found = marked or [FunctionTool(value) for value in public if _is_described(value, module)]
    if not found:
        raise ConfigurationError(f"{file} has no tools. Write a function with a docstring, or mark one with @tool.")
    return found


def _is_described(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and bool(inspect.getdoc(value))


def _imported(path: Path) -> ModuleType:
    name = f"perdure_tools_{path.stem}"
    spec = spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} cannot be imported as Python.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # type hints of its functions are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's own code raises
        del sys.modules[name]
        raise ConfigurationError(f"{path} cannot be imported{_line_in(path, error)}: {_said(error)}.") from error
    return module


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _line_in(path: Path, error: Exception) -> str:
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path.resolve())]
    return f" (line {lines[-1]})" if lines else ""
