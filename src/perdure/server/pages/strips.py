"""Counts of what needs a person's eye, over all sessions: running, waiting for you, killed, parked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perdure.actions.waiting import is_waiting
from perdure.errors import CorruptRecord, KeyUnavailable, SessionNotFound, UnreadableFile
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.protocols import PARKED, is_queue
from perdure.run_journal import HANDED_OVER
from perdure.sessions.pages import end_of_session
from perdure.sessions.sessions import Sessions

Concern = Literal["running", "waiting", "killed", "parked"]
NAMES: dict[Concern, str] = {
    "running": "running",
    "waiting": "waiting for you",
    "killed": "killed",
    "parked": "parked",
}
_MOST = 200
"""The number of suspended sessions in which those that wait for a person are looked for."""
_REMEMBERED = 10_000


@dataclass(frozen=True)
class Strips:
    """The ids of sessions by concern, the newest first."""

    ids: dict[Concern, Sequence[SessionId]]
    is_cut: bool = False
    """True if more sessions are suspended than were looked at."""


class Strip:
    """A search for what needs a person's eye. A version that waits for a person always will, so that is remembered."""

    def __init__(self) -> None:
        self._waits: OrderedDict[tuple[str, int, float], bool] = OrderedDict()

    async def look(self, sessions: Sessions) -> Strips:
        """Return the sessions of each concern, within the caller's reach."""
        running, killed = await _claimed(sessions)
        suspended = await sessions.headers(status=SessionStatus.SUSPENDED, order="updated", limit=_MOST)
        parked = [info.id for info in suspended if PARKED in info.tags]
        waiting = []
        for info in suspended:
            # With the time of creation, since the id of an erased session may be used again.
            key = (info.id, info.version, info.created_at.timestamp())
            if info.id not in parked and await self._is_waiting(sessions, info.id, key):
                waiting.append(info.id)
        busy = set(running) | set(killed)
        waiting = [each for each in waiting if each not in busy]  # these were decided on, and continue
        found: dict[Concern, Sequence[SessionId]] = {
            "running": running,
            "waiting": waiting,
            "killed": killed,
            "parked": parked,
        }
        return Strips(found, suspended.next is not None)

    async def _is_waiting(self, sessions: Sessions, session_id: SessionId, key: tuple[str, int, float]) -> bool:
        if key not in self._waits:
            try:
                self._waits[key] = is_waiting(await end_of_session(sessions, session_id, last=0))
            except (
                CorruptRecord,
                KeyUnavailable,
                UnreadableFile,
                SessionNotFound,
            ):  # its own page says so, and /approvals names it
                return False
            while len(self._waits) > _REMEMBERED:
                self._waits.popitem(last=False)
        return self._waits[key]


async def _claimed(sessions: Sessions) -> tuple[list[SessionId], list[SessionId]]:
    """Return the sessions that are being run, and those whose run was killed."""
    journal = sessions.runtime.journal
    if journal is None or not is_queue(journal):
        return [], []
    claims = [each for each in await journal.running() if sessions.owner in (None, each.owner)]
    running, killed = [], []
    for each in claims:
        if not each.lapsed:
            running.append(each.session_id)
            continue
        last = await journal.read(each.session_id, last=1)  # type: ignore[attr-defined]  # a Queue is a journal too
        if not last or last[0].kind != HANDED_OVER:  # a worker that was told to stop has handed those over
            killed.append(each.session_id)
    return running, killed
