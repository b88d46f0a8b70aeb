"""Writing the replacements of messages: in a session's versions, record and inbox, and in logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from perdure import codec
from perdure.aio import in_turns
from perdure.model.session import tag_rows
from perdure.protocols import Entry, JournalEntry
from perdure.redaction.replacement import Replacement
from perdure.stores.engine import Delete, Job, Select, Statement, Update
from perdure.stores.format.heads import decode_info
from perdure.stores.format.packing import pack_entries
from perdure.stores.format.rows import (
    Batch,
    Values,
    batch_checksum,
    checksum,
    entry_checksum,
    prepare_batch,
    prepare_entries,
)
from perdure.stores.jobs import attachments, timers
from perdure.stores.jobs.claiming import Facts, owner_of
from perdure.stores.jobs.erasing import forget_unused
from perdure.stores.jobs.record import read_by_batch, read_inbox
from perdure.stores.jobs.redaction.held import Held, Row
from perdure.stores.jobs.redaction.versions import Version, changed_version, next_version
from perdure.stores.jobs.saving import (
    NameOf,
    Pack,
    place_of,
    update_columns,
    write_batch,
    write_head,
    write_tags,
    write_values,
)
from perdure.stores.sealing import plain_name


class Replacing:
    """The replacement of messages' content in the versions, record, inbox and timers of one session."""

    def __init__(
        self, session_id: str, facts: Facts, replacement: Replacement, held: Held, pack: Pack, name_of: NameOf
    ) -> None:
        self._session_id = session_id
        self._facts = facts
        self._place = place_of(facts)
        self._replacement = replacement
        self._held = held
        self._pack = pack
        self._name_of = name_of
        self._changes: list[Statement] = []
        self._detached: list[tuple[str, int | str, int]] = []
        """The files that items of its inbox do not show any more, and the places of these items."""
        self._tags: Sequence[str] | None = None
        self._named: set[str] | None = None
        """The values that its versions name after the change; None if no version changes."""

    def find(self, told: Entry, at: datetime) -> Job[None]:
        """Read the session, and work out what has to be written."""
        newest = yield from self._replace_versions()
        yield from self._replace_entries()
        yield from self._replace_inbox()
        self._told = prepare_batch([told], self._pack)
        self._next = self._pack(next_version(newest, at))
        if "indexed" in codec.decode_plain(newest)["info"]:  # the index may have what is replaced
            self._tags = tag_rows(decode_info(newest, self._session_id, self._facts.version))
        self._updated = update_columns(at)

    def write(self) -> Job[None]:
        """Write the replacements, and note them on record. An interrupted session keeps its version, to resume."""
        facts, sid = self._facts, self._place.sid
        for statement in self._changes:  # noqa: UP028 (a list takes no answers)
            yield statement
        if self._named is not None:
            yield from _forget_values(sid, self._named)
        yield from _detach(self._detached)
        yield from self._replace_timers()
        # The unfinished answer of a killed run may repeat the content, and nothing says whether it does.
        yield Delete("sketch", {"sid": sid})
        if self._tags is not None:
            yield Delete("tag", {"sid": sid})
            yield from write_tags(sid, self._tags)
        end = facts.evt_end + 1
        yield from write_batch(sid, end, self._told, (facts.log, 0, 0))
        if facts.claim is None:
            # A further version, so that a session loaded before cannot be saved over this.
            yield from write_head(sid, facts.version + 1, self._next)
            values = {"evt_end": end, "version": facts.version + 1, **self._updated}
            yield Update("session", values, {"sid": sid})
        else:
            yield Update("session", {"evt_end": end}, {"sid": sid})

    def _replace_timers(self) -> Job[None]:
        """Replace what timers would send."""
        sid = self._place.sid
        # Read here, under the lock: a timer may be set or put off without a change in the facts of its session.
        for row in (yield Select("timer", timers.COLUMNS, {"sid": sid})):
            timer = timers.sound_timer(self._session_id, row)
            if timer is None or timer.entry is None:
                continue
            entry = self._replacement.item(timer.entry, is_repeated=timer.cron is not None)
            if entry != timer.entry:
                crc, body = timers.sealed(sid, replace(timer, entry=entry))
                yield Update("timer", {"crc": crc, "body": body}, {"timer": timer.id, "sid": sid})

    def _replace_versions(self) -> Job[bytes]:
        """Replace content in heads, and drop values that no head names then. Return the newest head."""
        named: set[str] = set()
        blocks: set[str] = set()
        newest, is_changed = b"", False
        name_of = self._name_of((yield from owner_of(self._place.sid)))
        for head in in_turns((yield from self._held.heads(self._session_id))):
            version = yield from self._held.version(self._session_id, head, blocks)
            changed = changed_version(self._replacement, version, name_of)
            if changed is not None:
                is_changed = True
                self._replace_version(changed, version.parts)
            named.update((changed or version).parts)
            newest = (changed or version).raw
        if is_changed:
            self._named = named | blocks
        return newest

    def _replace_version(self, version: Version, known: Mapping[str, bytes]) -> None:
        sid, body = self._place.sid, self._pack(version.raw)
        crc = checksum(body, sid, version.number)
        self._changes.append(Update("head", {"crc": crc, "body": body}, {"sid": sid, "version": version.number}))
        new: Values = {key: self._pack(value) for key, value in version.parts.items() if key not in known}
        self._changes += write_values(sid, new)

    def _replace_entries(self) -> Job[None]:
        """Replace entries of the record, each in its batch."""
        sid = self._place.sid
        for batch in (yield from read_by_batch(self._session_id)):
            entries = _plain(batch)
            if changed := self._replacement.changed_entries(entries):
                given = [changed.get(place, entry) for place, entry in enumerate(entries)]
                run, body = pack_entries(prepare_entries(given), self._pack)
                last = batch[-1].seq
                crc = batch_checksum(sid, last, Batch(len(batch), run, {}, body))
                self._changes.append(Update("batch", {"crc": crc, "body": body}, {"sid": sid, "last": last}))

    def _replace_inbox(self) -> Job[None]:
        sid = self._place.sid
        posted = yield from read_inbox(self._session_id, taken_too=True)
        items = map(self._replacement.item, _plain(posted))
        changed = {place: each for place, each in enumerate(items) if each.body != posted[place].body}
        for place, (entry, body) in zip(changed, prepare_entries(changed.values()), strict=True):
            seq = posted[place].seq
            crc = entry_checksum(sid, seq, entry.run, entry.kind, body)
            self._changes.append(Update("inbox", {"crc": crc, "body": body}, {"sid": sid, "seq": seq}))
            kept = codec.hashes_in_post(entry.body)
            for (key,) in (yield Select("attached", ("hash",), {"log": self._place.log, "pos": -seq})):
                if plain_name(key) not in kept:
                    self._detached.append((key, self._place.log, -seq))


