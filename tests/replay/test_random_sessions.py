"""Random conversations with tools, errors, approvals and steering: replayed with their answers they are the same."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.replay.scenes import Stage, on_stage
from tests.replay.test_replay import Edited
from tests.stories import KINDS, opened

import perdure
from perdure import AgentState, Interceptor, Message, ModelRequest, Replay, ToolCall
from perdure.testing import Chunks
from perdure.testing.outcomes import Outcome, note

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
calls = st.one_of(
    st.builds(lambda a, b: ToolCall("add", {"a": a, "b": b}), st.integers(0, 3), st.integers(0, 1)),
    st.builds(lambda why: ToolCall("fail", {"why": why}), words),
    st.builds(lambda amount: ToolCall("pay", {"amount": amount}), st.integers(0, 2)),
    st.builds(lambda x: ToolCall("nobody", {"x": x}), st.none() | st.booleans() | words),
    st.just(ToolCall("add", {"a": "no number"})),
    st.just(ToolCall("locate", {})),
)
call_steps = st.one_of(
    st.lists(calls, min_size=1, max_size=3),
    st.builds(
        lambda text, some: Message.assistant(text, tool_calls=some), words, st.lists(calls, min_size=1, max_size=2)
    ),
)
last_steps = st.one_of(
    words,
    words,
    st.builds(RuntimeError, words),
    st.builds(lambda text, why: Chunks([text, RuntimeError(why)]), words, words),
)


@st.composite
def turns(draw: Any) -> dict[str, Any]:
    """Draw a turn: its steps, the decision about its calls, and the steps after which it is steered."""
    steps: list[Any] = [*draw(st.lists(call_steps, max_size=3)), draw(last_steps)]
    steered = draw(st.lists(st.integers(0, len(steps) - 1), max_size=2, unique=True).map(sorted))
    return {
        "steps": steps,
        "steered": steered,
        "extra": [draw(words) for _ in steered],
        "approves": draw(st.booleans()),
    }


class SteerAt(Interceptor):
    """Sends messages into a run during the model calls of given steps."""

    def __init__(self) -> None:
        self.chat: Any = None
        self.plan: dict[int, str] = {}

    async def before_inference(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        text = self.plan.pop(request.step, None)
        if text is not None:
            await self.chat.send(text, when_busy="steer")
        return request


async def play(stage: Stage, script: list[dict[str, Any]], steer: SteerAt) -> perdure.Chat:
    """Hold a conversation."""
    chat = steer.chat = await stage.sessions.open("random")
    for number, turn in enumerate(script):
        said = [*turn["steps"], *(["More."] * len(turn["steered"]))]
        stage.says = {f"Turn {number}.": said}
        steer.plan = {at: f"Steered {at}: {text}" for at, text in zip(turn["steered"], turn["extra"], strict=True)}
        with suppress(perdure.RunFailed):
            await chat.send(f"Turn {number}.")
        await stage.sessions.runtime.idle()
        await settle(stage, chat, approves=turn["approves"])
    return chat


async def settle(stage: Stage, chat: perdure.Chat, *, approves: bool) -> None:
    while True:
        session = await chat.session()
        pending = session.state.execution.pending_calls if session.state.execution else ()
        if not pending:
            return
        asked = [call for call in pending if not call.external]
        answers = {call.id: {"city": "Oslo"} for call in pending if call.external}
        facts: dict[str, Any] = {"approve": asked} if approves else {"deny": {call.id: "No." for call in asked}}
        await stage.sessions.execute(chat.id, perdure.SettleToolCalls(stage.sessions.loops, **facts, answers=answers))
        await stage.sessions.runtime.idle()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(script=st.lists(turns(), min_size=1, max_size=3), chosen=st.integers(0, 10**6))
async def test_random_sessions_are_the_same(
    kind: str, script: list[dict[str, Any]], chosen: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every step is the same, with both histories; one changed word is found at exactly its step."""
    where, steer = tmp_path_factory.mktemp("random"), SteerAt()
    async with opened(kind, where) as store, on_stage(store, interceptors=[steer]) as stage:
        chat = await play(stage, script, steer)
        recording = await perdure.Recording.of(chat)
        stage.calls.clear()
        for options in ({}, {"history": "replayed"}):
            result = await Replay(recording, model="recorded", **options).run()
            assert result.is_same, str(result)
            assert all(step.is_same and step.recorded.usage == step.replayed.usage for step in complete(result))
        assert stage.calls == []
        live = await Replay(recording, model="recorded", tools="live").run()
        assert live.is_same, str(live)
        places = [(turn, step) for turn in result.turns for step in turn.steps if not step.recorded.is_incomplete]
        failures = 0
        if places:
            turn, step = places[chosen % len(places)]
            other = EditedStep(turn.recorded.loop_id, step.index)
            control = await Replay(recording, driver=other).run()
            found = [(each.recorded.loop_id, at.index) for each in control.turns for at in each.steps if not at.is_same]
            assert found == [(turn.recorded.loop_id, step.index)], str(control)
            failures = 1
    if kind == "memory":
        note(
            Outcome(
                attack="replay with the answers on record",
                store="memory",
                rounds=1,
                failures=0,
                control="one word of one answer is changed",
                control_rounds=failures,
                control_failures=failures,
            )
        )


class EditedStep(Edited):
    """Changes the answer of one step of one run on record."""

    def __init__(self, loop_id: str, step: int) -> None:
        self._loop_id, self._at = loop_id, step

    async def respond(self, request: ModelRequest, on_delta: Any) -> Any:
        from perdure.replay.script import playing

        reply = await perdure.RecordedDriver.respond(self, request, on_delta)
        now = playing.get()
        if now is None or now.turn.loop_id != self._loop_id or request.step != self._at:
            return reply
        parts = (perdure.Text("otherwise "), *reply.message.parts)
        return perdure.ModelReply(perdure.Message("assistant", parts, reply.message.id), reply.response)


def complete(result: Any) -> list[Any]:
    return [step for step in result.steps if not step.recorded.is_incomplete]
