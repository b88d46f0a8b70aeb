"""Workflows: stages in order or as a graph, which resume where they were."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests import workflow_process

import perdure
from perdure import (
    AgentDefinition,
    InvalidData,
    MemoryStore,
    PerdureError,
    RunFailed,
    SessionNotActive,
    Sessions,
    Stage,
    ToolCall,
    Workflow,
)
from perdure.model.ids import use
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver

POET, CRITIC = AgentDefinition("poet", system_prompt="write"), AgentDefinition("critic", system_prompt="judge")


class Echo:
    """Answers `<agent>(<the last message>)`, and remembers each request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.driver = ScriptedDriver(self._reply)
        self.fails: set[str] = set()

    def _reply(self, request: Any) -> Any:
        asked = request.messages[-1].text
        self.asked.append(asked)
        if asked in self.fails:
            return ValueError("not today")
        return f"{request.system_prompt or 'plain'}({asked})"

    def connect(self, **options: Any) -> Sessions:
        return perdure.connect("memory://", driver=self.driver, **options)


async def test_stages_run_in_order_and_pass_their_results_on() -> None:
    echo = Echo()
    async with echo.connect() as sessions:
        result = await Workflow("w", [Stage("draft", agent=POET), Stage("review", agent=CRITIC)]).run(sessions, "sea")
        assert result["draft"].text == "write(sea)"
        assert result.text == "judge(write(sea))"
        assert echo.asked == ["sea", "write(sea)"]


async def test_ids_are_stable_and_a_second_run_asks_nobody() -> None:
    echo = Echo()
    workflow = Workflow("w", [Stage("draft"), Stage("review", session="shared-review")])
    assert [workflow.session_of(stage) for stage in workflow.stages] == ["w.draft", "shared-review"]
    async with echo.connect() as sessions:
        first = await workflow.run(sessions, "sea")
        again = await Workflow("w", workflow.stages).run(sessions, "sea")
        assert again.text == first.text
        assert len(echo.asked) == 2
        with pytest.raises(InvalidData, match="another input"):
            await workflow.run(sessions, "mountain")
        await Workflow("w2", [Stage("draft")]).run(sessions, "mountain")


async def test_a_graph_runs_side_by_side_what_does_not_wait() -> None:
    """Two stages that each wait for the other to begin can only end together."""
    both = asyncio.Barrier(2)

    async def meet() -> str:
        async with asyncio.timeout(10):
            await both.wait()
        return "met"

    def reply(request: Any) -> Any:
        asked = next(message.text for message in reversed(request.messages) if message.role == "user")
        if asked.startswith("meet"):
            return ToolCall(name="meet") if request.step == 0 else "met"
        return f"<{asked}>"

    stages = [
        Stage("a", prompt="meet a", after=[]),
        Stage("b", prompt="meet b", after=[]),
        Stage("join", prompt="{a}+{b} of {input}", after=["a", "b"]),
    ]
    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[meet]) as sessions:
        assert (await Workflow("w", stages).run(sessions, "sea")).text == "<met+met of sea>"


async def test_stages_that_name_one_session_share_its_transcript() -> None:
    """Each has its own agent."""
    echo = Echo()
    stages = [Stage("draft", agent=POET, session="talk"), Stage("review", agent=CRITIC, session="talk")]
    async with echo.connect() as sessions:
        result = await Workflow("w", stages).run(sessions, "sea")
        assert result.text == "judge(write(sea))"
        said = [message.text for message in (await sessions.session("talk")).state.messages]
        assert said == ["sea", "write(sea)", "write(sea)", "judge(write(sea))"]
        assert (await Workflow("w", stages).run(sessions, "sea")).text == result.text


async def test_a_stage_branches_off_a_session_or_a_stage() -> None:
    echo = Echo()
    stages = [
        Stage("draft", agent=POET, fork_from="old-talk"),
        Stage("other", agent=CRITIC, fork_from="draft", prompt="again {input}"),
    ]
    async with echo.connect() as sessions:
        await sessions.inject((await sessions.open("old-talk")).id, {"role": "user", "content": "before"})
        workflow = Workflow("w", stages)
        await workflow.run(sessions, "sea")
        said = [message.text for message in (await sessions.session("w.other")).state.messages]
        assert said == ["before", "sea", "write(sea)", "again sea", "judge(again sea)"]
        assert (await sessions.ancestry("w.other")).root == "old-talk"
        assert await sessions.length("old-talk") == 1
        with pytest.raises(perdure.SessionNotFound, match="nowhere"):
            await Workflow("w2", [Stage("draft", fork_from="nowhere")]).run(sessions, "sea")


