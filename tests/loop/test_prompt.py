"""The model always gets a valid list, whatever the history."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.strategies import messages, states

from perdure import (
    AgentDefinition,
    AgentStop,
    ApproveToolCalls,
    ChangeModel,
    ChangeSystemPrompt,
    CompleteSession,
    DenyToolCalls,
    Envelope,
    ForkSession,
    InjectMessage,
    LoopFactory,
    Media,
    MemoryStore,
    Message,
    ModelReply,
    ModelRequest,
    Opaque,
    PerdureError,
    ResetTranscript,
    ResumeSession,
    Rewind,
    SendMessage,
    SessionRuntime,
    SqliteStore,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    TrimTranscript,
    tool,
)
from perdure.loop import prompt as prompt_module
from perdure.loop.prompt import EMPTY_RESULT, NO_RESULT, Prompt, Prompts, compile_prompt
from perdure.model.message import UnknownPart
from perdure.model.transcript import LogRef, Span, Tape, Transcript
from perdure.testing.scripted import ScriptedDriver

from .scenes import asked, loop_of, results_in

ids = st.sampled_from(["a", "b", "c", "", "a|b", "ä:1", "x" * 41])
calls = st.builds(ToolCall, st.just("look"), st.dictionaries(st.just("n"), st.integers(0, 3), max_size=1), ids)
results = st.builds(ToolResult, ids, st.integers(0, 9), is_error=st.booleans())
tags = st.fixed_dictionaries({}, optional={"is_trace": st.booleans(), "execution_id": st.sampled_from(["x", "y"])})


@st.composite
def tangles(draw: st.DrawFn) -> list[Message]:
    """Return messages of any role with calls, results and texts in any order: orphans, duplicates and the like."""
    made = []
    for _ in range(draw(st.integers(0, 8))):
        role: Any = draw(st.sampled_from(["user", "assistant", "tool", "system"]))
        parts = draw(
            st.lists(
                calls | results | st.builds(Text, st.text(max_size=3) | st.sampled_from(["", " ", "\n"])), max_size=4
            )
        )
        made.append(Message(role, tuple(parts), metadata=draw(tags)))
    return made


def assert_valid(sent: tuple[Message, ...]) -> None:
    """Assert that every call is the assistant's and is answered exactly once, right behind it."""
    expected: list[str] = []
    called = [call.id for message in sent for call in message.tool_calls]
    assert len(called) == len(set(called))
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", each) for each in called)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call.name) for message in sent for call in message.tool_calls)
    for message in sent:
        assert message.parts
        bound = (None, *message.parts[:-1])
        texts = [part for before, part in zip(bound, message.parts, strict=True) if not isinstance(before, Opaque)]
        assert all(part.text.strip() for part in texts if isinstance(part, Text | ToolResult))
        if expected:
            assert message.role == "tool"
            assert [result.call_id for result in message.tool_results] == [expected.pop(0)]
            assert len(message.parts) == 1
            continue
        assert message.role != "tool"
        assert not message.tool_results
        expected = [call.id for call in message.tool_calls]
        assert not expected or message.role == "assistant"
        assert len(set(expected)) == len(expected)
    assert not expected


@given(tangles() | st.lists(messages(), max_size=6), st.booleans())
def test_any_history_compiles_to_a_valid_list(history: list[Message], keep_traces: bool) -> None:
    """Every call has exactly one result right after its message, and no result is without its call."""
    assert_valid(compile_prompt(history, keep_traces=keep_traces, execution_id="x"))


@given(tangles())
def test_compiling_twice_changes_nothing_more(history: list[Message]) -> None:
    """A valid list is unchanged."""
    once = compile_prompt(history)
    assert compile_prompt(once) == once


@given(tangles())
def test_what_was_said_stays_and_in_order(history: list[Message]) -> None:
    """Only calls, results and blanks change: all texts stay in their places."""

    def said(them: Any) -> list[Text]:
        return [
            part for m in them if m.role != "tool" for part in m.parts if isinstance(part, Text) and part.text.strip()
        ]

    assert said(compile_prompt(history)) == said(history)


