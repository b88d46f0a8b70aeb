"""The link between a session and a loop: claim the session, run the agent, and return the result to be saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.callers import NOBODY, Caller
from perdure.actions.claimed_work import ClaimedWork
from perdure.actions.continuing import continuation_of
from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.agent_loop import AgentLoop, Run, RunStart
from perdure.loop.cut_off import LostAnswer
from perdure.loop.factory import LoopFactory
from perdure.loop.filters import rejection_in
from perdure.loop.response_format import Form
from perdure.loop.run_events import ResumePoint, Unrecorded, last_trace
from perdure.loop.tool_use import Decisions
from perdure.model.definition import AgentDefinition, ModelConfig, refuse_secrets
from perdure.model.execution import CallAnswer, ExecutionStatus, ExternalToolSpec, ModelOptions
from perdure.model.lineage import ChildLoopRef
from perdure.model.loop_events import KINDS
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.value import EMPTY, ErrorRecord
from perdure.protocols import ActionContext, Interrupted, Journal, Kept, Key, Next, ReadFiles, Sequel, keeps_files

if TYPE_CHECKING:
    from perdure.actions.titles import Titling
    from perdure.telemetry.spans import RunTrace
    from perdure.telemetry.telemetry import Telemetry

_UNTRACED = nullcontext()
Spawn = Callable[..., Coroutine[Any, Any, Any]]


class Past(msgspec.Struct, frozen=True):
    """The part of a run's record that is needed to continue the run."""

    told: ResumePoint = ResumePoint()
    key: Key | None = None
    context_data: Mapping[str, Any] | None = None


class RunOptions(msgspec.Struct, frozen=True):
    """The options that a run is started with, besides the session's state."""

    inputs: Sequence[Message] = ()
    decisions: Decisions = Decisions()
    key: Key | None = None
    posted: str | None = None
    """The delivery id of the inbox item that the run answers."""
    sender: str | None = None
    """The span that left that item."""
    depth: int = 0
    taken: int = 0
    work: ClaimedWork | None = None
    """The work on a run that was killed, whose claim is held already."""
    past: Past | None = None
    """The past of a run that is continued, if it has been read already."""
    then: Sequel | None = None
    """The sequel that is carried out once the session is free."""
    give_up: bool = False
    """True if the run is only ended, where it is."""
    failure: ErrorRecord | None = None
    """The error with which a run that is given up ends. Without one it counts as cancelled."""
    metadata: Mapping[str, Any] = EMPTY
    """The caller's data about the run, for its record."""
    caller: Caller = NOBODY
    lost: LostAnswer | None = None
    """The part of an answer that the model had written when the run was killed."""
    model: ModelConfig | None = None
    """The model of a run that is continued. A new run asks the session's."""
    takes_back: str | None = None
    """The loop that the run replaces."""
    began_as: AgentSession | None = None
    """The session without that loop, as the run finds it."""
    form: Form | None = None
    """The form of answer of a new run alone. A run that is continued has it on record."""
    external_tools: tuple[ExternalToolSpec, ...] = ()
    """Tools that a new run alone may call. A run that is continued has them on record."""
    instructions: str | None = None
    """Instructions for a new run alone. A run that is continued has them on record."""
    model_options: ModelOptions | None = None
    """Options with which a new run alone asks the model. A run that is continued has them on record."""


