"""Several answers to one message in parallel; one of them continues the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.callers import NOBODY, Caller
from perdure.actions.children import depth_of
from perdure.actions.claimed_work import ClaimedWork
from perdure.actions.continuing import parent_of
from perdure.actions.given import messages_to_send, redacted_messages, require_loops
from perdure.actions.needed_tools import connect_tools
from perdure.actions.run import checked_metadata, reader_of_files, titling_of
from perdure.actions.send import waiting_messages
from perdure.actions.subagents import Spawner
from perdure.actions.waiting import not_active
from perdure.aio import finish_despite_cancel
from perdure.errors import (
    CorruptRecord,
    DriverError,
    InvalidData,
    KeyUnavailable,
    PerdureError,
    SessionBusy,
    SessionLocked,
    StoreError,
)
from perdure.loop.agent_loop import AgentLoop, Run, RunStart
from perdure.loop.factory import LoopFactory
from perdure.loop.replay import Replay
from perdure.loop.run_events import Record, ResumePoint, Unrecorded
from perdure.loop.strategies import Branch, Chosen, First, Metered, Selection, Strategy, spec_of, strategy_of
from perdure.loop.unattended import LAST, RefuseApprovals
from perdure.model.checks import expect_several
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import (
    AgentEnd,
    AgentStart,
    AnyLoopEvent,
    ContinuationKind,
    LoopEvent,
    MessageEnd,
    ParallelLoopEnd,
    ParallelLoopStart,
)
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.state import AgentState
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.model.value import EMPTY
from perdure.protocols import ActionContext, ActionResult, Driver, Next, StoredAt

if TYPE_CHECKING:
    from perdure.telemetry.spans import GroupTrace, RunTrace

Config = ModelConfig | AgentDefinition
WHERE = "while several answers are compared"
# After these errors the branches wait for recovery. After any other, the group is ended on record.
_STORE_FAILED = (StoreError, SessionBusy, SessionLocked, CorruptRecord, KeyUnavailable)


class SendParallel:
    """An action that sends a message to several configurations of the agent at once. A strategy selects the answer.

    A config is a model, or a definition in place of the session's. Every branch is on record in a log of its own. The
    branches that were not selected stay there, to be read and forked from.

    `configs` are two or more configurations. `strategy` is one of `First`, `FewestTokens`, `LongestAnswer`, `Judge` and
    `Chosen`, or a function of the branches. `loops` runs the agent. `message`, `metadata`, `context` and `context_data`
    are those of `SendMessage`.
    """

    def __init__(
        self,
        message: object,
        loops: LoopFactory,
        *,
        configs: Sequence[ModelConfig | str | AgentDefinition],
        strategy: Strategy | Callable[[Sequence[Branch]], Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        context: object = None,
        context_data: Mapping[str, Any] | None = None,
    ) -> None:
        self._loops = require_loops(loops)
        self._messages = redacted_messages(messages_to_send(message), self._loops)
        self._caller = Caller.of(context, context_data)
        configs = () if isinstance(configs, str) else expect_several(configs, "$.configs")
        if len(configs) < 2:
            raise InvalidData("$.configs", "a parallel evaluation compares at least two configs")
        self._configs = tuple(each if isinstance(each, AgentDefinition) else ModelConfig.of(each) for each in configs)
        self._strategy = _as_strategy(strategy or First())
        self._metadata = checked_metadata(metadata)
        if getattr(self._loops, "redaction", None) is not None:
            self._caller = replace(self._caller, data=self._loops.redacted(self._caller.data))
            self._metadata = self._loops.redacted(self._metadata)
            self._configs = self._loops.redacted(self._configs)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        if session.status is not SessionStatus.ACTIVE:
            raise not_active(session)
        for config in self._configs:  # each raises if its model cannot be asked
            model = self._loops.model_of(config, session.state) if isinstance(config, AgentDefinition) else config
            await self._loops.require_known(model)
        await _connect_tools(self._loops, session, self._configs, context)
        loop_ids = tuple(new_id() for _ in self._configs)
        group = Group(session, context, self._loops, self._messages, self._configs, loop_ids, self._strategy)
        group.parent, group.metadata = await parent_of(session, context), self._metadata
        group.caller = self._caller
        return await group.evaluate()


def _as_strategy(given: Strategy | Callable[[Sequence[Branch]], Any]) -> Strategy:
    return given if isinstance(given, Strategy) else Chosen(given)


async def resume_group(
    session: AgentSession,
    context: ActionContext,
    loops: LoopFactory,
    start: ParallelLoopStart,
    stories: Mapping[str, Sequence[AnyLoopEvent]],
    written: Mapping[str, tuple[Message, StoredAt]],
    work: ClaimedWork,
) -> AgentSession | Next:
    """Continue an evaluation that was killed. Ended branches are kept, the others continue, then one is selected."""
    inputs = [written[each][0] for each in start.message_ids]
    configs = tuple(config_of(each) for each in start.configs)
    await _connect_tools(loops, session, configs, context)
    group = Group(session, context, loops, inputs, configs, start.loop_ids, strategy_of(start.strategy), work)
    group.parent = start.parent_loop_id
    group.told_trace = start.trace
    group.metadata = start.metadata
    started = (event for story in stories.values() for event in story if isinstance(event, AgentStart))
    group.caller = Caller(data=next((event.context_data for event in started), None))
    return await group.evaluate(stories)


async def _connect_tools(
    loops: LoopFactory, session: AgentSession, configs: Sequence[Config], context: ActionContext | None
) -> None:
    """Connect to toolsets before the group begins: a failure later would end the group on record."""
    for config in configs:
        definition = config if isinstance(config, AgentDefinition) else session.definition
        await connect_tools(loops, definition, context)


def _plain_config(config: Config) -> Mapping[str, Any]:
    kind = "definition" if isinstance(config, AgentDefinition) else "model"
    return {kind: msgspec.to_builtins(config)}


def config_of(plain: Any) -> Config:
    """Return a configuration from its form on record, in the start of an evaluation."""
    if "definition" in plain:
        return codec.convert(AgentDefinition, plain["definition"])
    return codec.convert(ModelConfig, plain["model"])


def configured(session: AgentSession, config: Config) -> tuple[AgentDefinition, AgentState]:
    """Return the definition and the state that a branch begins with."""
    state = session.state
    if isinstance(config, AgentDefinition):
        # The model that the definition names comes first: the session's own choice was for its own definition.
        named = config.model_config or state.model
        return config, state.with_system_prompt(config.system_prompt).with_model(named)
    return session.definition, state.with_model(config)


class Group:
    """The branches of one evaluation: one claim, one input, a log for each."""

    def __init__(
        self,
        session: AgentSession,
        context: ActionContext | None,
        loops: LoopFactory,
        messages: Sequence[Message],
        configs: Sequence[Config],
        loop_ids: tuple[str, ...],
        strategy: Strategy,
        work: ClaimedWork | None = None,
    ) -> None:
        self._session = session
        self._context = context
        self._loops = loops
        self._messages = messages
        self._configs = configs
        self._loop_ids = loop_ids
        self._strategy = strategy
        self._work = work or ClaimedWork(session, context, then=waiting_messages(context, session.id, loops))
        self._record = self._work.record
        self._branches = [self._record.branch(loop_id) for loop_id in loop_ids] if self._record else []
        self._runs: list[Run] = []
        self._over: dict[int, datetime] = {}
        self._finished: list[Branch] = []
        self._selection: Selection | None = None
        self._judged = Usage()
        self._titling = titling_of(session, loops)
        self._has_store_failed = False
        self.parent: str | None = None
        """The loop that the branches continue from."""
        self.metadata: Mapping[str, Any] = EMPTY
        self.caller = NOBODY
        self.told_trace: str | None = None
        """The span of a group that was killed."""
        self._trace: GroupTrace | None = None
        self._depth = 0

    def _branch(self, index: int, story: Sequence[AnyLoopEvent]) -> Run:
        """Return a branch that has not begun, or, with the events of its story so far, one to continue."""
        definition, state = configured(self._session, self._configs[index])
        asked = {message.id for message in self._messages}
        tells_input = any(isinstance(event, MessageEnd) and event.message.id in asked for event in story)
        replay = Replay(state if tells_input else state.with_messages(*self._messages)).apply_all(story)
        for end in (event for event in story if isinstance(event, AgentEnd)):
            self._over[index] = end.at
        loop, told = self._loop(definition, replay), ResumePoint.of(story)
        start = RunStart(
            record=self._record_of(index),
            session_id=self._session.id,
            decisions=replay.decisions,
            inputs=() if story else self._messages,
            execution_id=self._loop_ids[index],
            facts=self._branch_facts(index),
            spawn=self._spawner(),
            read_files=reader_of_files(self._session.id, self._context),
            told=told,
            owner=self._session.info.owner,
            context=self.caller.context,
            context_data=self.caller.data,
            trace=None if index in self._over else self._traced(loop, told),
            store=None if self._context is None else self._context.store,
        )
        self.caller.require_for(loop.setup.tools, self._session.id)
        run = loop.start(replay.state, start)
        run.is_interrupted = lambda: self._is_interrupted
        return run

    def _traced(self, loop: AgentLoop, told: ResumePoint) -> RunTrace | None:
        telemetry = self._loops.telemetry
        if telemetry is None:
            return None
        return telemetry.run(self._session, loop.setup.model, before=told.trace, inputs=self._messages)

    def _record_of(self, index: int) -> Record:
        return self._branches[index] if self._branches else Unrecorded()

    def _loop(self, definition: AgentDefinition, replay: Replay) -> AgentLoop:
        """Return a branch's loop. It waits for no person: the others would wait with it, and their claim would end."""
        setup = self._loops.build(definition, replay.state, depth=self._depth).setup
        nobody = RefuseApprovals(setup.tools, replay.decisions.unknown, WHERE)
        return AgentLoop(replace(setup, interceptors=(*setup.interceptors, (nobody, LAST))))

    def _spawner(self) -> Spawner | None:
        if self._context is None:
            return None
        return Spawner(self._session, self._context, self._loops, waits=False)

    def _branch_facts(self, index: int) -> dict[str, Any]:
        written = self._record.written if self._record is not None else {}
        places = [written[message.id].position for message in self._messages if message.id in written]
        return {
            "parent_loop_id": self.parent,
            "continuation": ContinuationKind("branch", str(index)) if self.parent else ContinuationKind(),
            "metadata": self.metadata,
            "base_version": self._session.version,
            "context_data": self.caller.data,
            "group": self._loop_ids,
            "input_at": (min(places), max(places) + 1) if places else None,
        }

    async def evaluate(self, stories: Mapping[str, Sequence[AnyLoopEvent]] | None = None) -> AgentSession | Next:
        """Run the branches, or continue those of a group that was killed. The session continues from one of them."""
        self.caller = await self.caller.known_to(self._loops, self._session)
        telemetry = self._loops.telemetry
        if telemetry is None:
            return await self._evaluated(stories)
        if stories is not None:
            telemetry.recovered()
        self._trace = telemetry.group(self._session, len(self._configs), self.told_trace)
        with self._trace.about(self._record) if self._trace is not None else nullcontext():
            return await self._evaluated(stories)

    async def _evaluated(self, stories: Mapping[str, Sequence[AnyLoopEvent]] | None) -> AgentSession | Next:
        try:
            await self._work.open_inbox()  # a request to cancel ends all branches; messages wait for the selection
            await self._work.carry_out(self._compare(stories))
            if self._is_interrupted:
                raise self._work.interrupted_by_closing()
            selection = self._selection or await self._left_off()
            await self._end(selection)
        except _STORE_FAILED:
            await finish_despite_cancel(self._settle())
            raise
        except BaseException:
            # A group that was interrupted waits for recovery. Any other failure ends it on record, for good.
            await finish_despite_cancel(self._settle() if self._is_interrupted else self._give_up())
            raise
        state = self._continued(self._runs[selection.index].state).with_spent(self._beside(selection))
        after = self._session.with_state(state)
        return self._work.next(after if self._titling is None else self._titling.named(after))

    def _beside(self, selection: Selection) -> Usage:
        """Return the usage besides the selected branch's: that of the other branches that have begun, and of judges."""
        others = (each for each in map(self._ended, range(len(self._runs))) if each.index != selection.index)
        return sum((each.state.usage for each in others if each.has_begun), start=selection.usage)

    @property
    def _is_interrupted(self) -> bool:
        """Return whether the branches are left for recovery: the store failed, or the runtime is being closed."""
        is_closing = self._context is not None and self._context.is_closing
        return self._has_store_failed or (self._selection is None and is_closing)

    async def _compare(self, stories: Mapping[str, Sequence[AnyLoopEvent]] | None) -> None:
        await self._start(announce=stories is None)
        self._depth = await depth_of(self._session, self._context)
        told = stories or {}
        self._runs = [self._branch(index, told.get(loop_id, ())) for index, loop_id in enumerate(self._loop_ids)]
        await self._run()
        self._selection = await self._select()
        if self._titling is not None:
            await self._titling.ask(self._runs[self._selection.index].state)

    async def _left_off(self) -> Selection:
        """Return the branch from which a session continues if its group was cancelled through the inbox.

        It is one that was stopped, or else one that has answered, or else any that has begun.
        """
        await self._flush()
        begun = [each for each in map(self._ended, range(len(self._runs))) if each.has_begun]
        stopped = [each for each in begun if each.state.stop_reason is StopReason.USER_REQUESTED]
        answered = [each for each in self._finished if each.state.has_final_response]
        candidates = stopped or answered or begun
        if not candidates:
            raise DriverError("The evaluation was cancelled before any of its branches had begun.")
        return Selection(candidates[0].index, self._judged)

    def _continued(self, state: AgentState) -> AgentState:
        """Return the state of the selected branch, with the session's own model and prompt."""
        prompt = self._session.state.context.system_prompt
        return state.with_model(self._session.state.model).with_system_prompt(prompt)

    async def _tell(self, event: LoopEvent) -> None:
        if self._record is not None:
            self._record.put(event)
        if self._context is not None:
            await self._context.emit(event)

    def _facts(self) -> dict[str, Any]:
        return {
            "loop_id": self._loop_ids[0],
            "session_id": self._session.id,
            "agent_id": self._session.state.agent_id,
            "loop_ids": self._loop_ids,
        }

    async def _start(self, announce: bool) -> None:
        """Claim the session, announce the branches and write what they answer, before any of them begins."""
        start = None
        if announce:
            start = ParallelLoopStart(
                **self._facts(),
                parent_loop_id=self.parent,
                metadata=self.metadata,
                configs=tuple(map(_plain_config, self._configs)),
                strategy=spec_of(self._strategy),
                message_ids=tuple(message.id for message in self._messages),
                base_version=self._session.version,
                trace=None if self._trace is None else self._trace.parent,
            )
        if self._record is not None:
            if start is not None:
                self._record.put(start)
                self._record.say(self._messages)
            await self._record.barrier()
        if start is not None and self._context is not None:  # once the session is claimed, and not before
            await self._context.emit(start)

    async def _run(self) -> None:
        """Run all branches. One that fails does not stop the others. They are noted in the order in which they end."""
        # Branches that ended before a crash come first, by their times on record: the order may decide the selection.
        in_order = sorted(self._over, key=lambda index: (self._over[index], index))
        self._finished += map(self._ended, in_order)
        open_ones = [index for index in range(len(self._runs)) if index not in self._over]
        tasks = {asyncio.ensure_future(self._to_the_end(index)): index for index in open_ones}
        waiting = set(tasks)
        try:
            while waiting and not (self._strategy.ends_early and any(map(_has_answer, self._finished))):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: self._when_ended(tasks[task])):
                    task.result()
                    self._finished.append(self._ended(tasks[task]))
        except _STORE_FAILED:
            self._has_store_failed = True
            raise
        finally:
            await finish_despite_cancel(_stop(*tasks))
        await self._flush()

    def _when_ended(self, index: int) -> tuple[bool, datetime | None, int]:
        """Return the sort key of branches that a busy event loop sees end together: their end times, as on record."""
        execution = self._runs[index].state.execution
        ended = execution.completed_at if execution else None
        return ended is None, ended, index

    async def _to_the_end(self, index: int) -> None:
        """Run every step of a branch, and put its end on record at once: the order of ends may decide the selection."""
        run = self._runs[index]
        trace = run.start.trace
        with nullcontext() if trace is None else trace.about(run):
            async with aclosing(run.steps()) as steps:
                async for _ in steps:
                    pass
        await self._record_of(index).barrier()

    async def _flush(self) -> None:
        for record in self._branches:
            await record.barrier()

    async def _settle(self) -> None:
        """Write what can still be written of every branch before the group is left, writes that failed included."""
        for record in self._branches:
            with suppress(PerdureError):
                await record.settle()

    def _ended(self, index: int) -> Branch:
        return Branch(index, self._loop_ids[index], self._runs[index].state)

    async def _select(self) -> Selection:
        answered = [branch for branch in self._finished if _has_answer(branch)]
        if not answered:
            errors = "; ".join(error.message for branch in self._finished for error in branch.state.errors)
            raise DriverError(f"None of the {len(self._configs)} branches came to an answer: {errors[:500]}")
        selection = await self._strategy.select(answered, self._metered_driver_of)
        return selection if selection.usage != Usage() else replace(selection, usage=self._judged)

    def _metered_driver_of(self, model: ModelConfig) -> Driver:
        """Return the driver of a model that judges. Its usage is charged when its answer comes, whatever follows."""
        return Metered(self._loops.traced(self._loops.driver_of(model)), self._charge)

    def _charge(self, usage: Usage) -> None:
        self._judged = self._judged + usage

    async def _end(self, selection: Selection) -> None:
        """Tell which branch was selected. The save puts it on record."""
        await self._tell(
            ParallelLoopEnd(
                **self._facts(),
                selected_loop_id=self._loop_ids[selection.index],
                selected_config_index=selection.index,
                evaluation_usage=selection.usage,
            )
        )

    async def _give_up(self) -> None:
        """Put on record that no branch was selected, so that the group is not taken for one that was killed."""
        record = self._record
        if record is None or record.claim is None or self._context is None:
            return
        await self._settle()
        end = ParallelLoopEnd(**self._facts(), evaluation_usage=self._judged)
        record.put(end)
        # Otherwise `leave` would drop the end, because no save follows, and recovery would run the branches again.
        record.ends_anyway = True
        await record.leave()
        await self._context.emit(end)


def _has_answer(branch: Branch) -> bool:
    return branch.state.status is ExecutionStatus.COMPLETED and branch.state.has_final_response


async def _stop(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    # Errors that the tasks raise now are dropped: they were told to stop.
    await asyncio.gather(*tasks, return_exceptions=True)
