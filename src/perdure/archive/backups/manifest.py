"""The manifest of a backup: a small file that is written last, and has its own checksum."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from perdure.errors import BackupDamaged
from perdure.stores.copies import Outline

FORMAT = 1
SUFFIX = ".json"


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A backup of a store."""

    id: str
    """The id, which begins with the time."""
    store: str
    """The id of its store. All backups of one store are a series."""
    engine: str
    """The kind of the store."""
    schema: int
    """The number of the store's schema."""
    release: str
    """The release of perdure that has made it."""
    at: datetime
    """The time at which it was made."""
    counts: Mapping[str, int]
    """The number of rows in each table."""
    bytes: int
    """The bytes that a restore writes."""
    added: int
    """The bytes that this backup has added to the directory, which had the rest already."""
    chunks: int
    """The number of chunks that it is made of."""
    catalog: tuple[str, ...]
    """The chunks that say which chunks the parts are made of."""
    facts: Mapping[str, Any] = {}
    """Facts that the engine needs to restore it."""
    format: int = FORMAT
    """The number of the format of the directory."""

    @property
    def outline(self) -> Outline:
        """The facts that an engine needs before it restores the backup."""
        return Outline(engine=self.engine, store=self.store, schema=self.schema, counts=self.counts, facts=self.facts)


class _File(msgspec.Struct, frozen=True):
    sha256: str
    backup: msgspec.Raw


def encoded(backup: Backup) -> bytes:
    raw = msgspec.json.encode(backup)
    return msgspec.json.encode(_File(sha256(raw).hexdigest(), msgspec.Raw(raw))) + b"\n"


def decoded(path: Path, raw: bytes) -> Backup:
    """Return a backup. Raise BackupDamaged if its file has changed since it was written."""
    try:
        found = msgspec.json.decode(raw, type=_File)
        body = bytes(found.backup)
        # The whole file is compared, since the checksum does not cover the bytes between the fields.
        if raw != msgspec.json.encode(_File(sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n":
            raise BackupDamaged(path, "its checksum does not match")
        number = msgspec.json.decode(body, type=_Format).format
        if number > FORMAT:
            raise BackupDamaged(path, f"it has format {number}; this release knows up to {FORMAT}. Upgrade perdure")
        backup = msgspec.json.decode(body, type=Backup)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BackupDamaged(path, f"it cannot be read ({error})") from None
    if backup.id != path.name.removesuffix(SUFFIX):
        raise BackupDamaged(path, f"it is the manifest of backup {backup.id!r}")
    return backup


class _Format(msgspec.Struct, frozen=True):
    format: int = FORMAT
