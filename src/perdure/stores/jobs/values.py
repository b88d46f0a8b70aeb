"""Reading the values that versions name by hash."""

from __future__ import annotations

from collections.abc import Container, Mapping

from perdure.errors import CorruptRecord, InvalidData
from perdure.stores.engine import Job, Select
from perdure.stores.format import packing
from perdure.stores.format.gathering import Gathering
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.rows import Values, hash_of, is_keyed


def gather(session_id: str, head: StoredHead, cached: Mapping[str, bytes] = {}) -> Job[Values]:
    """Return all values that a version names."""
    return (yield from gather_unmet(session_id, head, cached, ())).values


def gather_unmet(session_id: str, head: StoredHead, cached: Mapping[str, bytes], met: Container[str]) -> Job[Gathering]:
    """Return the values that a version names, without the blocks that were met before."""
    gathering = Gathering(head, met)
    for key in gathering:
        known = cached.get(key)
        gathering.put(key, (yield from read_value(session_id, key)) if known is None else known)
    return gathering


def read_value(session_id: str, key: str) -> Job[bytes]:
    rows = yield Select("value", ("body",), {"hash": key})
    return unpacked_value(session_id, key, rows[0][0] if rows else None)


def unpacked_value(session_id: str, key: str, stored: bytes | None) -> bytes:
    """Return a value as it was before it was packed. Raise CorruptRecord if it is missing, or is another one."""
    if stored is None:
        raise CorruptRecord(session_id, f"value {key}", "it is missing")
    try:
        value = packing.unpack(stored) if type(stored) is bytes else b""
    except InvalidData as error:
        raise CorruptRecord(session_id, f"value {key}", str(error)) from None
    # A keyed name cannot be checked without the key. That value was sealed, and its seal covers the name.
    if not is_keyed(key) and hash_of(value) != key:
        raise CorruptRecord(session_id, f"value {key}", "its hash does not match")
    return value
