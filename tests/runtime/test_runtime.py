"""The runtime's pipelines: the order of stages and events, the effect of each failure, and the events about it."""

from __future__ import annotations

import asyncio
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from tests.loop.scenes import loops_of

from perdure import (
    AgentDefinition,
    AgentSession,
    AgentState,
    Answer,
    ConfigurationError,
    EventBus,
    ForkSession,
    InvalidData,
    InvalidSessionId,
    MemoryStore,
    Message,
    Next,
    SendMessage,
    SessionActionExecuted,
    SessionConflict,
    SessionHookStack,
    SessionLoaded,
    SessionLoadFailed,
    SessionNotFound,
    SessionRepository,
    SessionRuntime,
    SessionSaved,
    SessionSaveFailed,
    SessionStage,
    SessionStatus,
    SpawnRef,
    WriteMetadata,
)
from perdure.model.session import forked_from
from perdure.protocols import Interrupted

AGENT = AgentDefinition("support", system_prompt="Be brief.", metadata={"tier": 1})


class Recorder:
    """A controller and a wiretap that write down their calls, in one list."""

    def __init__(self, fail_at: SessionStage | None = None) -> None:
        self.story: list[str] = []
        self.events: list[object] = []
        self.fail_at = fail_at

    async def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        self.story.append(stage.value)
        if stage is self.fail_at:
            raise RuntimeError(f"failed at {stage.value}")
        return session

    def hear(self, event: object) -> None:
        self.story.append(type(event).__name__)
        self.events.append(event)


def runtime_with(recorder: Recorder, store: MemoryStore | None = None) -> SessionRuntime:
    bus = EventBus()
    bus.wiretap(recorder.hear)
    return SessionRuntime(store or MemoryStore(), controller=recorder, events=bus)


async def test_create_passes_its_stages_in_order() -> None:
    """before_create, before_save, the store, after_save, after_create, then SessionSaved."""
    recorder = Recorder()
    session = await runtime_with(recorder).create(AGENT, owner="ann", tags=("vip",))
    assert recorder.story == ["before_create", "before_save", "after_save", "after_create", "SessionSaved"]
    assert recorder.events == [SessionSaved(session.id, 1, SessionStatus.ACTIVE)]
    assert (session.version, session.info.owner, session.info.tags) == (1, "ann", ("vip",))
    assert session.state.context.system_prompt == "Be brief."


async def test_a_child_is_created_by_its_parents_id() -> None:
    """A child that a call has spawned is not top-level; one without a call counts as a fork of its parent."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    parent = await runtime.create(AGENT, session_id="thread", owner="ann")
    spawn = SpawnRef("thread", "run-1", "call-1", "researcher")
    child = await runtime.create(
        AGENT, session_id="thread.researcher", owner="ann", parent=parent.id, spawn=spawn, name="Researcher"
    )
    fork = await runtime.create(AGENT, session_id="copy", parent=parent.id)
    assert (child.info.parent_id, child.info.spawn_ref, child.info.name) == ("thread", spawn, "Researcher")
    assert (forked_from(child.info), forked_from(fork.info)) == (None, "thread")
    assert await store.load("thread.researcher") == child
    assert [info.id for info in await runtime.list_sessions(parent="thread")] == ["copy", "thread.researcher"]
    assert [info.id for info in await runtime.list_sessions(top_level=True)] == ["copy", "thread"]
    assert [*await store.line_of("copy")] == ["thread"]


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ({"parent": "../up"}, None),
        ({"parent": 7}, None),
        ({"parent": "me"}, r"\$.parent"),
        ({"spawn": SpawnRef("p", "r", "c", "t")}, r"\$.spawn"),
        ({"spawn": SpawnRef("p", "r", "c", "t"), "parent": "q"}, r"\$.spawn.parent_session_id"),
        ({"spawn": SpawnRef("p", "r", None, "t"), "parent": "p"}, r"\$.spawn.tool_call_id"),  # type: ignore[arg-type]
        ({"spawn": "p", "parent": "p"}, r"\$.spawn"),
        ({"name": " "}, r"\$.name"),
        ({"name": 7}, r"\$.name"),
        ({"name": "x" * 501}, r"\$.name"),
    ],
)
async def test_a_family_that_cannot_be_is_refused(family: dict[str, Any], place: str | None) -> None:
    """It is refused before anything is stored: no parent, another's call, a session that is its own parent."""
    store = MemoryStore()
    with pytest.raises(InvalidSessionId if place is None else InvalidData, match=place):
        await SessionRuntime(store).create(AGENT, session_id="me", **family)
    assert not await store.list()