async def test_a_prompt_is_a_text_or_a_function_of_the_results() -> None:
    echo = Echo()

    async def told(results: Any) -> str:
        return f"{results['input']}!{results['a']}"

    stages = [Stage("a", prompt='say {input} {"b"}'), Stage("b", prompt=told)]
    async with echo.connect() as sessions:
        await Workflow("w", stages).run(sessions, "{b}{a}")
        assert echo.asked == ['say {b}{a} {"b"}', '{b}{a}!plain(say {b}{a} {"b"})']


@pytest.mark.parametrize("name", ["b", "nobody"])
async def test_a_prompt_cannot_ask_for_what_is_not_there_yet(name: str) -> None:
    """It can name neither the result of a later stage, nor that of an unknown one."""
    with pytest.raises(InvalidData, match=rf"is told {{{name}}}"):
        Workflow("w", [Stage("a", prompt=f"say {{{name}}}"), Stage("b")])


async def test_a_stage_that_failed_is_tried_again_by_the_next_run() -> None:
    """The stages before it are not, and the failed attempt is not in its transcript."""
    echo = Echo()
    echo.fails.add("write(sea)")
    workflow = Workflow("w", [Stage("draft", agent=POET), Stage("review", agent=CRITIC), Stage("end")])
    async with echo.connect() as sessions:
        for _ in range(2):
            with pytest.raises(RunFailed, match="not today"):
                await workflow.run(sessions, "sea")
        echo.fails.clear()
        assert (await workflow.run(sessions, "sea")).text == "plain(judge(write(sea)))"
        assert echo.asked.count("sea") == 1
        said = [message.text for message in (await sessions.session("w.review")).state.messages]
        assert said == ["write(sea)", "judge(write(sea))"]


async def words(sessions: Sessions, session_id: str) -> list[str]:
    return [message.text for message in (await sessions.session(session_id)).state.messages]


async def test_a_retry_leaves_what_others_have_said_in_the_session_they_share() -> None:
    """Only the failed attempt between their messages goes; their messages and their last run stay."""
    echo = Echo()
    echo.fails.add("sea")
    one = Workflow("one", [Stage("draft", agent=POET, session="talk")])
    two = Workflow("two", [Stage("judge", agent=CRITIC, session="talk")])
    async with echo.connect() as sessions:
        await sessions.inject((await sessions.open("talk", POET)).id, {"role": "user", "content": "before"})
        with pytest.raises(RunFailed):
            await one.run(sessions, "sea")
        await two.run(sessions, "hill")
        echo.fails.clear()
        assert (await one.run(sessions, "sea")).text == "write(sea)"
        assert await words(sessions, "talk") == ["before", "hill", "judge(hill)", "sea", "write(sea)"]
        assert (await two.run(sessions, "hill")).text == "judge(hill)"
        said = [message.text for message in await sessions.history("talk")]
        assert said == ["before", "sea", "hill", "judge(hill)", "sea", "write(sea)"]