@given(st.lists(st.tuples(tangles(), st.integers(0, 3)), max_size=5))
def test_prompts_of_a_run_go_on_from_each_other(turns: list[tuple[list[Message], int]]) -> None:
    """A prompt compiled piece by piece, with cuts or without, equals the whole one."""
    prompts, transcript = Prompts(), Transcript()
    for said, cut in turns:
        if cut == 1:
            transcript = transcript.cut(len(transcript) // 2, len(transcript))
        transcript = transcript.append(*said)
        prompt = prompts.of(transcript)
        if cut != 2:
            assert tuple(prompt) == compile_prompt(list(transcript))


@given(st.lists(st.tuples(tangles(), tangles()), max_size=5), st.integers(0, 3), st.integers(0, 20))
def test_prompts_of_runs_go_on_from_each_other(
    runs: list[tuple[list[Message], list[Message]]], most_open: int, cut: int
) -> None:
    """A prompt compiled run by run, each from the last one's tape, equals the whole one."""
    tape = Tape([], LogRef("store", 1))
    assert tape.items is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_module, "MOST_OPEN", most_open)
        for asked, answered in runs:
            prompts, transcript = Prompts(), Transcript([Span(tape, 0, tape.end)]).append(*asked)
            assert tuple(prompts.of(transcript)) == compile_prompt(list(transcript))
            transcript = transcript.append(*answered)
            assert tuple(prompts.of(transcript)) == compile_prompt(list(transcript))
            tape.items += [*asked, *answered]  # as a save does
            older = Transcript([Span(tape, min(cut % 3, tape.end), max(0, tape.end - cut))])
            if cut % 2:  # a rewind, or a trim
                assert tuple(Prompts().of(older)) == compile_prompt(list(older))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of messages read by each compilation."""
    counts: list[int] = []
    paired = prompt_module._paired
    monkeypatch.setattr(prompt_module, "_paired", lambda them, ids: counts.append(len(them)) or paired(them, ids))
    return counts


class Looking:
    """A driver that asks how long its prompt is."""

    async def respond(self, request: ModelRequest, on_delta: object) -> ModelReply:
        assert len(request.messages) > 0
        return ModelReply(Message.assistant("ok"))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_first_prompt_of_a_send_costs_what_is_new(kind: str, tmp_path: Path, looked: list[int]) -> None:
    """Its cost does not grow with the session, after each verb that keeps its history; a fork shares the cache."""
    async with MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "a.db") as store:
        runtime, loops = SessionRuntime(store), LoopFactory(driver=Looking())
        session = await runtime.create(AgentDefinition("agent"))
        await runtime.execute(session.id, InjectMessage(*[Message.user(f"{number}") for number in range(500)]))
        await runtime.execute(session.id, SendMessage("first", loops))
        assert sum(looked) >= 500
        for action in (None, ChangeSystemPrompt("Be brief."), ChangeModel("other"), InjectMessage("By the way.")):
            if action is not None:
                await runtime.execute(session.id, action)
            looked.clear()
            await runtime.execute(session.id, SendMessage("next", loops))
            assert sum(looked) <= 4
        fork = await runtime.branch(session.id, ForkSession())
        await runtime.execute(fork.id, SendMessage("first in the fork", loops))  # it is read again
        for _ in range(3):
            looked.clear()
            await runtime.execute(fork.id, SendMessage("in the fork", loops))
            assert sum(looked) <= 4


async def test_a_message_that_is_redacted_between_two_sends_is_not_sent_again() -> None:
    """Compiled prompts are dropped with the tapes that a redaction removes from the store's cache."""
    sent: list[list[str]] = []

    def reply(request: ModelRequest) -> str:
        sent.append([message.text for message in request.messages])
        return "ok"

    store = MemoryStore()
    runtime, loops = SessionRuntime(store), LoopFactory(driver=ScriptedDriver(reply))
    session = await runtime.create(AgentDefinition("agent"))
    session = await runtime.execute(session.id, SendMessage("secret", loops))
    await runtime.execute(session.id, SendMessage("and", loops))
    await store.redact(session.id, [session.state.messages[0].id])
    await runtime.execute(session.id, SendMessage("again", loops))
    assert sent[1][0] == "secret"
    assert sent[2] == ["[redacted]", "ok", "and", "ok", "again"]


