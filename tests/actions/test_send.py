"""Sending messages: how they are sent, what a key promises, and messages to a session that is running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.loop.scenes import Heard, HeldDriver, answer_of, loops_of
from tests.stories import KINDS, opened

from perdure import (
    AgentDefinition,
    AgentSession,
    CompleteSession,
    ConfigurationError,
    ExecutionBudget,
    ExecutionStatus,
    InvalidData,
    LoopFactory,
    LoopStatus,
    Media,
    MemoryStore,
    Message,
    RecoveryReport,
    SendMessage,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionRuntime,
    SqliteStore,
    TagSession,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    recover,
    tool,
)
from perdure.actions.given import messages_to_send
from perdure.archive import fsck
from perdure.model.loop_events import InputRejected
from perdure.model.message import Envelope, UnknownPart
from perdure.protocols import Entry
from perdure.testing.scripted import ScriptedDriver

AGENT = AgentDefinition("agent")


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Opens the same store each time it is called: in memory the same object, on disk another on the same file."""
    memory = MemoryStore()
    return lambda: memory if request.param == "memory" else SqliteStore(tmp_path / "sessions.db")


async def started(store: Any, definition: AgentDefinition = AGENT) -> tuple[SessionRuntime, AgentSession]:
    runtime = SessionRuntime(store)
    return runtime, await runtime.create(definition)


