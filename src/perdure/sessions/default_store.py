"""The default store: named by the environment or a config file, or else in the user's data directory."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from perdure.errors import ConfigurationError

VARIABLE = "PERDURE_STORE"
KEYS_VARIABLE = "PERDURE_KEYS"
PROJECT_FILE = "perdure.toml"
KEYS = ("store", "owner", "model", "agent", "keys", "redact")
# Tools are code. Only the person who types the command may choose it, never a file in a directory.
_NO_TOOLS = (
    "names tools, which are code that would run unasked. Leave them out, and give --tools or --mcp when you mean it."
)


@dataclass(frozen=True)
class Chosen:
    """A value that was settled on, and the source that named it."""

    value: str
    by: str


def default_store() -> Chosen:
    """Return the URL of the store that PERDURE_STORE or a config file names, or of one in the data directory."""
    given = os.environ.get(VARIABLE)
    if given:
        return Chosen(as_url(given), VARIABLE)
    return configured("store") or Chosen(_sqlite_url(data_directory() / "sessions.db"), "default")


def default_ring() -> str | None:
    """Return the path of the key ring that PERDURE_KEYS or a config file names for the default store, or None."""
    given = os.environ.get(KEYS_VARIABLE)
    if given == "":
        # As on the command line: a variable that a script forgot to set must not leave everything unsealed.
        raise ConfigurationError(
            f"{KEYS_VARIABLE} is empty. Name a key ring, or unset it to write what nobody has sealed."
        )
    chosen = Chosen(given, KEYS_VARIABLE) if given else configured("keys")
    return chosen.value if chosen else None


def data_directory() -> Path:
    return _home("XDG_DATA_HOME", ".local/share") / "perdure"


def config_file() -> Path | None:
    """Return the nearest `perdure.toml` from here upwards, or else the user's own, or None."""
    here = Path.cwd()
    candidates = [folder / PROJECT_FILE for folder in (here, *here.parents)]
    candidates.append(_home("XDG_CONFIG_HOME", ".config") / "perdure" / "config.toml")
    return next((path for path in candidates if path.is_file()), None)


def configured(name: str) -> Chosen | None:
    """Return what the config file says, and its path, or None if no config file says it."""
    path = config_file()
    if path is None:
        return None
    value = read_config(path).get(name)
    if value is None:
        return None
    if name == "store":
        value = as_url(value, path.parent)
    return Chosen(str(path.parent / value) if name in ("agent", "keys") else value, str(path))


def read_config(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}. Correct it, or move it away.") from None
    for key, value in found.items():
        if key in ("tools", "mcp"):
            raise ConfigurationError(f"{path} {_NO_TOOLS}")
        if key not in KEYS or not isinstance(value, str):
            raise ConfigurationError(f"{path}: {key!r} is not understood. It may set {', '.join(KEYS)}, each a text.")
    return found


def as_url(given: str, folder: Path = Path()) -> str:
    """Return a store's URL, with its path relative to a folder. The path of a database file is accepted as well."""
    scheme, found, rest = given.partition("://")
    if not found and given.endswith((".db", ".sqlite", ".sqlite3")):
        return _sqlite_url(folder / Path(given).expanduser())
    path, asked, options = rest.partition("?")
    if scheme == "sqlite" and path.startswith("/"):
        return _sqlite_url(folder / unquote(path[1:])) + asked + options
    return f"file://{quote(str(folder / unquote(path)))}{asked}{options}" if scheme == "file" and path else given


def _sqlite_url(path: Path) -> str:
    return f"sqlite:///{quote(str(path))}"


def path_of(url: str) -> Path | None:
    """Return the path of a store on this machine, or None for a store that has none."""
    scheme, _, rest = url.partition("://")
    path = rest.partition("?")[0]
    return Path(unquote(path[1:] if scheme == "sqlite" else path)) if scheme in ("sqlite", "file") else None


def _home(variable: str, fallback: str) -> Path:
    given = os.environ.get(variable, "")
    # The XDG specification says that a relative path has to be ignored.
    return Path(given) if given.startswith("/") else Path.home() / fallback
