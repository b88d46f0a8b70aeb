"""The changes that go out in batches: each knows the rows it writes, and what a refusal of it means.

A change is sent under an operation's id, which the database keeps. Sent again because the connection broke before the
answer, it is refused, and the id tells that it had been made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from perdure.errors import ClaimLost, PerdureError, RunInterrupted, SessionConflict, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Key, StoredAt
from perdure.stores.cache import CachedSession
from perdure.stores.claims import Holder
from perdure.stores.format import packing
from perdure.stores.format.heads import encode_head
from perdure.stores.format.placement import Placement, foreign_stretches
from perdure.stores.format.rows import Batch, Stretch, another_session, batch_checksum, checksum, operation_id
from perdure.stores.postgres_rows import Facts, Parcel, Place, given_time, plain, require_gone, wanted_of


class Change:
    """A change to one session. `put_into` may be called again: what it writes depends on where the session stands."""

    kind = ""

    def __init__(self, session_id: SessionId, origin: str) -> None:
        self.session_id = session_id
        self.origin = origin
        self.op = operation_id()
        self.at = given_time()
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.may_have_been_made = False
        self.is_settled = False
        self.tries = 0
        self.gone: int | None = None
        """The epoch of a claim that would stand if its holder were not gone."""

    def put_into(self, parcel: Parcel, n: int, place: Place) -> None:
        raise NotImplementedError

    def made(self, facts: Facts) -> tuple[Any, Place]:
        """The answer, and where the session stands now. `facts` are those from before the change."""
        raise NotImplementedError

    def refuse(self, facts: Facts) -> None:
        """Raise what is wrong; return if it may be tried again from where the session stands."""
        raise NotImplementedError

    def not_there(self) -> PerdureError:
        """What it means that there is no such session."""
        return SessionNotFound(self.session_id)

    def refs(self, place: Place) -> list[Stretch]:
        """The stretches of others' logs that it names, and that may not be noted yet."""
        return []

    def _row(self, n: int, place: Place, **columns: Any) -> dict[str, Any]:
        return {
            "n": n,
            "kind": self.kind,
            "id": str(self.session_id),
            "op": self.op,
            "at": self.at,
            "sid": place.sid,
            "msg_end": place.msg_end,
            "evt_end": place.evt_end,
            "gone": self.gone,
            "messages": 0,
            "entries": 0,
            "taken": 0,
            **columns,
        }

    def _require_unclaimed(self, facts: Facts, take_over: bool = False) -> None:
        """Raise for a claim that lies on the session. One that has lapsed may be taken over, a dead process's too."""
        if facts.claim is None:
            return
        if facts.stands:
            require_gone(self.session_id, facts.claim)
            self.gone = facts.epoch
        if not take_over:
            raise RunInterrupted(self.session_id)


