"""Send messages to an agent and run it to its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.callers import Caller
from perdure.actions.children import depth_of
from perdure.actions.given import messages_to_send, redacted_messages, require_loops
from perdure.actions.inbox import QUEUE, STEER, Inbox, WaitingMessages, item_of, messages_in
from perdure.actions.run import (
    RunOptions,
    checked_metadata,
    ready_to_run,
    require_journal,
    run_agent,
)
from perdure.actions.subagents import Spawner
from perdure.actions.waiting import not_active
from perdure.errors import (
    ClaimLost,
    InvalidData,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.loop.response_format import Form
from perdure.model.checks import expect_text
from perdure.model.execution import ExecutionStatus, ExternalToolSpec, ModelOptions
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.stop import StopReason
from perdure.model.value import thawed
from perdure.protocols import (
    ActionContext,
    ActionResult,
    Answer,
    Journal,
    JournalEntry,
    Key,
    Sequel,
    SessionManager,
    check_key,
)

if TYPE_CHECKING:
    from perdure.actions.definition import ChangeModel
    from perdure.actions.model_change import ModelFor
    from perdure.model.message import Message
    from perdure.model.state import AgentState

WhenBusy = Literal["raise", "steer", "queue"]
"""The ways to treat a message during another run: raise an error, steer that run with it, or send it afterwards."""
_SPEC = ("name", "description", "parameters")


class SendMessage:
    """An action that appends a user's message, runs the agent, and keeps the answer.

    `message` is a text, a `Message`, a dict, or several of them. `loops` runs the agent.

    `key` makes a repeated request return the result of the first one. `when_busy` is for a session that is being run.
    "raise" raises an error at once. "steer" delivers the message to the run between two steps. "queue" sends it when
    the run ends.

    `metadata` is put on the record of the run. `context` is what tools find in `ToolContext.context`. It is never
    stored. `context_data` is JSON that is stored with the run. Where the caller is gone, `connect(context=…)` makes a
    context of it.

    `output`, a type or a JSON schema, is the form of this answer alone. `external_tools` are tools that this run alone
    may call, and that are called outside. `instructions` are given to this run alone, behind the system prompt.
    `model_options` say how it alone asks the model.

    `model_for` returns the `ChangeModel` that a session needs first, or None. It is executed once nothing else prevents
    the run. `depth` is the number of agents above this one. `answers` is the entry of the inbox that is answered, if
    there is one.

    Messages of other roles than `user` are refused unless `any_role` is set. `InjectMessage` accepts them all.
    """

    def __init__(
        self,
        message: object,
        loops: LoopFactory,
        *,
        key: str | None = None,
        when_busy: WhenBusy = "raise",
        metadata: Mapping[str, Any] | None = None,
        depth: int = 0,
        answers: JournalEntry | None = None,
        any_role: bool = False,
        context: object = None,
        context_data: Mapping[str, Any] | None = None,
        output: object = None,
        external_tools: object = None,
        instructions: str | None = None,
        model_options: object = None,
        model_for: ModelFor | None = None,
    ) -> None:
        self._loops = require_loops(loops)
        self.messages = redacted_messages(messages_to_send(message, any_role=any_role), self._loops)
        self.asked = self.messages
        """The messages that its run answers. If it continues another run, that is a note about its calls."""
        if when_busy not in ("raise", STEER, QUEUE):
            raise InvalidData("$.when_busy", f"expected 'raise', 'steer' or 'queue', got {when_busy!r}")
        if key is not None:
            check_key(key)
        if key is not None and when_busy == STEER:
            problem = "a message that steers another run has no result of its own; use when_busy='queue'"
            raise InvalidData("$.key", problem)
        if metadata and when_busy == STEER:
            problem = "a message that steers another run has no record of its own; use when_busy='queue'"
            raise InvalidData("$.metadata", problem)
        if output is not None and when_busy == STEER:
            problem = "a message that steers another run has no answer of its own; use when_busy='queue'"
            raise InvalidData("$.output", problem)
        if (external_tools or instructions or model_options) and when_busy == STEER:
            problem = "a message that steers another run has no tools, instructions and options of its own; use 'queue'"
            raise InvalidData("$.when_busy", problem)
        self.form = None if output is None else Form.of(output)
        self._external_tools = _specs_of(external_tools) if external_tools else ()
        self._instructions = None if instructions is None else expect_text(instructions, "$.instructions") or None
        self._model_options = _options_of(model_options)
        self._metadata = checked_metadata(metadata)
        self._caller = Caller.of(context, context_data)
        self._redact_terms()
        self._when_busy = when_busy
        self._depth = depth
        self._answers = answers
        """The item of the inbox that the messages come from."""
        self._key = None if key is None else Key(key, self._digest())
        self._model_for = model_for
        self._takes_back: str | None = None
        self._has_taken_over = False
        """True if its key is that of the run that it replaces."""
        self.was_left = False
        """True if the messages were left in the inbox: what the session says is not an answer to them."""
        self.left_as: JournalEntry | None = None
        """The item of the inbox in which they wait for a run of their own."""

    def _redact_terms(self) -> None:
        """Redact what goes with the messages: it is stored with the run, and the model is told some of it."""
        if getattr(self._loops, "redaction", None) is None:
            return
        redacted = self._loops.redacted
        self._external_tools = redacted(self._external_tools)
        self._instructions = redacted(self._instructions)
        self._metadata = redacted(self._metadata)
        self._caller = replace(self._caller, data=redacted(self._caller.data))
        if self.form is not None and redacted(self.form.schema) is not self.form.schema:
            self.form = Form(redacted(self.form.schema))

    @property
    def key(self) -> Key | None:
        """The key that the caller has given, never one that was taken over."""
        return None if self._has_taken_over else self._key

    @property
    def may_be_queued(self) -> bool:
        """True if the message waits for its turn while another run is under way."""
        return self._may_be_left == QUEUE

    def in_place_of(self, loop_id: str, key: Key | None, messages: tuple[Message, ...]) -> Self:
        """Have the messages replace the run `loop_id`, which leaves the view in the same commit. Return this action.

        Without a key of their own they take over the `key` of the run. `messages` are these messages as they are on
        record: some may be notes.
        """
        self._takes_back = loop_id
        self.messages = self.asked = redacted_messages(messages, self._loops)
        if self._key is None and key is not None:
            self._key, self._has_taken_over = key, True
        return self

    def _digest(self) -> str:
        raw = codec.encode([[message.role, message.parts] for message in self.messages])
        if self.form is not None:  # without one, the key is the same as in earlier releases
            raw += msgspec.json.encode(self.form.schema, order="deterministic")
        if self._external_tools or self._instructions:
            raw += msgspec.json.encode([self._external_tools, self._instructions], order="deterministic")
        if self._model_options is not None:
            raw += msgspec.json.encode(self._model_options, order="deterministic")
        return hashlib.sha256(raw).hexdigest()

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        takes_back = self._takes_back
        if self._key is not None and not self._has_taken_over:
            journal = require_journal(context, "An idempotency key")
            kept = await self._kept(self._key, session, journal, context)
            if kept is not None and not await _may_run_again(kept, session, journal):
                return Answer(kept)
            if kept is not None and kept.state.execution is not None and takes_back is None:
                takes_back = kept.state.execution.execution_id
        if session.status is not SessionStatus.ACTIVE:
            raise not_active(session)
        depth = self._depth or await depth_of(session, context)
        spawn = Spawner(session, context, self._loops) if context is not None else None
        # A posted message has no sequel: what executes it looks for the next one itself.
        then = waiting_messages(context, session.id, self._loops, depth) if self._answers is None else None
        if self._may_be_left == QUEUE and context is not None and await _is_behind_others(session, context):
            return await self._left(session, context, then)
        self.asked = self.messages
        if takes_back is not None:
            self.asked, takes_back = await _asked_in_place_of(takes_back, session, context, self.messages)
        began_as = session if takes_back is None else await _without_run(session, takes_back, context)
        state = began_as.state.with_messages(*self.asked)
        options = replace(self._options(depth, then), takes_back=takes_back, began_as=began_as)
        try:
            change = None if self._model_for is None else self._model_for(session)
            if change is not None and context is not None:
                return await self._with_model(session, change, state, context, options)
            return await run_agent(session, state, self._loops, context, options, spawn)
        # Kinds of SessionBusy that leaving the message would not answer. This run was interrupted or taken over, or a
        # killed run has to be recovered first.
        except (ClaimLost, RunInterrupted):
            raise
        except (SessionBusy, SessionConflict) as error:  # the session is being run, or has been since it was loaded
            if self._may_be_left == "raise" or context is None or error.session_id != session.id:  # a child's, then
                raise
            if self._loops.telemetry is not None:  # the runtime counts those that are raised
                self._loops.telemetry.refused(error)
            return await self._left(session, context, then)

    async def _with_model(
        self, session: AgentSession, change: ChangeModel, state: AgentState, context: ActionContext, options: RunOptions
    ) -> ActionResult:
        """Change the session's model, then begin. Nothing is changed if the run could not begin with it."""
        from perdure.actions.model_change import begun_with, require_changed  # few sessions change their models

        await ready_to_run(session, change.state_of(state), self._loops, context, options)
        await require_changed(self._loops, session, change)
        return await begun_with(change, self, session, context)

    @property
    def _may_be_left(self) -> WhenBusy:
        """Return what happens to the messages if the session is being run. Those that replace a run never wait."""
        return "raise" if self._takes_back is not None else self._when_busy

    async def _left(self, session: AgentSession, context: ActionContext, then: Sequel | None) -> Answer:
        """Leave the messages in the inbox."""
        journal = require_journal(context, "when_busy")
        posted = await Inbox(journal, session.id).post(self._when_busy, self.item())
        self.was_left = True
        self.left_as = posted if self._when_busy == QUEUE else None
        is_claimed = await journal.is_claimed(session.id)  # the sequel of that run will read the inbox
        return Answer(session, None if is_claimed else then)

    def item(self) -> dict[str, Any]:
        """Return the messages with all their terms, as they wait in an inbox."""
        key, digest = (None, None) if self._key is None else (self._key.name, self._key.digest)
        output = None if self.form is None else self.form.schema
        item = item_of(self.messages, key, self._metadata, self._caller.data, output, digest)
        specs = [{name: thawed(getattr(each, name)) for name in _SPEC} for each in self._external_tools]
        tools = {"external_tools": specs} if specs else {}
        told = {"instructions": self._instructions} if self._instructions else {}
        options = {} if self._model_options is None else {"model_options": self._model_options.to_dict()}
        here = None if self._loops.telemetry is None else self._loops.telemetry.here()
        trace = {} if here is None else {"trace": here}
        return {**item, **tools, **told, **options, **trace}

    def _options(self, depth: int, then: Sequel | None) -> RunOptions:
        options = RunOptions(
            inputs=self.asked,
            key=self._key,
            depth=depth,
            metadata=self._metadata,
            then=then,
            caller=self._caller,
            form=self.form,
            external_tools=self._external_tools,
            instructions=self._instructions,
            model_options=self._model_options,
        )
        item = self._answers
        if item is None:
            return options
        return replace(options, taken=item.seq, posted=item.body.get("id"), sender=item.body.get("trace"))

    async def _kept(
        self, key: Key, session: AgentSession, journal: Journal, context: ActionContext | None
    ) -> AgentSession | None:
        """Return the session as the key's run has left it by now, or None if the key was not used."""
        found = await journal.find_key(session.id, key.name)
        if found is None:
            return None
        first, version = found
        if first.digest != key.digest:
            raise used_for_another(key.name)
        assert context is not None
        kept = await context.store.load(session.id, version)
        if kept is None:
            raise SessionNotFound(session.id, version)
        return kept


