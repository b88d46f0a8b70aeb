"""Start over within the same session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from perdure.actions.waiting import end_waiting
from perdure.model.ids import now
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.protocols import ActionContext, ActionResult


@dataclass(frozen=True, slots=True)
class ClearSession:
    """An action that resets the state to what the definition gives. The session keeps its identity.

    The count of its executions and their usage stay. A run that waits for a person ends, and its session is active.
    """

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        fresh = AgentState.of(session.definition)
        emptied = session.state.for_next_execution().with_context(fresh.context)
        state = replace(emptied, model=None, task=None, updated_at=now())
        return await end_waiting(session, session.with_state(state), context, "the session was cleared")
