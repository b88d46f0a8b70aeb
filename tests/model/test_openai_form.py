"""perdure's messages in OpenAI's form, and back: every part that the form has comes back the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import json_objects, messages

from perdure import Envelope, Media, Message, Opaque, ToolCall
from perdure.loop.prompt import compile_prompt
from perdure.model.given_messages import messages_of
from perdure.model.message import Text, Thinking
from perdure.model.openai_form import openai_messages

said = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
ids = st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True)
images = st.builds(Media, st.sampled_from(["image/png", "image/webp"]), data=st.binary(max_size=8))
links = st.just(Media("image/jpeg", url="https://x.org/a.jpg"))
files = st.builds(Media, st.just("application/pdf"), data=st.binary(max_size=8), name=st.just("a.pdf"))
audio = st.builds(Media, st.sampled_from(["audio/wav", "audio/mpeg"]), data=st.binary(max_size=8))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Return exchanges in which every call has its result."""
    made: list[Message] = []
    for turn in range(draw(st.integers(1, 3))):
        made.append(
            draw(st.builds(Message.system, said) | st.builds(Message.user, said | images | links | files | audio, said))
        )
        names = draw(st.lists(ids, max_size=2, unique=True))
        calls = [ToolCall(draw(ids), draw(json_objects), f"{name}-{turn}") for name in names]
        texts = draw(st.lists(said, min_size=0 if calls else 1, max_size=2))
        made.append(Message.assistant(*texts, tool_calls=calls))
        made += [Message.tool(call.id, draw(said)) for call in calls]
    return made


def content(message: Message) -> tuple[Any, ...]:
    return message.role, message.parts


@given(given_=conversations())
def test_there_and_back(given_: list[Message]) -> None:
    """Roles, texts, images, files, calls, results and the ids of calls come back; through JSON, as in a file."""
    there = json.loads(json.dumps(openai_messages(given_)))
    assert [content(each) for each in messages_of(there, "$")] == [content(each) for each in given_]
    assert openai_messages(messages_of(there, "$")) == there


@given(given_=st.lists(messages(), max_size=6))
def test_any_history_is_valid_for_the_api(given_: list[Message]) -> None:
    """Compiled as for a model, every call is followed by its result, and no message is empty."""
    forms = openai_messages(compile_prompt(given_))
    json.dumps(forms)
    waiting: list[str] = []
    for form in forms:
        if form["role"] == "tool":
            assert form["tool_call_id"] == waiting.pop(0)
        else:
            assert waiting == []
            waiting = [call["id"] for call in form.get("tool_calls", ())]
            assert form["content"] or waiting or form.get("refusal")
            assert all(
                isinstance(json.loads(call["function"]["arguments"]), dict) for call in form.get("tool_calls", ())
            )
    assert waiting == []
    messages_of(forms, "$")


def test_what_openai_said_beside_comes_back() -> None:
    """A developer, names, refusals and the detail of an image come back, though perdure has no part for them."""
    forms = [
        {"role": "developer", "content": "Be brief.", "name": "ops"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": "https://x.org/a.png", "detail": "low"}},
            ],
            "name": "ada",
        },
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]},
    ]
    assert openai_messages(messages_of(forms, "$")) == forms


def test_what_the_form_has_no_place_for() -> None:
    """Thinking is left out, a file by address is named in a text, and a message without other parts is dropped."""
    shown = Message.user("See", Media("application/pdf", url="https://x.org/a.pdf", name="a"))
    thought = Message.assistant(Thinking("Hm."), Opaque("acme", {}))
    drawn = Message.assistant(Text("Here:"), Media("image/png", data=b"abc"))
    assert openai_messages([shown, thought, drawn]) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See"},
                {"type": "text", "text": "[a: application/pdf: https://x.org/a.pdf]"},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Here:"}, {"type": "text", "text": "[image/png: 3 bytes]"}],
        },
    ]


def test_foreign_metadata_is_no_obstacle() -> None:
    """The metadata may have any value under the same key."""
    for mine in (5, {"parts": 5}, {"parts": {"0": 5}}, {"name": 5, "role": 5}):
        assert openai_messages([Message.user("a", metadata={"openai": mine})]) == [{"role": "user", "content": "a"}]


def test_an_envelope_is_left_out() -> None:
    """OpenAI cannot use another framework's envelope."""
    envelope = Envelope("acme", {"type": "message"})
    assert openai_messages([Message.user("Hi", envelope)]) == [{"role": "user", "content": "Hi"}]
    assert openai_messages([Message("assistant", (envelope,))]) == []


def test_a_blank_text_goes_with_the_opaque_part_it_belongs_to() -> None:
    """Without its opaque part, a blank text is dropped, so a written message can be read and written again."""
    blank = Text("")
    assert openai_messages(compile_prompt([Message("assistant", (Opaque("acme"), blank))])) == []
    call = ToolCall("look", {}, id="c1")
    forms = openai_messages(compile_prompt([Message("assistant", (Opaque("acme"), blank, Text("Hi"), call))]))
    assert forms[0]["content"] == "Hi"
    assert openai_messages(compile_prompt(messages_of(forms, "$"))) == forms
    assert openai_messages([Message("assistant", (blank,))]) == [{"role": "assistant", "content": ""}]
