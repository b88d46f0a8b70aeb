"""Sessions of every kind, for tests that replay them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.waiting import until

import perdure
from perdure import (
    AgentDefinition,
    AgentStop,
    AutoCompaction,
    Blocked,
    ContextTooLong,
    ExecutionBudget,
    Interceptor,
    Media,
    Message,
    ModelConfig,
    ModelRequest,
    Rejected,
    SendMessage,
    SendParallel,
    SessionRuntime,
    ToolCall,
    external_tool,
    tool,
)
from perdure.model.ids import use
from perdure.model.step import InferenceResponse
from perdure.model.usage import Usage
from perdure.parallel import LongestAnswer
from perdure.protocols import ModelReply
from perdure.testing import Chunks, FailingStore, FrozenClock, ScriptedDriver

Scene = Callable[["Stage"], Awaitable[str]]
SCENES: dict[str, Scene] = {}
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 64


class Stage:
    """A connection with tools that count, waiting for a scene."""

    def __init__(self, store: Any, clock: FrozenClock) -> None:
        self.store = store
        self.clock = clock
        self.says: dict[str, Any] = {}
        self.summary: str | None = None
        self.calls: list[str] = []
        self.gate, self.is_in = asyncio.Event(), asyncio.Event()
        self.driver = ScriptedDriver(self._reply)
        self.sessions: perdure.Sessions

    def _reply(self, request: ModelRequest) -> Any:
        if self.summary is not None and not request.tools:
            return self.summary
        for message in reversed(request.messages):
            if message.role == "user" and message.text in self.says:
                said = self.says[message.text]
                reply = said(request) if callable(said) else said[request.step]
                return reply(request) if callable(reply) else reply
        raise AssertionError(f"nobody wrote what to say to {request.messages[-1].text!r}")

    def tools(self) -> list[Any]:
        @tool(idempotent=True)
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.calls.append("add")
            return a + b

        @tool
        def fail(why: str) -> str:
            """Fail."""
            self.calls.append("fail")
            raise ValueError(why)

        @tool(needs_approval=True)
        def pay(amount: int) -> str:
            """Pay."""
            self.calls.append("pay")
            return f"paid {amount}"

        @tool
        async def pause() -> str:
            """Wait until the scene continues."""
            self.calls.append("pause")
            self.is_in.set()
            await self.gate.wait()
            return "rested"

        @tool
        def stop(reason: str) -> str:
            """End the run."""
            raise AgentStop(reason)

        return [add, fail, pay, pause, stop, external_tool("locate", "Where the user is.")]


@asynccontextmanager
async def on_stage(store: Any, **options: Any) -> AsyncIterator[Stage]:
    """Open a connection on a store for a scene."""
    clock = FrozenClock(tick=0.001)
    stage = Stage(store, clock)
    helper = AgentDefinition("helper", description="Helps.")
    given = {"tools": stage.tools(), "driver": stage.driver, "subagents": [helper], **options}
    with use(clock=clock):
        async with perdure.connect(store, **given) as sessions:
            stage.sessions = sessions
            yield stage


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


def add(a: int, b: int) -> ToolCall:
    return ToolCall("add", {"a": a, "b": b})


@scene
async def plain(stage: Stage) -> str:
    """Three turns without tools; one answer is cut off by its length."""
    long = ModelReply(Message.assistant("It goes on and"), InferenceResponse("length", Usage(7, 9, cost=0.25)))
    stage.says = {"Hello.": ["Hi."], "Go on.": [long], "Bye.": ["Good bye.\nSee you."]}
    chat = await stage.sessions.open("plain")
    for text in ("Hello.", "Go on.", "Bye."):
        with suppress(perdure.RunFailed):
            await chat.send(text)
    return chat.id


@scene
async def tools(stage: Stage) -> str:
    """Several calls at once, the same call twice, a tool that fails, arguments that do not fit, an unknown tool."""
    stage.says = {
        "Work.": [
            [add(1, 2), add(1, 2), ToolCall("fail", {"why": "no luck"}), ToolCall("nobody", {"x": 1})],
            [ToolCall("add", {"a": "many"}), add(2, 2)],
            "All done.",
        ],
        "More.": [add(5, 5), "Ten."],
    }
    chat = await stage.sessions.open("tools")
    await chat.send("Work.")
    await chat.send("More.")
    return chat.id


@scene
async def failing_model(stage: Stage) -> str:
    """The model fails at once, in the middle of an answer, and after a tool; then it answers."""
    stage.says = {
        "One.": [RuntimeError("the line is dead")],
        "Two.": [Chunks(["Half an ", "answer", RuntimeError("cut")])],
        "Three.": [add(1, 1), perdure.DriverError("It refused.")],
        "Four.": ["At last."],
    }
    chat = await stage.sessions.open("failing")
    for text in stage.says:
        with suppress(perdure.RunFailed):
            await chat.send(text)
    return chat.id


@scene
async def approvals(stage: Stage) -> str:
    """One call is approved, one denied, and a third needs no approval; then another call waits."""
    pays = [ToolCall("pay", {"amount": 1}), ToolCall("pay", {"amount": 2}), add(1, 1)]
    stage.says = {"Pay.": [pays, "Paid one."], "Again.": [ToolCall("pay", {"amount": 3}), "never said"]}
    chat = await stage.sessions.open("approvals")
    reply = await chat.send("Pay.")
    first, second = reply.pending_calls
    loops = stage.sessions.loops
    settle = perdure.SettleToolCalls(loops, approve=[first], deny={second.id: "Too much."})
    await stage.sessions.execute(chat.id, settle)
    await chat.send("Again.")
    return chat.id


@scene
async def steering(stage: Stage) -> str:
    """Messages reach a run after its first and its last step; another one is queued behind it."""
    stage.says = {"Work.": [ToolCall("pause"), add(1, 1), "Done, left.", "And blue."], "Next.": ["Queued answer."]}

    chat = await stage.sessions.open("steering")
    run = asyncio.ensure_future(chat.send("Work."))
    await stage.is_in.wait()
    await chat.send("Turn left!", when_busy="steer")
    await chat.send("Next.", when_busy="queue")
    await asyncio.sleep(0)
    stage.gate.set()
    await run
    await stage.sessions.runtime.idle()
    return chat.id


@scene
async def compacted(stage: Stage) -> str:
    """A run finds its prompt too long and compacts; between two runs the caller compacts."""
    asked: list[int] = []

    def too_long(request: ModelRequest) -> Any:
        if request.step == 0:
            return [add(3, 4)]
        if not asked:
            asked.append(1)
            raise ContextTooLong("scripted", "too many tokens")
        return "Seven."

    stage.says = {f"Say {n}.": [f"{n}, " * 30] for n in range(6)} | {"Count.": too_long, "After.": ["After all."]}
    chat = await stage.sessions.open("compacted")
    for n in range(4):
        await chat.send(f"Say {n}.")
    await chat.send("Count.")
    await chat.send("Say 4.")
    await chat.compact(compact_strategy="truncate", keep_last=2)
    await chat.send("After.")
    return chat.id


@scene
async def summarised(stage: Stage) -> str:
    """The prompt comes near the model's window during a run, and a model summarises the older messages."""
    stage.says = {f"Say {n}.": [f"{n}, " * 60] for n in range(5)} | {"Work.": [add(n, n) for n in range(6)]}
    stage.says["Work."] += ["Worked."]
    stage.summary = "They counted."
    agent = AgentDefinition("small", model=ModelConfig("small", context_window=600))
    chat = await stage.sessions.open("summarised", agent)
    for text in stage.says:
        await chat.send(text)
    return chat.id


