"""The pending tool calls of a suspended session, settled by a person's decision or an answer from outside."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.actions.callers import Caller
from perdure.actions.children import depth_of, pending_now
from perdure.actions.given import require_loops
from perdure.actions.leaving import left_to_worker
from perdure.actions.model_change import begun_with, require_changed
from perdure.actions.needed_model import recorded_config, require_model
from perdure.actions.needed_tools import require_tools
from perdure.actions.run import RunOptions, past_of, ready_to_run, run_agent
from perdure.actions.send import waiting_messages
from perdure.actions.subagents import Spawner
from perdure.errors import InvalidData, PendingCallsChanged, SessionNotActive
from perdure.loop.factory import LoopFactory
from perdure.loop.tool_use import Decisions, begun_before
from perdure.model.checks import expect, expect_text
from perdure.model.execution import CallAnswer, PendingCall
from perdure.model.message import ToolCall
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, brief
from perdure.protocols import ActionContext, ActionResult, Answer

if TYPE_CHECKING:
    from perdure.actions.model_change import ModelFor

Shown = Iterable[ToolCall | str]
"""The calls that a decision is about: as they were shown, or their digests, or their ids."""
_NEEDED = {
    "why": "A call of {name!r} is to be approved",
    "what_to_do": "Approve it where its tools are (tools=[…], or --tools FILE.py), leave it to a worker "
    "(wait=False, or --no-wait), or deny it.",
}


class _Decision:
    """The common part of all decisions."""

    def __init__(self, loops: LoopFactory, context: object, model_for: ModelFor | None, wait: bool) -> None:
        self._loops = require_loops(loops)
        self._caller = _caller(context, wait)
        self._model_for = model_for
        self.is_left = not wait
        """True if a worker continues the run."""
        self.used_before = Usage()
        """The usage of the run before this decision continued it."""
        self.names: Collection[str] | None = None
        """The ids and digests of the calls that it is about, or None for all."""


class ApproveToolCalls(_Decision):
    """An action that lets pending calls be made and continues the run. Unless some are named, all are approved.

    An approval is bound to what was shown: the calls as they are given, or as the session's state has them. If a call
    has changed since, or what a sub-agent waits for, PendingCallsChanged is raised and no call is made.

    With `wait=False` nothing is run here, and neither tools nor a model are needed. The decision is put on record in
    one commit, and a worker or `recover` continues the run. `DenyToolCalls` and `AnswerToolCalls` have it, too.

    `call_ids` are the calls, as they were shown, or their ids. `loops` runs the agent. `context` is what tools find in
    `ToolContext.context`. `model_for` returns the `ChangeModel` that a session needs first, or None.
    """

    def __init__(
        self,
        loops: LoopFactory,
        *,
        call_ids: Shown | None = None,
        context: object = None,
        model_for: ModelFor | None = None,
        wait: bool = True,
    ) -> None:
        super().__init__(loops, context, model_for, wait)
        self._given = _checked(call_ids)
        self.names = None if self._given is None else _names(self._given)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        shown, now = await _looked_at(session, context, self._given)
        _require_some(shown)
        shown = _approvable(session, shown, is_named=self._given is not None)
        decisions = Decisions(approved={call.id: call.digest for call in shown}, **_of_waiting(now))
        depth = await depth_of(session, context)
        if not self.is_left:
            await require_tools(self._loops, session, context, depth, shown, **_NEEDED)
        return await _continued(self, session, context, decisions, depth)


class DenyToolCalls(_Decision):
    """An action that denies pending calls: all of them, unless some are named. The model is told why, and continues.

    `reason` is what the model is told, and `call_ids` are the calls. `wait`, `loops`, `context` and `model_for` are
    those of `ApproveToolCalls`.
    """

    def __init__(
        self,
        loops: LoopFactory,
        *,
        reason: str,
        call_ids: Shown | None = None,
        context: object = None,
        model_for: ModelFor | None = None,
        wait: bool = True,
    ) -> None:
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidData("$.reason", "a denial needs a reason that the model can be told")
        super().__init__(loops, context, model_for, wait)
        self._reason = reason
        self._given = _checked(call_ids)
        self.names = None if self._given is None else _names(self._given)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        shown, now = await _looked_at(session, context, self._given, lets_happen=False)
        _require_some(shown)
        decisions = Decisions(denied={call.id: self._reason for call in shown}, **_of_waiting(now))
        return await _continued(self, session, context, decisions, await depth_of(session, context))


class SettleToolCalls(_Decision):
    """An action that settles several pending calls at once: approves some, denies some, answers those made outside.

    The run continues once, with all decisions. Other calls stay pending. `deny` has a reason for each call, by its id
    or digest. For the rest see `ApproveToolCalls`, `DenyToolCalls` and `AnswerToolCalls`. If one of the calls has
    changed or does not wait any more, nothing changes.

    `approve` has the calls to approve. `answers` has results, and `errors` reasons, by call ids. The other parameters
    are those of `ApproveToolCalls`: `wait`, `loops`, `context` and `model_for`.
    """

    def __init__(
        self,
        loops: LoopFactory,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        model_for: ModelFor | None = None,
        wait: bool = True,
    ) -> None:
        super().__init__(loops, context, model_for, wait)
        self._approve = _checked(approve) or ()
        self._deny = _reasons(deny, "$.deny")
        self._answers = {**_answers(answers, "$.answers"), **_answers(errors, "$.errors", are_errors=True)}
        if not (self._approve or self._deny or self._answers):
            raise InvalidData("$.approve", "settle one call at least")
        if len(self._answers) < len(answers) + len(errors):
            raise InvalidData("$.errors", "a call has a result or an error, not both")
        self.names = {*_names(self._approve), *self._deny, *self._answers}

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        approved, now = await _looked_at(session, context, self._approve)
        approved = _approvable(session, approved, is_named=bool(approved))
        denied: dict[str, str] = {}
        for name, reason in self._deny.items():
            (call,), _ = await _looked_at(session, context, (name,), lets_happen=False)
            _require_once(call.id, denied)
            denied[call.id] = reason
        answers = _placed(session, self._answers, now)
        for name in (*(call.id for call in approved), *answers):
            _require_once(name, denied)
        settled = {call.id: call.digest for call in approved}
        decisions = Decisions(approved=settled, denied=denied, answers=answers, **_of_waiting(now))
        depth = await depth_of(session, context)
        if approved and not self.is_left:
            await require_tools(self._loops, session, context, depth, approved, **_NEEDED)
        return await _continued(self, session, context, decisions, depth)


class AnswerToolCalls(SettleToolCalls):
    """An action that hands in the results of calls made outside, and continues the run. Other calls stay pending.

    `answers` has a result for each call, by its id or digest. A sub-agent's calls are answered in the same way. Calls
    in `errors` have failed, and the model is told why. If a call does not wait for an answer, nothing changes.

    `wait`, `loops`, `context` and `model_for` are those of `ApproveToolCalls`.
    """

    def __init__(
        self,
        loops: LoopFactory,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        model_for: ModelFor | None = None,
        wait: bool = True,
    ) -> None:
        if not answers and not errors:
            raise InvalidData("$.answers", "give the answer to one call at least: {call_id: result}")
        super().__init__(loops, answers=answers, errors=errors, context=context, model_for=model_for, wait=wait)


class ShowPendingCalls:
    """An action that shows the calls that a session's sub-agents now wait for, so that people see them and decide."""

    may_be_repeated = True

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        execution, now = session.state.execution, await pending_now(session, context)
        if execution is None or execution.pending_calls == now:
            return session if context is None else Answer(session)
        return session.with_state(session.state.with_execution(execution.with_pending_calls(now)))


