"""A check of the store that a caller has given."""

from __future__ import annotations

from typing import TypeVar

from perdure.errors import InvalidData
from perdure.model.value import brief
from perdure.protocols import ArchivingStore, SessionStore

T = TypeVar("T", bound=SessionStore)


def checked_store(given: T, where: str) -> T:
    """Return a store. Raise InvalidData if it is something else."""
    return _checked(given, SessionStore, where, "a store")


def checked_archive(given: T, where: str) -> T:
    """Return a store whose sessions can be moved. Raise InvalidData if it is something else."""
    return _checked(given, ArchivingStore, where, "a store with dump() and restore()")


def _checked(given: T, kind: type, where: str, wanted: str) -> T:
    if not isinstance(given, kind):
        raise InvalidData(where, f"expected {wanted}, such as SqliteStore(…) or sessions.store, got {brief(given)}")
    return given
