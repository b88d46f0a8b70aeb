"""Replays of a stored session: its turns are run again by the real loop, and each is compared with the record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from perdure.actions.approval import SettleToolCalls
from perdure.actions.fork import ForkSession
from perdure.actions.parallel import configured
from perdure.actions.send import SendMessage
from perdure.errors import ConfigurationError, InvalidData, SessionNotFound
from perdure.loop.external import ExternalTool
from perdure.loop.factory import LoopFactory
from perdure.loop.replay import Replay as Fold
from perdure.loop.subagents import SubagentTool
from perdure.model.checks import expect, expect_function
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget
from perdure.model.ids import SessionId
from perdure.model.loop_events import AnyLoopEvent, Compaction
from perdure.model.session import AgentSession
from perdure.model.value import thawed
from perdure.protocols import ArchivingStore, Driver, Tool
from perdure.replay.allowance import Allowance
from perdure.replay.answers import Answers, NamedTool, OnUnmatched
from perdure.replay.comparison import ReplayResult, SameAnswer, TurnComparison, compared
from perdure.replay.history import Retold, retold
from perdure.replay.recording import LeftOut, Recording
from perdure.replay.script import Playing, RecordedDriver, playing
from perdure.replay.story import PlayedTurn, Steering, by_loop, joined, turn_of
from perdure.replay.turn_setup import ReplayTurn, Steer
from perdure.runtime.runtime import SessionRuntime
from perdure.sessions.chat import Chat
from perdure.sessions.sessions import Sessions

Tools = Literal["recorded", "live"]
History = Literal["recorded", "replayed"]
Progress = Callable[[int, int], None]
RECORDED = "recorded"
"""The name of the model that gives the answers on record."""
TAG = "replay"
"""The tag of the sessions that a replay keeps."""


class Replay:
    """A replay of a stored session with another model, agent, prompt or tools, compared with the record.

    The source is a handle on a session, a `Recording`, or the path of an exported file with one session. The store of
    the session is only read. Without another model or driver, the model on record is asked. The model "recorded" gives
    the answers on record again.

    `tools="recorded"` answers calls from the record, so that the code of the tools is not needed. `on_unmatched`
    decides about a call that is not on record. The model is told so ("error"), the call is made ("live"), or the turn
    ends ("stop"). With `tools="live"` all calls are made, and decisions of people are repeated from the record.

    `history="recorded"` begins every turn with the history on record. With "replayed", later turns begin with the new
    answers. `loops` has the tools and sub-agents. By default it is that of the handle's connection. `budget` is for the
    whole replay. `same_answer` tells whether two texts count as the same. `children` also replays the sessions of
    sub-agents. `into` keeps the replayed sessions there, with the tag `replay`.

    `source` is a chat, a recording, or the path of an exported file. `model`, `agent` and `system_prompt` replace those
    of the session. `driver` replaces the one that the model's provider has.
    """

    def __init__(
        self,
        source: Chat | Recording | str | os.PathLike[str],
        *,
        model: ModelConfig | str | None = None,
        agent: AgentDefinition | None = None,
        system_prompt: str | None = None,
        tools: Tools = "recorded",
        on_unmatched: OnUnmatched = "error",
        history: History = "recorded",
        driver: Driver | None = None,
        loops: LoopFactory | None = None,
        budget: ExecutionBudget | Allowance | None = None,
        same_answer: SameAnswer | None = None,
        children: bool = False,
        into: Sessions | None = None,
    ) -> None:
        _one_of(tools, ("recorded", "live"), "$.tools")
        _one_of(on_unmatched, ("error", "live", "stop"), "$.on_unmatched")
        _one_of(history, ("recorded", "replayed"), "$.history")
        self._source = source
        if model == RECORDED and driver is None:
            model, driver = None, RecordedDriver()
        self._model = None if model is None else ModelConfig.of(model)
        self._agent = None if agent is None else expect(agent, AgentDefinition, "$.agent")
        self._system_prompt = None if system_prompt is None else expect(system_prompt, str, "$.system_prompt")
        self._tools = tools
        self._on_unmatched = on_unmatched
        self._history = history
        self._driver = driver
        self._loops = None if loops is None else expect(loops, LoopFactory, "$.loops")
        self._allowance = budget if isinstance(budget, Allowance) else Allowance(budget or ExecutionBudget())
        self._same_answer = _equal if same_answer is None else expect_function(same_answer, "$.same_answer")
        self._children = expect(children, bool, "$.children")
        self._into = _checked_target(into)

    async def run(self, *, progress: Progress | None = None) -> ReplayResult:
        """Replay every turn in order, and return the comparison. `progress` is given the number of turns done."""
        recording = await Recording.of(self._source)
        _require_reach(self._into, recording)
        own = await self._replayed(recording, progress)
        if not self._children:
            return own
        children = [await self._child(each).run() for each in await recording.children()]
        return replace(own, children=tuple(children))

    @property
    def gives_recorded_answers(self) -> bool:
        """Tell whether the answers on record are given, so that no model is asked."""
        return isinstance(self._driver, RecordedDriver)

    def _child(self, recording: Recording) -> Replay:
        """Return the replay of a sub-agent's session. The given agent replaces only agents of the same name."""
        # A copy of the settings, which were checked. The allowance is shared: all sessions spend one budget.
        child = object.__new__(Replay)
        child.__dict__.update(self.__dict__, _source=recording)
        if self._agent is not None and self._agent.name != recording.info.agent_name:
            child._agent = None
        return child

    async def _replayed(self, recording: Recording, progress: Progress | None) -> ReplayResult:
        loops = self._loops_for(recording)
        done: list[TurnComparison] = []
        left_out, notes, said = list(recording.left_out), dict[str, None](), list[Retold]()
        for place, turn in enumerate(recording.turns):
            if progress is not None:
                progress(place, len(recording.turns))
            left = self._allowance.left()
            if left is None:
                left_out.append(LeftOut(turn.loop_id, "the budget of the replay was used up before"))
                continue
            try:
                before = await recording.before(turn)
            except SessionNotFound as error:  # forgotten, most likely
                left_out.append(LeftOut(turn.loop_id, f"what it began with is gone. {error.what}"))
                continue
            replayed = _TurnReplay(self, recording, turn, loops, left)
            compared_turn = await replayed.run(before, said)
            self._allowance.spend(compared_turn.replayed)
            if not turn.is_cut:  # of which only a part was replayed
                said.append(Retold(turn, replayed.events))
            done.append(compared_turn)
            notes.update(dict.fromkeys(replayed.notes))
        if progress is not None:
            progress(len(recording.turns), len(recording.turns))
        kept = tuple(turn.session_id for turn in done) if self._into is not None else ()
        return ReplayResult(recording.session_id, tuple(done), tuple(left_out), tuple(notes), kept=kept)

    def _loops_for(self, recording: Recording) -> LoopFactory:
        if self._loops is not None:
            return self._loops
        return LoopFactory() if recording.sessions is None else recording.sessions.loops


