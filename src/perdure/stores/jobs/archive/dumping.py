"""The export of a session from a store: its rows, all of which have to be there, with other names for its logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from perdure import codec
from perdure.errors import CorruptRecord, SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, Entry, JournalEntry
from perdure.stores.engine import Job, Select, Where
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head
from perdure.stores.format.renaming import OpenHead, RenamedBlocks
from perdure.stores.format.rows import LAST, Stretch, Values
from perdure.stores.jobs.archive.archived import LENT, Messages, name_of_log, own_name, split_name
from perdure.stores.jobs.attachments import read_bodies as read_files
from perdure.stores.jobs.claiming import holder_of, is_in_future, require_absent
from perdure.stores.jobs.lines import noted_by_owners, own_stretches
from perdure.stores.jobs.loading import is_message_sound
from perdure.stores.jobs.record import read_inbox, read_record, require_all_keys, require_key
from perdure.stores.jobs.saving import owners_of_logs, require_log
from perdure.stores.jobs.values import gather_unmet
from perdure.stores.tapes import merged, without

_READ_AT_ONCE = 2_048


def dump(session_id: SessionId, origin: str, alone: bool) -> Job[ArchivedSession]:
    """Return a session as an archive. Raise CorruptRecord if any part of it is missing or cannot be read."""
    rows = yield from _rows_of(session_id)
    naming = _Naming(session_id, origin)
    heads, values = yield from _portable(rows, naming)
    lent: dict[str, Messages] = {}
    stretches = naming.stretches()
    in_need = yield from _forgotten_by_owners(stretches)
    for log, start, stop in stretches:
        if log in in_need or naming.is_carried(log, alone):
            shown = yield from _all_messages(session_id, log, start, stop)
            lent[naming.names[log]] = {**lent.get(naming.names[log], {}), **shown}
    own = {own_name(session_id, branch): messages for branch, messages in rows.own.items() if messages}
    files = _Files(session_id)
    logs = {name: files.taken_out(name, own[name]) for name in own if split_name(name)[0] == session_id}
    lent = {name: files.taken_out(name, messages) for name, messages in lent.items()}
    for seq, item in enumerate(rows.inbox, 1):
        files.places |= dict.fromkeys(codec.hashes_in_post(item.body), f"inbox {seq}")
    return ArchivedSession(
        session_id=session_id,
        heads=heads,
        values=values,
        logs=logs,
        lent=lent,
        blobs=(yield from files.bodies()),
        owners=naming.owners,
        entries=rows.entries,
        inbox=rows.inbox,
        keys=rows.keys,
        interrupted=rows.interrupted,
    )


class _Files:
    """The images and files of the messages that are exported."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self.places: dict[str, str] = {}
        """The hashes of files that have to be read, each with a place that names it."""
        self._given: dict[str, bytes] = {}

    def taken_out(self, name: str, messages: Messages) -> Messages:
        """Return messages with all large bytes taken out. Earlier releases have stored them inside of messages."""
        found: dict[int, bytes] = {}
        for at, raw in messages.items():
            body, attachments = codec.detached_raw(raw)
            self._given |= {each.hash: each.body for each in attachments if each.body is not None}
            self.places |= dict.fromkeys(codec.hashes_in(body), f"message {at} of log {name}")
            found[at] = body
        return found

    def bodies(self) -> Job[dict[str, bytes]]:
        wanted = {key: place for key, place in self.places.items() if key not in self._given}
        return {**self._given, **(yield from read_files(self._session_id, wanted))}


class SessionRows(NamedTuple):
    """A session's rows: versions by number, own logs by branch, everything else as it goes into an archive."""

    session_id: SessionId
    heads: Mapping[int, bytes]
    own: Mapping[str, Messages]
    entries: tuple[Entry, ...]
    inbox: tuple[Entry, ...]
    keys: Mapping[str, tuple[str, int]]
    interrupted: bool


def _rows_of(session_id: SessionId) -> Job[SessionRows]:
    columns = ("sid", "log", "version", "msg_end", "claim", "expires")
    found = yield Select("session", columns, {"id": str(session_id)})
    if not found:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    sid, log, version, msg_end, claim, expires = found[0]
    yield from _require_free(session_id, claim, expires)
    return SessionRows(
        session_id,
        (yield from _heads(session_id, sid, version)),
        (yield from _own_logs(session_id, sid, log, msg_end)),
        _plain((yield from read_record(session_id))),
        _plain((yield from read_inbox(session_id))),
        (yield from _keys(session_id, sid)),
        claim is not None,
    )