async def test_a_child_may_come_before_its_parent() -> None:
    """Frameworks write in their own order; until the parent is there, the child is found by its id."""
    store = MemoryStore()
    runtime = SessionRuntime(store)
    spawn = SpawnRef("late", "run-1", "call-1", "researcher")
    child = await runtime.create(AGENT, session_id="early", parent="late", spawn=spawn)
    assert await runtime.get_session("early") == child
    await runtime.create(AGENT, session_id="late")
    assert [info.id for info in await runtime.list_sessions(parent="late")] == ["early"]


CREATION = ["before_create", "before_save", "after_save", "after_create", "SessionSaved"]


async def test_a_fork_passes_the_stages_of_a_creation() -> None:
    """A fork is created like any other session."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    session = await runtime.create(AGENT)
    await runtime.execute(session.id, WriteMetadata("k", 1))
    recorder.story.clear()
    fork = await runtime.branch(session.id, ForkSession(dst="fork"), version=1)
    assert recorder.story == ["after_load", "SessionLoaded", *CREATION]
    assert (fork.id, fork.version, fork.info.parent_id) == ("fork", 1, session.id)
    assert "k" not in fork.state.metadata


async def test_a_fork_that_a_conflict_makes_passes_the_stages_of_a_creation() -> None:
    """The fork that on_conflict="fork" keeps is a new session, and a controller sees it as one."""
    recorder, store = Recorder(), MemoryStore()
    runtime = runtime_with(recorder, store)
    session = await runtime.create(AGENT)
    meddler = Meddler(SessionRuntime(store), 1)
    recorder.story.clear()
    await runtime.execute(session.id, meddler, on_conflict="fork")
    assert recorder.story == [
        "after_load",
        "SessionLoaded",
        "after_action",
        "before_save",
        "SessionActionExecuted",
        "SessionSaveFailed",
        *CREATION,
    ]


async def test_only_a_new_session_can_be_branched_off() -> None:
    """An action that makes the next version of a session makes no other session."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    with pytest.raises(InvalidData, match="a new session has version 0"):
        await runtime.branch(session.id, WriteMetadata("k", 1))
    with pytest.raises(ConfigurationError, match="execute_on"):
        await runtime.branch(session.id, ForkSession)  # type: ignore[arg-type]


async def test_a_claim_does_not_outlive_an_action_that_makes_no_new_session() -> None:
    """Everything that an action holds is released when it is over."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    with pytest.raises(InvalidData):
        await runtime.branch(session.id, SendMessage("Hi", loops_of(["Hello."])))
    assert runtime.journal is not None
    assert not await runtime.journal.is_claimed(session.id)


async def test_execute_passes_its_stages_in_order() -> None:
    """Load part, action part, save part, each with its stages before its event."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    session = await runtime.create(AGENT)
    recorder.story.clear()
    saved = await runtime.execute(session.id, WriteMetadata("ticket_id", "OPS-142"))
    assert recorder.story == [
        "after_load",
        "SessionLoaded",
        "after_action",
        "before_save",
        "SessionActionExecuted",
        "after_save",
        "SessionSaved",
    ]
    assert recorder.events[1:] == [
        SessionLoaded(session.id, 1, SessionStatus.ACTIVE),
        SessionActionExecuted(session.id, "WriteMetadata", 1, 1, SessionStatus.ACTIVE, SessionStatus.ACTIVE),
        SessionSaved(session.id, 2, SessionStatus.ACTIVE),
    ]
    assert saved.version == 2
    assert saved.state.metadata == {"tier": 1, "ticket_id": "OPS-142"}


