"""The prompt of one step of a run: what the model was sent, put together from the record as recovery does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from perdure.actions.undo_run import without_run
from perdure.loop.prompt import compile_prompt
from perdure.loop.replay import Replay
from perdure.model.definition import AgentDefinition
from perdure.model.loop_events import AgentStart, AnyLoopEvent, MessageEnd, TurnStart
from perdure.model.message import Message
from perdure.model.record import LoopRecord
from perdure.model.session import AgentSession
from perdure.model.state import AgentState

if TYPE_CHECKING:
    from perdure.sessions.looking import Looking


class Sent(msgspec.Struct, frozen=True):
    """A model call as the record tells it. Changes that interceptors made at the last moment are not on record."""

    definition: AgentDefinition
    state: AgentState
    """The agent's state right before the call: its prompt, the run's own instructions and tools, and the view."""
    messages: Sequence[Message]
    """The view as a prompt: every call has its result, and empty messages are left out."""


async def sent_in(sessions: Looking, loop: LoopRecord, step_id: str) -> Sent | None:
    """Return what the model was sent in a step of a run, or None if the record does not tell from what the run began.

    Raise VersionForgotten if the version that it began from is not kept any more.
    """
    events = list(_until_answer(loop.events, step_id))
    starts = [event for event in events if isinstance(event, AgentStart)]
    version = starts[-1].base_version if starts else None
    if version is None:
        return None
    # A run that was saved while it waited begins again from that version. One that was killed still has its first.
    first = next(place for place, event in enumerate(events) if _sets_out_from(event, version))
    session = await _as_it_was(sessions, loop, version, events[first])
    state = Replay(session.state).apply_all(events[first:]).state
    return Sent(session.definition, state, compile_prompt(state.transcript))


def _until_answer(events: Sequence[AnyLoopEvent], step_id: str) -> Iterator[AnyLoopEvent]:
    """Yield the events before a step's answer. An answer that a killed process had begun does not count."""
    is_in_step = False
    for event in events:
        if isinstance(event, TurnStart):
            if is_in_step:
                return
            is_in_step = event.step_id == step_id
        if is_in_step and isinstance(event, MessageEnd) and _is_answer(event.message):
            return
        yield event


def _is_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.is_superseded


def _sets_out_from(event: AnyLoopEvent, version: int) -> bool:
    return isinstance(event, AgentStart) and event.base_version == version


async def _as_it_was(sessions: Looking, loop: LoopRecord, version: int, start: AnyLoopEvent) -> AgentSession:
    session = await sessions.session(loop.session_id, version)
    if not isinstance(start, AgentStart) or start.takes_back is None:
        return session
    return await without_run(session, start.takes_back, sessions)
