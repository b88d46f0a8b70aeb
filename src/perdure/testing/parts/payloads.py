"""Odd content: some has to come back as it went in, and some has to be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import InvalidData
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.message import Envelope, Media, Message, Opaque, Part, Role, Text, Thinking, ToolCall, ToolResult
from perdure.model.session import AgentSession
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord
from perdure.protocols import SessionStore
from perdure.testing.samples import new_session, note, run_of, say, tell, texts
from perdure.testing.scene import Contract, in_store, refused

ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "a\x00b\x01\x1f\x7f",
    "line\nline\r\nline\u2028line\u2029",
    "\ufeffBOM \ufffe \uffff",
    "😀👩‍👩‍👧‍👦 e\u0301 é",
    "שלום \u202eevil\u202c مرحبا",
    "\U0010ffff\U0001f600",
    "\"quotes\" 'single' \\ back / slash </script> ~ %s {} $1 ?1",
    "'; DROP TABLE session; --",
    "~part",
    "null",
    "x" * 1_000_000,
)

CONTENT = (
    Message.assistant("Let me see.", tool_calls=[ToolCall("look_up", {"order": 7, "deep": {"a": [1, None, True]}})]),
    Message.tool("call-1", "sent", name="look_up"),
    Message.tool("call-2", {"state": "sent", "at": [1, 2.5, -0.0, 1e300, 2**63, -(2**63)]}, is_error=True),
    Message.tool("call-3", None),
    Message.tool("call-4", [[], {}, "", 0, False]),
    Message.assistant(Thinking("hm", signature="c2ln", provider="p", id="t-1"), "So."),
    Message.user("See:", Media("image/png", data=bytes(range(256)) * 4, name="a.png"), Media("text/html", url="x:y")),
    Message.assistant(Opaque("p", {"response": "r-1", "list": [1]})),
    Message.user("Hi", Envelope("acme", {"text": {"$": 0}, "~": ["~part", None]})),
    Message.user(),
    Message.system("Be kind.", metadata={"k": {"nested": [1, {"x": None}]}}),
    Message.user("twice", Text("parts"), id="my own id / \x00"),
)


class Payloads(Contract):
    """Accepted content comes back as it was, and refused content changes nothing."""

    @in_store
    async def test_odd_texts_survive(self, store: SessionStore) -> None:
        """Any Unicode text comes back letter by letter, wherever it is."""
        session = new_session(*ODD_TEXTS)
        for number, text in enumerate(ODD_TEXTS):
            session = note(note(session, f"k{number}", text), text[:300], number)
        session = session.with_state(session.state.with_system_prompt("".join(ODD_TEXTS)).with_task(ODD_TEXTS[3]))
        kept = await store.create(session)
        assert texts(kept) == [*ODD_TEXTS]
        assert await store.load(session.id) == kept
        again = await store.save(say(kept, *ODD_TEXTS))
        assert await store.load(session.id) == again

    @in_store
    async def test_values_come_back_in_plain_types(self, store: SessionStore) -> None:
        """Tuples, enums and subclasses of str load as plain JSON types, also from memory."""
        said = Message("user", (Text(_Word("hello")),), _Word("m-1"), {"k": (1, _Mood.GOOD, {"w": _Word("x")})})
        thought = Thinking(_Word("hm"), _Word("s"), _Word("p"), _Word("t-1"))
        seen = Media(_Word("image/png"), url=_Word("https://a.example/b.png"), name=_Word("b"))
        asked = Message.assistant(
            thought, seen, Opaque(_Word("p"), 1), ToolCall(_Word("look"), {"at": (1, (2,))}, _Word("c-1"))
        )
        told = Message.tool("c-1", (_Mood.GOOD,))
        model = ModelConfig(_Word("a:b"), base_url=_Word("https://a.example"), thinking=_Word("high"))
        given = new_session(owner=_Word("me"), tags=(_Word("t"),), definition=AgentDefinition(_Word("a"), model=model))
        session = note(tell(given, said, asked, told), "k", (_Mood.GOOD,))
        kept = await store.create(session.with_name(_Word("name")).with_tags([_Word("t")]))
        loaded = await store.load(session.id)
        assert loaded == kept
        assert loaded is not None
        assert _odd_kinds((loaded.info.owner, loaded.info.name, loaded.info.tags, loaded.state.metadata)) == set()
        assert _odd_kinds(loaded.definition) == set()
        assert [_odd_kinds(message) for message in loaded.state.messages] == [set()] * 3

    @in_store
    async def test_odd_headers_survive(self, store: SessionStore) -> None:
        """Names, owners, tags and agents may be any text."""
        for number, text in enumerate(text for text in ODD_TEXTS if text.strip()):
            given = new_session(
                id=f"s{number}",
                definition=AgentDefinition(text[:1000], label=text, description=text, system_prompt=text),
                owner=text[:1000],
                name=text,
                tags=(text[:200], "t"),
            )
            kept = await store.create(given)
            assert await store.load(given.id) == kept
            found = await store.list(agent=text[:1000], owner=text[:1000], tag=text[:200])
            assert found.all() == (kept.info,)

    @in_store
    async def test_every_kind_of_content_survives(self, store: SessionStore) -> None:
        """Tool calls and results, thinking, media bytes and providers' own parts come back as they were."""
        kept = await store.create(tell(new_session(), *CONTENT))
        loaded = await store.load(kept.id)
        assert loaded is not None
        assert [*loaded.state.messages] == [*CONTENT]
        again = await store.save(tell(loaded, *CONTENT))
        assert await store.load(kept.id) == again
        assert await store.load(kept.id, 1) == kept

    @in_store
    async def test_numbers_keep_their_kind(self, store: SessionStore) -> None:
        """1, 1.0 and True stay three different values, and the widest integers fit."""
        numbers: list[Any] = [1, 1.0, True, 0, -0.0, False, 2**64 - 1, -(2**63), 1e308, 5e-324, 0.1]
        kept = await store.create(note(new_session(), "numbers", numbers))
        loaded = await store.load(kept.id)
        assert loaded is not None
        assert [repr(n) for n in loaded.state.metadata["numbers"]] == [repr(n) for n in numbers]

    @in_store
    async def test_what_a_newer_release_wrote_survives(self, store: SessionStore) -> None:
        """Fields and parts that this release does not know come back after load, save and load."""
        given = AgentSession.from_dict(_from_the_future())
        session = await store.create(given)
        for _ in range(2):
            loaded = await store.load(session.id)
            assert loaded is not None
            _check_the_future(loaded.to_dict())
            session = await store.save(say(loaded, "and more"))

    @in_store
    async def test_a_run_survives(self, store: SessionStore) -> None:
        """The execution and its steps, with their messages, usage, tool results and errors, come back."""
        session = await store.create(run_of(new_session("Where is order 7?")))
        for _ in range(2):
            loaded = await store.load(session.id)
            assert loaded is not None
            assert loaded.state.execution is not None
            assert [len(step.output_messages) for step in loaded.state.steps] == [2, 1]
            assert loaded.state.final_response == loaded.state.messages[3]
            assert loaded.state.usage == session.state.usage
            assert loaded.state.steps[0].tool_executions == session.state.steps[0].tool_executions
            session = await store.save(say(loaded, "Thanks"))
        cleared = await store.save(session.with_state(session.state.for_next_execution()))
        assert cleared.state.execution is None
        assert await store.load(session.id) == cleared

    @in_store
    async def test_bad_content_is_refused_and_changes_nothing(self, store: SessionStore) -> None:
        """Content that is not JSON raises InvalidData at create and at save, and the store stays as it is."""
        kept = await store.create(run_of(new_session("Hello")))
        for name, spoil, bad in _spoiled():
            given = run_of(new_session("Hello"))
            with refused(InvalidData, of=name):
                await store.create(spoil(given, bad))
            assert not await store.exists(given.id), name
            with refused(InvalidData, of=name):
                await store.save(spoil(kept, bad))
            assert await store.load(kept.id) == kept, name
            assert (await store.list()).all() == (kept.info,), name
        saved = await store.save(say(kept, "fine"))
        assert saved.version == 2
        assert await store.load(kept.id) == saved


