"""The changes to one session: a version that is kept, a claim that is taken, entries that are written ahead under one.

Each change knows when it is refused, the rows that it writes, and the result for its caller. Engines that can make many
changes at once ask for these. All other engines drive its job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count, repeat
from typing import Any, Literal
from zlib import crc32

import msgspec
from msgspec.structs import replace

from perdure.errors import CorruptRecord, ErasedMeanwhile, SessionConflict, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession, tag_rows
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Key, StoredAt
from perdure.stores.cache import CachedSession, StoredMetadata
from perdure.stores.claims import Holder
from perdure.stores.engine import Count, Delete, Insert, Job, Later, Lock, Row, Select, Update
from perdure.stores.format.heads import PREFIX, encode_head
from perdure.stores.format.placement import Placement, foreign_stretches, own_named
from perdure.stores.format.rows import (
    LAST,
    Attachments,
    Batch,
    Namer,
    Stretch,
    Values,
    another_session,
    batch_checksum,
    checksum,
    hash_of,
    key_checksum,
    log_checksum,
    minute_of,
    operation_id,
    seed_of,
)
from perdure.stores.format.settled import note_settled
from perdure.stores.jobs.claiming import Facts, facts_of, refusal
from perdure.stores.jobs.lines import (
    Inherited,
    Stretches,
    inherited,
    known_beginning,
    noted,
    noted_by_owners,
    shown_by_first,
    uncovered,
)
from perdure.stores.tapes import without

Pack = Callable[[bytes], bytes]
"""A function that makes the body of a row smaller, or leaves it as it is."""
NameOf = Callable[[str | None], Namer]
"""A function from an owner to the function that names the owner's values."""
_NONE: frozenset[Any] = frozenset()


def plainly(owner: str | None) -> Namer:
    """Return the function that names values by their hashes, for every owner."""
    return hash_of


_FEW = 3
"""The most messages of a save whose head is packed, since it is most of what is written."""


class Place(msgspec.Struct, frozen=True):
    """The place for a session's rows: its number, its log, and the ends of its log and its record."""

    sid: int
    log: int | str
    msg_end: int = 0
    evt_end: int = 0

    def moved(self, messages: int, entries: int) -> Place:
        return Place(self.sid, self.log, self.msg_end + messages, self.evt_end + entries)


class Change:
    """A change to one session. `refuse` and `draft` may be called again, since they depend on the session's facts."""

    gate: Literal["", "share"] = ""
    owner: str | None = None
    """The owner of the session. A store without keys does not look it up."""
    attachments: Attachments = ()
    """The images and files that its messages name by hash."""

    def __init__(self, session_id: SessionId, origin: str) -> None:
        self.session_id = session_id
        self.origin = origin
        self.op = operation_id()

    def finish(self, result: Any) -> Any:
        """Handle the result in the caller's event loop, even if the caller was cancelled.

        A function that it calls must not refer to this change. Each save would be a cycle for the garbage collector.
        """
        return result

    def refuse(self, facts: Facts) -> None:
        """Raise an error unless the change may be made to a session with these facts."""
        raise NotImplementedError

    def job(self) -> Job[Any]:
        yield Lock((self.session_id,), self.gate)
        return (yield from self.made_to((yield from facts_of(self.session_id))))

    def made_to(self, facts: Facts) -> Job[Any]:
        """Make the change to a session with these facts. Engines call it that have read them in a quicker way."""
        raise NotImplementedError


class Draft(msgspec.Struct, frozen=True):
    """A version that will be kept: the session as it will be, and the rows to write."""

    session: AgentSession
    place: Place
    head: bytes
    hashes: tuple[str, ...]
    """The names of all values in its head."""
    new_values: Values
    """The values that may not be there yet, packed."""
    named: frozenset[Stretch]
    """The stretches of others' logs that it shows."""
    new_refs: tuple[Stretch, ...]
    """The stretches that may not be noted yet."""
    tags: tuple[str, ...] | None
    """Its tags, and marks for indexed metadata; None if they have not changed."""
    metadata: StoredMetadata | None
    """Its metadata as it is stored."""


