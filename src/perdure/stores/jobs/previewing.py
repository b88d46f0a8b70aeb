"""Previews of sessions: a few words from the beginning of a log, and from the end of a view.

Previews are not stored, so no save pays for them, and a redaction needs no step for them. A preview reads the head of
a session's newest version and two messages. It reads more only if these have no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.errors import CorruptRecord, KeyUnavailable
from perdure.model.message import Message
from perdure.model.session import forked_from
from perdure.model.usage import Usage
from perdure.model.words import first_words
from perdure.protocols import Preview
from perdure.stores.engine import Job, Select
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Stretch, Values, decode_row
from perdure.stores.jobs.loading import decoded, is_message_sound, read_messages
from perdure.stores.jobs.values import unpacked_value

TITLE, LAST_WORDS = 60, 120
"""The most characters that are shown."""
_FEW = 8
"""The most messages that are read to find one with a text."""
COLUMNS_OF_ROW = ("id", "sid", "log", "msg_end", "version")


class Standing(NamedTuple):
    """A session's row and its newest head. For a fork, or a session that has forgotten, also its oldest head."""

    id: str
    sid: int
    log: int | str
    msg_end: int
    head: StoredHead
    usage: Usage | None
    first: StoredHead | None

    @property
    def has_forgotten(self) -> bool:
        return self.head.head.info.first_version > 1

    @classmethod
    def of(cls, row: Sequence[Any], newest: Sequence[Any], first: Sequence[Any] | None) -> Standing:
        """Return a session from its row and its heads, each as (crc, body). An empty head is missing."""
        session_id, sid, log, msg_end, version = row
        head = _head(session_id, sid, version, newest)
        began = None if first is None else _head(session_id, sid, head.head.info.first_version, first)
        return cls(session_id, sid, log, msg_end, head, head.usage, began)


def _head(session_id: str, sid: int, version: int, row: Sequence[Any]) -> StoredHead:
    if not row or row[1] is None:
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    crc, body = row
    return StoredHead(unpacked_head(body, crc, session_id, sid, version), session_id, version)


def previews(
    session_ids: Iterable[str], cached: Mapping[str, bytes], is_strict: bool = True
) -> Job[dict[str, Preview]]:
    """Return a preview of each session that exists.

    If it is strict, damage is raised. Others may have written or erased between two statements, so the engine looks
    again. Otherwise a damaged session is previewed as far as it can be read.
    """
    found: dict[str, Preview] = {}
    for session_id in session_ids:
        try:
            standing = yield from _standing(session_id)
        except (CorruptRecord, KeyUnavailable) as damage:
            if is_strict:
                raise
            found[session_id] = Preview(damage=damage)
            continue
        if standing is not None:
            title = yield from caught(title_of(standing, cached), is_strict)
            view = yield from caught(view_of(standing, cached, is_strict), is_strict)
            found[session_id] = previewed(standing, title, view)
    return found


def _standing(session_id: str) -> Job[Standing | None]:
    rows = yield Select("session", COLUMNS_OF_ROW, {"id": str(session_id)})
    if not rows:
        return None
    _, sid, _, _, version = row = rows[0]
    newest = yield from _row_of_head(sid, version)
    standing = Standing.of(row, newest, None)
    info = standing.head.head.info
    if forked_from(info) is None and info.first_version == 1:
        return standing
    return Standing.of(row, newest, (yield from _row_of_head(sid, info.first_version)))


def _row_of_head(sid: int, version: int) -> Job[Sequence[Any]]:
    rows = yield Select("head", ("crc", "body"), {"sid": sid, "version": version})
    return rows[0] if rows else ()


class View(msgspec.Struct, frozen=True):
    """The part of a preview that is read from a session's view."""

    count: int | None
    last_words: str | None
    damage: CorruptRecord | KeyUnavailable | None = None


def caught(job: Job[Any], is_strict: bool) -> Job[Any]:
    """Drive a job, and return the damage that it raises. If it is strict, raise the damage."""
    try:
        return (yield from job)
    except (CorruptRecord, KeyUnavailable) as damage:
        if is_strict:
            raise
        return damage


_Unread = CorruptRecord | KeyUnavailable