class Keep(Change):
    """A new version of a session: a save, or the first one of a new session."""

    def __init__(
        self,
        session: AgentSession,
        placement: Placement,
        at: datetime,
        *,
        origin: str,
        is_new: bool = False,
        live: CachedSession | None = None,
        claim: Claim | None = None,
        batch: Batch | None = None,
        taken: int = 0,
        key: Key | None = None,
    ) -> None:
        super().__init__(session.id, origin)
        self.kind = "create" if is_new else "save"
        self.session = session
        self.version = session.version + 1
        self._placement = placement
        self._time = at
        self._live = live
        self.claim = claim
        self._batch = batch
        self._taken = taken
        self._key = key
        self._kept: AgentSession = session
        self._hashes: frozenset[str] = frozenset()
        self._named: set[Stretch] = set()
        self._place = Place(0, 0)
        self.numbers: Place | None = None
        """Those of a new session. Sent again, it is sent with the same."""
        self.checked_refs: list[Stretch] = []

    @property
    def is_new(self) -> bool:
        return self.kind == "create"

    def _settle(self, place: Place) -> None:
        own = LogRef(self.origin, place.log)
        settled = self._placement.settle(own, place.msg_end)
        self._kept = AgentSession.reconstitute(settled, version=self.version, updated_at=self._time)
        self._named = foreign_stretches(self._kept, own)
        self._place = place

    def refs(self, place: Place) -> list[Stretch]:
        if place != self._place:
            self._settle(place)
        return [*(self._named - self._live.refs if self._live else self._named)]

    def put_into(self, parcel: Parcel, n: int, place: Place) -> None:
        if place != self._place:
            self._settle(place)
        info, live = self._kept.info, self._live
        body, values = encode_head(self._kept, self.op)
        if self._kept.state.execution is not None:
            body = packing.pack(body)  # what has run has a record, whose disk counts more than the time to pack
        self._hashes = frozenset(values)
        for key in values.keys() - (live.hashes if live else frozenset()):
            value = packing.pack(values[key])
            parcel.put("values", n=n, sid=place.sid, hash=key, start=parcel.bytes_at(value), size=len(value))
        for log, start, stop in self.checked_refs:
            parcel.put("refs", n=n, sid=place.sid, log=log, start=start, stop=stop)
        parcel.put_messages(n, place.log, place.msg_end, self._placement.new)
        retagged = live is None or live.session.info.tags != info.tags
        row = self._row(
            n,
            place,
            status=info.status.value,
            agent=plain(info.agent_name),
            updated=self._time.timestamp(),
            created=info.created_at.timestamp(),
            messages=len(self._placement.new),
            taken=self._taken,
            head_crc=checksum(body, place.sid, self.version),
            head_from=parcel.bytes_at(body),
            head_size=len(body),
            hashes=[*values],
            wanted=wanted_of(self._kept),
            tags=[plain(tag) for tag in info.tags] if retagged else None,
            erasures=live.erasures if live else None,
            **put_batch(parcel, n, place, self._batch, place.log, place.msg_end, len(self._placement.new)),
        )
        row |= self._of_save() if not self.is_new else self._of_create(place)
        parcel.put("ops", **row)

    def _of_create(self, place: Place) -> dict[str, Any]:
        info = self._kept.info
        owner = None if info.owner is None else plain(info.owner)
        return {"log": place.log, "owner": owner, "parent": info.parent_id and str(info.parent_id)}

    def _of_save(self) -> dict[str, Any]:
        key = self._key
        return {
            "version": self.session.version,
            "epoch": self.claim.epoch if self.claim else None,
            "key_name": plain(key.name) if key else None,
            "key_digest": plain(key.digest) if key else None,
        }

    def made(self, facts: Facts) -> tuple[CachedSession, Place]:
        live = CachedSession(self._kept, facts.erasures, self._hashes, frozenset(self._named))
        return live, self._place.moved(len(self._placement.new), self._batch.count if self._batch else 0)

    def refuse(self, facts: Facts) -> None:
        if self.is_new:
            if facts.sid is not None:
                raise SessionConflict(self.session_id, 0, facts.version)
            return  # it was created meanwhile; the next look finds it
        if facts.sid is None:
            raise SessionNotFound(self.session_id)
        if self.claim is not None and (facts.claim is None or facts.epoch != self.claim.epoch):
            raise ClaimLost(self.session_id, self.claim.epoch)
        if self.claim is None:
            self._require_unclaimed(facts)
        if facts.version != self.session.version:
            raise SessionConflict(self.session_id, self.session.version, facts.version)
        if facts.created != self.session.info.created_at.timestamp():
            raise another_session(self.session)
        self._live = None