class Keep(Change):
    """A new version of a session: a save, or the first one of a new session."""

    gate = "share"

    def __init__(
        self,
        session: AgentSession,
        placement: Placement,
        at: datetime,
        *,
        origin: str,
        pack: Pack,
        known: CachedSession | None = None,
        claim: Claim | None = None,
        batch: Batch | None = None,
        taken: int = 0,
        key: Key | None = None,
        is_new: bool = False,
        erasures: int | None = None,
        parent: CachedSession | None = None,
        remember: Callable[[Keep, CachedSession], CachedSession] | None = None,
        drops_sketches: bool = False,
        name_of: Namer = hash_of,
    ) -> None:
        super().__init__(session.id, origin)
        self.owner = session.info.owner
        self._name_of = name_of
        self.drops_sketches = drops_sketches
        self.session = session
        self.is_new = is_new
        self._erasures = erasures
        """The number of erasures at the time when the contents of a new session were read."""
        self.version = session.version + 1
        self.messages = placement.new
        self.attachments: Attachments = placement.attachments
        self.at = at
        self.known = known
        self.claim = claim
        self.batch = batch
        self.taken = taken
        self.key = key
        self.parent = parent
        """The session at hand from which a new one is forked."""
        self.inherited = Inherited()
        """The stretches that a new session need not note, once they were looked up."""
        self._placement = placement
        self._pack = pack
        self._remember = remember

    def finish(self, result: CachedSession) -> CachedSession:
        return result if self._remember is None else self._remember(self, result)

    @property
    def entries(self) -> int:
        return self.batch.count if self.batch else 0

    @property
    def moves(self) -> bool:
        """True if a message gets a place in a log."""
        return self._placement.moves

    def refuse(self, facts: Facts) -> None:
        if self.is_new:
            if facts.sid is not None:
                raise SessionConflict(self.session_id, 0, facts.version)
            self.require_unerased(facts.erasures)
            return
        refused = refusal(self.session_id, facts, self.claim)
        if refused is not None:
            # If the session itself is gone, that is the better error than a lost claim.
            raise SessionNotFound(self.session_id) if facts.sid is None else refused
        if facts.version != self.session.version:
            raise SessionConflict(self.session_id, self.session.version, facts.version)
        if facts.created != self.session.info.created_at.timestamp():
            raise another_session(self.session)

    @property
    def is_guarded(self) -> bool:
        """True if it must be refused when something was erased since its contents were read."""
        return self._erasures is not None

    def require_unerased(self, erasures: int) -> None:
        if self._erasures not in (None, erasures):
            raise ErasedMeanwhile(self.session_id)

    def draft(self, place: Place, known: CachedSession | None) -> Draft:
        """Return the rows to write. `known` says what is there already. It is None if something was erased since."""
        own = LogRef(self.origin, place.log)
        settled = self._placement.settle(own, place.msg_end)
        kept = AgentSession.reconstitute(settled, version=self.version, updated_at=self.at)
        note_settled(kept.state.transcript, self.origin)
        body, values, metadata = encode_head(
            kept, self.op, tells_of_new_run=self._tells_of_new_run, at_hand=known, name_of=self._name_of
        )
        is_fork = self.is_new and kept.info.parent_id is not None
        state = kept.state
        is_mostly_head = is_fork or state.metadata or len(self.messages) <= _FEW
        if is_mostly_head or state.execution is not None or len(state.transcript.pieces) > PREFIX:
            # A session that has run has a record, and its size on disk counts more than the time to pack. A view of
            # many pieces packs well. A fork is little more than its head, and there may be very many. The same is true
            # of a save of a few messages or with metadata: the frameworks' runners make several in a turn.
            body = self._pack(body)
        named = frozenset(foreign_stretches(kept, own))
        there = known.hashes if known else _NONE
        tags = tag_rows(kept.info)
        is_tagged = known is not None and tag_rows(known.session.info) == tags
        return Draft(
            kept,
            place,
            body,
            tuple(values if metadata is None or not metadata.apart else {*values, *metadata.apart.values()}),
            {key: self._pack(values[key]) for key in values if key not in there},
            named,
            tuple(named - _noted(known, own)) if named else (),
            None if is_tagged else tags,
            metadata,
        )

    @property
    def _tells_of_new_run(self) -> bool:
        """True if the version before is known not to have this version's run."""
        return self.known is not None and self.known.session.state.execution is not self.session.state.execution

    def made_to(self, facts: Facts) -> Job[CachedSession]:
        self.refuse(facts)
        draft = self.draft_of(facts, (yield from self._new_session()) if self.is_new else None)
        return (yield from self.kept_as(draft, facts))

    def draft_of(self, facts: Facts, place: Place | None = None) -> Draft:
        """Return the rows to write to a session with these facts."""
        known = self.known if self.known is not None and self.known.erasures == facts.erasures else None
        return self.draft(place_of(facts) if place is None else place, known)

    def is_plain(self, draft: Draft) -> bool:
        """Tell whether a save writes only the row of its session, messages, a head, and entries of one run."""
        is_alone = self.known is not None and self.key is None and not self.attachments and not self.drops_sketches
        is_alone = is_alone and (self.batch is None or self.batch.is_of_one_run)
        is_alone = is_alone and draft.tags is None and not draft.new_values and not draft.new_refs
        return is_alone and not self.doubtful(draft)

    def doubtful(self, draft: Draft) -> list[Stretch]:
        """Return the stretches of its own log that a version shows but may have forgotten."""
        if self.is_new or draft.session.info.first_version == 1:
            return []
        own = LogRef(self.origin, draft.place.log)
        known = [] if self.known is None else own_named(self.known.session, own)
        return [*without(own_named(draft.session, own), [*known, (own.key, draft.place.msg_end, LAST)])]

    def regained(self, draft: Draft) -> Job[list[Stretch]]:
        """Return the stretches that a version shows again after its session had forgotten them.

        They are there if a fork that still shows them was adopted. Raise ErasedMeanwhile if they are gone, and the view
        is one that was loaded before.
        """
        doubtful = self.doubtful(draft)
        if not doubtful:
            return []
        return (yield from regained(self.session, draft.place.sid, draft.place.log, doubtful))

    def kept_as(self, draft: Draft, facts: Facts) -> Job[CachedSession]:
        regained = yield from self.regained(draft)
        yield from self._write(draft, facts)
        yield from write_refs(draft.place.sid, regained, self.since)
        return self.made(draft, facts)

    def _new_session(self) -> Job[Place]:
        info = self.session.info
        columns = {**EMPTY_SESSION, **info_columns(info), **update_columns(self.at), "log": 0, "version": 1}
        columns |= {"msg_end": len(self.messages), "evt_end": self.entries}
        sid, log = yield from new_session(columns)
        return Place(sid, log)

    def _write(self, draft: Draft, facts: Facts) -> Job[None]:
        place, sid = draft.place, draft.place.sid
        if not self.is_new:
            listed = yield from self._listed_as(sid)
            yield Update("session", self.columns(draft, facts, listed), {"sid": sid})
        if self.drops_sketches:
            yield Delete("sketch", {"sid": sid})
        if draft.tags is not None:
            if not self.is_new:
                yield Delete("tag", {"sid": sid})
            yield from write_tags(sid, draft.tags)
        end = place.msg_end + len(self.messages)
        yield from write_batch(sid, place.evt_end + self.entries, self.batch, (place.log, place.msg_end, end))
        if self.key is not None:
            yield from write_key(sid, self.key.name, self.key.digest, self.version)
        yield from write_messages(place.log, place.msg_end, self.messages)
        if self.attachments:
            yield from write_attachments(self, sid, (place.log, place.msg_end), draft.named)
        yield from write_head(sid, self.version, draft.head)
        yield from write_values(sid, draft.new_values)
        if draft.new_refs:
            yield from write_refs(sid, (yield from self.unnoted(draft, facts.erasures)), self.since)
            if self.inherited.line is not None:
                yield Update("session", {"line": self.inherited.line}, {"sid": sid})

    @property
    def since(self) -> int | None:
        """The value of `since` in new rows of stretches: the version, or None if it is the first."""
        return None if self.is_new else self.version

    def unnoted(self, draft: Draft, erasures: int) -> Job[list[Stretch]]:
        """Return the stretches to note for the version. Raise SessionNotFound if one of them was erased.

        `inherited` is set to the stretches that a new fork need not note.
        """
        sid, parent_id = draft.place.sid, self.session.info.parent_id
        if not self.is_new:
            return (yield from unnoted(self.session_id, sid, draft.new_refs, parent_id, erasures))
        self.inherited = Inherited()
        if parent_id is not None:
            parent = self.parent if self.parent is not None and self.parent.erasures == erasures else None
            self.inherited = yield from inherited(parent_id, draft.named, parent, self.origin)
        new = uncovered(draft.named, self.inherited.shown)
        owners = yield from owners_of_logs({log for log, _, _ in new})
        yield from _require_there(new, owners, parent_id, erasures)
        return new

    @property
    def known_listing(self) -> tuple[str, str] | None:
        """The status and the agent in the session's row, if they are at hand."""
        known = self.known
        return None if known is None else (known.session.info.status.value, known.session.info.agent_name)

    def _listed_as(self, sid: int) -> Job[tuple[str, str] | None]:
        """Return the status and the agent in the session's row; None if they have to be written in any case."""
        if self.known is not None:
            return self.known_listing
        try:
            rows = yield Select("session", ("status", "agent"), {"sid": sid})
        except CorruptRecord:  # this save mends it
            return None
        return rows[0] if rows else None

    def columns(self, draft: Draft, facts: Facts, listed: tuple[str, str] | None) -> dict[str, Any]:
        """Return the columns that change in the session's row. A save gives the claim back."""
        # Equal values are left out: to set an indexed column costs a page of the index, even if the value stays.
        info = draft.session.info
        columns: dict[str, Any] = {"version": self.version, "updated": self.at.timestamp()}
        if self.messages:
            columns["msg_end"] = draft.place.msg_end + len(self.messages)
        if self.entries:
            columns["evt_end"] = draft.place.evt_end + self.entries
        if self.taken > facts.taken:
            columns["taken"] = self.taken
        if facts.claim is not None:
            columns |= {"claim": None, "expires": None}
        if facts.recent != (minute := minute_of(columns["updated"])):
            columns["recent"] = minute
        if listed is None or listed[0] != info.status.value:
            columns["status"] = info.status.value
        if listed is None or listed[1] != info.agent_name:
            columns["agent"] = info.agent_name
        return columns

    def made(self, draft: Draft, facts: Facts) -> CachedSession:
        """Return the result of the save. `facts` are those from before it."""
        is_waited_for = facts.inbox_end > max(facts.taken, self.taken)
        hashes = frozenset(draft.hashes)
        began_with = draft.named if self.is_new else None
        if self.known is not None:
            began_with = known_beginning(self.known, LogRef(self.origin, draft.place.log))
        return CachedSession(
            draft.session,
            facts.erasures,
            hashes,
            draft.named,
            began_with=began_with,
            is_waited_for=is_waited_for,
            metadata=draft.metadata,
        )