def _require_free(session_id: SessionId, claim: bytes | None, expires: float) -> Job[None]:
    if claim is not None:
        holder = holder_of(session_id, claim)
        if (yield from is_in_future(expires)) and not holder.is_gone:
            by = f" by {holder.owner}" if holder.owner else ""
            what = f"Session {session_id!r} is being run{by}, and a run cannot move. Wait for it to end, or cancel it,"
            again = "and begin again: what has been brought over is not brought over twice."
            raise SessionBusy(session_id, holder.owner, f"{what} {again}")


def _heads(session_id: str, sid: int, newest: int) -> Job[dict[int, bytes]]:
    """Return the versions. Raise CorruptRecord if one is missing, since a damaged index returns fewer rows silently."""
    rows = yield Select("head", ("version", "crc", "body"), {"sid": sid}, order="version")
    found = {version: unpacked_head(body, crc, session_id, sid, version) for version, crc, body in rows}
    first = decode_info(found[newest], session_id, newest).first_version if newest in found else 1
    for version in range(first, max(newest, 1) + 1):
        if version not in found:
            raise CorruptRecord(session_id, f"head {version}", "it is missing")
    if len(found) != newest - first + 1:
        raise CorruptRecord(session_id, f"head {newest}", "it should be the last one, and is not")
    return found


def _own_logs(session_id: str, sid: int, main: int | str, msg_end: int) -> Job[dict[str, Messages]]:
    """Return the messages of a session's logs by branch. Raise CorruptRecord if a log or a message is missing."""
    ends: dict[int | str, int] = {}
    for log, end in (yield Select("run", ("log", "end_pos"), {"sid": sid})):
        ends[log] = max(end, ends.get(log, 0))
    ends[main] = msg_end  # if a run is noted to reach further, the check finds it
    kept = yield from own_stretches(sid)
    own: dict[str, Messages] = {}
    for log, name, crc in (yield Select("log", ("log", "name", "crc"), {"sid": sid}, order="log")):
        require_log(session_id, log, sid, name, crc)
        end = ends.pop(log, 0)
        stretches = [(start, stop) for each, start, stop in kept if each == log]
        if stretches == [(0, LAST)]:
            own[name] = yield from read_bodies(log)
            _require_all(session_id, log, name, own[name], end)
        else:
            own[name] = yield from _kept_messages(session_id, log, stretches, end)
    for missing in ends:
        raise CorruptRecord(session_id, f"log {missing}", "it is missing")
    return own


def _kept_messages(session_id: str, log: int | str, stretches: Iterable[tuple[int, int]], end: int) -> Job[Messages]:
    """Return the messages that are kept of a log with forgotten ones. Raise CorruptRecord if one of them is missing."""
    found: dict[int, bytes] = {}
    for start, stop in stretches:
        # The last stretch is open: new messages are added to it.
        found |= yield from _all_messages(session_id, log, start, max(start, end) if stop == LAST else stop)
    return found


def _require_all(session_id: str, log: int | str, name: str, messages: Messages, end: int) -> None:
    if name.startswith(LENT):
        return  # it has only those messages of another session that are shown
    for position in range(max(end, max(messages, default=-1) + 1)):
        if position not in messages:
            raise CorruptRecord(session_id, f"message {position} of log {log}", "it is missing")


def read_bodies(log: int | str, start: int = 0, stop: int | None = None) -> Job[Messages]:
    """Return the messages of a log that are there, by position. Raise CorruptRecord if one is damaged."""
    found: dict[int, bytes] = {}
    below: Where = {} if stop is None else {"pos <": stop}
    while True:
        # In portions: while one very long list of rows is freed, all other threads wait.
        where = {"log": log, "pos >=": start, **below}
        rows = yield Select("msg", ("pos", "crc", "body"), where, order="pos", limit=_READ_AT_ONCE)
        for pos, crc, body in rows:
            if not is_message_sound(log, pos, crc, body):
                raise CorruptRecord(None, f"message {pos} of log {log}", "its checksum does not match")
            found[pos] = body
        if len(rows) < _READ_AT_ONCE:
            return found
        start = rows[-1][0] + 1


def _all_messages(session_id: str, log: int | str, start: int, stop: int) -> Job[Messages]:
    messages = yield from read_bodies(log, start, stop)
    for at in range(start, stop):
        if at not in messages:
            raise CorruptRecord(session_id, f"message {at} of log {log}", "it is missing")
    return messages


