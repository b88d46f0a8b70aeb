"""Every action that needs no model: its changes, its limits, and its refusals."""

from __future__ import annotations

import pytest

from perdure import (
    AgentDefinition,
    AgentSession,
    ChangeDefinition,
    ChangeModel,
    ChangeSystemPrompt,
    ClearSession,
    CompleteSession,
    ConfigurationError,
    DeleteSession,
    ExecutionState,
    FailSession,
    ForkSession,
    IllegalStatusChange,
    InjectMessage,
    InvalidData,
    InvalidSessionId,
    MemoryStore,
    Message,
    ModelConfig,
    RenameSession,
    ResetTranscript,
    ResumeSession,
    Rewind,
    SessionFactory,
    SessionNotFound,
    SessionRuntime,
    SessionStatus,
    SuspendSession,
    TagSession,
    ToolCall,
    TrimTranscript,
    UpdateTask,
    WriteMetadata,
    connect,
)

AGENT = AgentDefinition("support", system_prompt="Be brief.", model="offline", metadata={"tier": 1})


def fresh(*texts: str) -> AgentSession:
    session = SessionFactory().create(AGENT)
    return session.with_state(session.state.with_messages(*(Message.user(text, id=text) for text in texts)))


def said(session: AgentSession) -> list[str]:
    return [message.text for message in session.state.messages]


async def test_lifecycle_actions_move_the_status() -> None:
    """Each verb moves to its status, and doing the same again changes nothing."""
    session = fresh()
    for action, status in [
        (SuspendSession(), SessionStatus.SUSPENDED),
        (ResumeSession(), SessionStatus.ACTIVE),
        (CompleteSession(), SessionStatus.COMPLETED),
        (ResumeSession(), SessionStatus.ACTIVE),
        (FailSession(), SessionStatus.FAILED),
        (DeleteSession(), SessionStatus.DELETED),
    ]:
        session = await action.execute_on(session)
        assert session.status is status
        assert await action.execute_on(session) is session


async def test_illegal_moves_are_refused() -> None:
    """The error names both statuses and the moves that are allowed."""
    deleted = fresh().deleted()
    with pytest.raises(IllegalStatusChange, match="deleted and cannot become active"):
        await ResumeSession().execute_on(deleted)
    with pytest.raises(IllegalStatusChange, match="active, deleted"):
        await SuspendSession().execute_on(fresh().completed())


async def test_resume_is_refused_while_calls_wait_for_approval() -> None:
    """The error says which calls, and which actions to use instead."""
    session = fresh()
    waiting = ExecutionState.fresh().with_pending_calls((ToolCall("refund"),))
    session = session.with_state(session.state.with_execution(waiting)).suspended()
    with pytest.raises(IllegalStatusChange, match=r"refund.*ApproveToolCalls"):
        await ResumeSession().execute_on(session)


async def test_clear_gives_back_what_the_definition_gives() -> None:
    """Prompt, model, metadata, task, transcript and execution are as new; identity and count stay."""
    session = fresh("a")
    state = session.state.with_execution_started().with_task("t").with_metadata("x", 1).with_system_prompt("other")
    session = session.with_state(state.with_model(ModelConfig("openai:gpt-5")))
    cleared = await ClearSession().execute_on(session)
    assert said(cleared) == []
    assert (cleared.state.task, cleared.state.model, cleared.state.execution) == (None, None, None)
    assert cleared.state.context.system_prompt == "Be brief."
    assert cleared.state.metadata == {"tier": 1}
    assert (cleared.id, cleared.state.agent_id, cleared.state.execution_count) == (session.id, state.agent_id, 1)


