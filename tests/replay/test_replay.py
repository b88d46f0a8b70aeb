"""The differences that a replay finds, and the data that it leaves alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.replay.scenes import OPTIONS, PNG, SCENES, add, on_stage
from tests.stories import opened

import perdure
from perdure import (
    AgentDefinition,
    ConfigurationError,
    ExecutionBudget,
    InvalidData,
    Message,
    ModelReply,
    ModelRequest,
    Recording,
    Replay,
    SessionBusy,
    ToolCall,
    tool,
)
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.replay import RecordedDriver, Rule
from perdure.testing import Delay, ScriptedDriver


class Edited(RecordedDriver):
    """Gives the answers on record, with one step's changed by `edit`."""

    def __init__(self, turn: str, step: int, edit: Any) -> None:
        self._turn, self._step, self._edit = turn, step, edit

    async def respond(self, request: ModelRequest, on_delta: Any) -> ModelReply:
        reply = await super().respond(request, on_delta)
        asked = [each.text for each in request.messages if each.role == "user"]
        if request.step != self._step or self._turn not in asked[-1:]:
            return reply
        return ModelReply(self._edit(reply.message), reply.response)


def word(message: Message) -> Message:
    return Message.assistant(message.text + " otherwise", tool_calls=message.tool_calls)


async def replayed(stage: Any, name: str, **options: Any) -> Any:
    chat = await stage.sessions.open(await SCENES[name](stage))
    stage.calls.clear()
    return await Replay(chat, **options).run()


@pytest.mark.parametrize(("turn", "step", "place"), [("Work.", 0, (0, 0)), ("Work.", 2, (0, 2)), ("More.", 1, (1, 1))])
async def test_one_other_word_is_found_at_exactly_its_step(turn: str, step: int, place: tuple[int, int]) -> None:
    """The control of the identity: one word is changed in one answer, and nothing else differs."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "tools", driver=Edited(turn, step, word))
        found = [(at, each.index) for at, turn in enumerate(result.turns) for each in turn.steps if not each.is_same]
        assert found == [place]
        (changed,) = [each for each in result.steps if not each.is_same]
        assert changed.differences == ("answer",)
        assert any("otherwise" in line for line in changed.answer_diff())


async def test_calls_are_told_apart() -> None:
    """Added, missing, changed and reordered calls are named as such, by tool and arguments in one form."""

    def other(message: Message) -> Message:
        return Message.assistant(tool_calls=[ToolCall("add", {"b": 2.0, "a": 1}), ToolCall("add", {"a": 7, "b": 7})])

    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "tools", driver=Edited("Work.", 0, other))
        kinds = [(each.kind, each.name, each.source) for each in result.turns[0].steps[0].calls]
        assert kinds == [
            ("same", "add", "recorded"),
            ("changed", "add", "unmatched"),
            ("missing", "fail", None),
            ("missing", "nobody", None),
        ]
        swapped = Edited("Work.", 1, lambda said: Message.assistant(tool_calls=said.tool_calls[::-1]))
        again = await Replay(await stage.sessions.open("tools"), driver=swapped).run()
        assert [each.kind for each in again.turns[0].steps[1].calls] == ["reordered", "reordered"]
        more = Edited("More.", 0, lambda said: Message.assistant(tool_calls=[*said.tool_calls, add(1, 2)]))
        added = await Replay(await stage.sessions.open("tools"), driver=more).run()
        (change,) = [each for each in added.turns[1].steps[0].calls if each.kind != "same"]
        assert (change.kind, change.source, change.replayed.result) == ("added", "elsewhere", 3)


async def test_a_step_more_moves_no_other() -> None:
    """Steps that are the same are paired with each other, whatever was added between them."""

    def longer(request: ModelRequest) -> Any:
        script = [
            [add(1, 2), add(1, 2), ToolCall("fail", {"why": "no luck"}), ToolCall("nobody", {"x": 1})],
            [add(2, 2)],
            [ToolCall("add", {"a": "many"}), add(2, 2)],
            "All done.",
        ]
        return script[request.step] if request.messages[0].text == "Work." and len(request.messages) < 14 else "Ten."

    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "tools", driver=ScriptedDriver(longer))
        assert [step.kind for step in result.turns[0].steps] == ["same", "added", "same", "same"]
        assert [call.source for step in result.turns[0].steps[1:3] for call in step.calls] == [
            "recorded",
            "recorded",
            "again",
        ]


async def test_a_call_that_is_not_on_record() -> None:
    """The model gets an error, or the tool is called, or the turn ends there."""
    other = Edited("More.", 0, lambda said: Message.assistant(tool_calls=[add(20, 22)]))
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        told = await replayed(stage, "tools", driver=other)
        (call,) = told.turns[1].steps[0].calls
        assert (call.source, stage.calls) == ("unmatched", [])
        assert "NotOnRecord: add was not called." in str(call.replayed.result)
        chat = await stage.sessions.open("tools")
        live = await Replay(chat, driver=other, on_unmatched="live").run()
        (call,) = live.turns[1].steps[0].calls
        assert (call.source, call.replayed.result, stage.calls) == ("live", 42, ["add"])
        ended = await Replay(chat, driver=other, on_unmatched="stop").run()
        assert ended.turns[1].note == "ended at a call of add that is not on record"
        assert [step.kind for step in ended.turns[1].steps] == ["changed", "missing"]
        assert not ended.is_same


async def test_an_unmatched_call_that_needs_a_person_is_not_made() -> None:
    """With on_unmatched="live", an unmatched call has no approval."""
    other = Edited("Pay.", 0, lambda said: Message.assistant(tool_calls=[ToolCall("pay", {"amount": 50})]))
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "approvals", driver=other, on_unmatched="live")
        changed = result.turns[0].steps[0].calls[0]
        assert "needs an approval" in str(changed.replayed.result)
        assert stage.calls == []


@pytest.mark.parametrize("name", ["tools", "approvals", "steering", "outside", "stopped", "structured", "subagents"])
async def test_live_tools_are_called_and_decisions_are_repeated(name: str) -> None:
    """Calls are made again, decisions are repeated, and calls answered outside get the answers on record."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, name, model="recorded", tools="live")
        assert result.is_same, str(result)
        expected = {
            "subagents": ["add"],
            "tools": ["add"] * 4 + ["fail"],
            "approvals": ["add", "pay"],
            "outside": ["add"],
        }
        assert sorted(stage.calls) == sorted(expected.get(name, stage.calls))