@scene
async def forked(stage: Stage) -> str:
    """A fork shows its parent's history and continues on its own; the parent is erased afterwards."""
    stage.says = {"Begin.": ["Begun."], "Parent.": ["Parent's."], "Child.": [add(2, 3), "Child's."]}
    chat = await stage.sessions.open("parent")
    await chat.send("Begin.")
    await chat.send("Parent.")
    fork = await chat.fork("forked", at=2)
    await fork.send("Child.")
    return fork.id


@scene
async def changed_between(stage: Stage) -> str:
    """Between runs, messages are injected, trimmed, rewound and undone, and the prompt changes."""
    stage.says = {f"Say {n}.": [f"Said {n}."] for n in range(5)}
    chat = await stage.sessions.open("changed")
    await chat.send("Say 0.")
    await chat.inject(Message.user("By the way."))
    await chat.send("Say 1.")
    await chat.trim(2)
    await chat.send("Say 2.")
    await chat.rewind(2)
    await stage.sessions.execute(chat.id, perdure.ChangeSystemPrompt("Be brief."))
    await chat.send("Say 3.")
    await chat.reset()
    await chat.send("Say 4.")
    return chat.id


@scene
async def retried(stage: Stage) -> str:
    """A run fails, is sent again in place of the failed one, and a good one is repeated."""
    tries: list[int] = []

    def second_time(request: ModelRequest) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return f"Try {len(tries)}."

    stage.says = {"First.": ["Fine."], "Try.": second_time}
    chat = await stage.sessions.open("retried")
    await chat.send("First.")
    with suppress(perdure.RunFailed):
        await chat.send("Try.")
    await chat.retry()
    await chat.retry()
    return chat.id


