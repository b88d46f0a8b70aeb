"""The oldest version of a session that is kept: its first, unless older ones were forgotten."""

from __future__ import annotations

from perdure.errors import CorruptRecord
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head


def oldest_head(session_id: str, sid: int) -> Job[StoredHead]:
    """Return the oldest head. Raise CorruptRecord if it is damaged, or is not the one that should be the oldest."""
    rows = yield Select("head", ("version", "crc", "body"), {"sid": sid}, order="version", limit=1)
    for version, crc, body in rows:
        head = StoredHead(unpacked_head(body, crc, session_id, sid, version), session_id, version)
        if version == 1 or version == (yield from first_version(session_id, sid)):
            return head
    raise CorruptRecord(session_id, "head 1", "it is missing")


def first_version(session_id: str, sid: int) -> Job[int]:
    """Return the number of the oldest version, which the newest one names."""
    rows = yield Select("head", ("version", "crc", "body"), {"sid": sid}, order="-version", limit=1)
    for version, crc, body in rows:
        raw = unpacked_head(body, crc, session_id, sid, version)
        return decode_info(raw, session_id, version).first_version
    raise CorruptRecord(session_id, "head 1", "it is missing")
