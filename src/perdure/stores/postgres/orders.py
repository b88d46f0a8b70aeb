"""A change on its way to the database: the rows that it is sent as, and what is known about its session.

It is sent with an operation's id, which the database keeps. If the connection breaks before the answer, it is sent
again. If it had been made, it is then refused, and the id tells why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from perdure.model.session import AgentSession
from perdure.stores.cache import CachedSession
from perdure.stores.format.placement import transcripts_of
from perdure.stores.format.rows import Stretch, batch_checksum, checksum
from perdure.stores.jobs.claiming import Facts
from perdure.stores.jobs.saving import Append, Change, Draft, Keep, Place, Take, borrowed_by
from perdure.stores.postgres.parcel import Parcel
from perdure.stores.postgres.rows import PLAIN, given_time, plain
from perdure.stores.sealing import Sealing

_MOST_WANTED = 16
_MOST_AT_ONCE = 256


class Answer(msgspec.Struct, frozen=True):
    """The session as the database found it when a change was tried, and whether the change was made."""

    n: int
    done: bool
    sid: int | None
    log: int
    version: int
    created: float
    msg_end: int
    evt_end: int
    inbox_end: int
    taken: int
    epoch: int
    claim: str | None
    stands: bool | None
    op: str
    erasures: int
    passed_over: bool = False
    """True if the session was not looked at, because another client has locked it."""
    told: object = None

    @property
    def facts(self) -> Facts:
        if self.sid is None:
            return Facts(erasures=self.erasures)
        return Facts(
            *(self.sid, self.log, self.version, self.created, self.msg_end, self.evt_end, self.inbox_end, self.taken),
            *(self.epoch, None if self.claim is None else self.claim.encode(), bool(self.stands), self.erasures),
        )


class Order:
    """A change that a caller waits for. Its rows depend on where the session's log and record end."""

    def __init__(self, change: Change, sealing: Sealing = PLAIN) -> None:
        self.change = change
        self._sealing = sealing
        self.session_id = str(change.session_id)
        self.at = given_time()
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.may_have_been_made = False
        self.is_settled = False
        self.tries = 0
        self.place = Place(0, 0)
        self.branch_log: tuple[int, int] | None = None
        """The number and the end of the log that an append to a branch goes to, once the writer has looked."""
        self.numbers: Place | None = None
        """The numbers of a new session. If it is sent again, it is sent with the same numbers."""
        self.refs: Sequence[Stretch] = ()
        """The stretches of others' logs that have to be noted, once the writer has looked."""
        self._gone: int | None = None
        """The epoch of a claim whose lease has not ended, but whose holder is gone."""
        self._known: CachedSession | None = change.known if isinstance(change, Keep) else None
        self._draft: Draft | None = None

    @property
    def is_new(self) -> bool:
        return isinstance(self.change, Keep) and self.change.is_new

    @property
    def branch(self) -> str:
        return self.change.branch if isinstance(self.change, Append) else ""

    @property
    def draft(self) -> Draft:
        assert isinstance(self.change, Keep)
        if self._draft is None or self._draft.place != self.place:
            self._draft = self.change.draft(self.place, self._known)
        return self._draft

    @property
    def needs_care(self) -> bool:
        """True if no erasure may run while it is written: it shows others' messages, or must not be too late.

        The same is true of a change that names files which it does not bring, and of a claim that is counted.
        """
        if isinstance(self.change, Take) and self.change.per_owner is not None:
            return True
        if self.change.attachments and borrowed_by(self.change):
            return True
        if not isinstance(self.change, Keep):
            return False
        return bool(self.draft.new_refs) or self.change.is_guarded or bool(self.change.doubtful(self.draft))

    def refuse(self, facts: Facts) -> None:
        """Raise the reason for which it was refused. Return if it may be tried again with the session's new place."""
        self.change.refuse(facts)
        if facts.claim is not None and facts.stands:
            self._gone = facts.epoch
        self._known = self._draft = None

    def made(self, answer: Answer) -> tuple[Any, Place]:
        """Return the result, and where the session's log and record end now."""
        change, facts, place = self.change, answer.facts, self.place
        if isinstance(change, Keep):
            return change.made(self.draft, facts), place.moved(len(change.messages), change.entries)
        assert isinstance(change, Append)
        if isinstance(change, Take) and answer.op == change.op:  # it was made before: these facts are from after it
            facts = msgspec.structs.replace(facts, epoch=facts.epoch - 1)
        moved = place.moved(0 if change.branch else len(change.messages), change.entries)
        return change.made(place, self._start(), facts), moved

    def branch_end(self) -> tuple[int, int] | None:
        """Return the branch's log and its end after the change."""
        if self.branch_log is None or not isinstance(self.change, Append):
            return None
        return self.branch_log[0], self.branch_log[1] + len(self.change.messages)

    def _start(self) -> tuple[int, int]:
        return self.branch_log or (int(self.place.log), self.place.msg_end)

    def put_into(self, parcel: Parcel, n: int) -> None:
        change = self.change
        assert isinstance(change, Keep | Append)
        log, start = self._start()
        columns = self._of_keep(parcel, n, change) if isinstance(change, Keep) else self._of_append(parcel, change)
        seal = self._seal_messages if self._sealing.is_on else None
        said = parcel.messages(log, start, change.messages, seal)
        self._put_files(parcel, n, log, start)
        recorded = self._of_batch(parcel, n, log, start)
        parcel.put("ops", {**self._common(parcel, n, change), **columns, **said, **recorded})

    def _put_files(self, parcel: Parcel, n: int, log: int, start: int) -> None:
        """Send the images and files of messages. Those that have to be in the store already are sent by name."""
        for place, each in self.change.attachments:
            parcel.need("files")
            at = None if each.body is None else parcel.bytes_at(each.body)
            row = {"hash": each.hash, "size": each.size, "start": at, "log": log, "pos": start + place}
            parcel.put("files", {"n": n, **row})

    def _common(self, parcel: Parcel, n: int, change: Keep | Append) -> dict[str, Any]:
        if change.drops_sketches:
            parcel.need("sketches")
        return {
            "n": n,
            "id": self.session_id,
            "op": change.op,
            "at": self.at,
            "sid": self.place.sid,
            "msg_end": self.place.msg_end,
            "evt_end": self.place.evt_end,
            "gone": self._gone,
            "messages": 0 if self.branch else len(change.messages),
            "entries": change.entries,
            "taken": change.taken,
            "drops": change.drops_sketches,
        }

    def _of_keep(self, parcel: Parcel, n: int, change: Keep) -> dict[str, Any]:
        draft, sid = self.draft, self.place.sid
        self._need_parts(parcel, draft, change)
        for key, value in draft.new_values.items():
            if self._sealing.is_on:
                value = self._sealing.seal("value", change.owner, value, name=key)
            start, size = parcel.bytes_at(value), len(value)
            parcel.put("values", {"n": n, "sid": sid, "hash": key, "start": start, "size": size})
        for log, start, stop in self.refs:
            stretch = {"log": log, "start": start, "stop": stop, "since": change.since}
            parcel.put("refs", {"n": n, "sid": sid, **stretch})
        info = draft.session.info
        head_crc, head = self._sealed("head", checksum(draft.head, sid, change.version), draft.head)
        key_name, key_digest = self._key(change)
        return {
            "status": info.status.value,
            "agent": plain(info.agent_name),
            "updated": change.at.timestamp(),
            "created": info.created_at.timestamp(),
            "head_crc": head_crc,
            "head_from": parcel.bytes_at(head),
            "head_size": len(head),
            "hashes": [*draft.hashes],
            "wanted": wanted_of(draft.session),
            "tags": None if draft.tags is None else [plain(tag) for tag in draft.tags],
            "erasures": self._known.erasures if self._known else None,
            "key_name": key_name,
            "key_digest": key_digest,
            **(self._of_create(draft, change) if change.is_new else _of_save(change)),
        }

    def _sealed(self, table: str, crc: int, body: bytes) -> tuple[int, bytes]:
        """Return the checksum and the body of a row as the table holds them."""
        if not self._sealing.is_on:
            return crc, body
        return self._sealing.sealed_row(table, self.change.owner, crc, body)

    def _seal_messages(self, sums: Sequence[int], bodies: Sequence[bytes]) -> tuple[Sequence[int], Sequence[bytes]]:
        rows = self._sealing.sealed_rows("msg", self.change.owner, zip(sums, bodies, strict=True))
        return [crc for crc, _ in rows], [body for _, body in rows]

    def _key(self, change: Keep) -> tuple[str | None, str | None]:
        """Return the name and the digest of an idempotency key as the table holds them."""
        if change.key is None:
            return None, None
        if self._sealing.is_on:
            return self._sealing.sealed_key(change.owner, change.key, None)[:2]
        return plain(change.key.name), plain(change.key.digest)

    def _need_parts(self, parcel: Parcel, draft: Draft, change: Keep) -> None:
        parcel.need("head")
        if change.is_new:
            parcel.need("create")
        if change.claim is not None:
            parcel.need("give_back")
        if change.key is not None:
            parcel.need("key")
        if draft.tags if change.is_new else draft.tags is not None:
            parcel.need("tags")
        if draft.new_values:
            parcel.need("values")
        if self.refs:
            parcel.need("refs")

    def _of_create(self, draft: Draft, change: Keep) -> dict[str, Any]:
        info = draft.session.info
        owner = None if info.owner is None else plain(info.owner)
        parent = info.parent_id and str(info.parent_id)
        family = {"parent": parent, "spawned": int(info.spawn_ref is not None), "line": change.inherited.line}
        return {"kind": "create", "log": self.place.log, "owner": owner, **family}

    def _of_append(self, parcel: Parcel, change: Append) -> dict[str, Any]:
        if isinstance(change, Take):
            parcel.need("claim")
            holder = change.holder.decode()
            expected = {"version": change.claim.version, "holder": holder, "take_over": change.take_over}
            return {"kind": "claim", "lease": change.claim.lease, **expected}
        return {"kind": "append", "lease": change.claim.lease, "epoch": change.claim.epoch}

    def _of_batch(self, parcel: Parcel, n: int, log: int, start: int) -> dict[str, Any]:
        """Send the entries of a change: a row for each run in them. Return the columns of the batch itself."""
        change, place = self.change, self.place
        assert isinstance(change, Keep | Append)
        batch = change.batch
        if batch is None:
            return {}
        parcel.need("record")
        first = place.evt_end + 1
        for loop, (begin, end) in batch.reach.items():
            run = {"n": n, "sid": place.sid, "loop": plain(loop), "first_seq": first + begin, "last_seq": first + end}
            stretch = {"log": log, "first_pos": start, "end_pos": start + len(change.messages)}
            parcel.put("runs", {**run, **stretch})
        crc, body = self._sealed("batch", batch_checksum(place.sid, place.evt_end + batch.count, batch), batch.body)
        return {
            "batch_crc": crc,
            "batch_from": parcel.bytes_at(body),
            "batch_size": len(body),
            "batch_run": None if batch.run is None else plain(batch.run),
        }


