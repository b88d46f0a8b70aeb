"""Stages that pass their results on, each in a session. A workflow that was killed continues where it stopped."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from itertools import count
from typing import Any

import msgspec

from perdure.actions.definition import ChangeDefinition
from perdure.actions.undo_run import TakeBackRun
from perdure.actions.waiting import not_active
from perdure.errors import (
    ConfigurationError,
    InvalidData,
    SessionConflict,
    SessionNotFound,
    StageFailed,
)
from perdure.model.checks import expect, expect_several, expect_text
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession
from perdure.model.stop import StopReason
from perdure.model.value import brief
from perdure.sessions.reply import Reply
from perdure.sessions.sessions import Sessions

Results = Mapping[str, str]
"""The answers of stages by their names, and under `input` the text that the workflow was given."""
Prompt = str | Callable[[Results], str | Awaitable[str]]


class Stage:
    """One agent's part in a workflow.

    `name` is the stage's name, and `agent` its definition, by default a plain assistant. `prompt` is the message to the
    agent: a text, or a function of the results. In a text, `{input}` is replaced by the workflow's input, and `{name}`
    by the result of another stage. By default the message is the results of the stages before. `after` names those
    stages. By default it is the one before.

    Stages that name the same `session` share a transcript. Without it, a stage has a session of its own, with the same
    id in every process. `fork_from` is a session, or the name of a stage: the stage's session begins as a fork of it.
    """

    def __init__(
        self,
        name: str,
        *,
        agent: AgentDefinition | None = None,
        prompt: Prompt | None = None,
        session: str | None = None,
        after: Iterable[str] | None = None,
        fork_from: str | None = None,
    ) -> None:
        self.name = SessionId(name)
        if agent is not None and not isinstance(agent, AgentDefinition):
            raise InvalidData("$.agent", f"expected an AgentDefinition, got {type(agent).__name__}")
        if prompt is not None and not isinstance(prompt, str) and not callable(prompt):
            raise InvalidData("$.prompt", f"expected a text or a function of the results, got {type(prompt).__name__}")
        if isinstance(after, str):
            raise InvalidData("$.after", f"expected a list of stages' names; write after=[{after!r}]")
        self.agent = agent
        self.prompt = prompt
        self.session = None if session is None else SessionId(session)
        self.after = None if after is None else expect_several(after, "$.after")
        self.fork_from = None if fork_from is None else SessionId(fork_from)

    def __repr__(self) -> str:
        return f"<Stage {self.name}>"


class WorkflowResult(msgspec.Struct, frozen=True):
    """The result of a workflow: the last stage's answer, and the reply of every stage by its name."""

    replies: Mapping[str, Reply[Any]]
    """The replies, by the names of their stages."""

    @property
    def text(self) -> str:
        """The answer of the last stage."""
        return list(self.replies.values())[-1].text

    def __getitem__(self, stage: str) -> Reply[Any]:
        return self.replies[stage]