def test_a_prompt_is_a_sequence_whatever_it_goes_on_from() -> None:
    """Its parts are on several tapes; indexes, slices and both directions are those of one list."""
    tape = Tape(conversation(), LogRef("store", 1))
    Prompts().of(Transcript([Span(tape, 0, tape.end)]))[0]
    transcript = Transcript([Span(tape, 0, tape.end)]).append(Message.user("more"), Message.user("and more"))
    prompt, whole = Prompts().of(transcript), compile_prompt(transcript)
    assert [prompt[place] for place in range(-len(whole), len(whole))] == [*whole, *whole]
    for index in (slice(2, 5), slice(-3, None), slice(None, None, -1), slice(None), slice(1, 9, 2)):
        assert prompt[index] == whole[index]
    assert [*reversed(prompt)] == [*reversed(whole)]
    with pytest.raises(IndexError):
        prompt[len(whole)]


def test_what_is_kept_of_a_prompt_does_not_keep_its_tape() -> None:
    """A session that a store drops is freed at once, without the garbage collector."""
    tape = Tape(conversation() * 3, LogRef("store", 1))
    transcript = Transcript([Span(tape, 0, tape.end)])
    before = sys.getrefcount(tape)
    assert len(Prompts().of(transcript)) == 21
    assert tape.found is not None
    assert sys.getrefcount(tape) == before


def test_a_call_that_never_got_a_result_makes_later_prompts_no_dearer(looked: list[int]) -> None:
    """It is closed after a while. A result that still comes is used, wherever it is."""
    lost = Message.assistant(tool_calls=[ToolCall("look", {}, "lost")])
    tape = Tape([Message.user("go"), lost, *conversation() * 100], LogRef("store", 1))
    assert tape.items is not None
    assert NO_RESULT in [message.text for message in Prompts().of(Transcript([Span(tape, 0, tape.end)]))]
    looked.clear()
    more, found = Message.user("more"), Message.tool("lost", "found")
    transcript = Transcript([Span(tape, 0, tape.end)]).append(more)
    assert len(Prompts().of(transcript)) == 2 + 1 + 700 + 1
    assert sum(looked) == 1
    late = transcript.append(found)
    prompts = Prompts()
    assert tuple(prompts.of(transcript)) == compile_prompt(transcript)
    assert [message.text for message in prompts.of(late)][2] == "found"
    tape.items += [more, found]
    assert tuple(Prompts().of(Transcript([Span(tape, 0, tape.end)]))) == compile_prompt(late)


def test_a_later_prompt_costs_what_is_new(looked: list[int]) -> None:
    prompts, transcript = Prompts(), Transcript.of(conversation() * 50)
    assert len(prompts.of(transcript)) == 7 * 50
    looked.clear()
    assert len(prompts.of(transcript.append(Message.user("more")))) == 7 * 50 + 1
    assert sum(looked) == 1


@given(states(changes=4))
def test_any_state_that_verbs_lead_to_compiles(state: Any) -> None:
    """The messages of a state compile to a valid list: trimmed, covered, cut or half done."""
    assert_valid(compile_prompt(state.messages))


@tool(needs_approval=lambda arguments: arguments["n"] % 2 == 1)
def look(n: int) -> int:
    if n == 2:
        raise AgentStop("two")
    return n


def asking(request: ModelRequest) -> Any:
    """Return an agent that first looks twice at once, and then answers."""
    looked = len(request.messages)
    return "Seen." if request.step else [ToolCall("look", {"n": looked % 3}), ToolCall("look", {"n": looked % 5})]


ORPHANS = (Message.tool("nobody", "asked"), Message.assistant(tool_calls=[ToolCall("look", {"n": 0}, "unanswered")]))
VERBS: dict[str, Callable[[LoopFactory, int], Any]] = {
    "send": lambda loops, n: SendMessage(f"Look {n}.", loops),
    "approve": lambda loops, n: ApproveToolCalls(loops),
    "deny": lambda loops, n: DenyToolCalls(loops, reason="no"),
    "resume": lambda loops, n: ResumeSession(),
    "complete": lambda loops, n: CompleteSession(),
    "trim": lambda loops, n: TrimTranscript(n),
    "rewind": lambda loops, n: Rewind(n),
    "reset": lambda loops, n: ResetTranscript(),
    "inject": lambda loops, n: InjectMessage(ORPHANS[n % 2]),
}


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([*VERBS, *["send", "approve", "deny"] * 2]), st.integers(0, 5)), max_size=12))
async def test_whatever_is_done_to_a_session_its_model_is_sent_a_valid_list(verbs: list[tuple[str, int]]) -> None:
    """Runs stop, wait, are denied or approved, and views are cut: every request is valid."""
    driver = ScriptedDriver(asking)
    loops = LoopFactory(driver=driver, tools=[look])
    runtime = SessionRuntime(MemoryStore())
    session = await runtime.create(AgentDefinition("agent"))
    for verb, number in verbs:
        with suppress(PerdureError):  # not every verb fits every moment, and then it changes nothing
            session = await runtime.execute(session.id, VERBS[verb](loops, number))
    for request in driver.requests:
        assert_valid(tuple(request.messages))
    assert_valid(compile_prompt(session.state.messages))


