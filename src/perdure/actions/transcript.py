"""Actions that change the messages that the model is shown. None deletes anything: each makes a new view of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.errors import ConfigurationError, InvalidData, SessionNotFound
from perdure.model.checks import expect_count
from perdure.model.message import Message, require_distinct, several_messages
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.transcript import Transcript
from perdure.model.value import brief
from perdure.protocols import ActionContext, ActionResult, Kept

_ORPHAN = (
    "no message before it makes the call {call} that this result answers, so the model would not be shown it; "
    "inject the assistant's message with that call too, or say it in a text of role 'user'"
)


class InjectMessage:
    """An action that appends `messages` without running the agent: messages, texts, or dicts as in OpenAI's APIs."""

    may_be_repeated = True

    __slots__ = ("messages",)

    def __init__(self, *messages: object) -> None:
        if not messages:
            raise InvalidData("$.messages", "there is nothing to inject; give at least one message")
        several = len(messages) > 1
        self.messages = several_messages(messages, "$.messages") if several else (Message.of(messages[0]),)
        require_distinct(self.messages, "$.messages")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        self._require_calls(session.state.transcript)
        return session.with_state(session.state.with_messages(*self.messages))

    def _require_calls(self, view: Transcript) -> None:
        """Raise InvalidData if a tool result answers no call: the model would not be shown it.

        A history from elsewhere may begin in the middle. Then its first results have lost their calls already.
        """
        made: set[str] = set()
        is_cut = not view and any(message.role != "tool" for message in self.messages)
        for place, message in enumerate(self.messages):
            made |= _calls_of(message)
            is_cut = is_cut and message.role == "tool"
            for result in () if is_cut else message.tool_results:
                if result.call_id not in made and not _makes_call(view, result.call_id):
                    raise InvalidData(f"$.messages[{place}]", _ORPHAN.format(call=brief(result.call_id)))


def _makes_call(view: Transcript, call_id: str) -> bool:
    """Tell whether a view shows a call. It looks at the last messages first, since results follow their calls."""
    return any(call_id in _calls_of(message) for message in reversed(view))


@dataclass(frozen=True, slots=True)
class TrimTranscript:
    """An action that shows the last `keep_last` messages, or a few more where a tool result would lose its call.

    The result may still be to come: calls that a person has to decide about stay. Hidden messages, which a framework
    keeps for itself, are not counted.
    """

    may_be_repeated: ClassVar[bool] = True

    keep_last: int

    def __post_init__(self) -> None:
        # Not isinstance, which takes True and False for numbers.
        if type(self.keep_last) is not int or self.keep_last < 0:
            raise InvalidData("$.keep_last", f"expected a count of at least 0, got {self.keep_last!r}")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        view, waiting = session.state.transcript, open_calls(session.state)
        needed = (place for place, message in enumerate(view) if waiting & _calls_of(message))
        first = next(needed, len(view)) if waiting else len(view)
        kept = view.trim(self.keep_last)
        kept = kept if len(kept) >= len(view) - first else view.cut(view.safe_cut(first), len(view))
        return session.with_state(session.state.with_transcript(kept))


@dataclass(frozen=True, slots=True)
class ResetTranscript:
    """An action that shows nothing of what was said so far. Prompt, metadata and the rest stay.

    A run that waits for a person ends, and its session is active: its calls are no longer shown.
    """

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        state = session.state.for_next_execution() if open_calls(session.state) else session.state
        after = session.with_state(state.with_transcript(state.transcript.reset()))
        return await _without_waiting(session, after, context, "the transcript was reset")


@dataclass(frozen=True, slots=True)
class Rewind:
    """An action that goes back to an earlier transcript: to a message, by its id, or to a version, by its number.

    A run that waits for a person ends, and its session is active.
    """

    may_be_repeated: ClassVar[bool] = True

    to: int | str
    """The number of a version, or the id of a message."""

    def __post_init__(self) -> None:
        if not isinstance(self.to, int | str) or isinstance(self.to, bool):
            raise InvalidData("$.to", f"expected a version number or a message id, got {type(self.to).__name__}")
        if isinstance(self.to, int):
            expect_count(self.to, "$.to", least=1)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if isinstance(self.to, str):
            transcript = session.state.transcript
            transcript = transcript.cut(0, place_of(transcript, self.to, "$.to"))
        else:
            transcript = (await at_version(session, self.to, context)).state.transcript
        after = session.with_state(session.state.for_next_execution().with_transcript(transcript))
        return await _without_waiting(session, after, context, "the session was rewound")