class KeepAll:
    """New versions of several sessions: all of them, or none."""

    def __init__(self, keeps: Sequence[Keep]) -> None:
        self.keeps = keeps

    def finish(self, results: Sequence[CachedSession]) -> list[CachedSession]:
        return [keep.finish(kept) for keep, kept in zip(self.keeps, results, strict=True)]

    def job(self) -> Job[list[CachedSession]]:
        # In the order of their ids: two writers that create the same sessions never wait for each other in a circle.
        ordered = sorted(self.keeps, key=lambda keep: keep.session_id)
        yield Lock(tuple(keep.session_id for keep in ordered), "share")
        facts: dict[str, Facts] = {}
        for keep in ordered:
            facts[keep.session_id] = yield from facts_of(keep.session_id)
        for keep in self.keeps:  # before anything is written: the error is the first in the caller's order
            keep.refuse(facts[keep.session_id])
        kept: dict[str, CachedSession] = {}
        for keep in ordered:
            kept[keep.session_id] = yield from keep.made_to(facts[keep.session_id])
        return [kept[keep.session_id] for keep in self.keeps]


class Append(Change):
    """Messages and entries written ahead under a claim."""

    def __init__(
        self,
        claim: Claim,
        origin: str,
        rows: Sequence[tuple[str, bytes]],
        batch: Batch | None,
        *,
        taken: int = 0,
        branch: str = "",
        attachments: Attachments = (),
        drops_sketches: bool = False,
    ) -> None:
        super().__init__(claim.session_id, origin)
        self.drops_sketches = drops_sketches
        self.claim = claim
        self.messages = [body for _, body in rows]
        self.attachments = attachments
        if attachments:
            self.gate = "share"
        self.batch = batch
        self.taken = taken
        self.branch = branch
        self._ids = [message_id for message_id, _ in rows]

    @property
    def entries(self) -> int:
        return self.batch.count if self.batch else 0

    @property
    def is_plain(self) -> bool:
        """True if it writes only the row of its session, messages of its own log, and entries of one run."""
        is_alone = not self.branch and not self.attachments and not self.drops_sketches
        return is_alone and self.batch is not None and self.batch.is_of_one_run

    def refuse(self, facts: Facts) -> None:
        refused = refusal(self.session_id, facts, self.claim)
        if refused is not None:
            raise refused

    def made_to(self, facts: Facts) -> Job[Any]:
        self.refuse(facts)
        place = place_of(facts)
        log, start = (yield from branch_log(place.sid, self.branch)) if self.branch else (place.log, place.msg_end)
        yield from write_messages(log, start, self.messages)
        if self.attachments:
            shown = (yield from noted(self.session_id, place.sid)) if borrowed_by(self) else ()
            yield from write_attachments(self, place.sid, (log, start), shown)
        end = place.evt_end + self.entries
        yield from write_batch(place.sid, end, self.batch, (log, start, start + len(self.messages)))
        if self.drops_sketches:
            yield Delete("sketch", {"sid": place.sid})
        yield Update("session", self.columns(place, facts), {"sid": place.sid})
        return self.made(place, (log, start), facts)

    def columns(self, place: Place, facts: Facts) -> dict[str, Any]:
        """Return the columns that change in the session's row."""
        # `taken` is left out unless it changes: it is in the condition of indexes, which SQLite would have to check.
        columns: dict[str, Any] = {
            "msg_end": place.msg_end + (0 if self.branch else len(self.messages)),
            "evt_end": place.evt_end + self.entries,
            "expires": Later(self.claim.lease),
        }
        if self.taken > facts.taken:
            columns["taken"] = self.taken
        return columns

    def made(self, place: Place, log: tuple[int | str, int], facts: Facts) -> Any:
        """Return the result of the append. `log` is the place of its messages. `facts` are those from before it."""
        ref = LogRef(self.origin, log[0])
        written: Mapping[str, StoredAt] = {key: StoredAt(ref, pos) for pos, key in enumerate(self._ids, log[1])}
        return Appended(written, place.evt_end + self.entries, facts.inbox_end)