def said(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


async def test_a_message_is_sent_and_answered(open_store: Callable[[], Any]) -> None:
    """The version moves by one, with message, answer and run; the messages are on record, and the session is free."""
    async with open_store() as store:
        runtime, session = await started(store)
        after = await runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."])))
        assert (after.version, said(after), answer_of(after.state)) == (2, ["Hi", "Hello."], "Hello.")
        assert await runtime.get_session(session.id) == after
        kinds = [entry.kind for entry in await store.read(session.id)]
        assert (kinds[0], kinds[1], kinds[-1]) == ("agent_start", "message_end", "agent_end")
        assert not await store.is_claimed(session.id)


async def test_several_messages_are_sent_at_once() -> None:
    """A list of texts, dicts and messages is one run with them all, in order, each on record."""
    heard = Heard()
    driver = ScriptedDriver(["Both."])
    runtime, session = await started(MemoryStore())
    parts = Message.user("And this.", Media("image/png", data=b"\x89"))
    action = SendMessage(["First.", {"role": "user", "content": "Then."}, parts], loops_of(driver, events=heard))
    after = await runtime.execute(session.id, action)
    assert said(after) == ["First.", "Then.", "And this.", "Both."]
    assert [message.text for message in driver.requests[0].messages] == ["First.", "Then.", "And this."]
    assert heard.names[:4] == ["AgentStart", "MessageEnd", "MessageEnd", "MessageEnd"]


@pytest.mark.parametrize("nothing", [[], (), b"bytes", [b"bytes"], object(), {"content": "no role"}])
def test_what_is_no_message_is_refused(nothing: Any) -> None:
    """Nothing to send and values that are not messages are refused."""
    with pytest.raises(InvalidData):
        SendMessage(nothing, LoopFactory())


@pytest.mark.parametrize("part", [ToolResult("c", "done"), ToolCall("look"), Thinking("Hm.")])
def test_a_users_message_of_which_no_model_would_be_sent_anything_is_blank(part: Any) -> None:
    """Calls, results and thoughts are not a user's: the model would be asked nothing."""
    with pytest.raises(InvalidData, match="the message is blank"):
        SendMessage(Message("user", (part,)), LoopFactory())
    assert SendMessage(Message("user", (part, Text("Go."))), LoopFactory()).messages


@pytest.mark.parametrize(
    "options", [{"when_busy": "wait"}, {"key": ""}, {"key": 5}, {"key": "k", "when_busy": "steer"}]
)
def test_wrong_options_are_refused(options: Any) -> None:
    """A key is a text, and is allowed only for a run with a result of its own."""
    with pytest.raises(InvalidData):
        SendMessage("Hi", LoopFactory(), **options)


async def test_a_session_that_is_not_active_takes_no_message() -> None:
    """It raises SessionNotActive before a model is asked or anything is changed."""
    driver = ScriptedDriver(["Hello."])
    runtime, session = await started(MemoryStore())
    closed = await runtime.execute(session.id, CompleteSession())
    with pytest.raises(SessionNotActive):
        await runtime.execute(session.id, SendMessage("Hi", loops_of(driver)))
    assert (await runtime.get_session(session.id), driver.requests) == (closed, [])


async def test_a_message_can_be_sent_without_a_runtime() -> None:
    """An action works on a session without a store; then nothing is recorded or saved."""
    _, session = await started(MemoryStore())
    after = await SendMessage("Hi", loops_of(["Hello."])).execute_on(session)
    assert (after.version, answer_of(after.state)) == (1, "Hello.")


async def test_a_key_runs_once(open_store: Callable[[], Any]) -> None:
    """The same request returns the session as that run saved it, and runs nothing, whatever came after."""
    driver = ScriptedDriver(["Hello."])
    loops = loops_of(driver)
    async with AsyncExitStack() as stack:
        runtime, session = await started(await stack.enter_async_context(open_store()))
        first = await runtime.execute(session.id, SendMessage("Hi", loops, key="req-17"))
        await runtime.execute(session.id, SendMessage("More", loops))
        await runtime.execute(session.id, CompleteSession())
        elsewhere = SessionRuntime(await stack.enter_async_context(open_store()))
        again = await elsewhere.execute(session.id, SendMessage("Hi", loops, key="req-17"))
        assert (again.version, said(again)) == (first.version, ["Hi", "Hello."])
        assert (again.state.usage, len(driver.requests)) == (first.state.usage, 2)
        with pytest.raises(InvalidData, match="another message"):
            await elsewhere.execute(session.id, SendMessage("Hello?", loops, key="req-17"))


async def test_a_key_holds_for_a_run_that_never_asked_a_model() -> None:
    """A run that was stopped before its first step is a result too: on record, and not run again."""
    store = MemoryStore()
    runtime, session = await started(store, AgentDefinition("agent", budget=ExecutionBudget(max_steps=0)))
    action = SendMessage("Hi", loops_of([]), key="k")
    first = await runtime.execute(session.id, action)
    again = await runtime.execute(session.id, action)
    assert (first.state.status, again.version) == (ExecutionStatus.STOPPED, first.version)
    assert [entry.kind for entry in await store.read(session.id)] == ["agent_start", "message_end", "agent_end"]


async def test_a_key_needs_a_journal() -> None:
    """A store that cannot remember keys refuses them rather than running twice; it works without a key."""

    class Plain:
        def __init__(self, store: MemoryStore) -> None:
            for verb in ("create", "save", "load", "exists", "delete", "list"):
                setattr(self, verb, getattr(store, verb))

    runtime, session = await started(Plain(MemoryStore()))
    with pytest.raises(ConfigurationError, match="idempotency key needs a store with a journal"):
        await runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."]), key="k"))
    after = await runtime.execute(session.id, SendMessage("Hi", loops_of(["Hello."])))
    assert answer_of(after.state) == "Hello."


class Busy:
    """Two processes on one file: in the first a run is under way, and waits to be let go.

    Its tool `pause` ends once the run has read a message that steers.
    """

    def __init__(self, first: Any, second: Any, session: AgentSession, script: Any) -> None:
        self.first, self.second = SessionRuntime(first), SessionRuntime(second)
        self.store = second
        self.id = session.id
        self.driver = HeldDriver(script)
        self._has_found = asyncio.Event()
        self._read, first.read = first.read, self._look
        loops = loops_of(self.driver, tool(name="pause")(self._pause))
        self.run = asyncio.ensure_future(self.first.execute(session.id, SendMessage("First.", loops)))

    async def _look(self, *given: Any, **named: Any) -> Any:
        found = await self._read(*given, **named)
        if any(entry.kind == "steer" for entry in found):
            self._has_found.set()
        return found

    async def _pause(self) -> str:
        await self._has_found.wait()
        return "rested"

    async def send(self, text: Any, when_busy: Any = "raise", **options: Any) -> ScriptedDriver:
        """Send a message from the second process, and return the driver it would have asked."""
        driver = ScriptedDriver(lambda request: f"Re: {request.messages[-1].text}")
        await self.second.execute(self.id, SendMessage(text, loops_of(driver), when_busy=when_busy, **options))
        return driver

    async def end(self) -> AgentSession:
        self.driver.may_answer.set()
        await self.run
        await self.first.idle()
        return await self.first.get_session(self.id)


class Scene(AsyncExitStack):
    """Opens two stores on one file, and a run in the first."""

    def __init__(self, path: Path, script: Any) -> None:
        super().__init__()
        self._path, self._script = path / "sessions.db", script

    async def start(self) -> Busy:
        first = await self.enter_async_context(SqliteStore(self._path))
        second = await self.enter_async_context(SqliteStore(self._path))
        _, session = await started(first)
        busy = Busy(first, second, session, self._script)
        await busy.driver.is_asked.wait()
        return busy


def echo(request: Any) -> str:
    return f"Re: {request.messages[-1].text}"


async def test_a_second_message_is_refused_before_a_token_is_spent(tmp_path: Path) -> None:
    """It raises SessionBusy at once, in another process too; no model is asked, and the run is not disturbed."""
    async with Scene(tmp_path, ["Done."]) as scene:
        busy = await scene.start()
        driver = ScriptedDriver(["never"])
        for key in (None, "k"):
            with pytest.raises(SessionBusy):
                await busy.second.execute(busy.id, SendMessage("Second.", loops_of(driver), key=key))
        assert driver.requests == []
        assert said(await busy.end()) == ["First.", "Done."]


async def test_a_message_may_steer_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is delivered between two steps: the next request has it, in the same run, and it is sent only once."""
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 0.01)
    async with Scene(tmp_path, [ToolCall("pause"), "Done."]) as scene:
        busy = await scene.start()
        unused = await busy.send(Message.user("Left!", UnknownPart({"type": "hologram"}), id="m-1"), "steer")
        session = await busy.end()
        assert (said(session), unused.requests) == (["First.", "", "rested", "Left!", "Done."], [])
        assert [message.text for message in busy.driver.requests[1].messages][-1] == "Left!"
        assert session.state.messages[3].parts[1] == UnknownPart({"type": "hologram"})
        assert (session.state.messages[3].id, session.version) == ("m-1", 2)
        assert await busy.store.read(busy.id, inbox=True) == []


async def test_a_message_that_comes_after_the_last_step_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too late to steer, it is sent as a message of its own when the run has ended."""
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 3600)  # a run that looks in time is steered
    async with Scene(tmp_path, echo) as scene:
        busy = await scene.start()
        await busy.send("Late.", "steer")
        session = await busy.end()
        assert said(session) == ["First.", "Re: First.", "Late.", "Re: Late."]
        assert session.state.execution_count == 2


