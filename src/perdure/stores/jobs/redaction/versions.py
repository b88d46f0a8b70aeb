"""The heads of versions in which messages are replaced: what they say, and the values that they name by hash."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.model.indexed import indexed_in
from perdure.redaction.replacement import Replacement
from perdure.stores.format.heads import INLINE
from perdure.stores.format.rows import Values, hash_of, operation_id


class Version(NamedTuple):
    """One version of a session: its head, and the parts that it names by hash. Blocks stay as they are."""

    number: int
    raw: bytes
    parts: Mapping[str, bytes]
    names_blocks: bool = False


def changed_version(replacement: Replacement, version: Version) -> Version | None:
    """Return a version with all replaced that its head tells of the messages; None if it tells nothing."""
    plain = codec.decode_plain(version.raw)
    parts = _replaced(replacement, plain, version.parts)
    return Version(version.number, msgspec.json.encode(plain), parts) if parts else None


def next_version(raw: bytes, at: datetime, *, first_version: int | None = None) -> bytes:
    """Return the newest head as the head of a further version, which may say that another one is the oldest now."""
    plain = codec.decode_plain(raw)
    if first_version is not None:
        plain["info"]["first_version"] = first_version
    plain["info"] |= {"version": plain["info"]["version"] + 1, "updated_at": at.isoformat().replace("+00:00", "Z")}
    plain["op"] = operation_id()
    return msgspec.json.encode(plain)


def _replaced(replacement: Replacement, plain: dict[str, Any], values: Mapping[str, bytes]) -> Values:
    """Replace what a head says. Return the parts that it names then, or none if it says nothing of the kind."""
    before = msgspec.json.encode(plain)
    kept = dict(values)
    for holder, field in ((plain["info"], "name"), (plain["state"], "task")):
        if isinstance(holder.get(field), str):
            holder[field] = replacement.scrubbed(holder[field])
    parts, hashed = plain.setdefault("parts", {}), plain.setdefault("hashed", {})
    for name, change in (("metadata", replacement.scrubbed), ("execution", replacement.execution)):
        part = codec.decode_plain(values[hashed[name]]) if name in hashed else parts.get(name)
        if part is None or (changed := change(part)) == part:
            continue
        raw = msgspec.json.encode(changed)
        kept.pop(hashed.pop(name, ""), None)
        parts.pop(name, None)
        if len(raw) > INLINE:
            hashed[name] = hash_of(raw)
            kept[hashed[name]] = raw
        else:
            parts[name] = changed
        if name == "metadata" and "indexed" in plain["info"]:
            plain["info"]["indexed"] = indexed_in(changed, plain["info"]["indexed"])
    for name in ("parts", "hashed"):
        if not plain[name]:
            del plain[name]
    return kept if msgspec.json.encode(plain) != before else {}