class Take(Append):
    """A claim, with a run's first entries."""

    def __init__(
        self,
        claim: Claim,
        *given: Any,
        take_over: bool,
        attachments: Attachments = (),
        note: Callable[[Claim], None] | None = None,
        per_owner: int | None = None,
        since: float = 0.0,
    ) -> None:
        super().__init__(claim, *given, attachments=attachments)
        self.take_over = take_over
        self.per_owner = per_owner
        self._note = note
        self.holder = msgspec.json.encode(Holder.here(claim.owner, since))

    @property
    def is_plain(self) -> bool:
        return self.per_owner is None and super().is_plain

    def made_to(self, facts: Facts) -> Job[Any]:
        self.refuse(facts)
        yield from self.require_seat()
        return (yield from super().made_to(facts))

    def require_seat(self) -> Job[None]:
        """Raise OwnerBusy if the session's owner already has as many runs as are allowed."""
        if self.per_owner is not None:
            from perdure.stores.jobs.waiting import require_seat  # imported late: most claims have no such limit

            yield from require_seat(self.session_id, self.per_owner)

    def finish(self, result: tuple[Claim, Appended]) -> tuple[Claim, Appended]:
        if self._note is not None:
            self._note(result[0])
        return result

    def refuse(self, facts: Facts) -> None:
        refused = refusal(self.session_id, facts, None, take_over=self.take_over)
        if refused is not None:
            raise refused
        if facts.version != self.claim.version:
            raise SessionConflict(self.session_id, self.claim.version, facts.version)

    def columns(self, place: Place, facts: Facts) -> dict[str, Any]:
        return {**super().columns(place, facts), "epoch": facts.epoch + 1, "claim": self.holder}

    def made(self, place: Place, log: tuple[int | str, int], facts: Facts) -> tuple[Claim, Appended]:
        return replace(self.claim, epoch=facts.epoch + 1), super().made(place, log, facts)


