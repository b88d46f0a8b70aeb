"""The files and directories that define agents, and the checks of a file's fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from perdure.codec.values import invalid
from perdure.definition_files.readers import Source, Where, read_json, read_markdown, read_toml, read_yaml
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget
from perdure.model.schema import check_schema, require_validators
from perdure.model.secrets import without_secrets
from perdure.model.value import clean_text

MAX_BYTES = 1024 * 1024
READERS: dict[str, Callable[[Source], Any]] = {
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".toml": read_toml,
    ".json": read_json,
}


def load_definition(path: str | PathLike[str]) -> AgentDefinition:
    """Return the agent that a file defines. An agent without a name gets that of its file, without the suffix.

    `path` is a Markdown, YAML, TOML or JSON file.
    """
    return _load(Source(Path(path)))


def load_definitions(directory: str | PathLike[str]) -> dict[str, AgentDefinition]:
    """Return the agents of a `directory` by name.

    Its .md, .markdown, .yaml, .yml, .toml and .json files are read, except hidden ones.
    """
    found: dict[str, AgentDefinition] = {}
    files: dict[str, str] = {}
    for path in _definition_files(Path(directory)):
        source = Source(path)
        definition = _load(source)
        if definition.name in found:
            raise source.invalid(
                ("name",), f"the agent {definition.name!r} is defined in {files[definition.name]} too; rename one"
            )
        found[definition.name] = definition
        files[definition.name] = source.file
    return found


def _definition_files(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"{clean_text(str(directory))} cannot be read as a directory of agent definitions: {error.strerror}."
        ) from None
    return [p for p in entries if p.suffix.lower() in READERS and not p.name.startswith(".") and not p.is_dir()]


def _load(source: Source) -> AgentDefinition:
    reader = READERS.get(source.path.suffix.lower())
    if reader is None:
        allowed = ", ".join(READERS)
        raise ConfigurationError(f"{source.file} is not an agent definition by its suffix, which is one of {allowed}.")
    source.text = _text(source)
    plain = reader(source)
    if not isinstance(plain, dict):
        raise source.invalid((), f"expected a mapping of fields, got {_GOT[type(plain).__name__]}")
    return _definition(source, {"name": source.checked(("name",), source.path.stem), **plain})


def _text(source: Source) -> str:
    raw = _bytes(source)
    if len(raw) > MAX_BYTES:
        raise source.invalid((), f"an agent definition holds at most {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")  # editors on Windows write such a mark and line ends
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise source.invalid((), "this is not UTF-8; save it as UTF-8", line) from None
    if not text.strip():
        fields = ", ".join(_fields_of(AgentDefinition))
        raise source.invalid((), f"the file is empty; write at least one of the fields {fields}")
    return text


def _bytes(source: Source) -> bytes:
    try:
        if not source.path.is_file():  # a pipe would wait for ever
            raise ConfigurationError(f"No file is at {source.file}. Check the path of the agent definition.")
        with source.path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # one more than allowed: enough to see that it is too long
    except OSError as error:
        raise ConfigurationError(f"The agent definition {source.file} cannot be read: {error.strerror}.") from None


def _definition(source: Source, fields: dict[str, Any]) -> AgentDefinition:
    model = fields.get("model")
    _check_fields(source, (), fields, AgentDefinition)
    _check_fields(source, ("model",), model, ModelConfig)
    _check_fields(source, ("budget",), fields.get("budget"), ExecutionBudget)
    if isinstance(model, dict):  # a model without a name is refused like one whose name is blank
        fields = {**fields, "model": {"name": "", **model}}
    try:
        definition = msgspec.convert(fields, AgentDefinition)
    except msgspec.ValidationError as error:
        cause = error.__cause__  # the model's own checks name the field, and msgspec only the value that has it
        problem = cause if isinstance(cause, InvalidData) else invalid(error)
        where = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", problem.path))
        raise source.invalid(where, _in_words(problem.problem)) from None
    except ConfigurationError as error:  # readers have refused secret keys, so only the model's own checks are left
        url = model.get("base_url") if isinstance(model, dict) else None
        field = "base_url" if url and without_secrets(url) != url else "api_key_env"
        raise ConfigurationError(f"{source.at(('model', field))}: {error}") from None
    _check_output(source, definition)
    return definition


def _check_output(source: Source, definition: AgentDefinition) -> None:
    if definition.output is None:
        return
    require_validators()
    try:
        check_schema(definition.output)
    except ConfigurationError as error:
        raise source.invalid(("output",), str(error)) from None


def _check_fields(source: Source, where: Where, value: Any, kind: type[msgspec.Struct]) -> None:
    """Refuse unknown fields, and empty ones, which would count as left out."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key not in _fields_of(kind):
            known = ", ".join(_fields_of(kind))
            raise source.invalid((*where, key), f"no such field; the fields are {known}")
        if item is None:
            raise source.invalid((*where, key), f"got {_NOTHING}")


def _fields_of(kind: type[msgspec.Struct]) -> list[str]:
    return [field for field in kind.__struct_fields__ if field != "unknown"]


_NOTHING = "nothing; fill it in, or leave the field out"
_MOMENT = "a date and time with its time zone, such as 2030-01-31T18:00:00Z"
_ALLOWED = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "array": "a list of names",
    "object": "a mapping",
    "datetime": _MOMENT,
    "str | object": "the name of a model, or a mapping of its settings",
}
_GOT = {**_ALLOWED, "bool": "a boolean", "array": "a list", "list": "a list", "null": _NOTHING, "NoneType": "nothing"}
_EXPECTED = re.compile(r"Expected `(.*?)(?: \| null)?`, got `(.*)`")


def _in_words(problem: str) -> str:
    """Reword msgspec's message about a type for people who write such files. Values are not shown."""
    if problem == "Invalid RFC3339 encoded datetime":
        return f"expected {_MOMENT}"
    if problem == "Expected `datetime` with a timezone component":
        return f"expected {_MOMENT}; this one has no time zone"
    found = _EXPECTED.fullmatch(problem)
    if found is None:
        return problem
    hint = "; put it in quotes" if found[1] == "str" and found[2] in ("int", "float", "bool") else ""
    return f"expected {_ALLOWED[found[1]]}, got {_GOT[found[2]]}{hint}"
