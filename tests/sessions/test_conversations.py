"""Conversations of other programs: injected, sent, imported and exported as OpenAI's messages."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.loop.drivers import wire
from tests.loop.drivers.asking import KEY, KEY_ENV
from tests.loop.drivers.loopback import Loopback, Stream
from tests.strategies import exchanges

import perdure
from perdure import (
    AgentDefinition,
    InvalidData,
    Message,
    ModelConfig,
    Opaque,
    SessionNotFound,
    StoreError,
    Text,
    ToolCall,
    tool,
)
from perdure.sessions.conversations import ImportReport
from perdure.testing import ScriptedDriver

CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?", "name": "ada"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "assistant", "content": "5"},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "What is 2 + 3?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a":2,"b":3}'},
    {"type": "function_call_output", "call_id": "c1", "output": "5"},
    {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "5"}]},
]


@pytest.fixture(params=["memory", "sqlite", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/s.db", "file": f"file://{tmp_path}/sessions"}
    return urls[request.param]


async def test_a_conversation_is_injected_at_once(url: str) -> None:
    """A list makes one version, and is exported as it was."""
    async with perdure.connect(url, driver=ScriptedDriver(["Yes."])) as sessions:
        chat = await sessions.open("s")
        await chat.inject(CHAT)
        assert (await chat.session()).version == 2
        out = io.BytesIO()
        report = await chat.export(out, format="openai")
        assert json.loads(out.getvalue()) == CHAT
        assert (report.sessions, report.messages, report.bytes) == (1, 5, len(out.getvalue()))
        with pytest.raises(InvalidData, match="needs a role"):
            await chat.inject([CHAT[0], "text"])
        with pytest.raises(InvalidData, match=r"\$\.messages\[1\]\.content\[0\]"):
            await chat.inject([CHAT[0], {"role": "user", "content": [{"type": "hologram"}]}])
        with pytest.raises(InvalidData, match="nothing to inject"):
            await chat.inject([])
        assert await chat.length() == 5
        await chat.inject("By the way.")
        await chat.inject("See this:", perdure.attach(b"x", media_type="image/png"))
        assert [(each.role, each.text) for each in (await chat.session()).state.messages[5:]] == [
            ("user", "By the way."),
            ("user", "See this:"),
        ]


async def test_responses_items_go_to_the_provider_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `any_role`, the reasoning goes back with its ids to the API that it came from."""
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    content = [{"type": "output_text", "text": "Sure.", "annotations": []}]
    item = {"type": "message", "id": "msg_2", "role": "assistant", "status": "completed", "content": content}
    async with Loopback(Stream(wire.responses(item))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        async with perdure.connect("memory://", model=ModelConfig("openai:gpt-5")) as sessions:
            chat = await sessions.open()
            await chat.send([*ITEMS, {"role": "user", "content": "Sure?"}], any_role=True)
        sent = server.requests[0].body["input"]
    kinds = [item.get("type") or item["role"] for item in sent]
    assert kinds == ["user", "reasoning", "function_call", "function_call_output", "message", "user"]
    assert [sent[place]["id"] for place in (1, 2, 4)] == ["rs_1", "fc_1", "msg_1"]
    assert sent[1]["encrypted_content"] == "xyz"


async def test_chat_messages_reach_the_wire_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation from elsewhere is continued by a server that speaks chat completions."""
    monkeypatch.setenv(KEY_ENV, KEY)
    answer = Stream(wire.chat({"content": "Sure."}, usage={"prompt_tokens": 1, "completion_tokens": 1}))
    async with Loopback(answer) as server:
        model = ModelConfig("openai:gpt-4o", base_url=f"{server.url}/v1", api_key_env=KEY_ENV)
        async with perdure.connect("memory://", model=model) as sessions:
            chat = await sessions.open()
            await chat.inject(CHAT[1:])
            await chat.send({"role": "user", "content": "Sure?"})
        sent = server.requests[0].body["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "assistant", "user"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":2,"b":3}'}
    assert sent[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(CHAT),
        "\ufeff\n" + json.dumps(CHAT, indent=2),
        "\n".join(map(json.dumps, CHAT)),
        "\r\n\r\n".join(map(json.dumps, CHAT)) + "\n",
        json.dumps({"messages": CHAT}),
        json.dumps([{"messages": CHAT}]),
    ],
)
async def test_a_file_of_messages_is_one_session(url: str, tmp_path: Path, raw: str) -> None:
    """It may be an array or lines; it gets a new id, one version, and an agent that the caller chooses."""
    (tmp_path / "chat.json").write_text(raw, encoding="utf-8")
    async with perdure.connect(url, driver=ScriptedDriver(["Yes."])) as sessions:
        report = await sessions.import_(tmp_path / "chat.json", format="openai", agent=AgentDefinition("clerk"))
        assert isinstance(report, ImportReport)
        [made] = report.created
        assert (report.sessions, report.messages) == (1, 5)
        info = await sessions.info(made)
        assert (info.version, info.agent_name) == (1, "clerk")
        assert (await sessions.send(made, "Sure?")).text == "Yes."


async def test_conversations_are_a_session_each_and_come_out_as_lines(url: str) -> None:
    """An import reads the export of several sessions; a second import makes two more sessions."""
    lines = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "hi"}]}]
    raw = "\n".join(map(json.dumps, lines)).encode()
    async with perdure.connect(url) as sessions:
        done: list[tuple[int, int]] = []
        for times in (1, 2):
            report = await sessions.import_(io.BytesIO(raw), format="openai", progress=lambda *each: done.append(each))
            assert (report.sessions, report.messages, done) == (2, 6, [(1, 2), (2, 2)] * times)
            out = io.BytesIO()
            assert (await sessions.export(out, format="openai")).sessions == 2 * times
            written = sorted(out.getvalue().splitlines())
            assert [json.loads(each) for each in written] == sorted(lines * times, key=json.dumps)


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", "no messages"),
        (b"[]", "no messages"),
        (b"[5]", r"\$\[0\]"),
        (b'["hi"]', r"\$\[0\]"),
        (b"[", "not JSON"),
        (b"{", "line 1"),
        (b"\xff", "line 1"),
        (b'{"role": "user", "content": "a"}\n{"role": "usr"}', r"line 2: \$\.role"),
        (b'{"role": "user", "content": "a"}\n{"messages": []}', r"line 1: \$"),
        (b'{"messages": []}', r"line 1: \$\.messages"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": []}', r"line 1: \$\.tools"),
        (b'\n\n{"messages": [{"role": "user", "content": 5}]}', r"line 3: \$\.messages\[0\]\.content"),
        (b'[{"role": "user", "content": "a", "id": "m"}, {"role": "user", "content": "b", "id": "m"}]', r"\$\[1\]\.id"),
        (b'[{"role": "user", "content": "a", "metadata": {"n": 99999999999999999999}}]', "64 bits"),
    ],
)
async def test_a_file_that_is_wrong_makes_nothing(raw: bytes, where: str) -> None:
    """The error names the line or the place, and the conversations before it are not imported either."""
    good = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
    async with perdure.connect("memory://") as sessions:
        with pytest.raises(InvalidData, match=where):
            await sessions.import_(io.BytesIO(raw), format="openai")
        if raw.startswith(b'{"messages"'):
            with pytest.raises(InvalidData):
                await sessions.import_(io.BytesIO(good + raw), format="openai")
        assert (await sessions.list()).all() == ()


async def test_a_view_and_a_history_are_written(url: str, tmp_path: Path) -> None:
    """By default an export has what the model is shown, with the prompt; with `history` also what was trimmed."""
    agent = AgentDefinition("clerk", system_prompt="You add.")
    async with perdure.connect(url) as sessions:
        chat = await sessions.open("s", agent)
        await chat.inject([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
        await chat.trim(1)
        prompt = {"role": "system", "content": "You add."}
        one, two = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
        await chat.export(tmp_path / "view.json", format="openai")
        assert json.loads((tmp_path / "view.json").read_bytes()) == [prompt, two]
        await chat.export(tmp_path / "view.json", format="openai", history=True)
        assert json.loads((tmp_path / "view.json").read_bytes()) == [prompt, one, two]
        assert (tmp_path / "view.json").stat().st_mode & 0o777 == 0o600
        await chat.export(tmp_path / "s.md", format="markdown", history=True)
        assert (tmp_path / "s.md").read_text().count("\n## User\n") == 2
        await sessions.open("t", agent)
        out = io.BytesIO()
        await sessions.export(out, ["s", "t"], format="markdown")
        assert out.getvalue().decode().count("\n---\n") == 1


async def test_calls_that_wait_are_written_with_a_result() -> None:
    """The exported messages are valid for the API even while a person still has to decide."""

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        return "paid"

    async with perdure.connect(
        "memory://", tools=[pay], driver=ScriptedDriver([ToolCall("pay", {"amount": 5})])
    ) as app:
        chat = await app.open()
        await chat.send("Pay.")
        out = io.BytesIO()
        await chat.export(out, format="openai")
    *_, call, result = json.loads(out.getvalue())
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "outcome is unknown" in result["content"]


async def test_owners_import_and_export_their_own(url: str) -> None:
    """An import belongs to its owner, and an export has no other owner's sessions."""
    async with perdure.connect(url) as sessions:
        ann, bob = sessions.of("ann"), sessions.of("bob")
        report = await ann.import_(io.BytesIO(json.dumps(CHAT).encode()), format="openai")
        assert isinstance(report, ImportReport)
        assert (await ann.info(report.created[0])).owner == "ann"
        out = io.BytesIO()
        assert (await bob.export(out, format="openai")).sessions == 0
        with pytest.raises(SessionNotFound):
            await bob.export(out, report.created, format="markdown")
        assert out.getvalue() == b""
        assert (await ann.export(out, format="openai")).sessions == 1


async def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """As for whole sessions, an error says so, and no half file is left."""
    async with perdure.connect("memory://") as sessions:
        chat = await sessions.open("s")
        with pytest.raises(StoreError, match="could not be written"):
            await chat.export(tmp_path / "no" / "such" / "place", format="openai")
        with pytest.raises(SessionNotFound):
            await sessions.export(tmp_path / "x.json", ["nobody"], format="openai")
        with pytest.raises(StoreError, match="could not be read"):
            await sessions.import_(tmp_path / "x.json", format="openai")
    assert os.listdir(tmp_path) == []


async def test_blocking_verbs_take_the_formats_too(tmp_path: Path) -> None:
    """The blocking face passes them on."""

    def work() -> None:
        with perdure.connect_blocking("memory://") as sessions:
            chat = sessions.open("s")
            chat.inject(CHAT)
            chat.export(tmp_path / "s.json", format="openai")
            assert sessions.import_(tmp_path / "s.json", format="openai").messages == 5

    await asyncio.to_thread(work)


@example(said=[Message("assistant", (Opaque("acme"), Text("")))])
@given(said=st.lists(exchanges(), max_size=2).map(lambda several: [each for some in several for each in some]))
async def test_any_session_there_and_back(said: list[Message]) -> None:
    """An exported session can be imported, and its second export is the same."""
    async with perdure.connect("memory://") as sessions:
        chat = await sessions.open()
        if said:
            await sessions.execute(chat.id, perdure.InjectMessage(*_renamed(said)))
        first, second = io.BytesIO(), io.BytesIO()
        await chat.export(first, format="openai")
        if first.getvalue().strip() == b"[]":
            return
        report = await sessions.import_(io.BytesIO(first.getvalue()), format="openai")
        assert isinstance(report, ImportReport)
        await sessions.export(second, report.created, format="openai")
    assert json.loads(first.getvalue()) == json.loads(second.getvalue())


def _renamed(said: list[Message]) -> list[Message]:
    """Give each message an id of its own."""
    return [Message(each.role, each.parts, f"m{place}", each.metadata) for place, each in enumerate(said)]


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(CHAT).encode(),
        json.dumps(CHAT, indent=2).encode() + b"\n",
        b'{"messages": []}',
        b'{ "role": "user", "content": "hi"}\n',
    ],
)
async def test_a_conversation_is_not_taken_for_an_export(raw: bytes) -> None:
    """The error names the format to give, however the file is laid out."""
    async with perdure.connect("memory://") as sessions:
        with pytest.raises(InvalidData, match="format='openai', or --format openai"):
            await sessions.import_(io.BytesIO(raw))


@pytest.mark.parametrize("raw", [b"", b"hello", b'{"perdure": "other", "format": 1}\n'])
async def test_what_is_neither_is_told_as_before(raw: bytes) -> None:
    async with perdure.connect("memory://") as sessions:
        with pytest.raises(InvalidData, match="Export it again"):
            await sessions.import_(io.BytesIO(raw))