@pytest.mark.parametrize("stage", [SessionStage.BEFORE_CREATE, SessionStage.BEFORE_SAVE])
async def test_a_create_that_fails_before_the_store_keeps_nothing(stage: SessionStage) -> None:
    """A controller that refuses before the commit leaves no session, and no event reports a save."""
    recorder, store = Recorder(stage), MemoryStore()
    with pytest.raises(RuntimeError, match=stage.value):
        await runtime_with(recorder, store).create(AGENT)
    assert recorder.events == []
    assert len(await store.list()) == 0


@pytest.mark.parametrize("stage", [SessionStage.AFTER_SAVE, SessionStage.AFTER_CREATE])
async def test_a_create_that_fails_after_the_store_says_that_it_persisted(stage: SessionStage) -> None:
    """The session is there, and SessionSaveFailed says so."""
    recorder, store = Recorder(stage), MemoryStore()
    with pytest.raises(RuntimeError, match=stage.value):
        await runtime_with(recorder, store).create(AGENT)
    (info,) = await store.list()
    assert recorder.events == [SessionSaveFailed(info.id, f"failed at {stage.value}", "RuntimeError", True)]


@pytest.mark.parametrize("stage", [SessionStage.AFTER_ACTION, SessionStage.BEFORE_SAVE])
async def test_an_action_that_fails_saves_nothing(stage: SessionStage) -> None:
    """A failure between load and save leaves the version unchanged, and does not count as a failed save."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    session = await runtime.create(AGENT)
    recorder.events.clear()
    recorder.fail_at = stage
    with pytest.raises(RuntimeError, match=stage.value):
        await runtime.execute(session.id, WriteMetadata("a", 1))
    assert [type(event) for event in recorder.events] == [SessionLoaded]
    assert (await runtime.get_session_info(session.id)).version == 1


async def test_an_after_save_hook_that_fails_leaves_the_new_version() -> None:
    """The version has moved; the original error is raised, and the event says persisted."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    session = await runtime.create(AGENT)
    recorder.fail_at = SessionStage.AFTER_SAVE
    with pytest.raises(RuntimeError, match="after_save"):
        await runtime.execute(session.id, WriteMetadata("a", 1))
    assert recorder.events[-1] == SessionSaveFailed(session.id, "failed at after_save", "RuntimeError", True)
    assert (await runtime.get_session_info(session.id)).version == 2