def place_of(facts: Facts) -> Place:
    assert facts.sid is not None, "who writes has made sure that the session is there"
    return Place(facts.sid, facts.log, facts.msg_end, facts.evt_end)


# The row of a new session, except for the columns that its header gives.
EMPTY_SESSION: Mapping[str, Any] = {
    **dict.fromkeys(("evt_end", "inbox_end", "taken", "epoch", "priority"), 0),
    **dict.fromkeys(("claim", "expires", "line", "since"), None),
}


def update_columns(at: datetime) -> dict[str, Any]:
    """Return the columns for the time of a session's update."""
    updated = at.timestamp()
    return {"updated": updated, "recent": minute_of(updated)}


def info_columns(info: Any) -> dict[str, Any]:
    """Return the columns that lists filter by, with the values of a header."""
    return {
        "id": str(info.id),
        "status": info.status.value,
        "agent": info.agent_name,
        "owner": info.owner,
        "parent": None if info.parent_id is None else str(info.parent_id),
        "spawned": int(info.spawn_ref is not None),
        "created": info.created_at.timestamp(),
    }


def new_session(columns: Mapping[str, Any]) -> Job[tuple[int, int | str]]:
    """Add a session's row, and begin its log. Return the numbers of both."""
    ((sid,),) = yield Insert("session", tuple(columns), [tuple(columns.values())])
    log = yield from new_log(sid, "")
    # Epochs begin with the session's number, which is never used twice, and leave room for a million claims. So a claim
    # on an erased session is never valid for a later one with the same id.
    yield Update("session", {"log": log, "epoch": sid << 20}, {"sid": sid})
    return sid, log