def previewed(session: Standing, title: str | _Unread | None, view: View | _Unread) -> Preview:
    """Return a preview from the results of its two jobs."""
    seen = View(None, None, view) if isinstance(view, _Unread) else view
    words, damage = (None, title) if isinstance(title, _Unread) else (title, seen.damage)
    return Preview(words, seen.last_words, seen.count, session.usage, damage)


def title_of(session: Standing, cached: Mapping[str, bytes]) -> Job[str | None]:
    """Return a session's name, or the first words of the log that it began with.

    That is its own log, or for a fork the one that its first version showed first. So only `forget` can change them,
    unless its own log is empty.
    """
    name = session.head.head.info.name
    if name is not None:
        return name
    shown = [] if session.first is None else (yield from _shown(session.id, session.first, cached))
    if session.has_forgotten:
        return (yield from _title_of_oldest(session, shown or (yield from _shown(session.id, session.head, cached))))
    log, start, _ = shown[0] if shown else (session.log, 0, 0)
    for low, high in ((0, 1), (1, _FEW)):
        said = yield from _beginning(session, log, low, high)
        if title := _title(said):
            return title
    if not session.msg_end and not shown:  # it may show messages of others, such as the copy of a thread of LangGraph
        return (yield from _title_of_oldest(session, (yield from _shown(session.id, session.head, cached))))
    # If a log's session was erased, its beginning may be gone. Then the fork's own beginning is tried.
    return _title((yield from _beginning(session, log, start, start + _FEW))) if start else None


def _title_of_oldest(session: Standing, shown: Sequence[Stretch]) -> Job[str | None]:
    """Return the first words that a version shows. The beginning of the log may have been forgotten."""
    for log, start, stop in shown[:1]:
        return _title((yield from read_messages(session.id, log, start, min(stop, start + _FEW))))
    return None


def _beginning(session: Standing, log: int | str, low: int, high: int) -> Job[list[Message]]:
    """Return the messages near a log's beginning. In another session's log, some may have been erased."""
    if log == session.log:
        high = min(high, session.msg_end)
        return (yield from read_messages(session.id, log, low, high)) if low < high else []
    rows = yield Select("msg", ("pos", "crc", "body"), {"log": log, "pos >=": low, "pos <": high}, order="pos")
    for pos, crc, body in rows:
        if not is_message_sound(log, pos, crc, body):
            raise CorruptRecord(session.id, f"message {pos} of log {log}", "its checksum does not match")
    return [decode_row(body, session.id, f"message {pos} of log {log}") for pos, _, body in rows]


def _title(messages: Iterable[Message]) -> str | None:
    texts = (first_words(message.text, TITLE) for message in messages if message.role == "user")
    return next((text for text in texts if text), None)


def view_of(session: Standing, cached: Mapping[str, bytes], is_strict: bool) -> Job[View]:
    """Return the number of messages that a session shows, and the beginning of the last text that was said."""
    shown = yield from _shown(session.id, session.head, cached)
    count = sum(stop - start for _, start, stop in shown)
    last = yield from caught(_last_words(session.id, shown), is_strict)
    return View(count, None, last) if isinstance(last, _Unread) else View(count, last)


def _last_words(session_id: str, shown: Sequence[Stretch]) -> Job[str | None]:
    left = _FEW
    for log, start, stop in reversed(shown):
        while left and start < stop:
            # One message first: it nearly always has a text, and the ones before may be large.
            low = stop - 1 if left == _FEW else max(start, stop - left)
            rows = yield Select("msg", ("pos", "crc", "body"), {"log": log, "pos >=": low, "pos <": stop}, order="pos")
            for message in reversed(decoded(session_id, log, low, stop, rows)):
                words = first_words(message.text, LAST_WORDS) if message.role in ("user", "assistant") else None
                if words:
                    return words
            left -= stop - low
            stop = low
    return None


def _shown(session_id: str, head: StoredHead, cached: Mapping[str, bytes]) -> Job[list[Stretch]]:
    values: Values = {}
    while unread := head.unread(values):
        values |= {key: known for key in unread if (known := cached.get(key)) is not None}
        missing = [key for key in unread if key not in values]
        rows = dict((yield Select("value", ("hash", "body"), {"hash in": missing}))) if missing else {}
        values |= {key: unpacked_value(session_id, key, rows.get(key)) for key in missing}
    return head.shown(values)