async def test_a_live_sub_agent_is_asked_by_the_replays_model() -> None:
    """Its session is in the replay's own store, and gone with it."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "subagents", driver=stage.driver, tools="live")
        assert result.is_same, str(result)
        assert stage.calls == ["add", "add"]
        assert len(await stage.sessions.list()) == 2


async def test_live_tools_that_have_changed_are_found_by_their_results() -> None:
    """With the answers on record and live tools, only the tools' results differ."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        chat = await stage.sessions.open(await SCENES["tools"](stage))

        @tool
        def add(a: int, b: int) -> int:
            """Add two numbers, wrongly."""
            return a + b + (a == 5)

        @tool
        def fail(why: str) -> str:
            """Fail."""
            raise ValueError(why)

        loops = perdure.LoopFactory(tools=[add, fail])
        result = await Replay(chat, model="recorded", tools="live", loops=loops).run()
        different = [(each.differences, each.index) for each in result.turns[1].steps if not each.is_same]
        assert different == [(("results",), 0)]
        assert Rule.of("results").is_broken(result)
        assert not Rule.of("answers").is_broken(result)


async def test_the_code_of_the_tools_is_not_needed(tmp_path: Path) -> None:
    """An exported session is replayed without its tools: their names are shown, and a note says so."""
    path = tmp_path / "tools.jsonl"
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        agent = AgentDefinition("adder", tools=("add", "fail"))
        stage.says = {"Go.": [add(1, 2), "Three."]}
        chat = await stage.sessions.open("named", agent)
        await chat.send("Go.")
        await chat.export(path)
    result = await Replay(path, model="recorded").run()
    assert result.is_same
    assert result.notes == ()
    shown: list[ModelRequest] = []

    def same(request: ModelRequest) -> Any:
        shown.append(request)
        return [add(1, 2), "Three."][request.step]

    result = await Replay(path, driver=ScriptedDriver(same)).run()
    assert result.is_same
    assert [each.name for each in shown[0].tools] == ["add", "fail"]
    assert "Only the names of these tools are known here" in result.notes[0]


async def test_another_model_prompt_and_agent_reach_the_request() -> None:
    """The real loop asks with the given values in place of those on record."""
    shown: list[ModelRequest] = []

    def answer(request: ModelRequest) -> str:
        shown.append(request)
        return "Hi."

    async with opened("memory", Path()) as store, on_stage(store) as stage:
        options = {"driver": ScriptedDriver(answer), "model": "openai:gpt-5", "system_prompt": "Be kind."}
        await replayed(stage, "plain", **options)
        assert {(each.model.name, each.system_prompt) for each in shown} == {("openai:gpt-5", "Be kind.")}
        shown.clear()
        agent = AgentDefinition("poet", system_prompt="Rhyme.", tools=("add",), model="offline")
        chat = await stage.sessions.open("plain")
        await Replay(chat, driver=ScriptedDriver(answer), agent=agent).run()
        assert {(each.model.name, each.system_prompt, len(each.tools)) for each in shown} == {("offline", "Rhyme.", 1)}