def new_log(sid: int, name: str) -> Job[Any]:
    """Begin a log of a session, and return its number."""
    ((log,),) = yield Insert("log", ("sid", "name", "crc"), [(sid, name, -1)])
    if isinstance(log, int):
        yield Update("log", {"crc": log_checksum(log, sid, name.encode())}, {"log": log})
    return log


def branch_log(sid: int, name: str) -> Job[tuple[Any, int]]:
    """Return a branch's log and its end. The log is begun if the branch has none."""
    rows = yield Select("log", ("log", "crc"), {"sid": sid, "name": name})
    if not rows:
        return (yield from new_log(sid, name)), 0
    log, crc = rows[0]
    require_log(None, log, sid, name, crc)
    return log, (yield from end_of_log(log))


def end_of_log(log: int | str) -> Job[int]:
    """Return the position after a log's last message."""
    last = yield Select("msg", ("pos",), {"log": log}, order="-pos", limit=1)
    return last[0][0] + 1 if last else 0


def write_messages(log: int | str, start: int, bodies: Sequence[bytes]) -> Job[None]:
    if bodies:
        yield Insert("msg", MESSAGE_COLUMNS, rows_of_messages(log, start, bodies))


MESSAGE_COLUMNS = ("log", "pos", "crc", "body")


def rows_of_messages(log: int | str, start: int, bodies: Sequence[bytes]) -> Iterable[Row]:
    sums: Iterator[int | None] = repeat(None)  # in a file, whose lines have checksums of their own
    if isinstance(log, int):
        sums = map(crc32, bodies, count(seed_of(log) + start))
    return zip(repeat(log), count(start), sums, bodies, strict=False)