class _Word(str):
    __slots__ = ()


class _Mood(StrEnum):
    GOOD = "good"


def _odd_kinds(value: Any) -> set[type]:
    """Return the types of texts in a value that are subclasses of str."""
    if isinstance(value, Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, str):
        return {type(value)} - {str}
    inside = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set[type]().union(*map(_odd_kinds, inside))


def _nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


def _loop() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    return loop


_BAD_VALUES: dict[str, Any] = {
    "nan": float("nan"),
    "infinity": float("-inf"),
    "surrogate": "half \ud800",
    "surrogate-key": {"\udfff": 1},
    "too-deep": _nested(200),
    # Deeper than Python's stack: it has to be found without recursion.
    "far-too-deep": _nested(50_000),
    "loop": _loop(),
    # Integers go from -2**63 to 2**64 - 1: these two are the next beyond.
    "huge": 2**64,
    "very-negative": -(2**63) - 1,
    "enormous": 10**5000,
    "number-key": {7: "seven"},
    "object": object(),
    "set": {1, 2},
}


def _of(session: AgentSession, role: Role, part: Part) -> AgentSession:
    return tell(session, Message(role, (part,)))


Spoil = Callable[[AgentSession, Any], AgentSession]

_WHERE_JSON_STANDS: dict[str, Spoil] = {
    "metadata": lambda session, bad: note(session, "k", bad),
    "message": lambda session, bad: tell(session, Message.user("x", metadata={"k": bad})),
    "result": lambda session, bad: _of(session, "tool", ToolResult("c", bad)),
    "call": lambda session, bad: _of(session, "assistant", ToolCall("t", {"k": bad})),
    "opaque": lambda session, bad: _of(session, "assistant", Opaque("p", bad)),
    "envelope": lambda session, bad: _of(session, "user", Envelope("p", bad)),
    "format": lambda session, bad: session.with_state(session.state.with_response_format({"k": bad})),
    "definition": lambda session, bad: session.with_definition(AgentDefinition("support", metadata={"k": bad})),
    "model": lambda session, bad: session.with_state(session.state.with_model(ModelConfig("m", settings={"k": bad}))),
    "run": lambda session, bad: _with_result(session, bad),
}