async def _continued(
    action: ApproveToolCalls | DenyToolCalls | SettleToolCalls,
    session: AgentSession,
    context: ActionContext | None,
    decisions: Decisions,
    depth: int,
) -> ActionResult:
    if action.is_left:
        return await left_to_worker(session, context, decisions)
    action.used_before = session.state.usage
    loops, caller = action._loops, action._caller
    change = None if action._model_for is None else action._model_for(session)
    if change is not None and context is not None:
        # Everything is checked first: the change is a separate version, and a run that cannot begin must not leave it.
        past = await past_of(session, session.state, context)
        options = RunOptions(decisions=decisions, depth=depth, caller=caller, past=past)
        await ready_to_run(session, change.state_of(session.state), loops, context, options)
        await require_changed(loops, session, change)
        return await begun_with(change, action, session, context)
    execution = session.state.execution
    assert execution is not None
    model = await require_model(
        loops,
        session,
        await recorded_config(session, context, execution.execution_id),
        why="The run that waits asks the model",
        what_to_do="Decide where the model can be asked, or give the session another one with ChangeModel.",
    )
    state = session.state.with_execution(execution.with_pending_calls(()))
    spawn = Spawner(session, context, loops, decisions) if context is not None else None
    then = waiting_messages(context, session.id, loops, depth)
    options = RunOptions(decisions=decisions, depth=depth, model=model, then=then, caller=caller)
    return await run_agent(session.activated(), state, loops, context, options, spawn)