async def test_a_retry_leaves_what_others_have_said_into_the_attempt_itself() -> None:
    """A message that comes while a run waits for approval stays when that run fails."""

    @perdure.tool(needs_approval=True)
    def publish() -> str:
        return "ok"

    def reply(request: Any) -> Any:
        return ToolCall(name="publish") if request.step == 0 else perdure.DriverError("not today")

    workflow = Workflow("w", [Stage("publish")])
    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[publish]) as sessions:
        with pytest.raises(SessionNotActive):
            await workflow.run(sessions, "go")
        await sessions.inject("w.publish", {"role": "user", "content": "Mind the gap."})
        with pytest.raises(RunFailed):
            await sessions.approve("w.publish")
        with pytest.raises(SessionNotActive):
            await workflow.run(sessions, "go")
        assert (await words(sessions, "w.publish"))[:2] == ["Mind the gap.", "go"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_retry_that_is_killed_at_any_call_of_the_store_loses_nobodys_words(after: bool) -> None:
    """Messages that come before the kill and before the resume stay; the stage is answered once."""
    for call in range(1, 200):
        echo, clock, store = Echo(), FrozenClock(tick=0.0001), FailingStore(MemoryStore())
        echo.fails.add("sea")
        workflow = Workflow("w", [Stage("draft", agent=POET, session="talk")])
        with use(clock=clock):
            async with perdure.connect(store, driver=echo.driver) as sessions:
                with pytest.raises(RunFailed):
                    await workflow.run(sessions, "sea")
                await sessions.inject("talk", {"role": "user", "content": "one"})
                echo.fails.clear()
                store.crash(call=call, after=after)
                with suppress(PerdureError):
                    await workflow.run(sessions, "sea")
                crashed = store.has_crashed
                store.heal()
                clock.advance(60)
                await sessions.recover()
                await sessions.inject("talk", {"role": "user", "content": "two"})
                assert (await workflow.run(sessions, "sea")).text == "write(sea)"
                said = await words(sessions, "talk")
                assert sorted(said) == ["one", "sea", "two", "write(sea)"]
                assert said.index("one") < said.index("two")
                assert said.index("write(sea)") == said.index("sea") + 1
                assert [message.text for message in await sessions.history("talk")].count("one") == 1
        if not crashed:
            break
    assert 5 < call < 199


async def test_a_stage_waits_for_approval() -> None:
    done: list[str] = []

    @perdure.tool(needs_approval=True)
    def publish() -> str:
        done.append("published")
        return "ok"

    def reply(request: Any) -> Any:
        return ToolCall(name="publish") if request.step == 0 and not done else "all done"

    workflow = Workflow("w", [Stage("publish"), Stage("thank")])
    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[publish]) as sessions:
        for _ in range(2):
            with pytest.raises(SessionNotActive):
                await workflow.run(sessions, "go")
        assert not await sessions.exists("w.thank")
        assert (await sessions.approve("w.publish")).text == "all done"
        assert (await workflow.run(sessions, "go")).text == "all done"
        assert done == ["published"]


async def test_a_stage_that_waits_is_not_done_whatever_tells_it_its_prompt() -> None:
    """The next stage waits for the answer, and then gets that answer."""

    @perdure.tool(needs_approval=True)
    def publish() -> str:
        return "ok"

    def reply(request: Any) -> Any:
        last = request.messages[-1]
        return ToolCall(name="publish") if last.text == "please go" else f"after {last.text}"

    workflow = Workflow("w", [Stage("publish", prompt=lambda results: f"please {results['input']}"), Stage("thank")])
    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[publish]) as sessions:
        for _ in range(2):
            with pytest.raises(SessionNotActive):
                await workflow.run(sessions, "go")
        assert not await sessions.exists("w.thank")
        await sessions.approve("w.publish")
        await sessions.inject("w.publish", {"role": "user", "content": "Somebody says more."})
        result = await workflow.run(sessions, "go")
        assert [each.text for each in result.replies.values()] == ["after ok", "after after ok"]


async def test_a_stage_that_fails_after_its_approval_is_tried_again() -> None:
    """Its reply is the last one saved, not the one that was still waiting."""
    broken = [True]

    @perdure.tool(needs_approval=True)
    def publish() -> str:
        return "ok"

    def reply(request: Any) -> Any:
        if request.messages[-1].role == "user":
            return ToolCall(name="publish")
        return perdure.DriverError("not today") if broken[0] else "published"

    workflow = Workflow("w", [Stage("publish")])
    async with perdure.connect("memory://", driver=ScriptedDriver(reply), tools=[publish]) as sessions:
        with pytest.raises(SessionNotActive):
            await workflow.run(sessions, "go")
        with pytest.raises(RunFailed):
            await sessions.approve("w.publish")
        with pytest.raises(SessionNotActive):
            await workflow.run(sessions, "go")
        broken.clear()
        broken.append(False)
        await sessions.approve("w.publish")
        assert (await workflow.run(sessions, "go")).text == "published"


