"""Lines of forks: the session that a session was forked from, the one before that, and so on."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.errors import CorruptRecord, InvalidData, KeyUnavailable
from perdure.model.ids import SessionId
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.format.views import stretches_of_view
from perdure.stores.jobs.claiming import sid_of, stored_id
from perdure.stores.jobs.oldest import oldest_head
from perdure.stores.jobs.saving import owners_of_logs
from perdure.stores.jobs.values import gather

Parents = dict[str, str | CorruptRecord | None]
"""The parents of forks, by the forks' ids. A sub-agent's session has a parent too, but is not a fork of it.

If the parent is not known because of damage, that is in its place. It is raised if a line depends on it.
"""


def line_of(session_id: SessionId) -> Job[list[SessionId]]:
    """Return a session's line, oldest first. If its beginning is erased, the oldest known name comes first."""
    yield from sid_of(session_id)
    known: Parents = yield from _parents_near(session_id)
    line, parent = {str(session_id): None}, _sound(known.get(session_id))
    # A session that was erased and created again may be a fork of its own fork.
    while parent is not None and parent not in line:
        line[parent] = None
        if parent not in known:
            known |= yield from _parents_near(parent)
        parent = _sound(known.get(parent))
    return [stored_id(each) for each in line if each != session_id][::-1]


def _sound(parent: str | CorruptRecord | None) -> str | None:
    if isinstance(parent, CorruptRecord):
        raise parent
    return parent


def _parents_near(session_id: str) -> Job[Parents]:
    """Return the parents of a session and of all sessions whose messages it began with.

    A fork begins with messages of most of its line, so these are looked up together.
    """
    rows = yield Select("session", ("sid",), {"id": session_id})
    if not rows:
        return {}
    sid = rows[0][0]
    owners = yield from owners_of_logs((yield from _logs_shown(session_id, sid)))
    found: Parents = yield from _parents_of({sid, *owners.values()})
    if session_id not in found:
        found[session_id] = CorruptRecord(session_id, "header", "it has another id, or none")
    return found


def _logs_shown(session_id: str, sid: int) -> Job[set[int | str]]:
    """Return the logs that a session's first version names; none if that cannot be read."""
    try:
        head = yield from oldest_head(session_id, sid)
        values = yield from gather(session_id, head)
        return {log for log, _, _ in stretches_of_view(head, values)}
    except (CorruptRecord, KeyUnavailable, InvalidData, LookupError, TypeError, ValueError):
        return set()  # the line is then found one by one, and the check reports the damage


def _parents_of(sids: set[int]) -> Job[Parents]:
    numbers = sorted(sids)
    rows = yield Select("session", ("sid", "id", "parent"), {"sid in": numbers})
    firsts: Mapping[int, tuple[int | None, bytes]] = {
        sid: (crc, body)
        for sid, crc, body in (
            yield Select("head", ("sid", "crc", "body"), {"sid in": numbers, "version": 1}, lenient=True)
        )
    }
    found: Parents = {}
    for sid, session_id, parent in rows:
        try:
            found[session_id] = yield from _parent_of_fork(session_id, sid, parent, firsts.get(sid))
        except CorruptRecord as damage:
            found[session_id] = damage
    return found


def _parent_of_fork(
    session_id: str, sid: int, noted: str | None, first: tuple[int | None, bytes] | None
) -> Job[str | None]:
    """Return the parent of a fork; None for a session that is not one. Raise CorruptRecord if the head has another."""
    if first is None:  # it was forgotten, or an index has lost it, which is an error then
        info = (yield from oldest_head(session_id, sid)).head.info
    else:
        raw = unpacked_head(first[1], first[0], session_id, sid, 1)
        # Decoding takes longer than everything else here, and few heads have this word anywhere.
        if b"spawn_ref" not in raw and _says(raw, noted):
            return noted
        info = decode_info(raw, session_id, 1)
    if info.parent_id != noted:
        raise CorruptRecord(session_id, "header", "it does not agree with its head about the parent")
    return noted if info.spawn_ref is None else None


def _says(raw: bytes, parent: str | None) -> bool:
    """Tell whether a head surely has this parent. If it cannot be told without decoding, return False."""
    return b'"parent_id"' not in raw if parent is None else b'"parent_id":"%b"' % parent.encode() in raw