def conversation() -> list[Message]:
    old = {"is_trace": True, "execution_id": "old"}
    new = {"is_trace": True, "execution_id": "new"}
    return [
        Message.user("One?"),
        Message.assistant(tool_calls=[ToolCall("look", id="1")], metadata=old),
        Message.tool("1", "seen", metadata=old),
        Message.assistant("One.", metadata={"execution_id": "old"}),
        Message.user("Two?"),
        Message.assistant(tool_calls=[ToolCall("look", id="2")], metadata=new),
        Message.tool("2", "seen", metadata=new),
    ]


def test_a_valid_history_is_sent_as_it_is() -> None:
    """Traces of earlier runs are kept by default, message for message."""
    said = conversation()
    assert all(sent is given for sent, given in zip(compile_prompt(said), said, strict=True))


def test_traces_of_earlier_runs_can_be_left_out() -> None:
    """Without traces, earlier runs keep only their words, and this run is whole."""
    sent = compile_prompt(conversation(), keep_traces=False, execution_id="new")
    assert [message.text for message in sent] == ["One?", "One.", "Two?", "", "seen"]


def test_a_call_without_a_result_is_told_to_be_unknown() -> None:
    """A call that was interrupted gets a result that says so."""
    sent = compile_prompt([Message.assistant(tool_calls=[ToolCall("pay", id="1")]), Message.user("Well?")])
    (result,) = sent[1].tool_results
    assert (result.call_id, result.name, result.is_error, result.content) == ("1", "pay", True, NO_RESULT)


def test_results_are_moved_to_their_calls() -> None:
    """A late result, or one in another order or in a user's message, is sent right after its call."""
    both = Message.assistant("Looking.", tool_calls=[ToolCall("look", id="1"), ToolCall("look", id="2")])
    late = Message("user", (ToolResult("2", "two"), Text("And?"), ToolResult("1", "one")))
    sent = compile_prompt([both, Message.user("Hm."), late])
    assert [(message.role, message.text) for message in sent] == [
        ("assistant", "Looking."),
        ("tool", "one"),
        ("tool", "two"),
        ("user", "Hm."),
        ("user", "And?"),
    ]


def test_an_id_that_comes_back_is_answered_by_the_nearest_result() -> None:
    """Two calls of one id in two messages have each their own result; of two in one message the first counts."""
    first = Message.assistant(tool_calls=[ToolCall("look", {"n": 1}, "x"), ToolCall("look", {"n": 2}, "x")])
    again = Message.assistant(tool_calls=[ToolCall("look", {"n": 3}, "x")])
    three, four = Message.tool("x", "three"), Message.tool("x", "four")
    sent = compile_prompt([first, Message.tool("x", "one"), again, three, four])
    assert [call.arguments["n"] for message in sent for call in message.tool_calls] == [1, 3]
    assert [result.content for message in sent for result in message.tool_results] == ["one", "three"]


def test_a_prompt_is_compiled_when_it_is_looked_at() -> None:
    """A driver that needs no history does not pay for it."""

    class Counting(list[Message]):
        looked = 0

        def __iter__(self) -> Any:
            self.looked += 1
            return super().__iter__()

    history = Counting(conversation())
    prompt = Prompt(history)
    assert history.looked == 0
    assert (len(prompt), prompt[0].text, prompt[-1].text, len(list(prompt))) == (7, "One?", "seen", 7)
    assert history.looked == 1


async def test_a_loop_leaves_out_earlier_traces_when_told_to() -> None:
    """keep_traces=False reaches the request: the second run gets the first one's words and its own tools."""
    for keep, expected in ((True, 5), (False, 3)):
        driver = ScriptedDriver([ToolCall("look", {"n": 0}), "One."])
        loop = loop_of(driver, look, keep_traces=keep)
        state = await loop.run(asked("One?"))
        state = await loop.run(state.with_messages(Message.user("Two?")))
        assert [len(request.messages) for request in driver.requests] == [1, 3, expected, expected + 2]
        assert len(results_in(state)) == 2


