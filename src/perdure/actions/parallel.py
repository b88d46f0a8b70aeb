"""Several answers to one message, side by side; one of them continues the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.running import LEASE, owner_here
from perdure.actions.send import send_leftovers_after
from perdure.actions.spawning import Spawner
from perdure.errors import DriverError, InvalidData, SessionNotActive, StoreError
from perdure.loop.agent_loop import Run
from perdure.loop.factory import LoopFactory
from perdure.loop.narrator import Record, Unrecorded
from perdure.loop.replay import Replay
from perdure.loop.strategies import Branch, Chosen, First, Selection, Strategy, spec_of, strategy_of
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import (
    AgentEnd,
    AnyLoopEvent,
    ContinuationKind,
    LoopEvent,
    ParallelLoopEnd,
    ParallelLoopStart,
)
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.state import AgentState
from perdure.protocols import ActionContext, Saving, StoredAt
from perdure.recording import BranchRecord, JournalRecord, see_through

Config = ModelConfig | AgentDefinition


class SendParallel:
    """Send a message to several configurations of the agent at once, and keep the answer that a strategy selects.

    A config is a model, or a definition that stands in for the session's. Every branch is on record in a log of its
    own; those that were not selected stay there, to be read and forked from.
    """

    runs_model = True

    def __init__(
        self,
        message: object,
        loops: LoopFactory,
        *,
        configs: Sequence[ModelConfig | str | AgentDefinition],
        strategy: Strategy | Callable[[Sequence[Branch]], Any] | None = None,
    ) -> None:
        given = message if isinstance(message, Sequence) and not isinstance(message, str) else (message,)
        self._messages = tuple(map(Message.of, given))
        if isinstance(configs, str) or len(configs) < 2:
            raise InvalidData("$.configs", "a parallel evaluation compares at least two configs")
        self._configs = tuple(each if isinstance(each, AgentDefinition) else ModelConfig.of(each) for each in configs)
        self._loops = loops
        self._strategy = _as_strategy(strategy or First())

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        if session.status is not SessionStatus.ACTIVE:
            raise SessionNotActive(session.id, session.status.value)
        loop_ids = tuple(new_id() for _ in self._configs)
        group = Group(session, context, self._loops, self._messages, self._configs, loop_ids, self._strategy)
        return await group.evaluate([group.branch(index) for index in range(len(loop_ids))], announce=True)


def _as_strategy(given: Strategy | Callable[[Sequence[Branch]], Any]) -> Strategy:
    return given if isinstance(given, Strategy) else Chosen(given)


async def resume_group(
    session: AgentSession,
    context: ActionContext,
    loops: LoopFactory,
    start: ParallelLoopStart,
    stories: Mapping[str, Sequence[AnyLoopEvent]],
    written: Mapping[str, tuple[Message, StoredAt]],
) -> AgentSession:
    """Go on with an evaluation that was killed: ended branches stand, the others go on, then one is selected."""
    inputs = [written[each][0] for each in start.message_ids]
    configs = tuple(_config_of(each) for each in start.configs)
    group = Group(session, context, loops, inputs, configs, start.loop_ids, strategy_of(start.strategy))
    group.remember({message.id: at for message, at in written.values()})
    runs = [group.branch(index, stories.get(loop_id, ())) for index, loop_id in enumerate(start.loop_ids)]
    return await group.evaluate(runs, announce=False)


def _plain_config(config: Config) -> Mapping[str, Any]:
    kind = "definition" if isinstance(config, AgentDefinition) else "model"
    return {kind: msgspec.to_builtins(config)}


def _config_of(plain: Any) -> Config:
    if "definition" in plain:
        return codec.convert(AgentDefinition, plain["definition"])
    return codec.convert(ModelConfig, plain["model"])


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
    ) -> None:
        self._session = session
        self._context = context
        self._loops = loops
        self._messages = messages
        self._configs = configs
        self._loop_ids = loop_ids
        self._strategy = strategy
        self._state: AgentState = session.state.with_messages(*messages)
        journal = context.journal if context is not None else None
        self._record = JournalRecord(journal, session, owner=owner_here(), lease=LEASE) if journal else None
        self._branches = [BranchRecord(self._record, loop_id) for loop_id in loop_ids] if self._record else []
        self._over: set[int] = set()

    def remember(self, written: Mapping[str, StoredAt]) -> None:
        """Where messages stand already, from before a crash."""
        if self._record is not None:
            self._record.written.update(written)

    def branch(self, index: int, story: Sequence[AnyLoopEvent] = ()) -> Run:
        """A branch that has not begun; or, with the events of its story so far, one that goes on."""
        config = self._configs[index]
        if isinstance(config, AgentDefinition):
            definition, state = config, self._state.with_system_prompt(config.system_prompt)
        else:
            definition, state = self._session.definition, self._state.with_model(config)
        replay = Replay(state).apply_all(story)
        if any(isinstance(event, AgentEnd) for event in story):
            self._over.add(index)
        record: Record = self._branches[index] if self._branches else Unrecorded()
        return self._loops.build(definition, replay.state).start(
            replay.state,
            record=record,
            session_id=self._session.id,
            decisions=replay.decisions,
            execution_id=self._loop_ids[index],
            facts={
                "continuation": ContinuationKind("branch", str(index)),
                "base_version": self._session.version,
                "group": self._loop_ids,
            },
            spawn=Spawner(self._session, self._context) if self._context is not None else None,
        )

    async def evaluate(self, runs: Sequence[Run], *, announce: bool) -> AgentSession:
        try:
            await self._start(announce)
            finished = await self._run(runs)
            selection = await self._select(finished)
            await self._end(selection)
        except BaseException:
            await see_through(self._give_back())
            raise
        send_leftovers_after(self._context, self._loops)
        return self._session.with_state(self._continued(runs[selection.index].state))

    def _continued(self, state: AgentState) -> AgentState:
        """The state of the selected branch, as the session's own model and prompt go on with it."""
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
            "agent_id": self._state.agent_id,
            "loop_ids": self._loop_ids,
        }

    async def _start(self, announce: bool) -> None:
        """Claim the session; announce the branches and write what they answer, before any of them begins."""
        if announce:
            execution = self._session.state.execution
            start = ParallelLoopStart(
                **self._facts(),
                parent_loop_id=execution.execution_id if execution else None,
                configs=tuple(map(_plain_config, self._configs)),
                strategy=spec_of(self._strategy),
                message_ids=tuple(message.id for message in self._messages),
                base_version=self._session.version,
            )
            await self._tell(start)
            if self._record is not None:
                self._record.say(self._messages)
        if self._record is not None:
            await self._record.barrier()

    async def _run(self, runs: Sequence[Run]) -> list[Branch]:
        """Run all branches, none taking another down. They come back in the order in which they ended."""
        finished = [self._ended(index, runs[index]) for index in sorted(self._over)]
        open_ones = [index for index in range(len(runs)) if index not in self._over]
        tasks = {asyncio.ensure_future(_to_the_end(runs[index])): index for index in open_ones}
        beating = asyncio.ensure_future(self._beat())
        waiting = set(tasks)
        try:
            while waiting and not (self._strategy.ends_early and any(map(_has_answer, finished))):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):
                    task.result()
                    finished.append(self._ended(tasks[task], runs[tasks[task]]))
        finally:
            await _stop(beating, *tasks)
        for record in self._branches:
            await record.barrier()
        return finished

    def _ended(self, index: int, run: Run) -> Branch:
        return Branch(index, self._loop_ids[index], run.state)

    async def _select(self, finished: Sequence[Branch]) -> Selection:
        answered = [branch for branch in finished if branch.state.has_final_response]
        if not answered:
            errors = "; ".join(error.message for branch in finished for error in branch.state.errors)
            raise DriverError(f"None of the {len(self._configs)} branches came to an answer: {errors[:500]}")
        return await self._strategy.select(answered, self._loops.driver_of)

    async def _beat(self) -> None:
        while self._record is not None:
            await asyncio.sleep(self._record.lease / 3)
            await self._record.beat()

    async def _end(self, selection: Selection) -> None:
        """Tell which branch was selected; the save carries it."""
        await self._tell(
            ParallelLoopEnd(
                **self._facts(),
                selected_loop_id=self._loop_ids[selection.index],
                selected_config_index=selection.index,
                evaluation_usage=selection.usage,
            )
        )
        if self._record is not None and self._context is not None:
            self._context.saving = self._saving(self._record)

    def _saving(self, record: JournalRecord) -> Saving | None:
        saving = record.saving()
        if saving is None:
            return None
        written = {key: at for branch in self._branches for key, at in branch.written.items()}
        return replace(saving, written={**saving.written, **written})

    async def _give_back(self) -> None:
        record = self._record
        if record is not None and record.claim is not None and self._context is not None and self._context.journal:
            with suppress(StoreError):
                for branch in self._branches:
                    await branch.barrier()
            with suppress(StoreError):
                await self._context.journal.release(record.claim)


async def _to_the_end(run: Run) -> None:
    async with aclosing(run.steps()) as steps:
        async for _ in steps:
            pass


def _has_answer(branch: Branch) -> bool:
    return branch.state.status is ExecutionStatus.COMPLETED and branch.state.has_final_response


async def _stop(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
