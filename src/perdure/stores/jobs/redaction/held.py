"""The rows of the sessions that a redaction concerns, read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from perdure import codec
from perdure.aio import in_turns
from perdure.errors import CorruptRecord
from perdure.stores.engine import Job, Select
from perdure.stores.engine import Row as Columns
from perdure.stores.format.heads import StoredHead, is_block, unpacked_head
from perdure.stores.format.rows import Stretch, Values
from perdure.stores.jobs.claiming import sid_of
from perdure.stores.jobs.lines import noted, own_stretches, with_descendants
from perdure.stores.jobs.loading import is_message_sound
from perdure.stores.jobs.redaction.places import Log, Places
from perdure.stores.jobs.redaction.versions import Version
from perdure.stores.jobs.saving import owner_of_log
from perdure.stores.jobs.values import gather_unmet, unpacked_value

T = TypeVar("T")
_READ_AT_ONCE = 4_096
_VALUES_AT_ONCE = 256


class Row(NamedTuple):
    """A message in its log."""

    log: Log
    position: int
    body: bytes


class Held:
    """The rows of sessions, with the values that their versions share."""

    def __init__(self) -> None:
        self.values: Values = {}
        """The values that were read so far."""

    def heads(self, session_id: str) -> Job[list[Columns]]:
        """Return the rows of all versions' heads. `version` unpacks one of them: all at once would be large."""
        sid = yield from sid_of(session_id)
        yield from self._fetch_values(session_id, sid)
        return (yield Select("head", ("sid", "version", "crc", "body"), {"sid": sid}, order="version"))

    def _fetch_values(self, session_id: str, sid: int) -> Job[None]:
        """Read the values that a session uses, many at a time, since most versions name one of their own."""
        missing = [key for (key,) in (yield Select("uses", ("hash",), {"sid": sid})) if key not in self.values]
        for first in range(0, len(missing), _VALUES_AT_ONCE):
            some = missing[first : first + _VALUES_AT_ONCE]
            for key, body in in_turns((yield Select("value", ("hash", "body"), {"hash in": some}))):
                with suppress(CorruptRecord):  # the version that names it reads it again, and raises
                    self.values[key] = unpacked_value(session_id, key, body)

    def version(self, session_id: str, head: Columns, blocks: set[str]) -> Job[Version]:
        """Return a version. The blocks that it names are read, unless they are in `blocks`, and added to `blocks`."""
        sid, number, crc, body = head
        raw = unpacked_head(body, crc, session_id, sid, number)
        stored = StoredHead(raw, session_id, number)
        found = yield from gather_unmet(session_id, stored, self.values, blocks)
        self.values |= found.values
        blocks |= found.blocks
        return Version(number, raw, found.parts, names_blocks=any(map(is_block, stored.head.hashed)))


def messages_of(session_id: str, ids: Collection[str]) -> Job[list[tuple[Row, dict[str, Any]]]]:
    """Return the messages with these ids, each with its content, in a session's logs and in those that it shows."""
    sid = yield from sid_of(session_id)
    own = yield from own_stretches(sid)
    shown = yield from noted(session_id, sid)
    found: list[tuple[Row, dict[str, Any]]] = []
    for stretch in sorted({*own, *shown}):
        yield from _look_through(session_id, stretch, ids, found)
    return found


def own_messages(session_id: str, kind: str) -> Job[list[Row]]:
    """Return the messages in a session's own logs that may have a part of this kind, or metadata under this key."""
    needle = msgspec.json.encode(kind)
    found: list[Row] = []
    for stretch in sorted((yield from own_stretches((yield from sid_of(session_id))))):
        yield from _read_through(session_id, stretch, lambda rows: [row for row in rows if needle in row.body], found)
    return found


def _look_through(
    session_id: str, stretch: Stretch, ids: Collection[str], found: list[tuple[Row, dict[str, Any]]]
) -> Job[None]:
    yield from _read_through(session_id, stretch, lambda rows: _named(rows, ids), found)


def _read_through(
    session_id: str, stretch: Stretch, pick: Callable[[Iterator[Row]], Iterable[T]], found: list[T]
) -> Job[None]:
    """Add to `found` what `pick` chooses from the messages of a stretch. They are read a few thousand at a time."""
    log, start, stop = stretch
    while True:
        where = {"log": log, "pos >=": start, "pos <": stop}
        rows = yield Select("msg", ("pos", "crc", "body"), where, order="pos", limit=_READ_AT_ONCE)
        found += pick(_sound(session_id, log, *row) for row in in_turns(rows))
        if len(rows) < _READ_AT_ONCE:
            return
        start = rows[-1][0] + 1


def _named(rows: Iterable[Row], ids: Collection[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield the messages with these ids, each with its content. Only rows that contain an id are decoded."""
    needles = [msgspec.json.encode(each) for each in ids]
    for row in rows:
        if any(needle in row.body for needle in needles):
            plain = codec.decode_plain(row.body)
            if plain.get("id") in ids:
                yield row, plain


def message_at(log: Log, position: int) -> Job[Row]:
    rows = yield Select("msg", ("pos", "crc", "body"), {"log": log, "pos": position})
    if not rows:
        raise CorruptRecord(None, f"message {position} of log {log}", "it is missing")
    return _sound(None, log, *rows[0])


def messages_at(log: Log, positions: Collection[int]) -> Job[list[Row]]:
    """Return the messages of a log that are there at these positions."""
    rows = yield Select("msg", ("pos", "crc", "body"), {"log": log, "pos in": sorted(positions)}, order="pos")
    return [_sound(None, log, *row) for row in rows]


def _sound(session_id: str | None, log: Log, position: int, crc: int | None, body: bytes) -> Row:
    if not is_message_sound(log, position, crc, body):
        raise CorruptRecord(session_id, f"message {position} of log {log}", "its checksum does not match")
    return Row(log, position, body)


def concerned(places: Places) -> Job[list[str]]:
    """Return the sessions whose logs have one of these messages, or that show one, and all their forks, sorted."""
    sids: set[int | None] = set()
    for log in places.logs():
        sids.add((yield from owner_of_log(log)))
        for child, start, stop in (yield Select("ref", ("child", "start", "stop"), {"log": log})):
            if places.touch((log, start, stop)):
                sids.add(child)
    showing = yield from with_descendants(sid for sid in sids if sid is not None)
    rows = yield Select("session", ("id",), {"sid in": sorted(showing)})
    found = {session_id for (session_id,) in rows}
    todo = list(found)
    while todo:
        forks = {fork for (fork,) in (yield Select("session", ("id",), {"parent": todo.pop()}))}
        todo += forks - found
        found |= forks
    return sorted(found)