class _TurnReplay:
    """The replay of one turn."""

    def __init__(
        self, replay: Replay, recording: Recording, turn: PlayedTurn, loops: LoopFactory, left: ExecutionBudget
    ) -> None:
        self._replay = replay
        self._recording = recording
        self._turn = turn
        self._loops = loops
        self._left = left
        self._runtime = SessionRuntime(recording.store)
        self._is_live = replay._tools == "live"
        self._answers = Answers(turn, recording.turns, replay._on_unmatched)
        """The outcomes on record. With live tools, only those of external calls and of decisions are used."""
        self.events: Sequence[AnyLoopEvent] = ()
        self.notes: list[str] = []

    async def run(self, before: AgentSession, said: Sequence[Retold]) -> TurnComparison:
        """Replay the turn in a session of its own, which begins as the stored session did."""
        session = await self._prepared(before, said)
        loops, steer = await self._equipped(session, before)
        await self._recording.store.create(session)
        # In the task's context, where a driver finds it: one driver answers for every turn.
        token = playing.set(Playing(self._turn))
        try:
            await self._play(session.id, loops, steer)
        finally:
            playing.reset(token)
        turns = await self._read(session.id)
        if self._replay._into is not None:
            archive = self._replay._into.store
            assert isinstance(archive, ArchivingStore)
            # Alone: with all that it shows of the session that it was forked from, which is not in that store.
            await archive.restore(await self._recording.store.dump(session.id, alone=True))
        steps = compared(self._turn, turns, self._answers.sources, self._replay._same_answer)
        return TurnComparison(self._turn, turns, tuple(steps), session.id, self._note())

    async def _prepared(self, before: AgentSession, said: Sequence[Retold]) -> AgentSession:
        replay = self._replay
        # A fork shows all that the version shows: compactions, files, and what parents have said.
        session = await ForkSession().execute_on(before)
        if replay._history == "replayed":
            view = retold(session.state.transcript, said)
            if view is not None:
                kept, new = view
                written = await self._recording.with_files(new)
                session = session.with_state(session.state.with_transcript(kept.append(*written)))
        if replay._agent is not None:
            definition, state = configured(session, replay._agent)
            session = session.with_definition(definition).with_state(state)
        if replay._system_prompt is not None:
            session = session.with_state(session.state.with_system_prompt(replay._system_prompt))
        if replay._model is not None:
            session = session.with_state(session.state.with_model(replay._model))
        # Time passes otherwise in a replay: what ended by it on record ends at the same step.
        budget = replace(session.definition.budget, max_seconds=None, deadline=None)
        session = session.with_definition(replace(session.definition, budget=budget))
        return session.with_tags((*session.info.tags, TAG)) if replay._into is not None else session

    async def _equipped(self, session: AgentSession, before: AgentSession) -> tuple[LoopFactory, Steer]:
        """Return the loops for this turn, and the `Steer` that brings in the messages that steered it."""
        steer = Steer(await self._steering())
        lengths = self._lengths(before) if self._turn.compactions else ()
        capability = ReplayTurn(self._turn, self._answers, self._is_recorded, steer, self._left, lengths)
        await self._loops.connect_tools(session.definition)
        missing = self._missing(session.definition)
        names = ", ".join(missing)
        if missing and self._is_live:
            self.notes.append(f"These tools are not known here, so their calls were not made: {names}.")
        elif missing and not self._replay.gives_recorded_answers:
            self.notes.append(
                f"Only the names of these tools are known here, so that the model was shown no more: {names}."
            )
        named = [] if self._is_live else [NamedTool(name) for name in missing]
        return self._loops.varied(capability, tools=named, driver=self._replay._driver), steer

    def _is_recorded(self, tool: Tool) -> bool:
        """Tell whether calls of a tool are answered from the record.

        A sub-agent is not run with a `RecordedDriver`: its answers are not among those of this turn.
        """
        return not self._is_live or (isinstance(tool, SubagentTool) and self._replay.gives_recorded_answers)

    async def _steering(self) -> list[Steering]:
        files = self._recording.with_files
        return [Steering(each.after, tuple(await files(each.messages))) for each in self._turn.steering]

    def _missing(self, definition: AgentDefinition) -> list[str]:
        """Return the names of the tools that the agent names or has called, and that are not here."""
        called = self._recording.called() if definition.tools is None else ()
        wanted = dict.fromkeys([*(definition.tools or ()), *definition.tools_deny, *called])
        known = self._loops.known_tools | self._turn.brought
        return [name for name in wanted if name not in known]

    def _lengths(self, before: AgentSession) -> list[int]:
        """Return the length of the view on record before each compaction."""
        fold, lengths = Fold(before.state), list[int]()
        for event in self._turn.events:
            if isinstance(event, Compaction):
                lengths.append(len(fold.state.transcript))
            fold.apply_all([event])
        return lengths

    async def _play(self, session_id: SessionId, loops: LoopFactory, steer: Steer) -> None:
        start, is_live = self._turn.start, self._is_live
        send = partial(SendMessage, loops=loops, any_role=True)
        asked = send(
            await self._recording.with_files(self._turn.asked),
            metadata=thawed(start.metadata) or None,
            context_data=thawed(start.context_data) if is_live and start.context_data is not None else None,
            output=None if start.response_format is None else thawed(start.response_format),
            # Answers from the record need none here: `ReplayTurn` adds these tools itself.
            external_tools=list(map(ExternalTool, start.external_tools)) if is_live else None,
            instructions=start.instructions,
            model_options=start.model_options,
        )
        await self._settled(await self._runtime.execute(session_id, asked), loops)
        while steer.left and not self._answers.stopped_at:  # they came too late to steer this run
            late = steer.left.pop(0).messages
            await self._settled(await self._runtime.execute(session_id, send(late)), loops)
        await self._runtime.idle()

    async def _settled(self, session: AgentSession, loops: LoopFactory) -> AgentSession:
        """Repeat the decisions on record about calls that wait, until none waits. Deny calls without a decision."""
        while session.state.execution is not None and session.state.execution.pending_calls:
            decided = _Decided(self._answers, self._turn)
            for call in session.state.execution.pending_calls:
                decided.take(call)
            if decided.is_open:
                return session
            session = await self._runtime.execute(session.id, SettleToolCalls(loops, **decided.all()))
        return session

    async def _read(self, session_id: SessionId) -> PlayedTurn:
        self.events = [event async for event in self._runtime.events(session_id)]
        turns = [turn for told in by_loop(self.events).values() if (turn := turn_of(told)) is not None]
        if not turns:
            raise ConfigurationError(f"The replay of {session_id!r} has left no record.")
        return joined(turns)

    def _note(self) -> str | None:
        if self._answers.stopped_at is not None:
            return f"ended at a call of {self._answers.stopped_at} that is not on record"
        if self._turn.is_cut:
            return f"replayed as far as the record goes: the run on it is {self._turn.end}"
        return None


