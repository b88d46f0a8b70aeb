"""Claims: the facts about a session, the rule who may change it, and the jobs that keep a claim or end it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    InvalidSessionId,
    PerdureError,
    RunInterrupted,
    SessionBusy,
    SessionNotFound,
)
from perdure.model.ids import SessionId
from perdure.protocols import Claim, Running
from perdure.stores.claims import Holder, Look
from perdure.stores.engine import Clock, Delete, Job, Later, Lock, Select, Update

COLUMNS_OF_FACTS = (
    *("sid", "log", "version", "created", "msg_end", "evt_end", "inbox_end", "taken", "epoch"),
    *("recent", "claim", "expires"),
)


class Facts(msgspec.Struct, frozen=True):
    """The facts about a session when a change to it is tried. `sid` is None if the session does not exist."""

    sid: int | None = None
    log: int | str = 0
    version: int = 0
    created: float = 0.0
    msg_end: int = 0
    evt_end: int = 0
    inbox_end: int = 0
    taken: int = 0
    epoch: int = 0
    claim: bytes | None = None
    """The holder of the session's claim. It stays after the lease has run out, until the claim is given back."""
    stands: bool = False
    """True until the lease of the claim has run out."""
    erasures: int = 0
    recent: int | None = None
    """The minute under which lists have it; None if that is not known, or if the engine sets it."""

    @property
    def is_waited_for(self) -> bool:
        """True if the inbox has an item that was not taken yet."""
        return self.inbox_end > self.taken


def owner_of(sid: int) -> Job[str | None]:
    """Return the owner of a session by its number."""
    rows = yield Select("session", ("owner",), {"sid": sid})
    return rows[0][0] if rows else None


def owner_by_id(session_id: str) -> Job[str | None]:
    """Return the owner of a session; None if it has none, or does not exist."""
    rows = yield Select("session", ("owner",), {"id": str(session_id)})
    return rows[0][0] if rows else None


def facts_of(session_id: str) -> Job[Facts]:
    rows = yield Select("session", COLUMNS_OF_FACTS, {"id": str(session_id)})
    erasures = yield from count_of_erasures()
    if not rows:
        yield from require_absent(session_id)
        return Facts(erasures=erasures)
    *columns, recent, claim, expires = rows[0]
    stands = claim is not None and (yield from is_in_future(expires))
    sid, log, version, created, msg_end, evt_end, inbox_end, taken, epoch = columns
    return Facts(sid, log, version, created, msg_end, evt_end, inbox_end, taken, epoch, claim, stands, erasures, recent)


def is_in_future(expires: float) -> Job[bool]:
    ((time,),) = yield Clock()
    return bool(expires > time)


def count_of_erasures() -> Job[int]:
    rows = yield Select("meta", ("value",), {"key": "erasures"})
    if not rows:
        raise CorruptRecord(None, "meta erasures", "it is missing")
    return number(rows[0][0], None, "meta erasures")


def stored_id(found: str) -> SessionId:
    """Return the id of a session's row. Raise CorruptRecord if no session can have it."""
    try:
        return SessionId(found)
    except InvalidSessionId as error:
        raise CorruptRecord(None, "of the session table", str(error)) from None


def number(found: object, session_id: str | None, where: str) -> int:
    """Return a number that was read. Raise CorruptRecord for another type, which damage can cause."""
    if type(found) is not int:
        raise CorruptRecord(session_id, where, "it is not a number")
    return found


def require_absent(session_id: str) -> Job[None]:
    """Raise CorruptRecord if a session that was not found does exist: then an index is damaged."""
    if (yield Select("session", ("sid",), {"id": str(session_id)}, again=True)):
        raise CorruptRecord(session_id, "in the index of ids", "it is missing or leads elsewhere")