async def test_queued_messages_are_sent_in_order_after_the_run(tmp_path: Path) -> None:
    """Each is a run of its own, even 120 of them; a key among them holds from then on."""
    async with Scene(tmp_path, echo) as scene:
        busy = await scene.start()
        for number in range(120):
            await busy.send(f"{number}", "queue", key=f"k{number}" if number % 60 == 0 else None)
        await busy.send("0", "queue", key="k0")
        session = await busy.end()
        assert said(session) == ["First.", "Re: First.", *(t for n in range(120) for t in (f"{n}", f"Re: {n}"))]
        assert session.version == 122
        assert (await busy.send("60", key="k60")).requests == []
        assert await busy.store.read(busy.id, inbox=True) == []


async def test_a_queued_message_under_a_key_of_another_is_refused_alone(tmp_path: Path) -> None:
    """It can never be sent. The runs before and after it raise no error for it."""
    async with Scene(tmp_path, echo) as scene:
        busy = await scene.start()
        for text in ("A", "B"):
            await busy.send(text, "queue", key="one key")
        await busy.send("C", "queue")
        session = await busy.end()
        assert said(session) == ["First.", "Re: First.", "A", "Re: A", "C", "Re: C"]
        assert await busy.store.read(busy.id, inbox=True) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_message_is_found_on_record(tmp_path: Path, kind: str) -> None:
    """A rejected loop has the reason and the message, live too. The session is unchanged."""
    heard = Heard()
    async with opened(kind, tmp_path) as store:
        runtime = SessionRuntime(store, events=heard)
        session = await runtime.create(AGENT)
        await runtime.execute(session.id, SendMessage("Hi", loops_of(echo), key="k"))
        other = Message.user("Something else.")
        await store.post(session.id, Entry("queue", {"messages": [other.to_dict()], "key": "k"}))
        after = await runtime.execute(session.id, SendMessage("More", loops_of(echo)))
        await runtime.idle()
        refused = (await runtime.record(session.id)).loops[-1]
        whole = await runtime.loop(session.id, refused.loop_id)
        assert (refused.status, whole.status) == (LoopStatus.REJECTED, LoopStatus.REJECTED)
        assert "'k' was used for another message" in (refused.rejection or "")
        assert whole.messages == (other,)
        assert [event.reason for event in whole.events if isinstance(event, InputRejected)] == [refused.rejection]
        assert [event.reason for event in heard.of(InputRejected)] == [refused.rejection]
        assert await runtime.get_session(session.id) == after
        assert await store.read(session.id, inbox=True) == []
        assert await recover(runtime, loops_of(echo), session_id=session.id) == RecoveryReport()
        again = await runtime.execute(session.id, SendMessage("Last", loops_of(echo)))
        assert said(again) == ["Hi", "Re: Hi", "More", "Re: More", "Last", "Re: Last"]
        assert (await fsck(store)).problems == ()