async def test_fork_begins_where_its_parent_stands() -> None:
    """A fork has an id of its own, version 0, its parent's id, and the parent's transcript up to `at`."""
    session = fresh("a", "b", "c")
    fork = await ForkSession().execute_on(session)
    assert (fork.version, fork.info.parent_id, said(fork)) == (0, session.id, ["a", "b", "c"])
    assert fork.id != session.id
    assert fork.status is SessionStatus.ACTIVE
    assert said(await ForkSession(at=2).execute_on(session)) == ["a", "b"]
    assert said(await ForkSession(at="a").execute_on(session)) == ["a"]
    assert (await ForkSession(dst="mine").execute_on(session)).id == "mine"


async def test_a_fork_does_not_take_a_run_with_it() -> None:
    """The execution, and calls that wait for approval in it, stay with the parent."""
    session = fresh("a")
    session = session.with_state(session.state.with_execution_started()).suspended()
    fork = await ForkSession().execute_on(session)
    assert fork.state.execution is None
    assert fork.status is SessionStatus.ACTIVE


@pytest.mark.parametrize("at", [-1, 4, "nowhere", True, 1.5])
async def test_fork_at_a_place_that_is_not_there(at: object) -> None:
    """InvalidData names the argument."""
    with pytest.raises(InvalidData, match=r"\$\.at"):
        await ForkSession(at=at).execute_on(fresh("a", "b", "c"))  # type: ignore[arg-type]
    with pytest.raises(InvalidSessionId):
        await ForkSession(dst="a/b").execute_on(fresh())


async def test_inject_takes_texts_dicts_and_messages() -> None:
    """Each becomes a message at the end; anything that is not a message is refused before the action runs."""
    session = await InjectMessage("a", {"role": "assistant", "content": "b"}, Message.system("c")).execute_on(fresh())
    assert [(message.role, message.text) for message in session.state.messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("system", "c"),
    ]
    with pytest.raises(InvalidData, match="needs a role"):
        InjectMessage({"content": "no role"})
    with pytest.raises(InvalidData, match=r"\$\.colour"):
        InjectMessage({"role": "user", "content": "x", "colour": "red"})
    with pytest.raises(InvalidData):
        InjectMessage(object())
    with pytest.raises(InvalidData):
        InjectMessage()


async def test_trim_keeps_calls_with_their_results() -> None:
    """The cut moves earlier rather than part a result from its call."""
    session = fresh("a", "b")
    call = ToolCall("add", {"a": 1})
    session = session.with_state(
        session.state.with_messages(
            Message.assistant("", tool_calls=[call]), Message.tool(call.id, "2"), Message.assistant("two")
        )
    )
    assert len((await TrimTranscript(1).execute_on(session)).state.messages) == 1
    assert len((await TrimTranscript(2).execute_on(session)).state.messages) == 3
    assert len((await TrimTranscript(99).execute_on(session)).state.messages) == 5
    assert said(await TrimTranscript(0).execute_on(session)) == []
    for bad in (-1, 1.0, True, "2"):
        with pytest.raises(InvalidData, match="keep_last"):
            TrimTranscript(bad)  # type: ignore[arg-type]


async def test_reset_empties_the_view_only() -> None:
    """Prompt, metadata and task stay."""
    session = fresh("a")
    session = session.with_state(session.state.with_task("t"))
    cleared = await ResetTranscript().execute_on(session)
    assert said(cleared) == []
    assert (cleared.state.task, cleared.state.metadata) == ("t", {"tier": 1})


async def test_rewind_to_a_message_or_a_version() -> None:
    """A message's id cuts behind it; a version's number brings that version's transcript back, also after a reset."""
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AGENT)
    for text in "abc":
        await runtime.execute(session.id, InjectMessage(Message.user(text, id=text)))
    assert said(await runtime.execute(session.id, Rewind("b"))) == ["a", "b"]
    await runtime.execute(session.id, ResetTranscript())
    assert said(await runtime.execute(session.id, Rewind(4))) == ["a", "b", "c"]
    with pytest.raises(SessionNotFound):
        await runtime.execute(session.id, Rewind(99))
    with pytest.raises(InvalidData):
        await runtime.execute(session.id, Rewind("nowhere"))
    with pytest.raises(ConfigurationError, match="store"):
        await Rewind(1).execute_on(session)