class Workflow:
    """Stages in order, or as a graph. The `id` names one run of it: running it again continues where that run stopped.

    A stage of `stages` that was answered is not run again, in any process: its message has a key that the store keeps.
    """

    def __init__(self, id: str, stages: Sequence[Stage]) -> None:
        self.id = SessionId(id)
        self.stages = expect_several(stages, "$.stages")
        _check_names(self.stages)
        self._after = {stage.name: self._dependencies(place) for place, stage in enumerate(self.stages)}
        _check_order(self._after)
        self._before = {stage.name: self._all_before(stage.name) for stage in self.stages}
        for stage in self.stages:
            _check_prompt(stage, self._before[stage.name])

    def _all_before(self, name: str) -> list[str]:
        """Return the stages that are always done when a stage begins, in their order."""
        before: set[str] = set()
        todo = list(self._after[SessionId(name)])
        while todo:
            each = todo.pop()
            if each not in before:
                before.add(each)
                todo += self._after[SessionId(each)]
        return [stage.name for stage in self.stages if stage.name in before]

    def _dependencies(self, place: int) -> tuple[str, ...]:
        """Return the stages that must be done before a stage: those it names, and the one before it in its session."""
        stage, earlier = self.stages[place], self.stages[:place]
        named = stage.after if stage.after is not None else tuple(each.name for each in earlier[-1:])
        known = [each.name for each in self.stages]
        for name in named:
            if name not in known:
                raise InvalidData("$.after", f"stage {stage.name!r} comes after {name!r}, but no such stage exists")
        if stage.fork_from in known and stage.fork_from not in named:
            named = (*named, stage.fork_from)
        sharing = [each.name for each in earlier if self.session_of(each) == self.session_of(stage)]
        return tuple(dict.fromkeys((*named, *sharing[-1:])))

    def session_of(self, stage: Stage) -> SessionId:
        """Return the id of a `stage`'s session: the one it names, or one made of the workflow's id and its name.

        The part after the last dot is the stage, so two workflows never share an id by accident. The dots in a stage's
        name are therefore written with `_`, and such a part begins with `_`, as no name does.
        """
        name = stage.name if "." not in stage.name else "_" + stage.name.replace("_", "__").replace(".", "_-")
        return stage.session or SessionId(f"{self.id}.{name}")

    async def _home_of(self, sessions: Sessions, stage: Stage) -> SessionId:
        """Return a stage's session. A stage with dots in its name may have one that an earlier release has begun."""
        session_id, earlier = self.session_of(stage), f"{self.id}.{stage.name}"
        if stage.session or "." not in stage.name or await sessions.exists(session_id):
            return session_id
        journal = sessions.runtime.journal
        if journal is None or not await sessions.exists(earlier):
            return session_id
        # Two workflows could share the earlier id. The key names workflow and stage apart, and so tells whose it is.
        is_own = await journal.find_key(SessionId(earlier), self._key(stage, 1)) is not None
        return SessionId(earlier) if is_own else session_id

    async def run(self, sessions: Sessions, input: str) -> WorkflowResult:
        """Run every stage that was not answered yet. Stages that do not wait for each other run at the same time.

        `sessions` are those of `connect`. `input` is the text that prompts name as `{input}`.
        """
        expect(sessions, Sessions, "$.sessions")
        expect_text(input, "$.input", blank=False)
        replies: dict[str, Reply[Any]] = {}
        tasks: dict[str, asyncio.Task[None]] = {}

        async def complete(stage: Stage) -> None:
            for name in self._after[stage.name]:
                # Shielded: a stage that is cancelled must not cancel the one before it, which others may wait for.
                await asyncio.shield(tasks[name])
            results = {"input": input, **{name: replies[name].text for name in self._before[stage.name]}}
            replies[stage.name] = await self._answer(sessions, stage, results)

        for stage in self.stages:
            tasks[stage.name] = asyncio.ensure_future(complete(stage))
        try:
            await asyncio.gather(*tasks.values())
        finally:
            # If one stage fails, the others are stopped, and their runs have ended before the error is raised.
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return WorkflowResult({stage.name: replies[stage.name] for stage in self.stages})

    async def _answer(self, sessions: Sessions, stage: Stage, results: Results) -> Reply[Any]:
        """Return a stage's reply: the one it has given before, or the one of a run now."""
        session_id = await self._home_of(sessions, stage)
        attempt = 1
        if await sessions.exists(session_id):
            await sessions.recover(session_id)
            attempt, given = await self._given(sessions, stage, session_id)
            if given is not None and callable(stage.prompt):
                return self._answered(stage, given)  # the function may return another text each time it is called
            if given is None:
                await self._hand_over(sessions, stage, session_id)
        else:
            await self._create(sessions, stage, session_id)
        return await self._send(sessions, stage, session_id, attempt, results)

    async def _send(
        self, sessions: Sessions, stage: Stage, session_id: SessionId, attempt: int, results: Results
    ) -> Reply[Any]:
        try:
            reply = await sessions.send(session_id, await self._told(stage, results), key=self._key(stage, attempt))
        except InvalidData as error:
            if error.path != "$.key":
                raise
            problem = f"workflow {self.id!r} has been run with another input or prompt; a new run needs a new id"
            raise InvalidData("$.input", problem) from None
        return self._answered(stage, Reply(await _since(sessions, reply.session)))

    def _answered(self, stage: Stage, reply: Reply[Any]) -> Reply[Any]:
        """Return the reply if it has an answer.

        Raise SessionNotActive while the run waits for a person, and StageFailed if it has ended without an answer.
        """
        session = reply.session
        if reply.pending_calls:
            raise not_active(session)
        if not _has_answer(session):
            raise StageFailed(session.id, session.version, _why_not(session), self.id, stage.name)
        return reply

    def _key(self, stage: Stage, attempt: int) -> str:
        return f"workflow {self.id} stage {stage.name} attempt {attempt}"

    async def _given(self, sessions: Sessions, stage: Stage, session_id: SessionId) -> tuple[int, Reply[Any] | None]:
        """Return the number of the next attempt, or that of the last one with its reply.

        An attempt that has ended without an answer is taken out of view.
        """
        journal = sessions.runtime.journal
        if journal is None:
            raise ConfigurationError("A workflow needs a store with a journal, to know which of its stages are done.")
        for attempt in count(1):
            found = await journal.find_key(session_id, self._key(stage, attempt))
            if found is None:
                return attempt, None
            session = await _since(sessions, await sessions.session(session_id, found[1]))
            if not _is_given_up(session):
                return attempt, Reply(session)
            # Only the newest attempt is still in view: the ones before were taken back when the next one began.
            if await journal.find_key(session_id, self._key(stage, attempt + 1)) is None:
                loop_id = _loop_of(session)
                assert loop_id is not None, "a run was given up, so there is one"
                (run,) = await journal.runs(session_id, run=loop_id)
                before = int(run.first.body["base_version"])
                await sessions.execute(session_id, TakeBackRun(loop_id, before, session.version))
        raise AssertionError("there is always a next attempt")

    async def _create(self, sessions: Sessions, stage: Stage, session_id: SessionId) -> None:
        if stage.fork_from is None:
            await sessions.open(session_id, stage.agent)
            return
        forked = next((each for each in self.stages if each.name == stage.fork_from), None)
        origin = None if forked is None else await self._home_of(sessions, forked)
        with suppress(SessionConflict):  # another process has just made it
            await sessions.fork(origin or stage.fork_from, session_id)
        await self._hand_over(sessions, stage, session_id)

    async def _hand_over(self, sessions: Sessions, stage: Stage, session_id: SessionId) -> None:
        """Make the stage's agent the one that answers in its session."""
        session = await sessions.session(session_id)
        if stage.agent is not None and session.definition != stage.agent:
            await sessions.execute(session_id, ChangeDefinition(stage.agent))

    async def _told(self, stage: Stage, results: Results) -> str:
        if callable(stage.prompt):
            made = stage.prompt(results)
            return await made if isawaitable(made) else made
        if isinstance(stage.prompt, str):
            return _filled(stage.prompt, results)
        before = [results[name] for name in self._after[stage.name]]
        return "\n\n".join(before) if before else results["input"]