def write_attachments(change: Change, sid: int, begin: tuple[int | str, int], shown: Iterable[Stretch]) -> Job[None]:
    """Write the images and files of messages. `begin` is the log and the position of the first message.

    `shown` are the stretches that the session shows of others. A message may name files by hash that are there, or in
    the session itself.
    """
    from perdure.stores.jobs import attachments  # imported late: most saves have none

    yield from attachments.require_reachable(change.session_id, sid, borrowed_by(change), shown)
    yield from attachments.write(change.attachments, *begin)


def borrowed_by(change: Change) -> set[str]:
    """Return the hashes that new messages name without giving the bytes."""
    return {each.hash for _, each in change.attachments if each.body is None}


def write_batch(sid: int, last: int, batch: Batch | None, stretch: Stretch) -> Job[None]:
    """Put a batch on record. `last` is the number of its last entry, `stretch` the place of its runs' messages."""
    if batch is None:
        return
    numbers: dict[str | None, int] = {}
    for row in rows_of_runs(sid, last, batch, stretch):
        ((numbers[row[1]],),) = yield Insert("run", RUN_COLUMNS, [row], or_set=RUN_GROWS)
    yield Insert("batch", BATCH_COLUMNS, [row_of_batch(sid, last, batch, numbers.get(batch.run))])


BATCH_COLUMNS = ("sid", "last", "count", "run", "crc", "body")
RUN_COLUMNS = ("sid", "loop", "first_seq", "last_seq", "log", "first_pos", "end_pos")
RUN_GROWS = ("last_seq", "end_pos")
"""The columns that change in the row of a run that is there already."""


def rows_of_runs(sid: int, last: int, batch: Batch, stretch: Stretch) -> list[Row]:
    """Return a row for each run of a batch, with its entries on record and its messages in the log."""
    first = last - batch.count + 1
    return [(sid, loop, first + begin, first + end, *stretch) for loop, (begin, end) in batch.reach.items()]


def row_of_batch(sid: int, last: int, batch: Batch, run: int | None) -> Row:
    return sid, last, batch.count, run, batch_checksum(sid, last, batch), batch.body


def write_key(sid: int, name: str, digest: str, version: int) -> Job[None]:
    crc = key_checksum(sid, name.encode(), digest.encode(), version)
    columns = ("sid", "name", "digest", "version", "crc")
    yield Insert("key", columns, [(sid, name, digest, version, crc)], or_set=("digest", "version", "crc"))


def write_head(sid: int, version: int, body: bytes) -> Job[None]:
    yield Insert("head", ("sid", "version", "crc", "body"), [row_of_head(sid, version, body)])


def row_of_head(sid: int, version: int, body: bytes) -> Row:
    return sid, version, checksum(body, sid, version), body


def write_values(sid: int, packed: Values) -> Job[None]:
    if packed:
        yield Insert("value", ("hash", "body"), list(packed.items()), or_set=(), whose=("sid", sid))
        yield Insert("uses", ("hash", "sid"), [(key, sid) for key in packed], or_set=())


def write_tags(sid: int, tags: Sequence[str]) -> Job[None]:
    if tags:
        yield Insert("tag", ("tag", "sid"), [(tag, sid) for tag in tags])


def write_refs(sid: int, stretches: Iterable[Stretch], since: int | None = None) -> Job[None]:
    rows = [(log, sid, start, stop, since) for log, start, stop in stretches]
    if rows:
        yield Insert("ref", ("log", "child", "start", "stop", "since"), rows)