class Append(Change):
    """Messages and entries written ahead under a claim."""

    kind = "append"

    def __init__(
        self,
        claim: Claim,
        origin: str,
        rows: Sequence[tuple[str, bytes]],
        batch: Batch | None,
        *,
        taken: int = 0,
        branch: str = "",
    ) -> None:
        super().__init__(claim.session_id, origin)
        self.claim = claim
        self.branch = branch
        self.branch_log: tuple[int, int] | None = None
        """The number and the end of the branch's log, once the writer has looked."""
        self._rows = rows
        self._batch = batch
        self._taken = taken
        self._place = Place(0, 0)

    def _start(self) -> tuple[int, int]:
        return self.branch_log or (self._place.log, self._place.msg_end)

    def put_into(self, parcel: Parcel, n: int, place: Place) -> None:
        self._place = place
        log, start = self._start()
        parcel.put_messages(n, log, start, [body for _, body in self._rows])
        row = self._row(
            n,
            place,
            messages=0 if self.branch else len(self._rows),
            taken=self._taken,
            lease=self.claim.lease,
            **put_batch(parcel, n, place, self._batch, log, start, len(self._rows)),
        )
        parcel.put("ops", **(row | self._expected()))

    def _expected(self) -> dict[str, Any]:
        return {"epoch": self.claim.epoch}

    def made(self, facts: Facts) -> tuple[Any, Place]:
        log, start = self._start()
        ref = LogRef(self.origin, log)
        written: Mapping[str, StoredAt] = {key: StoredAt(ref, pos) for pos, (key, _) in enumerate(self._rows, start)}
        entries = self._batch.count if self._batch else 0
        place = self._place.moved(0 if self.branch else len(self._rows), entries)
        return Appended(written, place.evt_end), place

    def branch_end(self) -> tuple[int, int] | None:
        """The branch's log and its end after the change."""
        return None if self.branch_log is None else (self.branch_log[0], self.branch_log[1] + len(self._rows))

    def not_there(self) -> PerdureError:
        return ClaimLost(self.session_id, self.claim.epoch)

    def refuse(self, facts: Facts) -> None:
        if facts.sid is None or facts.claim is None or facts.epoch != self.claim.epoch:
            raise ClaimLost(self.session_id, self.claim.epoch)


class Take(Append):
    """A claim, with a run's first entries."""

    kind = "claim"

    def __init__(
        self,
        claim: Claim,
        origin: str,
        rows: Sequence[tuple[str, bytes]],
        batch: Batch | None,
        *,
        take_over: bool,
    ) -> None:
        super().__init__(claim, origin, rows, batch)
        self._take_over = take_over
        self._holder = msgspec.json.encode(Holder.here(claim.owner)).decode()

    def _expected(self) -> dict[str, Any]:
        return {"version": self.claim.version, "holder": self._holder, "take_over": self._take_over}

    def made(self, facts: Facts) -> tuple[tuple[Claim, Appended], Place]:
        appended, place = super().made(facts)
        epoch = facts.epoch + (0 if facts.op == self.op else 1)
        return (msgspec.structs.replace(self.claim, epoch=epoch), appended), place

    def not_there(self) -> PerdureError:
        return SessionNotFound(self.session_id)

    def refuse(self, facts: Facts) -> None:
        if facts.sid is None:
            raise SessionNotFound(self.session_id)
        self._require_unclaimed(facts, self._take_over)
        if facts.version != self.claim.version:
            raise SessionConflict(self.session_id, self.claim.version, facts.version)


def put_batch(
    parcel: Parcel, n: int, place: Place, batch: Batch | None, log: int, start: int, messages: int
) -> dict[str, Any]:
    """Send what goes on record: a row for each run in it; the columns of the batch itself are returned."""
    if batch is None:
        return {}
    first = place.evt_end + 1
    for loop, (begin, end) in batch.reach.items():
        parcel.put(
            "runs",
            n=n,
            sid=place.sid,
            loop=plain(loop),
            first_seq=first + begin,
            last_seq=first + end,
            log=log,
            first_pos=start,
            end_pos=start + messages,
        )
    return {
        "entries": batch.count,
        "batch_crc": batch_checksum(place.sid, place.evt_end + batch.count, batch),
        "batch_from": parcel.bytes_at(batch.body),
        "batch_size": len(batch.body),
        "batch_run": None if batch.run is None else plain(batch.run),
    }
