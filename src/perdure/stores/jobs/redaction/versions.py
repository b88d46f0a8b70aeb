"""Redacted heads of versions: their own content, and the values that they name by hash."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from perdure import codec
from perdure.model.indexed import indexed_in
from perdure.redaction.replacement import Replacement
from perdure.stores.format.heads import FORMAT, INLINE
from perdure.stores.format.metadata import apart_in, parts_of, put_together, taken_apart
from perdure.stores.format.rows import Namer, Values, hash_of, operation_id


class Version(NamedTuple):
    """One version of a session: its head, and the parts that it names by hash. Blocks stay as they are."""

    number: int
    raw: bytes
    parts: Mapping[str, bytes]
    names_blocks: bool = False


def changed_version(replacement: Replacement, version: Version, name_of: Namer = hash_of) -> Version | None:
    """Return a version in which the messages' content is replaced; None if it has none of it."""
    plain = codec.decode_plain(version.raw)
    parts = _replaced(replacement, plain, version.parts, name_of)
    return Version(version.number, msgspec.json.encode(plain), parts) if parts else None


def next_version(raw: bytes, at: datetime, *, first_version: int | None = None) -> bytes:
    """Return the newest head as the head of a further version. `first_version` is the oldest one that is kept then."""
    plain = codec.decode_plain(raw)
    if first_version is not None:
        plain["info"]["first_version"] = first_version
    plain["info"] |= {"version": plain["info"]["version"] + 1, "updated_at": at.isoformat().replace("+00:00", "Z")}
    plain["op"] = operation_id()
    return msgspec.json.encode(plain)


def _replaced(replacement: Replacement, plain: dict[str, Any], values: Mapping[str, bytes], name_of: Namer) -> Values:
    """Replace content in a head. Return the parts that it names then, or nothing if the head has not changed."""
    before = msgspec.json.encode(plain)
    for holder, field in ((plain["info"], "name"), (plain["state"], "task")):
        if isinstance(holder.get(field), str):
            holder[field] = replacement.scrubbed(holder[field])
    plain.setdefault("parts", {})
    plain.setdefault("hashed", {})
    new = _replaced_metadata(replacement, plain, values, name_of)
    new |= _replaced_run(replacement, plain, values, name_of)
    for name in ("parts", "hashed"):
        if not plain[name]:
            del plain[name]
    if msgspec.json.encode(plain) == before:
        return {}
    every = {**values, **new}
    named = (plain["definition"], *plain.get("hashed", {}).values())
    return {key: every[key] for key in named if key in every}  # blocks are not among them


def _replaced_metadata(
    replacement: Replacement, plain: dict[str, Any], values: Mapping[str, bytes], name_of: Namer
) -> Values:
    """Replace content in the metadata of a head. Return the new values that it names then."""
    hashed, apart = plain["hashed"], apart_in(plain["hashed"])
    metadata = put_together(_part(plain, "metadata", values) or {}, apart, values)
    changed = replacement.metadata(metadata)
    if changed == metadata:
        return {}
    for part in parts_of(apart):
        del hashed[part]
    found, new = taken_apart(changed, name_of=name_of)
    hashed |= parts_of(found.apart)
    if found.apart:
        plain["format"] = FORMAT
    if "indexed" in plain["info"]:
        plain["info"]["indexed"] = indexed_in(changed, plain["info"]["indexed"])
    return {**new, **_put(plain, "metadata", found.rest, name_of)}


def _replaced_run(
    replacement: Replacement, plain: dict[str, Any], values: Mapping[str, bytes], name_of: Namer
) -> Values:
    """Replace content in the last run of a head. Return its new value, if the head names the run by hash."""
    run = _part(plain, "execution", values)
    if run is None or (changed := replacement.execution(run)) == run:
        return {}
    return _put(plain, "execution", msgspec.json.encode(changed), name_of)


def _part(plain: Mapping[str, Any], name: str, values: Mapping[str, bytes]) -> Any:
    hashed = plain["hashed"]
    return codec.decode_plain(values[hashed[name]]) if name in hashed else plain["parts"].get(name)


def _put(plain: Mapping[str, Any], name: str, raw: bytes, name_of: Namer) -> Values:
    """Replace a part of a head. A large one is named by its hash, and returned as a value."""
    parts, hashed = plain["parts"], plain["hashed"]
    parts.pop(name, None)
    hashed.pop(name, None)
    if len(raw) <= INLINE:
        parts[name] = codec.decode_plain(raw)
        return {}
    hashed[name] = name_of(raw)
    return {hashed[name]: raw}