def _noted(known: CachedSession | None, own: LogRef) -> Stretches:
    """Return the stretches of others' logs that are known to be noted."""
    if known is None:
        return frozenset()
    return frozenset(foreign_stretches(known.session, own)) if known.refs is None else known.refs


def unnoted(
    session_id: str, sid: int, stretches: Sequence[Stretch], parent: str | None, erasures: int
) -> Job[list[Stretch]]:
    """Return the stretches of others' logs that are not noted yet. Raise SessionNotFound if one of them was erased."""
    # All together and not one by one: a fork of a fork of a fork shows stretches of many logs.
    noted: dict[int | str, list[tuple[int, int]]] = {}
    where = {"child": sid, "log in": sorted({log for log, _, _ in stretches}, key=str)}
    for log, start, stop in (yield Select("ref", ("log", "start", "stop"), where)):
        noted.setdefault(log, []).append((start, stop))
    new = [
        (log, start, stop)
        for log, start, stop in stretches
        if not any(low <= start and stop <= high for low, high in noted.get(log, ()))
    ]
    if new and (yield Select("session", ("sid",), {"sid": sid, "line !=": None})):
        new = uncovered(frozenset(new), (yield from shown_by_first(session_id, sid)))
    owners = yield from owners_of_logs({log for log, _, _ in new})
    yield from _require_there(new, owners, parent, erasures)
    return [stretch for stretch in new if owners.get(stretch[0]) != sid]


def _require_there(
    stretches: Iterable[Stretch], owners: Mapping[int | str, int], parent: str | None, erasures: int
) -> Job[None]:
    """Raise SessionNotFound if one of the stretches was erased, because its session is gone or has forgotten it."""
    # Forgetting counts as an erasure, so a store without erasures need not be asked.
    in_part = (yield from noted_by_owners(owners)) if erasures else ()
    for log, start, stop in stretches:
        if log not in owners or log in in_part:
            ((held,),) = yield Count("msg", {"log": log, "pos >=": start, "pos <": stop})
            if held != stop - start:
                raise SessionNotFound(parent or f"log {log}")


def regained(session: AgentSession, sid: int, log: int | str, stretches: Iterable[Stretch]) -> Job[list[Stretch]]:
    """Return the parts of stretches of its own log that a session has forgotten.

    Raise ErasedMeanwhile if one of them is gone.
    """
    kept = yield Select("ref", ("log", "start", "stop"), {"child": sid, "log": log})
    forgotten = [*without(stretches, kept)] if kept else []
    for _, start, stop in forgotten:
        ((held,),) = yield Count("msg", {"log": log, "pos >=": start, "pos <": stop})
        if held != stop - start:
            raise ErasedMeanwhile(session.id, session.version)
    return forgotten


def owners_of_logs(logs: Collection[int | str]) -> Job[dict[int | str, int]]:
    """Return the numbers of the logs' sessions, by log. Logs whose sessions are gone are left out."""
    if not logs:
        return {}
    rows = yield Select("log", ("log", "sid"), {"log in": sorted(logs, key=str)})
    there = {sid for (sid,) in (yield Select("session", ("sid",), {"sid in": sorted({sid for _, sid in rows})}))}
    return {log: sid for log, sid in rows if sid in there}


def owner_of_log(log: int | str) -> Job[int | None]:
    """Return the number of a log's session; None if it is gone."""
    rows = yield Select("log", ("sid",), {"log": log})
    if not rows or not (yield Select("session", ("sid",), {"sid": rows[0][0]})):
        return None
    return int(rows[0][0])


def require_log(session_id: str | None, log: int | str, sid: int, name: str, crc: int | None) -> None:
    """Raise CorruptRecord unless the row of a log is what was written."""
    if not is_log_sound(log, sid, name, crc):
        raise CorruptRecord(session_id, f"log {log}", "its checksum does not match")


def is_log_sound(log: int | str, sid: int, name: str, crc: int | None) -> bool:
    if crc is None:
        return True
    is_typed = type(log) is int and type(sid) is int and type(name) is str
    return is_typed and log_checksum(int(log), sid, name.encode()) == crc