@scene
async def recovered(stage: Stage) -> str:
    """A run is killed behind a tool that took effect, and is recovered by another process."""
    stage.says = {"Go.": [add(1, 2), [ToolCall("fail", {"why": "x"}), add(4, 4)], "Recovered."], "On.": ["Further."]}
    chat = await stage.sessions.open("recovered")
    for call in (2, 3, 4):
        failing = FailingStore(stage.store)
        for verb in ("append", "save"):
            failing.fail(verb, call=call if verb == "append" else None)
        for later in range(call + 1, 12):
            failing.fail("append", call=later)
        failing.fail("release", call=None)
        runtime = SessionRuntime(failing)
        action: Any = (
            SendMessage("Go.", stage.sessions.loops) if call == 2 else perdure.ResumeExecution(stage.sessions.loops)
        )
        with pytest.raises(Exception, match="told to fail"):
            await runtime.execute(chat.id, action)
        stage.clock.advance(3600)
    await stage.sessions.recover()
    await chat.send("On.")
    return chat.id


@scene
async def killed(stage: Stage) -> str:
    """A run was killed behind its first step, and was not recovered."""
    stage.says = {"Hello.": ["Hi."], "Go.": [add(1, 2), "never said"]}
    chat = await stage.sessions.open("killed")
    await chat.send("Hello.")
    failing = FailingStore(stage.store)
    for call in range(4, 20):
        failing.fail("append", call=call)
    failing.fail("save", call=None)
    failing.fail("release", call=None)
    with pytest.raises(Exception, match="told to fail"):
        await SessionRuntime(failing).execute(chat.id, SendMessage("Go.", stage.sessions.loops))
    stage.clock.advance(3600)
    return chat.id


@scene
async def cancelled(stage: Stage) -> str:
    """One run is cancelled while a tool works, one while the model speaks."""
    stage.says = {
        "Work.": [add(1, 1), [ToolCall("pause"), add(2, 2)], "never said"],
        "Talk.": [Chunks(["Once upon ", perdure.testing.Delay(60, "a time")])],
        "End.": ["The end."],
    }
    chat = await stage.sessions.open("cancelled")
    run = asyncio.ensure_future(chat.send("Work."))
    await stage.is_in.wait()
    await chat.cancel()
    with suppress(perdure.PerdureError):
        await run
    run = asyncio.ensure_future(chat.send("Talk."))
    await until(lambda: len(stage.driver.requests) == 3)
    await asyncio.sleep(0.01)
    await chat.cancel()
    with suppress(perdure.PerdureError):
        await run
    await chat.send("End.")
    return chat.id


@scene
async def stopped(stage: Stage) -> str:
    """A tool stops one run; another reaches the limit of its agent's steps."""
    stage.says = {
        "Stop.": [[add(1, 1), ToolCall("stop", {"reason": "enough"})], "never said"],
        "Loop.": [add(1, 1), add(2, 2), add(3, 3), "never said"],
    }
    agent = AgentDefinition("limited", budget=ExecutionBudget(max_steps=2, max_seconds=600))
    chat = await stage.sessions.open("stopped", agent)
    for text in stage.says:
        with suppress(perdure.RunFailed):
            await chat.send(text)
    return chat.id


