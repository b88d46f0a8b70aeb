"""Sessions without their views: the heads of their newest versions, with definitions and metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from perdure.errors import CorruptRecord
from perdure.model.definition import AgentDefinition
from perdure.protocols import SessionHead
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Values
from perdure.stores.jobs.claiming import require_absent
from perdure.stores.jobs.values import unpacked_value

Definitions = MutableMapping[str, AgentDefinition]
"""Definitions at hand, by their hashes. Those that are decoded are added."""


def heads(session_ids: Iterable[str], definitions: Definitions) -> Job[dict[str, SessionHead]]:
    """Return the heads of the sessions that exist. Raise CorruptRecord if one of them is damaged."""
    found: dict[str, StoredHead] = {}
    for session_id in session_ids:
        rows = yield Select("session", ("sid", "version"), {"id": str(session_id)})
        if rows:
            found[session_id] = yield from _newest(session_id, *rows[0])
        else:
            yield from require_absent(session_id)
    unread = unread_values(found, definitions)
    rows = (yield Select("value", ("hash", "body"), {"hash in": [*unread]})) if unread else []
    return assembled(found, unpacked(unread, dict(rows)), definitions)


def _newest(session_id: str, sid: int, version: int) -> Job[StoredHead]:
    rows = yield Select("head", ("version", "crc", "body"), {"sid": sid, "version >=": version}, order="version")
    return newest_of(session_id, sid, version, rows)


def newest_of(session_id: str, sid: int, version: int, rows: Sequence[Sequence[Any]]) -> StoredHead:
    """Return the head that a session's row names. `rows` has it and any newer ones, which would be damage."""
    if [row[0] for row in rows] != [version]:
        raise CorruptRecord(session_id, f"head {version}", "it is missing, or is not the last one")
    ((_, crc, body),) = rows
    return StoredHead(unpacked_head(body, crc, session_id, sid, version), session_id, version)


def unread_values(found: Mapping[str, StoredHead], definitions: Definitions) -> dict[str, str]:
    """Return the hashes of values that heads name and that are not at hand, each with a session that names it."""
    named = {key: session_id for session_id, head in found.items() for key in head.named_beside_view()}
    return {key: session_id for key, session_id in named.items() if key not in definitions}


def unpacked(unread: Mapping[str, str], bodies: Mapping[str, bytes]) -> Values:
    """Return values as they were before they were packed."""
    return {key: unpacked_value(session_id, key, bodies.get(key)) for key, session_id in unread.items()}


def assembled(found: Mapping[str, StoredHead], values: Values, definitions: Definitions) -> dict[str, SessionHead]:
    """Return heads with their definitions and metadata. Sessions share definitions, so each is decoded once."""
    return {session_id: head.without_view(values, definitions) for session_id, head in found.items()}
