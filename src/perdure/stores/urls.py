"""Stores by their URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.model.checks import expect, expect_count
from perdure.model.value import kind_of
from perdure.protocols import KeyRing, SessionStore

_FORMS = (
    "memory://, file://directory, sqlite:///file.db (sqlite:////absolute/file.db) or postgresql://user@host/database"
)


def store_of(
    url: str | SessionStore, *, cache: int = 128, commit_in_loop: bool = False, keys: KeyRing | None = None
) -> SessionStore:
    """Return the store that a `url` names, not opened yet. A store is returned as it is.

    `cache` is the number of sessions that it keeps in memory. `commit_in_loop` is for a SQLite file whose URL does not
    say it: see `SqliteStore`. With `keys`, new rows are sealed. Only a SQLite file or PostgreSQL can be sealed.
    """
    expect_count(cache, "$.cache")
    expect(commit_in_loop, bool, "$.commit_in_loop")
    if isinstance(url, SessionStore):
        if keys is not None:
            kind = type(url).__name__
            raise ConfigurationError(f"This store was made without these keys. Give them to it: `{kind}(…, keys=…)`.")
        return url
    if not isinstance(url, str):
        raise ConfigurationError(f"A store is named by a URL: {_FORMS}. This is {kind_of(url)}.")
    scheme, found, rest = url.partition("://")
    if not found or scheme not in (*_OPENERS, "sqlite", "postgresql", "postgres"):
        raise ConfigurationError(f"{_without_password(url)!r} names no store. Use {_FORMS}.")
    if keys is not None and scheme in _UNSEALED:
        raise ConfigurationError(f"{_UNSEALED[scheme]} Keep sealed sessions in sqlite:///file.db or postgresql://….")
    if scheme == "sqlite":
        return _sqlite(url, rest, cache, commit_in_loop, keys)
    if scheme in ("postgres", "postgresql"):
        return _postgres(url, rest, cache, keys)
    return _OPENERS[scheme](url, rest, cache)


def accept_lost_commits(url: str) -> Path | None:
    """Give up the commits that the log of a SQLite file has lost. Return the path of the damaged log if it is kept."""
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite":
        raise ConfigurationError(f"{_without_password(url)!r} is not a SQLite file, and has no log that loses commits.")
    from perdure.stores.sqlite.lost import accept_lost_commits as accept

    return accept(_path(url, rest.partition("?")[0].removeprefix("/")))


_UNSEALED = {
    "file": "The files of a file:// store are for people to read, and cannot be sealed.",
    "memory": "A memory:// store has nothing at rest that keys could seal.",
}


def _memory(url: str, rest: str, cache: int) -> SessionStore:
    # Each store is imported only when a URL names it: they load libraries that the others do not need.
    from perdure.stores.memory import MemoryStore

    if rest:
        raise ConfigurationError(f"memory:// has nothing behind it; {_without_password(rest)!r} is too much.")
    return MemoryStore()


def _file(url: str, rest: str, cache: int) -> SessionStore:
    from perdure.stores.file import FileStore

    return FileStore(_path(url, rest))


def _sqlite(url: str, rest: str, cache: int, commit_in_loop: bool, keys: KeyRing | None) -> SessionStore:
    from perdure.stores.sqlite import SqliteStore

    # As elsewhere, three slashes come before a relative path, and four before an absolute one.
    if not rest.startswith("/"):
        raise ConfigurationError(
            f"{_without_password(url)!r} has no path. Use sqlite:///file.db, or sqlite:////absolute/file.db."
        )
    path, asked, option = rest[1:].partition("?")
    if asked:
        if option not in _COMMITS_IN_LOOP:
            raise ConfigurationError(
                f"{_without_password(url)!r} has an option that a SQLite file does not take in a URL. There is "
                f"{' and '.join(_COMMITS_IN_LOOP)}; give others to SqliteStore itself. A ? in a path is written %3F."
            )
        commit_in_loop = _COMMITS_IN_LOOP[option]
    return SqliteStore(_path(url, path), cache=cache, commit_in_loop=commit_in_loop, keys=keys)


_COMMITS_IN_LOOP = {"commit_in_loop=on": True, "commit_in_loop=off": False}


def _unquoted(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def _path(url: str, rest: str) -> str:
    if "?" in rest or "#" in rest:
        raise ConfigurationError(
            f"{_without_password(url)!r} has options after its path, and this kind of store takes none. "
            "Give them to the store itself; a ? or # that belongs to the path is written %3F or %23."
        )
    path = _unquoted(rest)
    if not path or "\0" in path:
        raise ConfigurationError(f"{_without_password(url)!r} has no path. Use {_FORMS}.")
    return path


def _postgres(url: str, rest: str, cache: int, keys: KeyRing | None) -> SessionStore:
    try:
        from perdure.stores.postgres import PostgresStore
    except ImportError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'perdure[postgres]'.") from None
    address, _, asked = url.partition("?")
    options = [each for each in asked.split("&") if each]
    schemas = [_unquoted(each.removeprefix("schema=")) for each in options if each.startswith("schema=")]
    if len(schemas) > 1:
        raise ConfigurationError(f"{_without_password(url)!r} names {len(schemas)} schemas; a store is in one.")
    # The driver reads the rest. It does not know the option `schema`.
    others = "&".join(each for each in options if not each.startswith("schema="))
    _check_known(each.partition("=")[0] for each in options if not each.startswith("schema="))
    dsn = f"{address}?{others}" if others else address
    if not schemas:
        return PostgresStore(dsn, cache=cache, keys=keys)
    return PostgresStore(dsn, schema=schemas[0], cache=cache, keys=keys)


def _check_known(names: Iterable[str]) -> None:
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} | {"ssl"}
    for name in names:
        if name not in known:
            raise ConfigurationError(f"PostgreSQL has no option {name!r}. Beside libpq's own there is `schema`.")


_OPENERS: dict[str, Callable[[str, str, int], SessionStore]] = {
    "memory": _memory,
    "file": _file,
}


def _without_password(url: str) -> str:
    """Return a URL that can be shown. A password is before the last @, after a question mark, or in `password=…`."""
    _, found, place = url.rpartition("@")
    shown, is_cut, _ = (f"…@{place}" if found else url).partition("?")[0].partition("password")
    return f"{shown}password…" if is_cut else shown