async def test_the_history_is_the_recorded_one_unless_asked_otherwise() -> None:
    """A turn begins with the history on record by default, or else with the new answers if a turn is shown whole."""
    shown: list[list[str]] = []

    def answer(request: ModelRequest) -> str:
        shown.append([each.text for each in request.messages])
        return "New."

    async with opened("memory", Path()) as store, on_stage(store) as stage:
        await replayed(stage, "changed_between", driver=ScriptedDriver(answer))
        recorded, shown[:] = list(shown), []
        chat = await stage.sessions.open("changed")
        await Replay(chat, driver=ScriptedDriver(answer), history="replayed").run()
        assert recorded == [
            ["Say 0."],
            ["Say 0.", "Said 0.", "By the way.", "Say 1."],
            ["Say 1.", "Said 1.", "Say 2."],
            ["Say 0.", "Said 0.", "Say 3."],
            ["Say 4."],
        ]
        assert shown == [
            [text.replace("Said 0.", "New.").replace("Said 1.", "New.") for text in one] for one in recorded
        ]


async def test_images_and_files_are_shown_again() -> None:
    """The model of a replay gets the bytes of the message."""
    seen: list[bytes] = []

    class Looking(RecordedDriver):
        async def respond(self, request: ModelRequest, on_delta: Any) -> ModelReply:
            parts = [part for message in await request.messages_with_files() for part in message.parts]
            seen.extend(part.data for part in parts if isinstance(part, perdure.Media))
            return await super().respond(request, on_delta)

    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "files", driver=Looking())
        assert result.is_same
        assert seen == [PNG, PNG, b"plain words"]


async def test_what_a_replay_kept_is_found_as_sessions_of_their_own() -> None:
    """With `into`, each turn is a session with a tag; without it, nothing is kept."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "plain", driver=Edited("Bye.", 0, word), into=stage.sessions)
        kept = await stage.sessions.list(tag="replay")
        assert {each.id for each in kept} == set(result.kept)
        last = await stage.sessions.open(result.turns[-1].session_id)
        assert (await last.history())[-1].text == "Good bye.\nSee you. otherwise"
        assert [info.id for info in await stage.sessions.list() if "replay" not in info.tags] == ["plain"]


async def test_what_a_replay_keeps_stays_with_its_owner() -> None:
    """The sessions belong to the owner of the stored one, so another owner cannot reach them."""
    async with perdure.connect("memory://", model="offline") as sessions:
        chat = await sessions.of("ada").open("order-7")
        await chat.send("Hello")
        with pytest.raises(InvalidData, match="is not one of 'bob'"):
            await Replay(chat, model="recorded", into=sessions.of("bob")).run()
        assert len(await sessions.list()) == 1
        result = await Replay(chat, model="recorded", into=sessions.of("ada")).run()
        assert [info.id for info in await sessions.of("ada").list(tag="replay")] == [*result.kept]


async def test_a_budget_is_for_the_whole_replay() -> None:
    """A turn that does not begin within it is left out, with the reason."""
    dear = ScriptedDriver(
        lambda request: ModelReply(Message.assistant("Hi."), InferenceResponse("stop", Usage(9, 9, cost=1.0)))
    )
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "plain", driver=dear, budget=ExecutionBudget(max_cost=1.5))
        assert len(result.turns) == 2
        assert [left.reason for left in result.left_out] == ["the budget of the replay was used up before"]


async def test_a_replay_can_be_cancelled() -> None:
    """A cancelled task ends at once, and the stored session is unchanged."""
    slow = ScriptedDriver(lambda request: Delay(60, "never"))
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        chat = await stage.sessions.open(await SCENES["plain"](stage))
        before = await store.dump("plain")
        task = asyncio.ensure_future(Replay(chat, driver=slow).run())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert await store.dump("plain") == before


async def test_a_session_that_runs_is_not_replayed() -> None:
    """Its answers are not final yet: SessionBusy, before a token is spent."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        stage.says = {"Work.": [ToolCall("pause"), "Done."]}
        chat = await stage.sessions.open("busy")
        run = asyncio.ensure_future(chat.send("Work."))
        await stage.is_in.wait()
        with pytest.raises(SessionBusy):
            await Replay(chat, model="recorded").run()
        stage.gate.set()
        await run