def _of_save(change: Keep) -> dict[str, Any]:
    epoch = change.claim.epoch if change.claim else None
    return {"kind": "save", "version": change.session.version, "epoch": epoch}


def wanted_of(session: AgentSession) -> list[int] | None:
    """Return the stretches that a load of a settled session reads, as a flat list. None if they are many, or long."""
    merged: list[list[int]] = []
    views = [session.state.transcript, *_outputs(session)]
    for span in (span for view in views for span in view.spans()):
        assert span.tape.ref is not None
        log, start, stop = int(span.tape.ref.key), span.start, span.stop
        last = merged[-1] if merged else None
        if last is not None and last[0] == log and last[1] <= start <= last[2]:
            last[2] = max(last[2], stop)
        elif not any(each[0] == log and each[1] <= start and stop <= each[2] for each in merged):
            merged.append([log, start, stop])
        if len(merged) > _MOST_WANTED:
            return None
    if sum(stop - start for _, start, stop in merged) > _MOST_AT_ONCE:
        return None
    return [number for stretch in merged for number in stretch]


def _outputs(session: AgentSession) -> Iterable[Any]:
    """Return the views of outputs. A state's views are its transcript, then an input and an output for each step."""
    return () if session.state.execution is None else list(transcripts_of(session.state))[2::2]
