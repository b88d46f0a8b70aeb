"""How a session stands, who may change it, and what keeps a claim or ends it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from perdure.errors import (
    ClaimLost,
    CorruptRecord,
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
    """How a session stands when a change to it is tried. `sid` is None if there is none."""

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
    """Who holds the session, or has held it last and not given it back."""
    stands: bool = False
    """Whether the lease of the claim has not run out."""
    erasures: int = 0
    recent: int | None = None
    """The minute that lists have it under; None if that is not known, or the engine sees to it."""

    @property
    def is_waited_for(self) -> bool:
        """Tell whether the inbox holds something that nobody has taken."""
        return self.inbox_end > self.taken


def owner_of(sid: int) -> Job[str | None]:
    """Return the owner of a session by its number."""
    rows = yield Select("session", ("owner",), {"sid": sid})
    return rows[0][0] if rows else None


def owner_by_id(session_id: str) -> Job[str | None]:
    """Return the owner of a session; None if it has none, or is not there."""
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


def number(found: object, session_id: str | None, where: str) -> int:
    """Return a number that was read; damage can change a column's type."""
    if type(found) is not int:
        raise CorruptRecord(session_id, where, "it is no number")
    return found


def require_absent(session_id: str) -> Job[None]:
    """Raise CorruptRecord if a session that was not found is there all the same."""
    if (yield Select("session", ("sid",), {"id": str(session_id)}, again=True)):
        raise CorruptRecord(session_id, "in the index of ids", "it is missing or leads elsewhere")


def sid_of(session_id: str) -> Job[int]:
    """Return the number of a session; SessionNotFound if there is none."""
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
    """Raise SessionBusy while somebody's claim stands: its lease has not run out, nor its process ended."""
    if facts.claim is not None and facts.stands:
        holder = holder_of(session_id, facts.claim)
        if not holder.is_gone:
            raise SessionBusy(session_id, holder.owner)


def refusal(
    session_id: SessionId, facts: Facts, claim: Claim | None, *, take_over: bool = False
) -> PerdureError | None:
    """Say why a session may not be changed: under a claim, or by one who has none. None if it may be.

    This is the one place that decides it. One who has no claim is refused while one lies there, unless it has lapsed
    and is to be taken over.
    """
    if claim is not None:
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
    """Give a claim back. What was being said under it is dropped, unless somebody is to recover it."""
    if sketched and not interrupted:
        yield Lock((claim.session_id,))
        for (sid,) in (yield Select("session", ("sid",), held(claim))):
            yield Delete("sketch", {"sid": sid})
    yield Update("session", {"expires": 0.0} if interrupted else {"claim": None, "expires": None}, held(claim))


def lapse(claims: Iterable[Claim]) -> Job[None]:
    """Let claims run out at once: their holders can write no more, and others may recover what they have left."""
    for claim in sorted(claims, key=lambda each: each.session_id):
        yield Lock((claim.session_id,))
        ((time,),) = yield Clock()
        yield Update("session", {"expires": 0.0}, {**held(claim), "expires >": time})


def lapse_all() -> Job[int]:
    """Let every claim run out, in a store that was put back from a copy: its holders ran on another one."""
    ids = [session_id for (session_id,) in (yield Select("session", ("id",), {"claim !=": None}, order="sid"))]
    yield Lock(tuple(ids))
    for session_id in ids:
        yield Update("session", {"expires": 0.0}, {"id": session_id, "claim !=": None})
    return len(ids)


def held(claim: Claim) -> dict[str, object]:
    """Return what a session's row meets while a claim on it is held."""
    return {"id": str(claim.session_id), "epoch": claim.epoch, "claim !=": None}


def lapsed() -> Job[list[SessionId]]:
    rows = yield Select("session", ("id", "claim", "expires"), {"claim !=": None}, order="sid")
    ((time,),) = (yield Clock()) if rows else [(0.0,)]  # idle workers ask every second
    look = Look()
    return [SessionId(key) for key, claim, expires in rows if expires <= time or look.finds_gone(holder_of(key, claim))]


def running() -> Job[list[Running]]:
    """Return every claim there is."""
    columns = ("id", "owner", "claim", "expires")
    rows = yield Select("session", columns, {"claim !=": None}, order="sid")
    ((time,),) = yield Clock()
    look = Look()
    return [_running(look, time, *row) for row in rows]


def _running(look: Look, time: float, session_id: str, owner: str | None, claim: bytes, expires: float) -> Running:
    holder = holder_of(session_id, claim)
    is_lapsed = expires <= time or look.finds_gone(holder)
    return Running(SessionId(session_id), owner, holder.owner, holder.since or None, expires, is_lapsed)


def is_claimed(session_id: str) -> Job[bool]:
    facts = yield from _claim_of(session_id)
    if facts.sid is None:
        raise SessionNotFound(session_id)
    return facts.claim is not None and facts.stands and not holder_of(session_id, facts.claim).is_gone


def is_interrupted(session_id: str) -> Job[bool]:
    facts = yield from _claim_of(session_id)
    return facts.claim is not None and (not facts.stands or holder_of(session_id, facts.claim).is_gone)


def _claim_of(session_id: str) -> Job[Facts]:
    rows = yield Select("session", ("sid", "claim", "expires"), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        return Facts()
    sid, claim, expires = rows[0]
    stands = claim is not None and (yield from is_in_future(expires))
    return Facts(sid=sid, claim=claim, stands=stands)
