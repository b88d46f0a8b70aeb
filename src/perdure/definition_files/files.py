"""The files and directories that agents are defined in."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from perdure.definition_files.fields import AGENT, definition_in
from perdure.definition_files.json_reader import read_json
from perdure.definition_files.markdown_reader import read_markdown
from perdure.definition_files.source import Source, kind_of
from perdure.definition_files.toml_reader import read_toml
from perdure.definition_files.yaml_reader import read_yaml
from perdure.errors import ConfigurationError
from perdure.model.definition import AgentDefinition
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
    """The agent that a file defines. An agent without a name is called as its file, less the suffix."""
    return definition_in(_read(Path(path)))


def load_definitions(directory: str | PathLike[str]) -> dict[str, AgentDefinition]:
    """The agents of a directory by name: of its .md, .markdown, .yaml, .yml, .toml and .json files, but hidden ones."""
    found: dict[str, AgentDefinition] = {}
    files: dict[str, str] = {}
    for path in _definition_files(Path(directory)):
        source = _read(path)
        definition = definition_in(source)
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


def _read(path: Path) -> Source:
    source = Source(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        allowed = ", ".join(READERS)
        raise ConfigurationError(f"{source.file} is not an agent definition by its suffix, which is one of {allowed}.")
    source.text = _text(source, path)
    plain = reader(source)
    if not isinstance(plain, dict):
        raise source.invalid((), f"expected a mapping of fields, got {kind_of(plain)}")
    source.fields = {"name": path.stem, **plain}
    return source


def _text(source: Source, path: Path) -> str:
    raw = _bytes(source, path)
    if len(raw) > MAX_BYTES:
        raise source.invalid((), f"an agent definition holds at most {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise source.invalid((), "this is not UTF-8; save it as UTF-8", line) from None
    if not text.strip():
        raise source.invalid((), f"the file is empty; write at least one of the fields {', '.join(AGENT)}")
    return text


def _bytes(source: Source, path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise ConfigurationError(f"There is no file {source.file}. Check the path of the agent definition.")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"The agent definition {source.file} cannot be read: {error.strerror}.") from None