def _approvable(session: AgentSession, shown: Sequence[PendingCall], *, is_named: bool) -> list[PendingCall]:
    """Return the calls that can be approved: all but those that are made outside, which wait for an answer."""
    external = [call for call in shown if call.external]
    if external and (is_named or len(external) == len(shown)):
        raise InvalidData(
            "$.call_ids",
            f"{external[0].name} is called outside, so it cannot be approved: hand its result in with "
            f"answer({{{external[0].id!r}: …}}), or deny it",
        )
    return [call for call in shown if not call.external]


def _caller(context: object, wait: bool) -> Caller:
    """Return the caller who decides. Raise InvalidData for a context that a worker would lack when it continues."""
    if not expect(wait, bool, "$.wait") and context is not None:
        problem = "it would not be there when a worker continues the run; have the worker make it: connect(context=…)"
        raise InvalidData("$.context", problem)
    return Caller(context)


def _reasons(given: Mapping[str, str], path: str) -> dict[str, str]:
    expect(given, Mapping, path)  # type: ignore[type-abstract]
    for call_id, reason in given.items():
        expect(call_id, str, path)
        expect_text(reason, f"{path}.{call_id}", blank=False)
    return dict(given)


def _require_once(call: str, settled: Collection[str]) -> None:
    """Raise InvalidData if a call is settled already, under this name or another one of its names."""
    if call in settled:
        raise InvalidData("$.approve", f"the call {call!r} is settled twice; settle it in one way")


def _answers(given: Mapping[str, object], path: str, *, are_errors: bool = False) -> dict[str, CallAnswer]:
    expect(given, Mapping, path)  # type: ignore[type-abstract]
    answers = {}
    for call_id, result in given.items():
        expect(call_id, str, path)
        if are_errors:
            expect_text(result, f"{path}.{call_id}", blank=False)
        # Through JSON and back: the run gets what recovery would read, and values that cannot be stored are refused.
        plain = codec.decode_plain(codec.encode_json(result, f"{path}.{call_id}"))
        answers[call_id] = CallAnswer(call_id, plain, are_errors)
    return answers


def _placed(
    session: AgentSession, answers: Mapping[str, CallAnswer], now: Sequence[PendingCall]
) -> dict[str, CallAnswer]:
    """Return answers by the names that a run knows calls by: its own by id, those of sub-agents by digest."""
    placed: dict[str, CallAnswer] = {}
    own = {call.id for call in now}
    leaves = [leaf for call in now for leaf in call.leaves if leaf.external]
    for name, answered in answers.items():
        found = [leaf for leaf in leaves if name in (leaf.id, leaf.digest)]
        if not found:
            known = ", ".join(f"{leaf.id} ({leaf.name})" for leaf in leaves) or "none"
            raise InvalidData("$.answers", f"{name!r} does not wait for an answer in {session.id!r}; these do: {known}")
        if len(found) > 1:
            raise InvalidData("$.answers", f"several calls have the id {name!r}; name each by its digest")
        (leaf,) = found
        call = leaf.id if leaf.id in own else leaf.digest
        _require_once(call, placed)
        placed[call] = replace(answered, call=call)
    return placed


def _checked(given: Shown | None) -> tuple[ToolCall | str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str | ToolCall) or not isinstance(given, Iterable):
        raise InvalidData("$.call_ids", f"expected several calls or ids, got one {type(given).__name__}; write (…,)")
    checked = tuple(given)
    for place, each in enumerate(checked):
        if not isinstance(each, str | ToolCall):
            raise InvalidData(
                f"$.call_ids[{place}]", f"expected a pending call, its digest or its id; got {brief(each)}"
            )
    return checked


def _names(given: Sequence[ToolCall | str]) -> Collection[str]:
    return {each if isinstance(each, str) else each.id for each in given}