def _plain(entries: Sequence[JournalEntry]) -> list[Entry]:
    return [Entry(each.kind, each.body, each.run) for each in entries]


def _forget_values(sid: int, named: Collection[str]) -> Job[None]:
    """Erase the values of a session that none of its versions names any more."""
    rows = yield Select("uses", ("hash",), {"sid": sid})
    gone = [key for (key,) in rows if key not in named]
    for key in gone:
        yield Delete("uses", {"hash": key, "sid": sid})
    yield from forget_unused(gone)


def replace_messages(rows: Iterable[Row], asked: Collection[str]) -> Job[None]:
    """Write messages. Those that were asked for come last.

    An engine whose commit may be cut short writes in the order in which sessions were last changed. The rest of the
    work is then found again by these messages, while they still have their content.
    """
    for row in sorted(rows, key=lambda row: codec.decode_plain(row.body)["id"] in asked):
        crc = checksum(row.body, row.log, row.position) if isinstance(row.log, int) else None
        yield Update("msg", {"crc": crc, "body": row.body}, {"log": row.log, "pos": row.position})
        noted = yield Select("attached", ("hash",), {"log": row.log, "pos": row.position})
        yield from _detach([(key, row.log, row.position) for (key,) in noted])


def _detach(files: Iterable[tuple[str, int | str, int]]) -> Job[None]:
    """Erase the notes that these places show files, and the bytes of files that nothing else shows."""
    for key, log, pos in files:
        yield Delete("attached", {"log": log, "pos": pos, "hash": key})
        yield from attachments.forget_unused([key])