async def test_a_failed_load_is_told_and_raised() -> None:
    """Unknown ids and refusing after_load hooks emit SessionLoadFailed with the error's own words."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    with pytest.raises(SessionNotFound):
        await runtime.execute("nobody", WriteMetadata("a", 1))
    assert isinstance(recorder.events[0], SessionLoadFailed)
    assert (recorder.events[0].session_id, recorder.events[0].error_type) == ("nobody", "SessionNotFound")
    session = await runtime.create(AGENT)
    recorder.fail_at = SessionStage.AFTER_LOAD
    with pytest.raises(RuntimeError, match="after_load"):
        await runtime.get_session(session.id)
    assert isinstance(recorder.events[-1], SessionLoadFailed)


async def test_a_conflicting_save_is_told_and_raised() -> None:
    """Two executes from one version: one wins, the other gets SessionConflict and SessionSaveFailed."""
    recorder = Recorder()
    runtime = runtime_with(recorder)
    session = await runtime.create(AGENT)

    class Slow:
        async def execute_on(self, session: AgentSession, context: object = None) -> AgentSession:
            await asyncio.sleep(0.01)
            return session.with_state(session.state.with_task("slow"))

    outcomes = await asyncio.gather(
        runtime.execute(session.id, Slow()), runtime.execute(session.id, Slow()), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AgentSession", "SessionConflict"]
    failed = [event for event in recorder.events if isinstance(event, SessionSaveFailed)]
    assert [(event.error_type, event.persisted) for event in failed] == [("SessionConflict", False)]
    assert (await runtime.get_session_info(session.id)).version == 2


async def test_controllers_change_what_is_saved() -> None:
    """A before_save controller's session is the one that is stored; an after_save one's goes to the caller only."""

    class Suspender:
        def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
            if stage is SessionStage.BEFORE_SAVE:
                return session.suspended()
            return session.with_name("caller's") if stage is SessionStage.AFTER_SAVE else session

    runtime = SessionRuntime(MemoryStore(), controller=Suspender())
    session = await runtime.create(AGENT)
    assert (session.status, session.info.name) == (SessionStatus.SUSPENDED, "caller's")
    stored = await runtime.get_session(session.id)
    assert (stored.status, stored.info.name) == (SessionStatus.SUSPENDED, None)


async def test_hooks_run_by_priority_then_by_registration() -> None:
    """The highest is first; ties keep the order in which they were added; a stack may be inside another."""
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
            if stage is SessionStage.BEFORE_CREATE:
                order.append(self.name)
            return session

    inner = SessionHookStack.empty().with_hook(Named("d")).with_hook(Named("c"), priority=1)
    stack = SessionHookStack.empty().with_hook(inner, priority=-1).with_hook(Named("b")).with_hook(Named("b2"))
    await SessionRuntime(MemoryStore(), controller=stack.with_hook(Named("a"), priority=9)).create(AGENT)
    assert order == ["a", "b", "b2", "c", "d"]


async def test_a_controller_must_hand_the_session_on() -> None:
    """Returning nothing, or another session, is a ConfigurationError that names the controller."""

    class Forgetful:
        def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
            return None  # type: ignore[return-value]

    with pytest.raises(ConfigurationError, match="Forgetful"):
        await SessionRuntime(MemoryStore(), controller=Forgetful()).create(AGENT)
    with pytest.raises(ConfigurationError, match="on_stage"):
        SessionHookStack.empty().with_hook(object())  # type: ignore[arg-type]


async def test_execute_refuses_what_is_not_an_action_or_makes_another_session() -> None:
    """ForkSession inside execute gets an error that says where it belongs; nothing is saved."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    with pytest.raises(ConfigurationError, match=r"runtime\.branch"):
        await runtime.execute(session.id, ForkSession())
    with pytest.raises(ConfigurationError, match="execute_on"):
        await runtime.execute(session.id, "send")  # type: ignore[arg-type]
    assert (await runtime.get_session_info(session.id)).version == 1


async def test_reads_at_any_version() -> None:
    """get_session(version=…) shows the past; an unknown version is SessionNotFound that names it."""
    runtime = SessionRuntime(SessionRepository(MemoryStore()))
    session = await runtime.create(AGENT)
    for number in range(3):
        await runtime.execute(session.id, WriteMetadata("n", number))
    assert (await runtime.get_session(session.id, version=3)).state.metadata["n"] == 1
    with pytest.raises(SessionNotFound, match="version 9"):
        await runtime.get_session(session.id, version=9)


async def test_bad_arguments_change_nothing() -> None:
    """Ids, owners, tags, seeds and filters of the wrong form each have their typed error."""
    runtime = SessionRuntime(MemoryStore())
    with pytest.raises(InvalidSessionId):
        await runtime.create(AGENT, session_id="../etc/passwd")
    for arguments in ({"owner": ""}, {"tags": "vip"}, {"tags": ("",)}, {"seed": {}}):
        with pytest.raises(InvalidData):
            await runtime.create(AGENT, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidData, match="there are id, agent"):
        await runtime.list_sessions(colour="red")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError):
        SessionRuntime("sqlite")  # type: ignore[arg-type]
    assert len(await runtime.list_sessions()) == 0
    await runtime.create(AGENT, session_id="taken")
    with pytest.raises(SessionConflict):
        await runtime.create(AGENT, session_id="taken")


async def test_a_seed_is_filled_up_from_the_definition() -> None:
    """A seed's messages stay; the definition fills in what it leaves open."""
    seed = AgentState().with_messages(Message.user("Hello")).with_metadata("own", True)
    session = await SessionRuntime(MemoryStore()).create(AGENT, seed=seed)
    assert [message.text for message in session.state.messages] == ["Hello"]
    assert session.state.context.system_prompt == "Be brief."
    assert session.state.metadata == {"tier": 1, "own": True}