def sid_of(session_id: str) -> Job[int]:
    """Return the number of a session. Raise SessionNotFound if it does not exist."""
    rows = yield Select("session", ("sid",), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    return int(rows[0][0])


def holder_of(session_id: str, claim: bytes) -> Holder:
    try:
        holder = msgspec.json.decode(claim, type=Holder)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(session_id, "claim", str(error)) from None
    if not holder.is_sound:
        raise CorruptRecord(session_id, "claim", "its checksum does not match")
    return holder


def require_free(session_id: str, facts: Facts) -> None:
    """Raise SessionBusy while a claim is held: neither has its lease run out nor its process ended."""
    if facts.claim is not None and facts.stands:
        holder = holder_of(session_id, facts.claim)
        if not holder.is_gone:
            raise SessionBusy(session_id, holder.owner)


def refusal(
    session_id: SessionId, facts: Facts, claim: Claim | None, *, take_over: bool = False
) -> PerdureError | None:
    """Return the reason why a session may not be changed, with a claim or without one; None if it may be.

    This is the one place that decides it. A caller without a claim is refused while the session has one, unless that
    one has lapsed and the caller takes it over.
    """
    if claim is not None:
        # The fence: each claim has a higher epoch, so a holder that was taken over can write nothing any more.
        is_held = facts.sid is not None and facts.claim is not None and facts.epoch == claim.epoch
        return None if is_held else ClaimLost(session_id, claim.epoch)
    if facts.sid is None:
        return SessionNotFound(session_id)
    require_free(session_id, facts)
    return RunInterrupted(session_id) if facts.claim is not None and not take_over else None


def heartbeat(claim: Claim) -> Job[None]:
    ((changed,),) = yield Update("session", {"expires": Later(claim.lease)}, held(claim))
    if not changed:
        raise ClaimLost(claim.session_id, claim.epoch)


def release(claim: Claim, interrupted: bool, *, sketched: bool = False) -> Job[None]:
    """Give a claim back. The pieces of an unfinished answer are dropped, unless the run will be recovered."""
    if sketched and not interrupted:
        yield Lock((claim.session_id,))
        for (sid,) in (yield Select("session", ("sid",), held(claim))):
            yield Delete("sketch", {"sid": sid})
    yield Update("session", {"expires": 0.0} if interrupted else {"claim": None, "expires": None}, held(claim))


def lapse(claims: Iterable[Claim]) -> Job[None]:
    """Let claims lapse at once. Others may then recover their runs."""
    # In one order for all, since sessions are locked one after the other.
    for claim in sorted(claims, key=lambda each: each.session_id):
        yield Lock((claim.session_id,))
        ((time,),) = yield Clock()
        yield Update("session", {"expires": 0.0}, {**held(claim), "expires >": time})


def lapse_all() -> Job[int]:
    """Let every claim lapse, in a store that was restored from a copy: their holders ran on another store."""
    ids = [session_id for (session_id,) in (yield Select("session", ("id",), {"claim !=": None}, order="sid"))]
    yield Lock(tuple(ids))
    for session_id in ids:
        yield Update("session", {"expires": 0.0}, {"id": session_id, "claim !=": None})
    return len(ids)


def held(claim: Claim) -> dict[str, object]:
    """Return the conditions that a session's row meets while a claim on it is held."""
    return {"id": str(claim.session_id), "epoch": claim.epoch, "claim !=": None}


def lapsed() -> Job[list[SessionId]]:
    rows = yield Select("session", ("id", "claim", "expires"), {"claim !=": None}, order="sid")
    ((time,),) = (yield Clock()) if rows else [(0.0,)]  # idle workers ask every second
    look = Look()
    return [stored_id(key) for key, claim, expires in rows if expires <= time or look.finds_gone(holder_of(key, claim))]


def running() -> Job[list[Running]]:
    """Return all claims."""
    columns = ("id", "owner", "claim", "expires")
    rows = yield Select("session", columns, {"claim !=": None}, order="sid")
    ((time,),) = yield Clock()
    look = Look()
    return [_running(look, time, *row) for row in rows]


def _running(look: Look, time: float, session_id: str, owner: str | None, claim: bytes, expires: float) -> Running:
    holder = holder_of(session_id, claim)
    is_lapsed = expires <= time or look.finds_gone(holder)
    return Running(stored_id(session_id), owner, holder.owner, holder.since or None, expires, is_lapsed)


def is_claimed(session_id: str) -> Job[bool]:
    facts = yield from _claim_of(session_id)
    if facts.sid is None:
        raise SessionNotFound(session_id)
    return facts.claim is not None and facts.stands and not holder_of(session_id, facts.claim).is_gone


def is_interrupted(session_id: str) -> Job[bool]:
    facts = yield from _claim_of(session_id)
    return facts.claim is not None and (not facts.stands or holder_of(session_id, facts.claim).is_gone)


def _claim_of(session_id: str) -> Job[Facts]:
    rows = yield Select("session", ("sid", "version", "claim", "expires", "priority"), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        return Facts()
    sid, version, claim, expires, priority = rows[0]
    # A row that is zeros in part reads as one without a claim. Then a column before it or one after it is missing, too.
    number(version, session_id, "header")
    number(priority, session_id, "header")
    if claim is not None:
        holder_of(session_id, claim)  # if the row's columns are shifted, the claim shows it, and the lease does not
    stands = claim is not None and (yield from is_in_future(expires))
    return Facts(sid=sid, claim=claim, stands=stands)
