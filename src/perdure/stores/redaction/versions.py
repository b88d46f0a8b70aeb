"""The heads of versions in which messages are replaced: what they say, and the values that they name by hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from perdure import codec
from perdure.redaction.replacement import Replacement
from perdure.stores.format.heads import INLINE
from perdure.stores.format.rows import Values, hash_of
from perdure.stores.redaction.bench import Version


def changed_versions(replacement: Replacement, versions: Iterable[Version]) -> Iterator[Version]:
    """Return the versions whose heads tell of the messages, with that replaced."""
    for version in versions:
        plain = codec.decode_plain(version.raw)
        if values := _replaced(replacement, plain, version.values):
            yield Version(version.number, msgspec.json.encode(plain), values)


def _replaced(replacement: Replacement, plain: dict[str, Any], values: Mapping[str, bytes]) -> Values:
    """Replace what a head says; the values that it names then, or none if it says nothing of the kind."""
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
    for name in ("parts", "hashed"):
        if not plain[name]:
            del plain[name]
    return kept if msgspec.json.encode(plain) != before else {}
