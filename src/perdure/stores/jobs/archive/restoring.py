"""The import of a session into a store: the places of its logs, a look whether it is there already, and its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perdure import codec
from perdure.errors import SessionNotFound
from perdure.model.session import AgentSessionInfo, tag_rows
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.claims import Holder
from perdure.stores.engine import Count, Job, Lock, Select, Update
from perdure.stores.format.heads import StoredHead, decode_info
from perdure.stores.format.renaming import OpenHead, RenamedBlocks
from perdure.stores.format.rows import LAST, Namer, Stretch, Values, prepare_batch, prepare_entries
from perdure.stores.jobs import attachments, saving
from perdure.stores.jobs.archive.archived import (
    LENT,
    Messages,
    check,
    first_version,
    newest_version,
    own_name,
    require_same,
    run_stretches,
    say_the_same,
    split_name,
    within,
)
from perdure.stores.jobs.archive.dumping import dump, read_bodies
from perdure.stores.jobs.claiming import require_absent
from perdure.stores.jobs.record import write_inbox
from perdure.stores.jobs.saving import NameOf, Pack, plainly
from perdure.stores.tapes import merged

MOVED = Holder("a run that was interrupted before its session was moved here")
"""The holder of the claim on an interrupted session after its import. It is not a process, so it never comes back."""
_ENTRIES_AT_ONCE = 32
_MESSAGES_AT_ONCE = 1_000

Logs = Mapping[str, int | str]
"""The keys of logs, by branch."""


def restore(archived: ArchivedSession, origin: str, pack: Pack, name_of: NameOf = plainly) -> Job[bool]:
    """Write a session. Return False if it is there already. Raise SessionConflict if another session has its id."""
    stretches = check(archived)
    # The sessions whose messages it will show are locked too, so that none of them is deleted meanwhile.
    owners = {split_name(str(name))[0] for name, _, _ in stretches} & archived.owners.keys()
    yield Lock((archived.session_id, *sorted(owners - {archived.session_id})), "share")
    plan = RestorePlan(archived, stretches)
    yield from plan.find_links()
    if (yield Select("session", ("sid",), {"id": str(archived.session_id)})):
        require_same(archived, (yield from dump(archived.session_id, origin, bool(archived.lent))))
        return False
    yield from require_absent(archived.session_id)
    yield from _write(plan, pack, name_of)
    return True


class RestorePlan:
    """The places of an archived session's logs in a store: logs of sessions that are there, or logs of its own."""

    def __init__(self, archived: ArchivedSession, stretches: list[Stretch]) -> None:
        self.archived = archived
        self.own: dict[str, Messages] = {"": {}}
        """The logs to be written, by branch."""
        self.first_version = first_version(archived)
        self._stretches = stretches
        self._links: dict[str, int | str] = {}
        for name, messages in archived.logs.items():
            self.own[split_name(name)[1]] = messages

    def find_links(self) -> Job[None]:
        """Find the logs that are in this store. Raise SessionNotFound if one is neither here nor in the archive."""
        for name in dict.fromkeys(str(name) for name, _, _ in self._stretches):
            if name in self.archived.logs:
                continue
            log = yield from self._linked(name)
            if log is not None:
                self._links[name] = log
            elif name in self.archived.lent:
                self.own[LENT + name] = self.archived.lent[name]
            else:
                raise SessionNotFound(split_name(name)[0])

    def _linked(self, name: str) -> Job[int | str | None]:
        owner, branch = split_name(name)
        if owner not in self.archived.owners:
            return None
        log = yield from _log_of(owner, branch, self.archived.owners[owner])
        return log if log is not None and (yield from self._is_the_same(name, log)) else None

    def _is_the_same(self, name: str, log: int | str) -> Job[bool]:
        # A session of the same id and time may have gone another way in this store.
        lent = self.archived.lent.get(name)
        for start, stop in [(start, stop) for each, start, stop in self._stretches if each == name]:
            if lent is None:
                ((held,),) = yield Count("msg", {"log": log, "pos >=": start, "pos <": stop})
                is_same = held == stop - start
            else:
                here = yield from read_bodies(log, start, stop)
                is_same = say_the_same(here, {at: lent[at] for at in range(start, stop)})
            if not is_same:
                return False
        return True

    def shown_of_others(self) -> list[Stretch]:
        """Return the stretches of other sessions' logs, by their keys here."""
        return [(self._links[str(name)], start, stop) for name, start, stop in self._stretches if name in self._links]

    def kept_of_own(self, logs: Logs) -> list[Stretch]:
        """Return the stretches that are kept of the session's logs, if it has forgotten some of them; else nothing."""
        if self.first_version == 1:
            return []
        found = []
        for branch, messages in self.own.items():
            pieces = merged((logs[branch], at, at + 1) for at in messages)
            if not branch:  # open at its end: new messages are added after the last one
                _, start, _ = pieces.pop() if pieces else (0, 0, 0)
                pieces.append((logs[""], start, LAST))
            found += pieces
        return found

    def heads(self, logs: Logs, name_of: Namer) -> Iterator[tuple[bytes, Values]]:
        """Yield the versions over the logs of the store, each with the values that it is the first to name."""
        keys = {**self._links, **{own_name(self.archived.session_id, branch): logs[branch] for branch in self.own}}
        blocks = RenamedBlocks(lambda name, start, stop: keys[str(name)], name_of)
        for version, raw in enumerate(self.archived.heads, self.first_version):
            stored = StoredHead(raw, self.archived.session_id, version)
            yield OpenHead(raw, stored, self.archived.values).renamed(blocks)