async def run_agent(
    session: AgentSession,
    state: AgentState,
    loops: LoopFactory,
    context: ActionContext | None,
    options: RunOptions,
    spawn: Spawn | None = None,
) -> AgentSession | Next:
    """Run a state of a session to the end of its execution. Return the session with the result.

    Raise Interrupted with that session if the run was cancelled and has ended in good order.
    """
    past = options.past or await past_of(session, state, context)
    loop, caller = await ready_to_run(session, state, loops, context, replace(options, past=past))
    work = options.work or ClaimedWork(session, context, taken=options.taken, then=options.then)
    key = options.key or past.key
    trace = None if loops.telemetry is None else _begun_trace(loops.telemetry, session, loop, past, options)
    start = RunStart(
        record=work.record or Unrecorded(),
        session_id=session.id,
        decisions=options.decisions,
        inputs=options.inputs,
        facts={
            "base_version": session.version,
            "spawn_ref": session.info.spawn_ref,
            "key": (key.name, key.digest) if key else None,
            "posted": options.posted,
            "context_data": caller.data,
            "metadata": options.metadata,
            "takes_back": options.takes_back,
            # A run that is recovered has told this, and how it continues, in its first start.
            "answers": () if options.work else _answers_below(state, options.decisions),
            **await continuation_of(options.began_as or session, () if options.work else options.inputs, context),
        },
        spawn=spawn,
        read_files=reader_of_files(session.id, context),
        told=past.told,
        owner=session.info.owner,
        context=caller.context,
        context_data=caller.data,
        lost=options.lost,
        form=options.form,
        external_tools=options.external_tools,
        instructions=options.instructions,
        model_options=options.model_options,
        trace=trace,
        store=None if context is None else context.store,
    )
    run, titling = loop.start(state, start), titling_of(session, loops)
    try:
        with _UNTRACED if trace is None else trace.about(run, work.record):
            await _carry_through(run, work, context, options, titling)
    except asyncio.CancelledError:
        made = work.next(_after(session, run, titling), key=key)
        if run.is_settled and work.can_be_saved and isinstance(made, Next):
            raise Interrupted(made) from None
        raise
    return work.next(_after(session, run, titling), key=key)


def _begun_trace(
    telemetry: Telemetry, session: AgentSession, loop: AgentLoop, past: Past, options: RunOptions
) -> RunTrace | None:
    if options.work is not None and not options.give_up:
        telemetry.recovered()
    return telemetry.run(
        session,
        loop.setup.model,
        before=past.told.trace,
        sender=options.sender,
        is_posted=options.posted is not None,
        inputs=options.inputs,
    )


async def ready_to_run(
    session: AgentSession, state: AgentState, loops: LoopFactory, context: ActionContext | None, options: RunOptions
) -> tuple[AgentLoop, Caller]:
    """Return a run's loop and caller. Raise ConfigurationError, before anything changes, if something is missing."""
    definition = _definition_for(session, options)
    if loops.needs_toolsets(definition):
        from perdure.actions.needed_tools import connect_tools  # few runs have such tools

        await connect_tools(loops, definition, context)
    model = options.model or loops.model_of(definition, state)
    if not options.give_up:
        await loops.require_known(model)
    external = options.external_tools or _external_tools_of(state)
    loop = loops.build(definition, state, depth=options.depth, model=model, external=external)
    caller = await _caller_of(session, loops, options, options.past or Past())
    if not options.give_up:
        caller.require_for(loop.setup.tools, session.id)
        if session.state.execution is not None and session.state.execution.pending_calls:
            from perdure.actions.needed_tools import require_tools_of_waiting  # few runs have waited for a person

            require_tools_of_waiting(session, state, options.decisions, loop.setup.tools)
    return loop, caller


def _answers_below(state: AgentState, decisions: Decisions) -> tuple[CallAnswer, ...]:
    """Return the answers to sub-agents' calls.

    Answers to the run's own calls are put on record as results, in the same commit.
    """
    step = state.execution.current_step if state.execution else None
    own = {call.id for call in step.tool_calls} if step else set()
    return tuple(answer for call, answer in decisions.answers.items() if call not in own)


def _external_tools_of(state: AgentState) -> tuple[ExternalToolSpec, ...]:
    """Return the external tools of the run that is continued. A new run has none yet."""
    is_continued = state.execution is not None and state.status is ExecutionStatus.IN_PROGRESS
    return state.execution.external_tools if is_continued and state.execution is not None else ()


async def _caller_of(session: AgentSession, loops: LoopFactory, options: RunOptions, past: Past) -> Caller:
    """Return the caller of a run. If the caller is gone, the data that it left for tools is on record."""
    caller = options.caller
    if caller.data is None and past.context_data is not None:
        caller = replace(caller, data=past.context_data)
    return caller if options.give_up else await caller.known_to(loops, session)


def reader_of_files(session_id: str, context: ActionContext | None) -> ReadFiles | None:
    """Return a function that reads the images and files of a session, or None if its store keeps none apart."""
    if context is None or not keeps_files(context.store):
        return None
    return partial(context.store.attachments, session_id)