def _keys(session_id: str, sid: int) -> Job[dict[str, tuple[str, int]]]:
    keys: dict[str, tuple[str, int]] = {}
    for name, digest, version, crc in (yield Select("key", ("name", "digest", "version", "crc"), {"sid": sid})):
        require_key(session_id, sid, name, digest, version, crc)
        keys[name] = (digest, version)
    yield from require_all_keys(session_id, sid, len(keys))
    return keys


def _plain(entries: Iterable[JournalEntry]) -> tuple[Entry, ...]:
    return tuple(Entry(entry.kind, entry.body, entry.run) for entry in entries)


def _portable(rows: SessionRows, naming: _Naming) -> Job[tuple[tuple[bytes, ...], Values]]:
    """Return the versions with logs by name, and the values that they name."""
    written, values, known = list[bytes](), Values(), Values()
    blocks = RenamedBlocks(naming.rename)
    for version in sorted(rows.heads):
        raw = rows.heads[version]
        stored = StoredHead(raw, rows.session_id, version)
        # Versions next to each other have mostly the same values, so those of the last are kept for the next.
        known = (yield from gather_unmet(rows.session_id, stored, known, blocks.met)).values
        head = OpenHead(raw, stored, known)
        renamed = head.renamed(blocks)
        if (yield from naming.learn()):
            blocks.take_back()
            renamed = head.renamed(blocks)
        written.append(renamed[0])
        values |= renamed[1]
    return tuple(written), values


class _Naming:
    """The names in an archive for the logs that a session names."""

    def __init__(self, session_id: str, origin: str) -> None:
        self._session_id = session_id
        self._origin = origin
        self.names: dict[int | str, str] = {}
        self.owners: dict[str, float] = {}
        self._linked: set[str] = set()
        self._met: dict[Stretch, None] = {}
        self._strangers: dict[int | str, None] = {}

    def rename(self, log: int | str, start: int, stop: int) -> str:
        self._met[log, start, stop] = None
        if log not in self.names:
            self._strangers[log] = None
        return self.names.get(log, "")

    def learn(self) -> Job[bool]:
        """Name the logs that were met and have no name yet. Return True if there were any: then rename once more."""
        strangers, self._strangers = self._strangers, {}
        for log in strangers:
            self.names[log] = self._name_of(log, (yield from _owner_of(log)))
        return bool(strangers)

    def _name_of(self, log: int | str, owner: _Owner | None) -> str:
        if owner is None:
            return f"{self._origin[:8]}:{log}"
        if owner.session_id == self._session_id:
            return self._free(own_name(self._session_id, owner.branch))
        name = name_of_log(owner.session_id, owner.branch)
        if name in self.names.values():
            return self._free(name)
        self.owners[owner.session_id] = owner.created
        self._linked.add(name)
        return name

    def _free(self, name: str) -> str:
        """Return the name, or a similar one if it is taken: a session may show both a log and its copy of that log."""
        while name in self.names.values():
            name += ":2"
        return name

    def stretches(self) -> list[Stretch]:
        """Return the stretches that were named, merged and in order."""
        return merged(self._met)

    def is_carried(self, log: int | str, alone: bool) -> bool:
        """Tell whether the archive needs a copy of messages from a log that the session has not written."""
        name = self.names[log]
        return split_name(name)[0] != self._session_id and (alone or name not in self._linked)


def _forgotten_by_owners(stretches: Iterable[Stretch]) -> Job[set[int | str]]:
    """Return the logs of which some stretches are kept for others only, as their own sessions have forgotten them."""
    logs = {log for log, _, _ in stretches}
    owners = yield from owners_of_logs(logs)
    in_need: set[int | str] = set()
    for log in (yield from noted_by_owners(owners)):
        kept = yield Select("ref", ("log", "start", "stop"), {"child": owners[log], "log": log})
        if any(without([each for each in stretches if each[0] == log], kept)):
            in_need.add(log)
    return in_need


class _Owner(NamedTuple):
    """The owner of a log: a session in the store, the branch, and the session's time of creation."""

    session_id: str
    branch: str
    created: float


def _owner_of(log: int | str) -> Job[_Owner | None]:
    """Return the owner of a log; None if its session is gone."""
    rows = yield Select("log", ("sid", "name", "crc"), {"log": log})
    for sid, name, crc in rows:
        for session_id, created in (yield Select("session", ("id", "created"), {"sid": sid})):
            require_log(session_id, log, sid, name, crc)
            return _Owner(session_id, name, created)
    return None