def _specs_of(tools: object) -> tuple[ExternalToolSpec, ...]:
    from perdure.loop.external import specs_of  # few messages bring tools

    return specs_of(tools)


def _options_of(given: object) -> ModelOptions | None:
    """Return options for the model, which may be given as plain data."""
    if given is None or isinstance(given, ModelOptions):
        return given
    if not isinstance(given, Mapping):
        raise InvalidData("$.model_options", f"expected ModelOptions, got {type(given).__name__}")
    return codec.convert(ModelOptions, given)


def used_for_another(key: str) -> InvalidData:
    """Explain that a key stands for another request."""
    problem = f"the key {key!r} was used for another message or output; a new request needs a new key"
    return InvalidData("$.key", problem)


async def _without_run(session: AgentSession, loop_id: str, context: ActionContext | None) -> AgentSession:
    from perdure.actions.undo_run import without_run  # few messages are sent in place of others

    return await without_run(session, loop_id, context)


async def _asked_in_place_of(
    loop_id: str, session: AgentSession, context: ActionContext | None, messages: tuple[Message, ...]
) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages that a run in place of another one answers, and the run that it takes back, if any."""
    from perdure.actions.begun_calls import in_place_of  # few messages are sent in place of others

    journal = require_journal(context, "A run that is begun again")
    made = await in_place_of(journal, session, loop_id, messages)
    return tuple(made.messages), made.takes_back


async def _is_behind_others(session: AgentSession, context: ActionContext) -> bool:
    """Tell whether messages wait that were queued before. A killed run does not count: it is recovered first."""
    journal = context.journal
    if journal is None or await Inbox(journal, session.id).first_waiting() is None:
        return False
    return not await journal.is_interrupted(session.id)


async def _may_run_again(answer: AgentSession, session: AgentSession, journal: Journal) -> bool:
    """Tell whether a key's run has no result: it failed, was cancelled, or was given up while it waited."""
    state = answer.state
    if state.execution is not None and state.execution.pending_calls and session.version > answer.version:
        runs = await journal.runs(session.id, run=state.execution.execution_id)
        return any(run.last.kind == "agent_end" for run in runs)
    return state.status is ExecutionStatus.FAILED or state.stop_reason is StopReason.USER_REQUESTED


def waiting_messages(
    given: ActionContext | SessionManager | None, session_id: str, loops: LoopFactory, depth: int = 0
) -> WaitingMessages | None:
    """Return the sequel of work on a session. It sends what waits in the inbox, each message by a run of its own."""
    if given is None or given.journal is None:
        return None

    def send(item: JournalEntry) -> SendMessage:
        return posted_message(item, loops, depth)

    return WaitingMessages(given.execute, Inbox(given.journal, session_id), send)


def posted_message(item: JournalEntry, loops: LoopFactory, depth: int = 0) -> SendMessage:
    """Return the action that sends an item of an inbox."""
    names = ("key", "metadata", "context_data", "output", "external_tools", "instructions", "model_options")
    facts = {name: item.body.get(name) for name in names}
    # `any_role`: roles were checked when it was posted.
    return SendMessage(messages_in(item), loops, **facts, depth=depth, answers=item, any_role=True)
