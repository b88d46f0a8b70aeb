"""Images and files in a directory of sessions: `blobs/{hash}` has the bytes whose SHA-256 is its name.

A process that writes or removes them holds one lock, from before it looks until the logs that name them are written.
Every process takes it after the locks of sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.errors import CorruptRecord, UnreadableFile
from perdure.stores.engine import Count, Delete, Insert, Select, Statement, Where
from perdure.stores.folder import Folder, NotAFile, temporary
from perdure.stores.tables import Tables

LOCK = ".blobs"
DIRECTORY = "blobs"
_NAME = re.compile("[0-9a-f]{64}")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.tmp")


class Blobs:
    """The table `blob`, whose rows are files. The changes of a job take effect with its commit."""

    def __init__(self, sessions: Path) -> None:
        self._path = sessions / DIRECTORY
        self._opened: Folder | None = None
        self._new: dict[str, bytes] = {}
        self._written: set[str] = set()
        self._gone: set[str] = set()
        self._leftovers: set[str] = set()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def begin(self) -> None:
        self._new.clear()
        self._written.clear()
        self._gone.clear()
        self._leftovers.clear()

    @property
    def is_changed(self) -> bool:
        return bool(self._new or self._gone or self._leftovers)

    def answer(self, statement: Statement) -> list[Any]:
        match statement:
            case Insert(_, columns, rows):
                self._insert(columns, rows)
            case Delete(_, where):
                gone = {key for (key,) in self._rows(Select("blob", ("hash",), where))}
                self._gone |= gone
                for key in gone & self._new.keys():
                    del self._new[key]
            case Select():
                return self._rows(statement)
            case Count(_, where):
                return [(len(self._rows(Select("blob", ("hash",), where))),)]
            case _:
                raise AssertionError("what is named by its bytes is never changed")
        return [(None,)]

    def _insert(self, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
        for row in rows:
            given = dict(zip(columns, row, strict=True))
            self._new[given["hash"]] = given["body"]
            self._gone.discard(given["hash"])

    def _rows(self, asked: Select) -> list[Any]:
        """Return the rows asked for. Bytes are read only if the statement asks for them."""
        few = Tables()
        names = {*asked.columns, *(key.partition(" ")[0] for key in asked.where)}
        for key in self._candidates(asked.where):
            body = self._body(key) if names & {"size", "body"} else b""
            if body is not None:
                few.tables["blob"].put({"hash": key, "size": len(body), "body": body}, ())
        return few.answer(asked)

    def _candidates(self, where: Where) -> Iterable[str]:
        if "hash" in where or "hash in" in where:
            wanted = {where["hash"]} if "hash" in where else {*where["hash in"]}
            return {key for key in wanted if self._has(key)}
        folder = self._folder()
        on_disk = folder.names() if folder is not None else ()
        self._leftovers |= {name for name in on_disk if _TEMPORARY.fullmatch(name)}
        return ({name for name in on_disk if _NAME.fullmatch(name)} | self._new.keys()) - self._gone

    def _has(self, key: str) -> bool:
        if key in self._new or key in self._gone:
            return key in self._new
        folder = self._folder() if _NAME.fullmatch(key) else None
        return folder is not None and folder.size(key) is not None

    def _body(self, key: str) -> bytes | None:
        folder = self._folder()
        if key in self._new or folder is None:
            return self._new.get(key)
        try:
            return folder.read(key)
        except NotAFile as error:
            raise CorruptRecord(None, f"file {key}", str(error.strerror)) from None

    def _folder(self, *, create: bool = False) -> Folder | None:
        """Return the directory; None while no session has had a file, and it does not exist."""
        if self._opened is None and (create or self._path.is_dir()):
            self._opened = Folder(self._path)
        return self._opened

    def write(self) -> None:
        """Write new bytes to the disk, before any log names them."""
        folder = self._folder(create=bool(self._new))
        for key, body in self._new.items():
            assert folder is not None, "it has been created"
            if folder.read(key) != body:  # a damaged file is repaired when the same bytes are written again
                self._written.add(key)
                folder.replace(key, body)

    def take_back(self, sessions: Folder) -> None:
        """Remove what a failed operation has written, except for bytes that a log already names."""
        folder = self._folder()
        with suppress(OSError, UnreadableFile):  # `gc` removes what stays
            for key in self._written - _named_in(sessions, self._written):
                assert folder is not None, "something was written there"
                folder.discard(key)

    def remove(self, sessions: Folder) -> None:
        """Remove the bytes that no log names by now. Another session may have begun to name some."""
        gone = self._gone - _named_in(sessions, self._gone)
        folder = self._folder()
        if folder is None or not (gone or self._leftovers):
            return
        folder.remove(*gone, *map(temporary, gone), *self._leftovers)
        folder.sync()


def is_name(name: str) -> bool:
    """Tell whether a file of this name holds an image or a file."""
    return _NAME.fullmatch(name) is not None


def _named_in(sessions: Folder, hashes: Iterable[str]) -> set[str]:
    """Return those of some hashes that a log contains."""
    wanted, found = {key: key.encode() for key in hashes}, set[str]()
    for name in sessions.names() if wanted else ():
        if name.endswith(".jsonl"):
            raw = sessions.read(name) or b""
            found |= {key for key, mark in wanted.items() if mark in raw}
    return found