def test_call_ids_are_such_as_every_provider_takes() -> None:
    """A foreign, long or repeated id is replaced, the same in call and result, and the same in every prompt."""
    odd = ["call:1", "x" * 60, "", "call|1", "fine"]
    history = [
        message
        for name in (*odd, "fine")
        for message in (Message.assistant(ToolCall("look", {}, name)), Message.tool(name, f"of {name}"))
    ]
    sent = compile_prompt(history)
    assert_valid(sent)
    assert [message.text for message in sent if message.role == "tool"] == [f"of {name}" for name in (*odd, "fine")]
    assert compile_prompt(history) == compile_prompt(sent) == sent
    assert sent[8].tool_calls[0].id == "fine"
    assert compile_prompt(history[:4]) == sent[:4]


def test_a_prompt_that_grows_keeps_the_ids_it_was_sent_with() -> None:
    """Ids that repeat in later runs are made distinct without changing a provider's cached prompt."""
    run = [Message.user("go"), Message.assistant(ToolCall("look", {}, "call_0")), Message.tool("call_0", "seen")]
    prompts, transcript, before = Prompts(), Transcript(), ()
    for _ in range(4):
        transcript = transcript.append(*run)
        sent = tuple(prompts.of(transcript))
        assert_valid(sent)
        assert sent[: len(before)] == before
        assert sent == compile_prompt(transcript)
        before = sent


def test_blank_text_is_not_sent() -> None:
    """A blank block is dropped, also a message that has no other, and a blank result is put in words."""
    call = ToolCall("look", {}, "c")
    history = [
        Message.user(""),
        Message.user(" \n", Media("image/png", data=b"x")),
        Message.system("\t"),
        Message.assistant(Text(" "), call),
        Message.tool("c", ""),
        Message.assistant(Opaque("p", {"next": {"signature": "s"}}), Text("")),
    ]
    sent = compile_prompt(history)
    assert [message.role for message in sent] == ["user", "assistant", "tool", "assistant"]
    assert sent[0].parts == (Media("image/png", data=b"x"),)
    assert sent[1].parts == (call,)
    assert sent[2].text == EMPTY_RESULT
    assert len(sent[3].parts) == 2, "a provider's own part stays with the text it came with"


def test_a_message_that_says_nothing_in_its_role_is_not_sent() -> None:
    """Only an answer may consist of a provider's own parts; in other messages they would not be sent."""
    opaque, unknown = Opaque("p", {"next": {"id": "m"}}), UnknownPart({"type": "video"})
    history = [
        Message("user", (opaque, Text(" "))),
        Message("user", (unknown,)),
        Message("system", (Thinking("Hm."), opaque)),
        Message("system", (Media("image/png", data=b"x"),)),
        Message("user", (unknown, Text("Go."))),
        Message.assistant(opaque, Text("")),
    ]
    assert compile_prompt(history) == tuple(history[-2:])


def test_names_that_a_model_has_made_up_are_such_as_every_provider_takes() -> None:
    """A call of `multi_tool_use.parallel`, or of nothing, would otherwise be refused in every later request."""
    made_up = ["multi_tool_use.parallel", "", "x" * 70, "look"]
    history = [
        message
        for number, name in enumerate(made_up)
        for message in (
            Message.assistant(ToolCall(name, {}, f"c{number}")),
            Message.tool(f"c{number}", "There is no such tool.", name=name, is_error=True),
        )
    ]
    sent = compile_prompt(history)
    assert_valid(sent)
    names = [call.name for message in sent for call in message.tool_calls]
    assert names == ["multi_tool_use_parallel", "unknown", "x" * 64, "look"]
    assert [result.name for message in sent for result in message.tool_results] == names
    assert sent[-2:] == tuple(history[-2:])


def test_an_envelope_is_sent_to_no_provider() -> None:
    """A message is sent without its envelope, and one that has nothing else is not sent."""
    call, envelope = ToolCall("look", {}, "c"), Envelope("acme", {"type": "message"})
    bare = [Message.user("Hi", id="1"), Message.assistant(call, id="2"), Message.tool("c", "5", id="3")]
    wrapped = [replace(message, parts=(*message.parts, envelope)) for message in bare]
    odd = [Message(role, (envelope,)) for role in ("system", "user", "assistant", "tool")]
    assert compile_prompt([*odd, *wrapped]) == tuple(bare)