def _log_of(owner: str, branch: str, created: float) -> Job[int | str | None]:
    """Return the log of a session that was created at that time; None if the store does not have it."""
    for (sid,) in (yield Select("session", ("sid",), {"id": owner, "created": created})):
        for (log,) in (yield Select("log", ("log",), {"sid": sid, "name": branch})):
            return log  # type: ignore[no-any-return]  # a column's value has no type here
    return None


def _write(plan: RestorePlan, pack: Pack, name_of: NameOf) -> Job[None]:
    archived = plan.archived
    info = decode_info(archived.heads[-1], archived.session_id, newest_version(archived))
    sid, main = yield from saving.new_session(_session_row(plan, info))
    logs: dict[str, int | str] = {"": main}
    for branch, messages in plan.own.items():
        if branch:
            logs[branch] = yield from saving.new_log(sid, branch)
        yield from _write_messages(logs[branch], messages)
        named = {at: hashes for at, body in messages.items() if (hashes := codec.hashes_in(body))}
        yield from _attach(archived, logs[branch], named)
    yield from saving.write_tags(sid, tag_rows(info))
    yield from _write_heads(sid, plan, logs, pack, name_of(info.owner))
    yield from saving.write_refs(sid, plan.shown_of_others())
    kept = plan.kept_of_own(logs)
    yield from saving.write_refs(sid, kept, plan.first_version)
    yield from _write_record(sid, archived, logs, kept, pack)
    yield from write_inbox(sid, prepare_entries(archived.inbox))
    yield from _attach(archived, main, {-seq: codec.hashes_in_post(item.body) for seq, item in _posted(archived)})
    for name, (digest, version) in archived.keys.items():
        yield from saving.write_key(sid, name, digest, version)


def _session_row(plan: RestorePlan, info: AgentSessionInfo) -> dict[str, Any]:
    archived = plan.archived
    row = {**saving.info_columns(info), **saving.EMPTY_SESSION, "log": 0, "version": info.version}
    row |= {**saving.update_columns(info.updated_at), "msg_end": max(plan.own[""], default=-1) + 1}
    row |= {"evt_end": len(archived.entries), "inbox_end": len(archived.inbox)}
    if archived.inbox:  # the archive does not say since when they wait: at the latest since the last change
        row["since"] = info.updated_at.timestamp()
    if archived.interrupted:
        row |= {"claim": msgspec.json.encode(MOVED), "expires": 0.0}
    return row


def _write_messages(log: int | str, messages: Messages) -> Job[None]:
    """Write messages at their positions, between which there may be gaps."""
    # In portions: one list of 100,000 rows causes full garbage collections, for which every thread waits.
    for start, stop in _portions(sorted(messages)):
        yield from saving.write_messages(log, start, [messages[at] for at in range(start, stop)])


def _portions(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield short stretches without gaps, which together are these positions."""
    start = 0
    for place, at in enumerate(positions, 1):
        is_last = place == len(positions) or positions[place] != at + 1
        if is_last or place - start == _MESSAGES_AT_ONCE:
            yield positions[start], at + 1
            start = place


def _attach(archived: ArchivedSession, log: int | str, named: Mapping[int, Collection[str]]) -> Job[None]:
    """Write the images and files that messages of a log, or items of an inbox, name."""
    found = [(at, key, archived.blobs[key]) for at, hashes in named.items() for key in sorted(hashes)]
    if found:
        yield from attachments.write([(at, codec.Attachment(key, len(body), body)) for at, key, body in found], log, 0)


def _posted(archived: ArchivedSession) -> Iterator[tuple[int, Entry]]:
    """Return the items of the inbox with the numbers that they get."""
    return enumerate(archived.inbox, 1)


def _write_heads(sid: int, plan: RestorePlan, logs: Logs, pack: Pack, name_of: Namer) -> Job[None]:
    written: set[str] = set()
    for version, (raw, values) in enumerate(plan.heads(logs, name_of), plan.first_version):
        yield from saving.write_head(sid, version, pack(raw))
        yield from saving.write_values(sid, {key: pack(values[key]) for key in values if key not in written})
        written |= values.keys()


def _write_record(
    sid: int, archived: ArchivedSession, logs: dict[str, int | str], kept: Sequence[Stretch], pack: Pack
) -> Job[None]:
    for start in range(0, len(archived.entries), _ENTRIES_AT_ONCE):
        entries = archived.entries[start : start + _ENTRIES_AT_ONCE]
        batch = prepare_batch(entries, pack)
        yield from saving.write_batch(sid, start + len(entries), batch, (logs[""], 0, 0))
    for loop, (branch, start, stop) in run_stretches(archived).items():
        if branch not in logs:
            logs[branch] = yield from saving.new_log(sid, branch)
        log, start, stop = within(kept, (logs[branch], start, stop))
        place = {"log": log, "first_pos": start, "end_pos": stop}
        yield Update("run", place, {"sid": sid, "loop": loop})