async def test_metadata_is_json_and_never_a_secret() -> None:
    """NaN, odd keys and things that look like keys to other people's services are refused when the action is made."""
    session = await WriteMetadata("a", {"b": [1, None]}).execute_on(fresh())
    assert session.state.metadata["a"] == {"b": [1, None]}
    for key, value in [("", 1), (1, 1), ("a", float("nan")), ("a", {1: 2}), ("a", "\ud800"), ("a", object())]:
        with pytest.raises(InvalidData):
            WriteMetadata(key, value)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="api_key"):
        WriteMetadata("api_key", "sk-1")


async def test_prompt_model_task_tags_and_name() -> None:
    """Each verb changes its own thing, and can undo its change."""
    session = await ChangeSystemPrompt("Be long.").execute_on(fresh())
    assert session.state.context.system_prompt == "Be long."
    session = await ChangeModel("openai:gpt-5").execute_on(session)
    assert session.state.model == ModelConfig("openai:gpt-5")
    assert (await ChangeModel(None).execute_on(session)).state.model is None
    assert (await UpdateTask("ship").execute_on(session)).state.task == "ship"
    session = await TagSession("b", "a").execute_on(session)
    assert (await TagSession("c", "a", remove=("b",)).execute_on(session)).info.tags == ("a", "c")
    assert (await RenameSession("Ticket 7").execute_on(session)).info.name == "Ticket 7"
    for make in (lambda: ChangeModel(""), lambda: TagSession(""), lambda: RenameSession(" ")):
        with pytest.raises(InvalidData):
            make()


async def test_change_definition_keeps_a_prompt_of_the_sessions_own() -> None:
    """A prompt that came from the definition follows it; one that was changed stays."""
    other = AgentDefinition("sales", system_prompt="Be kind.")
    session = await ChangeDefinition(other).execute_on(fresh())
    assert (session.info.agent_name, session.state.context.system_prompt) == ("sales", "Be kind.")
    session = await ChangeSystemPrompt("Mine.").execute_on(fresh())
    assert (await ChangeDefinition(other).execute_on(session)).state.context.system_prompt == "Mine."
    with pytest.raises(InvalidData):
        ChangeDefinition("sales")  # type: ignore[arg-type]


CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}


async def test_a_result_without_its_call_is_not_injected() -> None:
    """The model would never see it. The error says what to do, and nothing is changed."""
    async with connect("memory://", model="offline") as sessions:
        chat = await sessions.open("s")
        for given in (RESULT, [RESULT], [{"role": "user", "content": "hi"}, RESULT], [RESULT, RESULT]):
            with pytest.raises(InvalidData, match="inject the assistant's message with that call too"):
                await chat.inject(given)
        assert await chat.length() == 0
        await chat.inject({"role": "user", "content": "hi"})
        with pytest.raises(InvalidData, match="no message before it makes the call 'c'") as caught:
            await chat.inject([{"role": "user", "content": "hi"}, RESULT])
        assert caught.value.path == "$.messages[1]"


async def test_a_result_may_answer_a_call_that_was_injected_before() -> None:
    async with connect("memory://", model="offline") as sessions:
        chat = await sessions.open("s")
        await chat.inject(CALLING)
        await chat.inject(RESULT)
        await chat.inject([{**CALLING, "id": "m"}, RESULT])
        assert await chat.length() == 4


async def test_a_history_may_begin_in_the_middle() -> None:
    """The first results of an imported history need no call in this session; later ones do."""
    async with connect("memory://", model="offline") as sessions:
        chat = await sessions.open("s")
        with pytest.raises(InvalidData):
            await chat.inject([RESULT, {"role": "user", "content": "hi"}, {**RESULT, "tool_call_id": "d"}])
        await chat.inject([RESULT, {**RESULT, "tool_call_id": "d"}, {"role": "user", "content": "hi"}])
        assert (await chat.send("Go on.")).text