class Meddler:
    """An action during which somebody else saves the session, a given number of times."""

    def __init__(self, runtime: SessionRuntime, times: int) -> None:
        self.runtime = runtime
        self.left = times
        self.executions = 0

    async def execute_on(self, session: AgentSession, context: object = None) -> AgentSession:
        self.executions += 1
        if self.left:
            self.left -= 1
            await self.runtime.execute(session.id, WriteMetadata(f"other-{self.left}", True))
        return session.with_state(session.state.with_messages(Message.user("mine")))


class RepeatableMeddler(Meddler):
    may_be_repeated = True


async def test_retry_applies_an_action_anew() -> None:
    """on_conflict="retry" loads again and repeats an action that allows it, so that both changes are kept."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    action = RepeatableMeddler(runtime, 2)
    kept = await runtime.execute(session.id, action, on_conflict="retry")
    assert action.executions == 3
    assert (kept.version, kept.state.metadata["other-0"], kept.state.metadata["other-1"]) == (4, True, True)
    assert [message.text for message in kept.state.messages] == ["mine"]


async def test_retry_does_not_repeat_an_action_that_does_not_say_it_may() -> None:
    """An action may have paid a model, or written elsewhere: it is not repeated behind the caller's back."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)

    class Unrepeatable(Meddler):
        may_be_repeated = False

    for action in (Meddler(runtime, 1), Unrepeatable(runtime, 1)):
        with pytest.raises(SessionConflict):
            await runtime.execute(session.id, action, on_conflict="retry")
        assert action.executions == 1


class Returns:
    """An action that returns the result of a function."""

    def __init__(self, made: Any) -> None:
        self._made = made

    async def execute_on(self, session: AgentSession, context: object = None) -> Any:
        return self._made(session)


async def test_an_action_that_answers_saves_nothing() -> None:
    """The caller gets the session of the Answer, and the version stays."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    other = session.with_name("other")
    answered = await runtime.execute(session.id, Returns(lambda _: Answer(other)))
    assert answered is other
    assert (await runtime.get_session(session.id)).version == 1


async def test_what_a_next_tells_is_told_once_it_is_saved() -> None:
    """Next carries a session, and events that follow SessionSaved."""
    told: list[object] = []
    bus = EventBus()
    bus.wiretap(told.append)
    runtime = SessionRuntime(MemoryStore(), events=bus)
    session = await runtime.create(AGENT)
    kept = await runtime.execute(session.id, Returns(lambda each: Next(each.with_name("named"), tells=("an event",))))
    assert (kept.version, kept.info.name) == (2, "named")
    assert [type(event).__name__ for event in told[-2:]] == ["SessionSaved", "str"]


async def test_an_action_that_is_cancelled_can_have_something_saved_first() -> None:
    """Interrupted carries it; the caller is still cancelled."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)

    def interrupt(session: AgentSession) -> None:
        raise Interrupted(Next(session.with_name("kept")))

    with pytest.raises(asyncio.CancelledError) as cancelled:
        await runtime.execute(session.id, Returns(interrupt))
    assert type(cancelled.value) is asyncio.CancelledError
    assert (await runtime.get_session(session.id)).info.name == "kept"


async def test_an_action_cannot_change_its_context() -> None:
    """An action returns its effects; the context is read only."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)

    class Meddling:
        async def execute_on(self, session: AgentSession, context: Any = None) -> AgentSession:
            context.journal = None
            return session

    with pytest.raises(FrozenInstanceError):
        await runtime.execute(session.id, Meddling())


async def test_a_conflict_can_keep_the_work_as_a_fork() -> None:
    """on_conflict="fork" returns a new session with the action's result, and the parent as the other one left it."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    fork = await runtime.execute(session.id, Meddler(runtime, 1), on_conflict="fork")
    assert (fork.version, fork.info.parent_id) == (1, session.id)
    assert [message.text for message in fork.state.messages] == ["mine"]
    assert len((await runtime.get_session(session.id)).state.messages) == 0
    with pytest.raises(InvalidData, match="on_conflict"):
        await runtime.execute(session.id, Meddler(runtime, 0), on_conflict="shrug")  # type: ignore[arg-type]