async def test_turns_whose_beginning_was_forgotten_are_left_out() -> None:
    """`forget` erases old versions; turns that are left are replayed."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        chat = await stage.sessions.open(await SCENES["plain"](stage))
        await chat.forget(before=3)
        result = await Replay(chat, model="recorded").run()
        assert result.is_same
        assert (len(result.turns), len(result.left_out)) == (1, 2)


async def test_sub_agents_sessions_are_replayed_if_asked() -> None:
    """Otherwise their calls are answered from the record, like any."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        alone = await replayed(stage, "subagents", model="recorded")
        assert (len(alone.steps), alone.children) == (2, ())
        chat = await stage.sessions.open("subagents")
        both = await Replay(chat, driver=Edited("Add.", 1, word), children=True).run()
        (child,) = both.children
        assert [step.kind for step in child.steps] == ["same", "changed"]
        assert not both.is_same
        assert Rule.of("answers").is_broken(both)


async def test_answers_may_be_judged_by_a_function() -> None:
    """`same_answer` decides about two texts that differ."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(
            stage, "plain", driver=Edited("Bye.", 0, word), same_answer=lambda old, new: old[:4] == new[:4]
        )
        assert result.is_same


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("any", True),
        ("answers", True),
        ("calls", False),
        ("ends", False),
        ("tokens=1", False),
        ("tokens=0.5", True),
        ("cost=1", False),
        ("cost=0.9", True),
    ],
)
async def test_rules_say_what_counts_as_different(rule: str, broken: bool) -> None:
    """A rule is about one kind of difference, or about a ratio."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(stage, "plain", driver=Edited("Bye.", 0, word))
        assert Rule.of(rule).is_broken(result) is broken
        assert str(Rule.of(rule)) == rule


@pytest.mark.parametrize("rule", ["any", "answers", "calls", "results", "ends", "tokens=9", "cost=9"])
async def test_a_turn_that_fails_breaks_every_rule(rule: str) -> None:
    """A model that cannot be asked has no answers, no calls and no cost, which does not count as success."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        result = await replayed(
            stage, "plain", driver=ScriptedDriver([ConfigurationError("no such model", "name one")])
        )
        assert Rule.of(rule).is_broken(result)


@pytest.mark.parametrize("rule", ["", "words", "cost", "cost=", "cost=much", "cost=-1", "cost=inf", "calls=2"])
def test_a_wrong_rule_is_refused(rule: str) -> None:
    """The error lists the valid rules."""
    with pytest.raises(InvalidData, match="cost=RATIO"):
        Rule.of(rule)


@pytest.mark.parametrize(
    "wrong",
    [{"tools": "some"}, {"history": "new"}, {"on_unmatched": "ask"}, {"agent": "poet"}, {"budget": 3}, {"loops": 1}],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    """They are refused before anything is read."""
    with pytest.raises(InvalidData):
        Replay("sessions.jsonl", **wrong)


async def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    """A file with several sessions must be read with `in_file`; other values are refused."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        await SCENES["plain"](stage)
        await SCENES["tools"](stage)
        await stage.sessions.export(tmp_path / "two.jsonl")
    with pytest.raises(InvalidData, match="in_file"):
        await Replay(tmp_path / "two.jsonl").run()
    assert [each.session_id for each in await Recording.in_file(tmp_path / "two.jsonl")] == ["plain", "tools"]
    with pytest.raises(InvalidData, match="a Chat, a Recording or a path"):
        await Replay(42).run()  # type: ignore[arg-type]  # as the test asks
    with pytest.raises(ConfigurationError, match="in a replay only"):
        await RecordedDriver().respond(ModelRequest(perdure.ModelConfig("m"), ()), None)  # type: ignore[arg-type]  # never called


async def test_a_model_that_is_not_here_is_said_so() -> None:
    """A session that was recorded with a driver of the caller's own needs a driver, or another model."""
    async with opened("memory", Path()) as store, on_stage(store) as stage:
        chat = await stage.sessions.open(await SCENES["plain"](stage))
        with pytest.raises(ConfigurationError):
            await Replay(chat, loops=perdure.LoopFactory()).run()


async def test_interceptors_and_filters_of_the_connection_are_used() -> None:
    """A replay runs with the loops of the connection, with its capabilities and filters."""
    async with opened("memory", Path()) as store, on_stage(store, **OPTIONS["intercepted"]) as stage:
        result = await replayed(stage, "intercepted", model="recorded", tools="live")
        assert result.is_same, str(result)
        assert stage.calls == ["add"]


async def test_nobody_hears_the_events_of_a_replay() -> None:
    """Subscribers are for stored sessions."""
    bus, heard = perdure.EventBus(), list[Any]()
    async with opened("memory", Path()) as store, on_stage(store, events=bus) as stage:
        chat = await stage.sessions.open(await SCENES["plain"](stage))
        bus.wiretap(heard.append)
        await Replay(chat, model="recorded").run()
        assert heard == []