_WHERE_TEXT_STANDS: dict[str, Spoil] = {
    "text": lambda session, bad: _of(session, "user", Text(bad)),
    "prompt": lambda session, bad: session.with_state(session.state.with_system_prompt(bad)),
    "task": lambda session, bad: session.with_state(session.state.with_task(bad)),
    "name": lambda session, bad: session.with_name(bad),
    "tag": lambda session, bad: session.with_tags([bad]),
    "agent": lambda session, bad: session.with_definition(AgentDefinition(bad)),
    "owner": lambda session, bad: replace(session, info=replace(session.info, owner=bad)),
    "error": lambda session, bad: _with_error(session, ErrorRecord("ValueError", bad)),
}

_ELSEWHERE: dict[str, tuple[Spoil, Any]] = {
    "cost": (lambda session, bad: _with_usage(session, bad), Usage(cost=float("nan"))),
    "tokens": (lambda session, bad: _with_usage(session, bad), Usage(input_tokens=2**70)),
    "no message": (lambda session, bad: tell(session, bad), "a text"),
}


def _spoiled() -> Iterator[tuple[str, Spoil, Any]]:
    """Yield the ways to make a session that cannot be stored, each with a name."""
    for where, spoil in _WHERE_JSON_STANDS.items():
        for name, bad in _BAD_VALUES.items():
            yield f"{where}: {name}", spoil, bad
    for where, spoil in _WHERE_TEXT_STANDS.items():
        yield f"{where}: half a character", spoil, "half \ud800"
    for name, (spoil, bad) in _ELSEWHERE.items():
        yield name, spoil, bad


def _with_result(session: AgentSession, result: Any) -> AgentSession:
    assert session.state.execution is not None
    (first, *rest) = session.state.execution.step_executions
    (ran,) = first.step.tool_executions
    step = replace(first.step, tool_executions=(replace(ran, result=result),))
    steps = (replace(first, step=step), *rest)
    return session.with_state(session.state.with_execution(replace(session.state.execution, step_executions=steps)))


def _with_usage(session: AgentSession, usage: Usage) -> AgentSession:
    assert session.state.execution is not None
    (first, *rest) = session.state.execution.step_executions
    response = replace(first.step.inference_response, usage=usage)
    steps = (replace(first, step=replace(first.step, inference_response=response)), *rest)
    return session.with_state(session.state.with_execution(replace(session.state.execution, step_executions=steps)))


def _with_error(session: AgentSession, error: ErrorRecord) -> AgentSession:
    assert session.state.execution is not None
    return session.with_state(session.state.with_execution(session.state.execution.with_error(error)))


def _from_the_future() -> dict[str, Any]:
    """Return a session's document with an unknown field in every object, and a part of an unknown kind."""
    document = run_of(new_session("Where is order 7?")).to_dict()
    logs = document.pop("logs")
    future: dict[str, Any] = _marked(document)
    for log in logs.values():
        messages = [_marked(message) for message in log["messages"]]
        messages[0]["parts"].append({"type": "hologram", "rays": [1, {"x": None}], "text": 7})
        log["messages"] = messages
    return {**future, "format": document["format"], "logs": logs}


# Free JSON: a further field in there is not unknown to this release.
_FREE = ("metadata", "arguments", "settings", "result", "content", "response_format")


def _marked(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {**{k: v if k in _FREE else _marked(v) for k, v in plain.items()}, "hue": {"from": "the future"}}
    return [_marked(item) for item in plain] if isinstance(plain, list) else plain


def _check_the_future(document: dict[str, Any]) -> None:
    logs = document.pop("logs")
    _check_marks(document, "$")
    parts = [message["parts"] for log in logs.values() for message in log["messages"][:1]]
    assert {"type": "hologram", "rays": [1, {"x": None}], "text": 7} in parts[0]
    for log in logs.values():
        for message in log["messages"]:
            if message["parts"] != [{"type": "text", "text": "and more"}]:
                _check_marks(message, "$.message")


def _check_marks(plain: Any, path: str) -> None:
    if isinstance(plain, dict) and plain.get("type") != "hologram":
        assert plain.get("hue") == {"from": "the future"}, path
        for key, value in plain.items():
            if key not in (*_FREE, "hue"):
                _check_marks(value, f"{path}.{key}")
    elif isinstance(plain, list):
        for place, item in enumerate(plain):
            _check_marks(item, f"{path}[{place}]")