@dataclass(frozen=True, slots=True)
class Undo:
    """An action that takes back the last change of what the model is shown. Another one takes back the change before.

    Raise InvalidData if nothing is left to undo. A change of hidden messages alone, which a framework keeps for itself,
    is taken back together with the change before it. Nothing is lost: every version can still be rewound to. A run that
    waits for a person ends.
    """

    may_be_repeated: ClassVar[bool] = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        first = session.info.first_version
        shown = await self._origin(session, first, context)
        while shown.version > first and not _began_before(shown.state, first):
            older = await at_version(session, shown.version - 1, context)
            shown = await self._origin(older, first, context)
            if _is_seen(shown.state.transcript, session.state.transcript):
                state = session.state.for_next_execution()
                after = session.with_state(state.with_transcript(shown.state.transcript, rewound_to=shown.version))
                return await _without_waiting(session, after, context, "it was undone")
        forgotten = f" that is kept; versions before {first} were forgotten" if first > 1 else ""
        raise InvalidData("$", f"there is nothing to undo: this view is the session's first{forgotten}")

    async def _origin(self, session: AgentSession, first: int, context: ActionContext | None) -> AgentSession:
        """Return the version that first had a session's view. A view that an undo has made is older than its version.

        Only versions from `first` on are read. A state that was not made by its own methods may name a version with
        another view. It is taken for a new view.
        """
        while first <= (since := session.state.rewound_to or session.state.shown_since) < session.version:
            older = await at_version(session, since, context)
            if older.state.transcript != session.state.transcript:
                break
            session = older
        return session


def _is_seen(before: Transcript, after: Transcript) -> bool:
    """Tell whether a reader can see that a view has changed."""
    return before != after and not before.differs_by_hidden(after)


def _began_before(state: AgentState, version: int) -> bool:
    """Tell whether a view is older than a version, so that what was shown before the view was forgotten."""
    return 0 < (state.rewound_to or state.shown_since) < version


def open_calls(state: AgentState) -> set[str]:
    """Return the ids of the calls of a run that waits for a person. Their results are still to come."""
    execution = state.execution
    if execution is None:
        return set()
    step = execution.current_step.tool_calls if execution.current_step else ()
    return {call.id for call in (*execution.pending_calls, *step)}


def _calls_of(message: Message) -> set[str]:
    return {call.id for call in message.tool_calls}


async def _without_waiting(
    session: AgentSession, after: AgentSession, context: ActionContext | None, why: str
) -> ActionResult:
    """Return a session in which no run waits."""
    # Imported here: an action that only injects a message should not load what ends a run.
    from perdure.actions.waiting import end_waiting

    return await end_waiting(session, after, context, why)


async def at_version(session: AgentSession, version: int, context: Kept | None) -> AgentSession:
    """Return a session as of an older version."""
    if context is None:
        raise ConfigurationError("Going back to a version needs the store: execute it with SessionRuntime.execute().")
    older = await context.store.load(session.id, version)
    if older is None:
        raise SessionNotFound(session.id, version)
    return older


def place_of(transcript: Transcript, at: int | str, path: str) -> int:
    """Return the number of messages in a view up to a count of them, or up to and including a message's id."""
    if isinstance(at, bool) or not isinstance(at, int | str):
        raise InvalidData(path, f"expected a count of messages or a message id, got {type(at).__name__}")
    if isinstance(at, int):
        if not 0 <= at <= len(transcript):
            raise InvalidData(path, f"{at} is not between 0 and the {len(transcript)} messages of this transcript")
        return at
    try:
        return transcript.index(at) + 1
    except ValueError as error:
        raise InvalidData(path, f"{error}; it shows {len(transcript)} messages") from None