def _pending(session: AgentSession) -> Mapping[str, PendingCall]:
    """Return a session's pending calls by id. Raise if the session is closed, or has no pending calls."""
    if session.status not in (SessionStatus.SUSPENDED, SessionStatus.ACTIVE):
        raise SessionNotActive(session.id, session.status.value)
    execution = session.state.execution
    if execution is None or not execution.pending_calls:
        raise PendingCallsChanged(session.id, (), ())
    return {call.id: call for call in execution.pending_calls}


async def _looked_at(
    session: AgentSession,
    context: ActionContext | None,
    given: Sequence[ToolCall | str] | None,
    *,
    lets_happen: bool = True,
) -> tuple[list[PendingCall], tuple[PendingCall, ...]]:
    """Return the calls that a decision is about, as they were shown, and all pending calls as they are now.

    Raise PendingCallsChanged if these differ. The session then shows them as they are now. A denial may be about calls
    that a sub-agent does not want any more.
    """
    waiting, now = _pending(session), await pending_now(session, context)
    try:
        shown = _shown(session, given, waiting, now)
        _require_unchanged(session, [call for call in shown if lets_happen or call != waiting[call.id]], now)
    except PendingCallsChanged:
        if context is not None:
            await context.execute(session.id, ShowPendingCalls())
        raise
    return shown, now


def _require_some(shown: Sequence[PendingCall]) -> None:
    """Raise InvalidData if a decision is about an empty list of calls: it would silently do nothing."""
    if not shown:
        raise InvalidData(
            "$.call_ids", "the list is empty; name one call at least, or leave it out to decide about all"
        )


def _shown(
    session: AgentSession,
    given: Sequence[ToolCall | str] | None,
    waiting: Mapping[str, PendingCall],
    now: Sequence[PendingCall],
) -> list[PendingCall]:
    """Return the calls that a decision is about, as they were shown to the person who decided."""
    if given is None:
        return list(waiting.values())
    shown: dict[str, PendingCall] = {}
    for each in given:
        call = _named(session, each, waiting, now) if isinstance(each, str) else each
        if call.id not in waiting and isinstance(each, PendingCall):
            raise _changed(session, now)
        if call.id not in waiting:
            known = ", ".join(f"{each.id} ({each.name}, digest {each.digest})" for each in waiting.values())
            raise InvalidData("$.call_ids", f"{call.id!r} does not wait for a decision; these do: {known}")
        begun = waiting[call.id].begun
        shown[call.id] = call if isinstance(call, PendingCall) else PendingCall.of(call, begun=begun)
    return list(shown.values())


# A SHA-256 in hexadecimal: a text of this form is the digest of a call that has changed since, not a wrong id.
_DIGEST = re.compile("[0-9a-f]{64}")


def _named(
    session: AgentSession, name: str, waiting: Mapping[str, PendingCall], now: Sequence[PendingCall]
) -> PendingCall:
    """Return the pending call with this id or digest."""
    found = waiting.get(name) or next((call for call in (*waiting.values(), *now) if call.digest == name), None)
    if found is None and _DIGEST.fullmatch(name):
        raise _changed(session, now)
    return PendingCall(name="", id=name) if found is None else found


def _require_unchanged(session: AgentSession, shown: Iterable[PendingCall], now: Sequence[PendingCall]) -> None:
    """Raise PendingCallsChanged if a call, or what a sub-agent wants, is not what was shown.

    For a sub-agent that does not wait any more, an approval cannot let anything happen.
    """
    by_id = {call.id: call for call in now}
    if not all(by_id[call.id].digest == call.digest or _waits_no_longer(by_id[call.id]) for call in shown):
        raise _changed(session, now)


def _waits_no_longer(call: PendingCall) -> bool:
    return call.session_id is not None and not call.waits_for


def _changed(session: AgentSession, now: Sequence[PendingCall]) -> PendingCallsChanged:
    leaves = [leaf for call in now for leaf in call.leaves]
    wanted = [f"{leaf.name}({msgspec.json.encode(leaf.arguments).decode()[:200]})" for leaf in leaves]
    return PendingCallsChanged(session.id, now, wanted)


def _of_waiting(now: Sequence[PendingCall]) -> dict[str, Any]:
    """Return the facts about the calls that wait now, in the form of decisions."""
    waited = {call.id: call for call in now if call.session_id is None}
    return {"waited": waited, "begun": begun_before(now)}