async def test_what_is_queued_before_a_steering_message_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steering message overtakes the queued ones; they are still sent, in their order."""
    monkeypatch.setattr("perdure.actions.inbox.LOOK_EVERY", 0.01)

    def script(request: Any) -> Any:
        return ToolCall("pause") if request.messages[-1].text == "First." else echo(request)

    async with Scene(tmp_path, script) as scene:
        busy = await scene.start()
        for text, how in (("A", "queue"), ("Left!", "steer"), ("B", "queue")):
            await busy.send(text, how)
        session = await busy.end()
        assert said(session)[3:] == ["Left!", "Re: Left!", "A", "Re: A", "B", "Re: B"]
        assert await busy.store.read(busy.id, inbox=True) == []


@pytest.mark.parametrize("when_busy", ["steer", "queue"])
@pytest.mark.parametrize("moment", ["before the post", "after the post"])
async def test_nothing_is_lost_if_the_run_ends_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: str, moment: str
) -> None:
    """The caller that finds the run gone sends the message, and it is sent once."""
    async with Scene(tmp_path, echo) as scene:
        busy = await scene.start()
        post = busy.store.post

        async def post_at_the_end(*given: Any) -> int:
            if moment == "before the post":
                await busy.end()
            seq: int = await post(*given)
            if moment == "after the post":
                await busy.end()
            return seq

        monkeypatch.setattr(busy.store, "post", post_at_the_end)
        await busy.send("Late.", when_busy)
        await busy.second.idle()
        session = await busy.second.get_session(busy.id)
        assert said(session) == ["First.", "Re: First.", "Late.", "Re: Late."]


async def test_a_run_that_ended_since_the_load_is_no_error_to_one_who_queues(tmp_path: Path) -> None:
    """Another version may be saved between load and claim: a caller that would wait for a run can wait for that."""
    async with SqliteStore(tmp_path / "s.db") as store:
        runtime, session = await started(store)
        for when_busy, is_sent in (("raise", False), ("queue", True)):
            overtaken = _Overtaken(runtime, SendMessage("Hi", loops_of(echo), when_busy=when_busy))  # type: ignore[arg-type]
            if not is_sent:
                with pytest.raises(SessionConflict):
                    await runtime.execute(session.id, overtaken)
            else:
                await runtime.execute(session.id, overtaken)
                await runtime.idle()
                assert said(await runtime.get_session(session.id)) == ["Hi", "Re: Hi"]


class _Overtaken:
    """An action before which another caller saves the session."""

    def __init__(self, runtime: SessionRuntime, action: SendMessage) -> None:
        self._runtime, self._action = runtime, action

    async def execute_on(self, session: AgentSession, context: Any = None) -> AgentSession:
        await self._runtime.execute(session.id, TagSession(f"v{session.version}"))
        return await self._action.execute_on(session, context)


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_a_message_of_an_envelope_alone_is_blank(role: Any) -> None:
    """An envelope of a foreign item is not shown to a model."""
    with pytest.raises(InvalidData, match="the message is blank"):
        messages_to_send(Message(role, (Envelope("acme", {"a": 1}),)), any_role=True)