BAD: dict[str, tuple[Any, str]] = {
    "none": (lambda: Workflow("w", []), "at least one stage"),
    "twice": (lambda: Workflow("w", [Stage("a"), Stage("a")]), "taken"),
    "input": (lambda: Workflow("w", [Stage("input")]), "taken"),
    "no stage": (lambda: Workflow("w", ["a"]), "Stage"),  # type: ignore[list-item]
    "unknown": (lambda: Workflow("w", [Stage("a", after=["b"])]), "no such stage"),
    "circle": (lambda: Workflow("w", [Stage("a", after=["b"]), Stage("b", after=["a"])]), "circle"),
    "text": (lambda: Stage("a", after="b"), r"after=\['b'\]"),
    "agent": (lambda: Stage("a", agent="poet"), "AgentDefinition"),  # type: ignore[arg-type]
    "prompt": (lambda: Stage("a", prompt=7), "text or a function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD)
def test_a_workflow_that_cannot_work_is_refused(case: str) -> None:
    make, match = BAD[case]
    with pytest.raises(InvalidData, match=match):
        make()


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_killed_workflow_goes_on_in_its_unfinished_stage(tmp_path: Path, kind: str) -> None:
    """Killed in the middle of stage 2, it repeats no finished step."""
    url = f"sqlite:///{tmp_path / 's.db'}" if kind == "sqlite" else f"file://{tmp_path / 'files'}"
    ledger = tmp_path / "ledger"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, workflow_process.__file__, url, str(ledger)]
    killed = subprocess.Popen([*command, "wait"], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (ledger.exists() and "third" in ledger.read_text()):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again = subprocess.run([*command, "go"], env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert again.stdout == "drafted reviewed\n"
    assert ledger.read_text().split() == ["first", "second", "third", "third"]


NAMES = ["a", "b", "a.b", "b.c", "a_b", "a_-b", "a__b", "a.b_c", "a-b", "a._b"]


def test_no_two_stages_share_a_session_by_accident() -> None:
    """Each pair of workflow and stage has an id of its own, with any dots in their names."""
    made = {(flow, name): Workflow(flow, [Stage(name)]).session_of(Stage(name)) for flow in NAMES for name in NAMES}
    assert len(set(made.values())) == len(NAMES) ** 2
    assert made["a.b", "b"] == "a.b.b", "an id that was never ambiguous is as it was"


async def test_two_workflows_whose_names_join_alike_do_not_meet() -> None:
    """`acme.eu` + `draft` and `acme` + `eu.draft` are two stages of two workflows."""
    echo = Echo()
    async with echo.connect() as sessions:
        await Workflow("acme.eu", [Stage("draft")]).run(sessions, "sea")
        result = await Workflow("acme", [Stage("eu.draft")]).run(sessions, "hill")
        assert result.text == "plain(hill)"
        assert await words(sessions, result["eu.draft"].session.id) == ["hill", "plain(hill)"]


async def test_a_stage_that_an_earlier_release_has_begun_is_found() -> None:
    """Its session's id has ambiguous dots; the key in the session says whose it is."""
    echo = Echo()
    async with echo.connect() as sessions:
        await sessions.open("acme.eu.draft")
        await sessions.send("acme.eu.draft", "sea", key="workflow acme stage eu.draft attempt 1")
        assert (await Workflow("acme", [Stage("eu.draft")]).run(sessions, "sea")).text == "plain(sea)"
        assert echo.asked == ["sea"]


def no_answer_by(name: str) -> dict[str, Any]:
    """Return options of a connection in which a run of the poet's has no answer."""

    def reject(messages: Any) -> Any:
        return perdure.Rejected("not here") if messages[-1].text == "sea" else None

    class Brief:
        async def respond(self, request: Any, on_delta: Any) -> perdure.ModelReply:
            return perdure.ModelReply(perdure.Message.assistant("Once"), perdure.InferenceResponse("length"))

    return {
        "rejected": {"input_filters": [reject]},
        "cut off": {"driver": Brief()},
        "blank": {"driver": ScriptedDriver([" "])},
        "budget": {},
    }[name]


@pytest.mark.parametrize("why", ["rejected", "cut off", "blank", "budget"])
async def test_a_stage_without_an_answer_stops_the_workflow(why: str) -> None:
    """Nothing is passed on, the error names the stage and the reason, and the next run tries that stage again."""
    echo = Echo()
    budget = perdure.ExecutionBudget(max_steps=0 if why == "budget" else None)
    poet = AgentDefinition("poet", system_prompt="write", budget=budget)
    store = MemoryStore()
    async with perdure.connect(store, **{"driver": echo.driver, **no_answer_by(why)}) as sessions:
        for _ in range(2):
            with pytest.raises(PerdureError) as caught:
                await Workflow("w", [Stage("draft", agent=poet), Stage("review")]).run(sessions, "sea")
            assert isinstance(caught.value, perdure.StageFailed) or why == "rejected"
        assert echo.asked == []
        assert not await sessions.exists("w.review")
    async with perdure.connect(store, driver=echo.driver) as sessions:
        result = await Workflow("w", [Stage("draft", agent=POET), Stage("review")]).run(sessions, "sea")
        assert result.text == "plain(write(sea))"
        assert await words(sessions, "w.draft") == ["sea", "write(sea)"]