async def _since(sessions: Sessions, session: AgentSession) -> AgentSession:
    """Return the session as it is after a person's decisions, if its run waited for some when it was saved."""
    while Reply(session).pending_calls:
        try:
            after = await sessions.session(session.id, session.version + 1)
        except SessionNotFound:
            break
        if _loop_of(after) != _loop_of(session):
            break
        session = after
    return session


def _loop_of(session: AgentSession) -> str | None:
    execution = session.state.execution
    return execution.execution_id if execution else None


def _is_given_up(session: AgentSession) -> bool:
    """Tell whether a run has ended without an answer: it failed, was refused, or was stopped."""
    return not Reply(session).pending_calls and not _has_answer(session)


def _has_answer(session: AgentSession) -> bool:
    """Tell whether a run has a whole answer that can be passed on."""
    state = session.state
    answer = state.final_response
    is_over = state.status in (ExecutionStatus.COMPLETED, ExecutionStatus.STOPPED)
    if not is_over or state.stop_reason is StopReason.USER_REQUESTED:
        return False
    return answer is not None and bool(answer.text.strip())


def _why_not(session: AgentSession) -> str:
    execution = session.state.execution
    if execution is None:
        return "its run has left no trace"
    told = [signal.message or signal.reason.value for signal in execution.continuation.stop_signals]
    return told[-1] if told else "the model answered with an empty text"


def _filled(prompt: str, results: Results) -> str:
    """Return a prompt with results in place of their names. Braces in a result mean nothing."""
    # In two rounds, with marks in between: a result may contain `{name}`, which must stay as it is.
    for name in sorted(results, key=len, reverse=True):
        prompt = prompt.replace("{" + name + "}", f"\0{name}\0")
    for name, text in results.items():
        prompt = prompt.replace(f"\0{name}\0", text)
    return prompt


def _check_names(stages: Sequence[Stage]) -> None:
    if not stages:
        raise InvalidData("$.stages", "a workflow has at least one stage")
    seen: set[str] = set()
    for stage in stages:
        if not isinstance(stage, Stage):
            raise InvalidData("$.stages", f"expected a Stage, got {brief(stage)}")
        if stage.name in seen or stage.name == "input":
            raise InvalidData("$.stages", f"the name {stage.name!r} is taken; every stage has a name of its own")
        seen.add(stage.name)


_PLACE = re.compile(r"\{([A-Za-z0-9][A-Za-z0-9._-]*)\}")


def _check_prompt(stage: Stage, before: Sequence[str]) -> None:
    """Raise InvalidData if a prompt names a result that does not exist when the stage begins."""
    for name in _PLACE.findall(stage.prompt) if isinstance(stage.prompt, str) else ():
        if name != "input" and name not in before:
            known = ", ".join(f"{{{each}}}" for each in ("input", *before))
            raise InvalidData("$.prompt", f"stage {stage.name!r} is told {{{name}}}, and has only {known}")


def _check_order(after: Mapping[SessionId, Sequence[str]]) -> None:
    """Raise InvalidData if stages wait for each other in a circle."""
    done: set[str] = set()
    while len(done) < len(after):
        ready = {name for name, before in after.items() if name not in done and done.issuperset(before)}
        if not ready:
            stuck = ", ".join(sorted(after.keys() - done))
            raise InvalidData("$.after", f"these stages wait for each other in a circle: {stuck}")
        done |= ready