@scene
async def parallel(stage: Stage) -> str:
    """Three configurations answer one message, and the longest answer continues the session."""
    other = AgentDefinition("other", system_prompt="Be long.", model="long")

    def by_model(request: ModelRequest) -> Any:
        if request.model.name == "broken":
            raise RuntimeError("down")
        if request.model.name == "long":
            return [ToolCall("pay", {"amount": 9}), add(1, 1)] if request.step == 0 else "A long answer indeed."
        return "Short."

    stage.says = {"Hello.": ["Hi."], "Compare.": by_model, "After.": ["Afterwards."]}
    chat = await stage.sessions.open("parallel")
    await chat.send("Hello.")
    compare = SendParallel(
        "Compare.", stage.sessions.loops, configs=["short", other, "broken"], strategy=LongestAnswer()
    )
    await stage.sessions.execute(chat.id, compare)
    await chat.send("After.")
    return chat.id


@scene
async def structured(stage: Stage) -> str:
    """An answer has a form, and is requested again since the first one does not fit."""
    form = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    stage.says = {"Number.": ["many", '{"n": 3}'], "Options.": ["Sure."], "Never.": ["bad", "worse"]}
    chat = await stage.sessions.open("structured")
    await chat.send("Number.", output=form)
    await chat.send("Options.", instructions="Only now: be kind.", model_options={"temperature": 0.5})
    with suppress(perdure.RunFailed):
        await chat.send("Never.", output=form)
    return chat.id


@scene
async def outside(stage: Stage) -> str:
    """Calls are answered outside: one tool of the connection, one that a message brought, one that failed there."""
    look = external_tool("look", "Look at the screen.")
    stage.says = {
        "Where?": [[ToolCall("locate"), add(1, 1)], "In Oslo."],
        "See?": [[ToolCall("look", {}), ToolCall("locate", {"again": 1})], "A map."],
    }
    chat = await stage.sessions.open("outside")
    reply = await chat.send("Where?")
    await chat.answer({reply.pending_calls[0].id: {"city": "Oslo"}})
    reply = await chat.send("See?", external_tools=[look])
    first, second = reply.pending_calls
    await stage.sessions.execute(
        chat.id,
        perdure.AnswerToolCalls(
            stage.sessions.loops, {first.id: "a map"}, errors={second.id: "The browser is closed."}
        ),
    )
    return chat.id


@scene
async def files(stage: Stage) -> str:
    """A message brings an image, and a later one a file beside its text."""
    stage.says = {"What is it?": ["A picture."], "And this?": ["A text."]}
    chat = await stage.sessions.open("files")
    await chat.send("What is it?", Media("image/png", PNG))
    await chat.send("And this?", Media("text/plain", b"plain words"))
    return chat.id


@scene
async def subagents(stage: Stage) -> str:
    """An agent asks another, which uses a tool in a session of its own."""
    stage.says = {
        "Ask.": [[ToolCall("helper", {"prompt": "Add."}), add(1, 2)], "The helper says eleven."],
        "Add.": [add(5, 6), "Eleven."],
    }
    chat = await stage.sessions.open("subagents")
    await chat.send("Ask.")
    return chat.id


@scene
async def rejected(stage: Stage) -> str:
    """An input filter refuses one message; the next one is answered."""
    stage.says = {"Good.": ["Fine."], "Better.": ["Finer."]}
    chat = await stage.sessions.open("rejected")
    await chat.send("Good.")
    with suppress(perdure.PerdureError):
        await chat.send("A bad word.")
    await chat.send("Better.")
    return chat.id


class Blocking(Interceptor):
    """Blocks one call and changes another."""

    def before_tool_use(self, call: ToolCall, state: Any) -> Any:
        if call.name == "fail":
            return Blocked("not today")
        if call.name == "add" and call.arguments.get("a") == 100:
            return ToolCall("add", {"a": 1, "b": 1}, call.id)
        return call


@scene
async def intercepted(stage: Stage) -> str:
    """An interceptor blocks a call and changes the arguments of another."""
    stage.says = {"Go.": [[ToolCall("fail", {"why": "x"}), add(100, 5)], "Done."]}
    chat = await stage.sessions.open("intercepted")
    await chat.send("Go.")
    return chat.id


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "rejected": {
        "input_filters": [lambda asked: Rejected("no bad words") if "bad" in asked[-1].text else None],
    },
    "intercepted": {"interceptors": [Blocking()]},
    "compacted": {"compaction": AutoCompaction(compact_strategy="truncate", keep_last=3)},
}
