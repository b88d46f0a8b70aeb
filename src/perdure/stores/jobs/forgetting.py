"""Forgetting: the older versions of a session are erased, with all that only they show or need.

A session that has forgotten versions has rows for what it keeps of its own logs, as a fork has for others' logs. So
erasures, checks, searches and archives use the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime

from perdure import codec
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.protocols import FORGOTTEN, Entry, Forgotten
from perdure.stores.engine import Delete, Job, Select, Update
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.renaming import OpenHead, RenamedBlocks
from perdure.stores.format.rows import LAST, Stretch, Values, entry_checksum, prepare_entries
from perdure.stores.jobs.claiming import Facts, facts_of, refusal
from perdure.stores.jobs.erasing import Erasure, count_erasure, lock_with_callers
from perdure.stores.jobs.forgotten_runs import ForgottenRuns, Run, runs_of
from perdure.stores.jobs.holding import require_unheld
from perdure.stores.jobs.oldest import first_version
from perdure.stores.jobs.redaction.versions import next_version
from perdure.stores.jobs.saving import Pack, Place, place_of, update_columns, write_head, write_messages, write_refs
from perdure.stores.jobs.tally import Tally
from perdure.stores.jobs.values import gather_unmet
from perdure.stores.tapes import merged

_AT_ONCE = 500


def forget(session_id: SessionId, before: int, at: datetime, pack: Pack) -> Job[Forgotten]:
    """Erase the versions before `before`, except for the newest. Return the numbers of what was erased."""
    yield from lock_with_callers([session_id])
    facts: Facts = yield from facts_of(session_id)
    refused = refusal(session_id, facts, None)
    if refused is not None:
        raise refused
    yield from require_unheld([session_id])
    before = min(before, facts.version)
    if before <= (yield from first_version(session_id, place_of(facts).sid)):
        return Forgotten()
    return (yield from _Forgetting(session_id, facts, before, pack).carry_out(at))


class _Versions:
    """All that the kept versions name. If one is damaged, it might name anything, so nothing is erased."""

    def __init__(self) -> None:
        self.hashes: set[str] = set()
        self.loops: set[str] = set()
        """The runs that are in them."""
        self.waiting: str | None = None
        """The run in the newest version, if it waits for a person and continues then."""
        self.shown: dict[Stretch, int] = {}
        """The stretches that they show, cover or have sent to a model, each with the first version that did so."""
        self.newest = b""
        self._version = 0

    def read(self, session_id: str, sid: int, first: int) -> Job[None]:
        blocks, values = RenamedBlocks(self._meet), Values()
        following = first
        while rows := (
            yield Select(
                *("head", ("version", "crc", "body"), {"sid": sid, "version >=": following}, "version", _AT_ONCE)
            )
        ):
            for self._version, crc, body in rows:
                self.newest = unpacked_head(body, crc, session_id, sid, self._version)
                head = StoredHead(self.newest, session_id, self._version)
                # Versions next to each other have mostly the same values, so those of the last are kept for the next.
                values = (yield from gather_unmet(session_id, head, values, blocks.met)).values
                self.hashes |= values.keys()
                OpenHead(self.newest, head, values).renamed(blocks)
                run = head.run(values)
                self.loops |= {run.execution_id} if run else set()
                self.waiting = run.execution_id if run and run.is_waiting else None
            following = self._version + 1

    def _meet(self, log: int | str, start: int, stop: int) -> int | str:
        self.shown.setdefault((log, start, stop), self._version)
        return log


class _Forgetting:
    """The erasure of one session's versions that are older than `before`."""

    def __init__(self, session_id: SessionId, facts: Facts, before: int, pack: Pack) -> None:
        self._session_id = session_id
        self._facts = facts
        self._place: Place = place_of(facts)
        self._before = before
        self._pack = pack
        self._versions = _Versions()
        self._tally = Tally()
        self._erasure = Erasure(self._tally)
        self._own: list[int | str] = []
        self._end = self._place.msg_end

    def carry_out(self, at: datetime) -> Job[Forgotten]:
        sid = self._place.sid
        yield from self._versions.read(self._session_id, sid, self._before)
        self._own = [log for (log,) in (yield Select("log", ("log",), {"sid": sid}, order="log"))]
        runs = yield from runs_of(self._session_id, sid, self._own)
        forgotten = ForgottenRuns(self._session_id, sid, self._before, runs)
        shown, waiting = self._versions.loops, self._versions.waiting
        yield from forgotten.find(shown, waiting, self._named_of_own(), self._place.log)
        # First, since the forks inherit rows of this session, which are replaced below.
        yield from self._erasure.bequeath(sid)
        logs = {*self._own, *(log for (log,) in (yield Select("ref", ("log",), {"child": sid})))}
        yield from self._note_kept(forgotten.staying, forgotten.begin)
        versions = yield from self._erase_versions()
        yield from forgotten.erase(self._pack, self._tally)
        yield from self._empty_inbox()
        yield from self._leave_values()
        yield from self._erasure.erase_unshown(logs)
        yield from self._erasure.finish()
        yield from self._erase_empty_logs()
        yield from self._move_on(at)
        yield from count_erasure()
        return Forgotten(versions, self._tally.messages, self._tally.bytes)

    def _named_of_own(self) -> list[Stretch]:
        return [stretch for stretch in self._versions.shown if stretch[0] in self._own]

    def _note_kept(self, staying: Iterable[Run], begin: int | None) -> Job[None]:
        """Write the rows for what the session shows of others now, and for what it keeps of its own logs."""
        sid, main = self._place.sid, self._place.log
        yield Delete("ref", {"child": sid})
        others = {each: since for each, since in self._versions.shown.items() if each[0] not in self._own}
        for version in sorted({*others.values()}):
            new = [stretch for stretch, since in others.items() if since == version]
            yield from write_refs(sid, new, None if version == self._before else version)
        kept = [*self._named_of_own(), *(stretch for run in staying for stretch in run.stretches(main))]
        tail = yield from self._tail(kept, self._place.msg_end if begin is None else begin)
        pieces = merged([*kept, (main, tail, LAST)])
        # An empty row marks a log of which nothing is kept. Without any row, its session would have all of it.
        bare = [(log, 0, 0) for log in self._own if log not in {each for each, _, _ in pieces}]
        yield from write_refs(sid, [*pieces, *bare], self._before)

    def _tail(self, kept: Collection[Stretch], begin: int) -> Job[int]:
        """Return the position from which all of the log is kept. Its last message stays, since it numbers new ones."""
        main, end = self._place.log, self._place.msg_end
        last = end - 1
        if begin < end or not end or any(log == main and start <= last < stop for log, start, stop in kept):
            return begin
        for (body,) in (yield Select("msg", ("body",), {"log": main, "pos": last})):
            if codec.decode_plain(body).get("id") == FORGOTTEN:
                return last
        # After the last message, which cannot be replaced since others may still show it.
        yield from write_messages(main, end, [codec.encode_message(Message("system", (), FORGOTTEN))])
        self._end = end + 1
        return end

    def _erase_versions(self) -> Job[int]:
        sid, erased = self._place.sid, 0
        where = {"sid": sid, "version <": self._before}
        while rows := (yield Select("head", ("version", "body"), where, order="version", limit=_AT_ONCE)):
            self._tally.add(body for _, body in rows)
            erased += len(rows)
            yield Delete("head", {"sid": sid, "version in": [version for version, _ in rows]})
        return erased

    def _empty_inbox(self) -> Job[None]:
        """Empty the items that were taken. Nobody reads them any more, and they contain what was said."""
        sid, taken = self._place.sid, self._facts.taken
        ((_, body),) = prepare_entries([Entry(FORGOTTEN, {})])
        where = {"sid": sid, "seq <=": taken, "kind !=": FORGOTTEN}
        rows = yield Select("inbox", ("seq", "body"), where, order="seq")
        self._tally.add(each for _, each in rows)
        for seq, _ in rows:
            crc = entry_checksum(sid, seq, None, FORGOTTEN, body)
            values = {"run": None, "kind": FORGOTTEN, "crc": crc, "body": body}
            yield Update("inbox", values, {"sid": sid, "seq": seq})
        places = {"log": self._place.log, "pos >=": -taken, "pos <": 0}
        self._erasure.leave_files([key for (key,) in (yield Select("attached", ("hash",), places))])
        yield Delete("attached", places)

    def _leave_values(self) -> Job[None]:
        sid = self._place.sid
        used = [key for (key,) in (yield Select("uses", ("hash",), {"sid": sid}))]
        unused = [key for key in used if key not in self._versions.hashes]
        for key in unused:
            yield Delete("uses", {"hash": key, "sid": sid})
        self._erasure.leave_values(unused)

    def _erase_empty_logs(self) -> Job[None]:
        """Erase the branches' logs of which nothing is left: their only row is the mark of this session."""
        for log in self._own:
            rows = yield Select("ref", ("start", "stop"), {"log": log}, limit=2)
            if log != self._place.log and rows == [(0, 0)]:
                yield Delete("ref", {"log": log})
                yield Delete("log", {"log": log})

    def _move_on(self, at: datetime) -> Job[None]:
        """Write a further version, which names the first that is kept. It refuses saves of sessions loaded before."""
        sid, version = self._place.sid, self._facts.version + 1
        head = next_version(self._versions.newest, at, first_version=self._before)
        yield from write_head(sid, version, self._pack(head))
        values = {"version": version, "line": None, "msg_end": self._end, **update_columns(at)}
        yield Update("session", values, {"sid": sid})