class _Decided:
    """The decisions about calls that wait, taken from the record."""

    def __init__(self, answers: Answers, turn: PlayedTurn) -> None:
        self._answers = answers
        starts = [event for event in turn.events if hasattr(event, "denied")]
        self._denied: Mapping[str, str] = {name: why for event in starts for name, why in event.denied.items()}
        self._approve: list[Any] = []
        self._deny: dict[str, str] = {}
        self._results: dict[str, object] = {}
        self._errors: dict[str, str] = {}
        self.is_open = False
        """True if a call waits for a decision that nobody has made on record either."""

    def take(self, call: Any) -> None:
        found = self._answers.take(call.name, call.arguments, call.id)
        if found is not None and found.outcome is None:
            self.is_open = True
        elif found is None or found.outcome is None:
            if call.external:
                self._errors[call.id] = f"No call of {call.name} with these arguments is on record."
            else:
                self._deny[call.id] = "No decision about this call is on record."
        elif call.external and found.outcome.error is not None:
            self._errors[call.id] = found.outcome.error.message
        elif call.external:
            self._results[call.id] = thawed(found.outcome.result)
        elif found.id in self._denied:
            self._deny[call.id] = self._denied[found.id]
        else:
            self._approve.append(call)
        if found is not None and not call.external:
            # Only the decision came from the record, not the result.
            self._answers.sources[call.id] = "live"

    def all(self) -> dict[str, Any]:
        return {"approve": self._approve, "deny": self._deny, "answers": self._results, "errors": self._errors}


def _equal(before: str, after: str) -> bool:
    return before == after


def _one_of(given: object, known: tuple[str, ...], path: str) -> None:
    if given not in known:
        raise InvalidData(path, f"expected one of {', '.join(known)}; got {given!r}")


def _checked_target(into: Sessions | None) -> Sessions | None:
    if into is not None and not isinstance(expect(into, Sessions, "$.into").store, ArchivingStore):
        raise ConfigurationError("The store of `into` cannot take sessions in whole.")
    return into


def _require_reach(into: Sessions | None, recording: Recording) -> None:
    """Raise InvalidData if the sessions that are kept would belong to another owner than those of `into`."""
    if into is not None and into.owner not in (None, recording.info.owner):
        problem = f"session {recording.session_id!r} is not one of {into.owner!r}'s; use sessions without an owner"
        raise InvalidData("$.into", problem)