def _definition_for(session: AgentSession, options: RunOptions) -> AgentDefinition:
    """Return the definition of a run. A run that is only ended needs no tools, and no answer in a form."""
    if not options.give_up:
        return session.definition
    return replace(session.definition, tools=(), tools_deny=(), capabilities=(), output=None)


async def past_of(session: AgentSession, state: AgentState, context: ActionContext | None) -> Past:
    """Return how far the record of the run to continue has come, and the key of the request that the run answers."""
    if context is None or context.journal is None or state.execution is None:
        return Past()
    if state.status is not ExecutionStatus.IN_PROGRESS:
        return Past()
    loop_id = state.execution.execution_id
    entries = [entry for entry in await context.journal.read(session.id, run=loop_id) if entry.kind in KINDS]
    if not entries:
        return Past()
    (run,) = await context.journal.runs(session.id, run=loop_id)
    stored = {message.id: message for message in await context.journal.messages(run.log, run.start, run.stop)}
    said = (entry.body["message"]["id"] for entry in entries if entry.kind == "message_end")
    spawned = (entry.body.get("child") for entry in entries if entry.kind == "tool_execution_end")
    told = ResumePoint(
        int(entries[-1].body["seq"]),
        tuple(stored[each] for each in said if each in stored),
        tuple(codec.convert(ChildLoopRef, each) for each in spawned if each),
        sum(entry.kind == "compaction" for entry in entries),
        codec.convert(datetime, entries[-1].body["at"]),
        last_trace(entry.body.get("trace") for entry in entries if entry.kind == "agent_start"),
    )
    key = run.first.body.get("key")
    return Past(told, Key(*key) if key else None, run.first.body.get("context_data"))


def titling_of(session: AgentSession, loops: LoopFactory) -> Titling | None:
    """Return what asks for a session's title, or None if this connection makes no titles."""
    if loops.title is None:
        return None
    from perdure.actions.titles import Titling  # few connections make them

    return Titling(session, loops)


def _after(session: AgentSession, run: Run, titling: Titling | None) -> AgentSession:
    after = session.with_state(_shown(session.state, run))
    after = after if titling is None else titling.named(after)
    return after.suspended() if run.is_waiting else after


def _shown(before: AgentState, run: Run) -> AgentState:
    """Return the state after a run. Input that filters refused is not shown: the view is the one that the run found."""
    signals = run.state.execution.continuation.stop_signals if run.state.execution else ()
    if run.is_input_accepted and rejection_in(signals) is None:
        return run.state
    return run.state.with_transcript(before.transcript, rewound_to=before.rewound_to, shown_since=before.shown_since)


async def _carry_through(
    run: Run, work: ClaimedWork, context: ActionContext | None, options: RunOptions, titling: Titling | None
) -> None:
    """Take every step of a run, or only end it."""
    if context is not None:
        run.is_interrupted = lambda: context.is_closing
    if options.give_up:
        await work.open_inbox(answers=options.posted)  # so that the save takes the inbox item that the run has answered
        await run.give_up(options.failure)
        return
    await work.open_inbox(run, answers=options.posted)
    await work.carry_out(_all_steps(run, titling))
    if not run.is_settled:
        raise work.interrupted_by_closing()


async def _all_steps(run: Run, titling: Titling | None) -> None:
    try:
        async with aclosing(run.steps()) as steps:
            async for _ in steps:
                pass
    except asyncio.CancelledError:
        # The run ends in good order first, so that what was said until now is saved.
        await run.end_cancelled()
        raise
    if titling is not None:
        # Here, while the claim is kept alive. The run has ended, so a request to cancel ends only this wait.
        await titling.ask(run.state)


def checked_metadata(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a caller's data about a run, as it will be stored. Raise if it is not JSON, or names a secret."""
    if given is None:
        return EMPTY
    if not isinstance(given, Mapping):
        raise InvalidData("$.metadata", f"expected a mapping, got {type(given).__name__}")
    refuse_secrets(given, "$.metadata")
    plain: dict[str, Any] = codec.decode_plain(codec.encode_json(dict(given), "$.metadata"))
    return plain


def require_journal(context: Kept | None, what: str) -> Journal:
    if context is None or context.journal is None:
        raise ConfigurationError(f"{what} needs a store with a journal, and SessionRuntime.execute() to hand it over.")
    return context.journal
