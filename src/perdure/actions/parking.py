"""Parking: a session whose runs crash their processes is closed until an operator opens it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from perdure.actions.resume import ResumeExecution
from perdure.errors import InvalidData
from perdure.loop.factory import LoopFactory
from perdure.model.ids import now
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.value import ErrorRecord
from perdure.protocols import PARKED, ActionContext, ActionResult, Entry, Journal, Next, Parked
from perdure.run_journal import HANDED_OVER
from perdure.runtime.record_reader import last_of_run

_LOOKED_AT = 64
"""The number of entries at the end of a record that are searched for the reason. Few follow it in a closed session."""
_PROGRESS = frozenset({"tool_execution_end", "turn_end"})


async def deaths(journal: Journal, session_id: str) -> int:
    """Return how often the run to continue has died with its process since it last made progress.

    It has died at least once, unless it was handed over: then its process had time to say so.
    """
    newest = await last_of_run(journal, session_id)
    if newest is None or newest.run is None:
        return 0
    first = await journal.read(session_id, run=newest.run, limit=1)
    died, is_alive = 0, False
    for entry in await journal.read(session_id, after=first[0].seq - 1):
        if entry.kind == "agent_start" and entry.run == newest.run:
            # Another start while the run counts as alive: the process of the one before has died.
            died, is_alive = died + is_alive, True
        elif entry.kind in _PROGRESS:
            died = 0
        elif entry.kind == HANDED_OVER:
            died, is_alive = 0, False
    return died + is_alive


@dataclass(frozen=True, slots=True)
class ParkSession:
    """An action that ends a killed run where it is, and closes the session until somebody opens it again.

    What waits in its inbox stays there. The reason is put on record.
    """

    ends_interruption: ClassVar[bool] = True

    loops: LoopFactory
    tries: int
    reason: str = "its process has died each time it was run"

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        failure = ErrorRecord("RunParked", f"{self.reason} ({_times(self.tries)}), so its session was parked")
        # `alone`: messages in the inbox must not be sent from here, where they may crash this process too.
        ended = ResumeExecution(self.loops, give_up=True, failure=failure, alone=True)
        made = await ended.execute_on(session, context)
        why = Parked(self.reason, self.tries, now().isoformat())
        if not isinstance(made, Next):  # another process has recovered it
            return made
        entry = Entry(PARKED, msgspec.to_builtins(why))
        saving = None if made.saving is None else replace(made.saving, entries=(*made.saving.entries, entry))
        return replace(made, session=_closed(made.session), saving=saving)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _closed(session: AgentSession) -> AgentSession:
    tagged = session.with_tags((*(tag for tag in session.info.tags if tag != PARKED), PARKED))
    return tagged.suspended() if tagged.status is SessionStatus.ACTIVE else tagged


async def why_parked(journal: Journal, session_id: str) -> Parked | None:
    """Return why a session is parked, or None if its record does not say."""
    newest = await journal.read(session_id, last=_LOOKED_AT)
    found = next((entry for entry in reversed(newest) if entry.kind == PARKED), None)
    return None if found is None else msgspec.convert(found.body, Parked)


@dataclass(frozen=True, slots=True)
class UnparkSession:
    """An action that opens a session that is parked. What waits in its inbox is sent next."""

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        if PARKED not in session.info.tags:
            raise InvalidData("$.session_id", f"session {session.id!r} is not parked")
        opened = session.with_tags(tag for tag in session.info.tags if tag != PARKED)
        return opened.activated() if opened.status is SessionStatus.SUSPENDED else opened
