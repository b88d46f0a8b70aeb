"""The codec: values come back the same, unknown fields are kept, and a wrong value is InvalidData with a path."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import (
    budgets,
    json_values,
    messages,
    sessions,
    states,
    stop_signals,
    tool_executions,
    transcripts,
)

from perdure import codec
from perdure.errors import InvalidData
from perdure.model import ids
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget, ExecutionState
from perdure.model.ids import SessionId
from perdure.model.lineage import SpawnRef
from perdure.model.message import Media, Message, Opaque, Text, Thinking, ToolCall, ToolResult, UnknownPart
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.model.state import AgentContext, AgentState
from perdure.model.step import AgentStep, InferenceResponse, StepExecution, ToolExecution
from perdure.model.stop import ExecutionContinuation, StopReason, StopSignal
from perdure.model.transcript import LogRef, Span, Tape, Transcript, every_span
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord, Value

START = datetime(2030, 1, 1, tzinfo=UTC)


def through_json(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(document))


class Logs:
    """A store's part for the codec: names for tapes, and spans by name."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def name_of(self, span: Span) -> int:
        if span.tape not in self.tapes:
            self.tapes.append(span.tape)
        return self.tapes.index(span.tape)

    def span_of(self, log: int | str, start: int, stop: int) -> Span:
        return Span(self.tapes[int(log)], start, stop)


def assert_comes_back(value: Value) -> None:
    """Assert that a value comes back equal from a document, JSON and bytes, and is written the same again."""
    document = value.to_dict()
    twin = type(value).from_dict(through_json(document))
    assert twin == value
    assert twin.to_dict() == document
    logs = Logs()
    raw = codec.encode(value, logs.name_of)
    assert codec.encode(value, logs.name_of) == raw
    read = codec.decode(type(value), raw, logs.span_of)
    assert read == value
    assert codec.encode(read, logs.name_of) == raw


def transcripts_in(state: AgentState) -> Iterator[Transcript]:
    yield state.transcript
    run = state.execution or ExecutionState()
    for step in (*run.steps, *([run.current_step] if run.current_step else [])):
        yield step.input_messages
        yield step.output_messages


@given(sessions())
def test_every_reachable_session_comes_back(session):
    """Any session comes back equal from its document and its bytes, and is written the same again."""
    assert_comes_back(session)


@given(states())
def test_every_reachable_state_comes_back_and_holds_each_message_once(state):
    """Any state, and each part of its run, comes back; a document has each message exactly once."""
    assert_comes_back(state)
    if state.execution is not None:
        assert_comes_back(state.execution)
        for done in state.execution.step_executions:
            assert_comes_back(done)
            assert_comes_back(done.step)
    document = state.to_dict()
    written = Counter(message["id"] for log in document.get("logs", {}).values() for message in log["messages"])
    spans = [span for transcript in transcripts_in(state) for span in every_span(transcript.pieces)]
    assert written == Counter({message.id for span in spans for message in span.messages()})
    text = json.dumps(document)
    assert all(text.count(json.dumps(message_id)) == 1 for message_id in written)


@given(tool_executions(), budgets, st.lists(stop_signals, max_size=2), st.booleans())
def test_tool_runs_budgets_and_continuations_come_back(tool_execution, budget, signals, goes_on):
    """Tool runs, budgets and continuations each have a document of their own."""
    assert_comes_back(tool_execution)
    assert_comes_back(budget)
    assert_comes_back(ExecutionContinuation(tuple(signals), goes_on))


@given(messages())
def test_every_message_comes_back_from_its_bytes(message):
    """A message comes back equal from its bytes, which are the same each time."""
    raw = codec.encode_message(message)
    assert codec.decode_message(raw) == codec.decode(Message, raw) == message
    assert codec.encode_message(codec.decode_message(raw)) == raw
    assert Message.from_dict({"format": 1, **json.loads(raw)}) == message


@given(transcripts())
def test_pieces_come_back(transcript):
    """Pieces as plain data come back as equal pieces on the same tapes."""
    logs = Logs()
    plain = through_json(codec.dump_pieces(transcript.pieces, logs.name_of))
    assert Transcript(codec.load_pieces(plain, logs.span_of)) == transcript


@given(st.integers(-840, 840), st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)))
def test_times_come_back_to_the_microsecond(minutes, moment):
    """A time keeps its instant in any zone."""
    there = moment.replace(tzinfo=UTC).astimezone(msgspec.json.decode(f'"{_offset(minutes)}"', type=datetime).tzinfo)
    assert ExecutionBudget.from_dict(ExecutionBudget(deadline=there).to_dict()).deadline == there


def _offset(minutes: int) -> str:
    sign, (hours, rest) = "-" if minutes < 0 else "+", divmod(abs(minutes), 60)
    return f"2020-01-01T00:00:00{sign}{hours:02}:{rest:02}"


def rich_session() -> AgentSession:
    """A session with a value in every place: all kinds of parts, runs, blocks in blocks, unread spans."""
    call = ToolCall("look", {"at": {"sky": [1, None]}}, id="c1", provider="acme", opaque={"sig": "x"})
    error = ErrorRecord("ValueError", "no", "trace")
    run = ToolExecution(call, START, START, {"colour": "blue"}, error, Usage(1, 2, 3, 4, 5, 0.5))
    parts = (Thinking("hm", "sig", "acme", "t1"), Media("image/png", data=b"\0\xff"), Opaque("acme", [1]))
    definition = AgentDefinition(
        "support",
        label="Support",
        system_prompt="Be brief.",
        model=ModelConfig("openai:gpt-5", temperature=0.5, settings={"top_p": 1}),
        tools=["look"],
        budget=ExecutionBudget(5, 10, 1.5, 0.5, START),
        metadata={"team": {"name": "x"}},
    )
    state = AgentState.of(definition).with_messages(*(Message.user(f"{n}", metadata={"n": [n]}) for n in range(6)))
    state = state.with_messages(Message.user(*parts, UnknownPart({"type": "hologram", "depth": {"z": 1}})))
    state = state.with_execution_started().with_current_step(
        AgentStep.of(
            [Message.assistant("wait", tool_calls=[call]), Message.tool("c1", {"colour": "blue"}, name="look")],
            input=state.transcript,
            response=InferenceResponse("tool_calls", Usage(10, cost=0.25), "gpt-5", "openai", "r1"),
            tool_executions=[run],
            errors=[error],
        )
    )
    state = state.with_current_step_completed().with_current_step(AgentStep.of([Message.assistant("It is blue.")]))
    state = state.with_stop_signal(StopSignal(StopReason.TOKEN_LIMIT_REACHED, "spent", "guard", "max_cost"))
    state = state.with_execution(state.execution.with_pending_calls((call,)).with_error(error))
    view = state.transcript.cover(0, 2, [Message.user("sum")], by="llm", tokens_before=9, tokens_after=1)
    view = view.cover(0, 2, [Message.user("sum of sums")], by="llm").cover(4, 5, [], by="mask")
    unread = Span(Tape(None, LogRef("store", 7)), 3, 9)
    state = state.with_transcript(Transcript((unread, *view.pieces)))
    state = state.with_task("t").with_model(ModelConfig("m")).with_response_format({"type": "object"})
    info = AgentSessionInfo(
        SessionId("s-1"), "support", parent_id=SessionId("s-0"), spawn_ref=SpawnRef("s-0", "l", "c", "t"), tags=("vip",)
    )
    return AgentSession(info, definition, state)


RICH = json.dumps(rich_session().to_dict())


def test_the_rich_session_comes_back():
    """The session that the tests below take apart comes back equal."""
    session = rich_session()
    assert AgentSession.from_dict(through_json(session.to_dict())) == session
    assert AgentSession.from_dict(json.loads(RICH)).to_dict() == json.loads(RICH)


FREE = {"metadata", "arguments", "response_format", "settings", "opaque", "content", "result", "body"}


def objects_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths to every object of a document that is a value, not a caller's own data."""
    if isinstance(node, dict):
        if path != ("logs",) and path[-2:-1] != ("logs",):
            yield path
        for key, item in node.items():
            if key not in FREE and not (node.get("type") == "hologram" and path):
                yield from objects_in(item, (*path, key))
    elif isinstance(node, list):
        for place, item in enumerate(node):
            yield from objects_in(item, (*path, place))


def places_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths to everything in a document."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


OBJECTS = list(objects_in(json.loads(RICH)))
PLACES = [path for path in places_in(json.loads(RICH)) if path]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: ".".join(map(str, path)) or "top")
def test_an_unknown_field_survives_anywhere(path):
    """A field that a newer release has added to any value is still there after a read and a write."""
    document = json.loads(RICH)
    at(document, path).update(x_new={"deep": [1, None]}, covers_all=False)
    assert AgentSession.from_dict(document).to_dict() == document


def test_unknown_fields_survive_everywhere_at_once():
    """A document of a newer release with a new field in every value is written as it was read."""
    document = json.loads(RICH)
    for path in OBJECTS:
        at(document, path)["x_new"] = ["n", {"type": "text"}]
    read = AgentSession.from_dict(document)
    assert read.to_dict() == document
    assert_comes_back(read)


def test_unknown_fields_survive_changes():
    """An unknown field stays when another field of the value changes."""
    document = json.loads(RICH)
    for path in OBJECTS:
        at(document, path)["x_new"] = 1
    changed = AgentSession.from_dict(document).suspended().with_tags(["new"])
    changed = changed.with_state(changed.state.with_metadata("a", 1).with_stop_signal(StopSignal(StopReason.UNKNOWN)))
    written = changed.to_dict()
    run = written["state"]["execution"]
    for value in (written, written["info"], written["state"], written["state"]["context"], run, run["continuation"]):
        assert value["x_new"] == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "hologram"},
        {"type": "hologram", "depth": 3, "~": {"a": 1}, "body": {"type": "text"}},
        {"type": "~part"},
        {"type": "~part", "body": {}},
        {"type": "~part", "body": {"type": "text", "text": "x"}},
        {"type": "text", "text": "x", "~": 5},
        {"type": "text", "text": "x", "~": {"text": "y"}, "new": {"~": None}},
        {"type": "tool_call", "name": "t", "id": "c", "arguments": {"~": {"a": 1}}, "new": 1},
    ],
)
def test_unknown_parts_and_odd_names_survive(part):
    """A part of an unknown kind, and fields named like the codec's own marks, are written unchanged."""
    plain = {"role": "user", "parts": [{"type": "text", "text": "hi"}, part], "id": "m1", "x_new": part}
    document = {"format": 1, **plain}
    assert Message.from_dict(document).to_dict() == document
    raw = json.dumps(plain).encode()
    message = codec.decode(Message, raw)
    assert json.loads(codec.encode_message(message)) == plain
    assert codec.decode(Message, codec.encode_message(message)) == message


@given(st.dictionaries(st.text(max_size=5).map("x_{}".format), json_values, max_size=3), json_values)
def test_unknown_fields_and_parts_survive_in_bytes(fields, body):
    """The bytes of a newer release's message are the same after a read and a write."""
    part = {"type": "hologram", "body": body}
    plain = {**fields, "role": "user", "parts": [{"type": "text", "text": "hi", **fields}, part], "id": "m1"}
    raw = codec.encode_message(codec.decode_message(json.dumps(plain).encode()))
    assert json.loads(raw) == plain
    assert codec.encode_message(codec.decode_message(raw)) == raw


class Envelope(Value, frozen=True):
    """A value that carries bytes which are encoded already, as a store's rows do."""

    state: msgspec.Raw
    parts: dict[str, msgspec.Raw] = {}
    name: str = ""


@pytest.mark.parametrize("name", ["plain", "~/notes", "~part", '"~":'])
@pytest.mark.parametrize("unknown", [{}, {"x_new": 1}])
def test_values_that_carry_encoded_bytes_come_back(name, unknown):
    """Raw fields come back beside any other values: texts like the codec's marks, and unknown fields."""
    raw = msgspec.Raw(b'{"task":"~/src","n":[1.5,null]}')
    value = Envelope(raw, {"a": raw}, name, unknown=unknown)
    read = codec.decode(Envelope, codec.encode(value))
    assert codec.decode_plain(bytes(read.state)) == codec.decode_plain(bytes(read.parts["a"])) == json.loads(bytes(raw))
    assert (read.name, read.unknown) == (name, unknown)


@pytest.mark.parametrize("text", ["~", "~/src", '"~":', "~part", '{"~":{}}', '\\"~":'])
def test_texts_that_look_like_marks_are_texts(text):
    """A text that looks like a mark is a text as content, as a key and as a value."""
    message = Message.user(text, metadata={text: text, "in": [{text: text}]})
    assert codec.decode_message(codec.encode_message(message)) == message
    assert Message.from_dict(message.to_dict()) == message


def test_the_form_of_a_document():
    """A document is its fields without defaults, the format number, and the logs that its spans name."""
    with ids.use(clock=lambda: START, ids=iter("abcdefgh").__next__):
        state = AgentState().with_messages(Message.user("hi"), Message.assistant("hello"))
        state = state.with_transcript(state.transcript.cover(0, 1, [Message.user("sum")], by="llm"))
    time = "2030-01-01T00:00:00Z"
    block = {"covered": [["0", 0, 1]], "shown": [["1", 0, 1]], "by": "llm", "id": "e", "at": time}
    assert state.to_dict() == {
        "format": 1,
        "agent_id": "a",
        "created_at": time,
        "updated_at": time,
        "context": {"transcript": [block, ["0", 1, 2]]},
        "logs": {
            "0": {
                "base": 0,
                "messages": [
                    {"role": "user", "parts": [{"type": "text", "text": "hi"}], "id": "b"},
                    {"role": "assistant", "parts": [{"type": "text", "text": "hello"}], "id": "c"},
                ],
            },
            "1": {"base": 0, "messages": [{"role": "user", "parts": [{"type": "text", "text": "sum"}], "id": "d"}]},
        },
    }


def test_a_document_shares_nothing_with_its_value():
    """Changing a document does not reach the value it was made from."""
    message = Message.user("x", UnknownPart({"type": "new", "in": {"a": 1}}), metadata={"in": {"a": 1}})
    document = message.to_dict()
    document["metadata"]["in"]["a"] = document["parts"][1]["in"]["a"] = 2
    assert message.metadata["in"]["a"] == message.parts[1].body["in"]["a"] == 1


def test_only_what_is_named_is_written():
    """A document holds only the stretches of a tape that its spans name, at their positions."""
    whole = Transcript.of([Message.user(str(number)) for number in range(100)])
    document = AgentState().with_transcript(whole[10:12]).to_dict()
    (log,) = document["logs"].values()
    assert (log["base"], len(log["messages"])) == (10, 2)
    state = AgentState().with_transcript(Transcript([*whole[90:92].pieces, *whole[5:7].pieces, *whole[6:9].pieces]))
    document = state.to_dict()
    assert [(log["base"], len(log["messages"])) for log in document["logs"].values()] == [(90, 2), (5, 4)]
    assert AgentState.from_dict(document) == state
    assert AgentState.from_dict(document).to_dict() == document


def test_stored_and_unread_logs_keep_their_refs():
    """A log in a store keeps its name there; unread messages stay unread."""
    read = Span(Tape([Message.user("a")], LogRef("store", 5), 40), 40, 41)
    unread = Span(Tape(None, LogRef("store", "branch")), 2, 9)
    state = AgentState().with_transcript(Transcript([unread, read]))
    twin = AgentState.from_dict(through_json(state.to_dict()))
    assert twin == state
    assert [span.tape.ref for span in twin.transcript.spans()] == [LogRef("store", "branch"), LogRef("store", 5)]
    assert [span.tape.items is None for span in twin.transcript.spans()] == [True, False]


def test_compactions_may_nest_without_end():
    """Thousands of compactions, each over the one before, come back from a document and from bytes."""
    view = Transcript.of([Message.user("0")])
    for number in range(1000):
        view = view.cover(0, 1, [Message.user("sum", id=f"s{number}")], by="x")
    assert_comes_back(AgentState().with_transcript(view))


@pytest.mark.parametrize("kind", [AgentSession, AgentState, ExecutionState, AgentStep, Message, ExecutionBudget])
@pytest.mark.parametrize("number", [None, 0, 2, -1, "1", 1.0, True, [], 2**64 - 1])
def test_only_known_formats_are_read(kind, number):
    """A document of another format, or without one, is refused with the formats that can be read."""
    with pytest.raises(InvalidData) as caught:
        kind.from_dict({"format": number} if number is not None else {})
    assert caught.value.path == "$.format"


def test_check_format_takes_any_value():
    """The check of a format number itself survives numbers too long to print."""
    codec.check_format(1)
    with pytest.raises(InvalidData):
        codec.check_format(10**5000)


def deep(make: Callable[[Any], Any], levels: int = 10**5) -> Any:
    node: Any = None
    for _ in range(levels):
        node = make(node)
    return node


def circle(kind: type) -> Any:
    node: Any = kind()
    node.append(node) if kind is list else node.update(again=node, twice=node)
    return node


HOSTILE: dict[str, Any] = {
    "none": None,
    "true": True,
    "minus one": -1,
    "2**63": 2**63,
    "2**64": 2**64,
    "huge int": 10**5000,
    "huge negative int": -(10**5000),
    "float": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "empty text": "",
    "text": "x",
    "half a pair": "\ud800",
    "nul": "\0",
    "path": "../../etc/passwd",
    "naive time": "2030-01-01T00:00:00",
    "impossible time": "2030-13-45T99:99:99Z",
    "earliest time": "0001-01-01T00:00:00+23:59",
    "bytes": b"x",
    "datetime": START,
    "empty list": [],
    "list": [1, "x", None],
    "spans": [["0", 0, 10**30]],
    "backward span": [["0", 5, 1]],
    "negative span": [["0", -5, 1]],
    "strange log": [["nowhere", 0, 1]],
    "boolean span": [[True, 0, 1]],
    "endless unread spans": [["0", 3, 2**62], ["0", 3, 2**62], ["0", 3, 2**62]],
    "block": [{"covered": 5, "shown": []}],
    "block of blocks": [{"covered": [{"covers": 9, "shown": []}], "shown": []}],
    "block showing blocks": [{"covered": [], "shown": [{"covered": [], "shown": []}]}],
    "empty object": {},
    "object": {"x": 1},
    "role": {"role": "robot"},
    "mark": {"~": 5},
    "marked": {"~": {"role": "x", "status": "y"}},
    "mark as part": [{"type": "~part", "body": 5}],
    "text part without text": [{"type": "text"}],
    "part without type": [{}],
    "part of list type": [{"type": []}],
    "int key": {5: 5},
    "huge key": {10**5000: 1},
    "none key": {None: 1},
    "tuple key": {(1, 2): 1},
    "half key": {"\udfff": 1},
    "deep list": deep(lambda node: [node]),
    "deep dict": deep(lambda node: {"a": node}),
    "deep block": [deep(lambda node: {"covered": [node], "shown": []})],
    "101 levels": deep(lambda node: [node], 110),
    "circle of lists": circle(list),
    "circle of dicts": circle(dict),
    "set": {1, 2},
    "object()": object(),
    "type": int,
    "message": Message.user("x"),
    "complex": 1j,
    "tuple": (1, 2),
}
shallow_names = st.sampled_from([name for name in HOSTILE if not name.startswith(("deep", "circle"))])


def tried(call: Callable[[], Any]) -> tuple[Any, InvalidData | None]:
    """Return a call's value and None, or None and its InvalidData; any other error fails the test."""
    try:
        return call(), None
    except InvalidData as error:
        return None, error


def assert_refused_or_whole(read: Callable[[], Value]) -> None:
    """Hostile input is InvalidData with a path, or else a value that can be written and read again."""
    value, error = tried(read)
    if error is not None:
        assert error.path.startswith("$")
        assert error.problem
        return
    document = value.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert type(value).from_dict(document).to_dict() == document


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", [AgentSession, AgentState, ExecutionState, AgentStep, ToolExecution, Message])
def test_a_hostile_document_is_refused(kind, name):
    """Any value in place of a document is InvalidData."""
    with pytest.raises(InvalidData) as caught:
        kind.from_dict(HOSTILE[name])
    assert caught.value.path.startswith("$")
    with pytest.raises(InvalidData):
        codec.convert(kind, [HOSTILE[name]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused_anywhere(name):
    """Any value in any one place of a good document is InvalidData there, or harmless."""
    stride = 1 if os.environ.get("PERDURE_TORTURE") else 16
    for path in PLACES[[*HOSTILE].index(name) % stride :: stride]:
        document = json.loads(RICH)
        at(document, path[:-1])[path[-1]] = HOSTILE[name]
        assert_refused_or_whole(lambda document=document: AgentSession.from_dict(document))


@given(st.data())
def test_documents_with_several_faults_are_refused(data):
    """A good document with random places replaced, removed or swapped is InvalidData, or a value like any other."""
    document = json.loads(RICH)
    for _ in range(data.draw(st.integers(1, 5))):
        places = [path for path in places_in(document) if path]
        path = data.draw(st.sampled_from(places))
        holder = at(document, path[:-1])
        match data.draw(st.sampled_from(["replace", "remove", "move", "json"])):
            case "replace":
                holder[path[-1]] = copy.deepcopy(HOSTILE[data.draw(shallow_names)])
            case "remove":
                del holder[path[-1]]
            case "move":
                holder[path[-1]] = at(json.loads(RICH), data.draw(st.sampled_from(PLACES)))
            case "json":
                holder[path[-1]] = data.draw(json_values)
    assert_refused_or_whole(lambda: AgentSession.from_dict(document))


@given(st.binary() | st.text().map(str.encode) | st.text(st.sampled_from('[]{}",:0e-\\u~d8null ')).map(str.encode))
def test_any_bytes_are_plain_data_or_refused(raw):
    """Bytes that are not JSON are InvalidData for every type."""
    for read in (codec.decode_plain, codec.decode_message, lambda raw: codec.decode(AgentState, raw)):
        _, error = tried(lambda read=read: read(raw))
        assert error is None or error.path.startswith("$")


@given(st.text(st.characters()))
def test_any_text_is_plain_data_or_refused(text):
    """Text that is not JSON, or that UTF-8 cannot encode, is InvalidData."""
    _, error = tried(lambda: codec.decode_plain(text))
    assert error is None or error.path == "$"


MESSAGE = Message.assistant(
    "wait", Thinking("hm", "s"), tool_calls=[ToolCall("t", {"a": [1, 2.5, None]})], metadata={"k": {"n": -1}}
)


@given(st.data())
def test_damaged_bytes_are_refused_or_whole(data):
    """Good bytes with some cut out, put in or changed are InvalidData or a message that can be written again."""
    raw = bytearray(codec.encode_message(MESSAGE))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        stop = data.draw(st.integers(start, min(len(raw), start + 8)))
        raw[start:stop] = data.draw(st.binary(max_size=6) | st.sampled_from([b'"', b"~", b"[", b"}", b"\\ud800"]))
    assert_refused_or_whole(lambda: codec.decode_message(bytes(raw)))
    assert_refused_or_whole(lambda: codec.decode(Message, bytes(raw)))


@pytest.mark.parametrize(
    "value",
    [
        "[" * 10**5 + "]" * 10**5,
        '{"a":' * 10**5 + "1" + "}" * 10**5,
        "[" * 10**5,
        "9" * 5000,
        "-" + "9" * 5000,
        "1e999",
        "NaN",
        "Infinity",
        '"\\ud800"',
        '"\\ud800\\u0041"',
        "[" * 200 + "]" * 200,
        "9" * 30,
        "nul",
        "",
        "1 2",
        '{"a":1,}',
        "\ufeff1",
    ],
    ids=lambda value: value[:12],
)
@pytest.mark.parametrize("place", ["{}", '{{"context":{{"metadata":{{"a":{}}}}}}}', '{{"x_new":{},"role":"user"}}'])
def test_hostile_json_is_refused(place, value):
    """Nesting, numbers and characters that cannot be kept are InvalidData anywhere in the bytes."""
    raw = place.format(value).encode()
    for kind in (AgentState, Message, AgentSession):
        with pytest.raises(InvalidData) as caught:
            codec.decode(kind, raw)
        assert caught.value.path.startswith("$")


@pytest.mark.parametrize("raw", [None, 5, "text\ud800", [], object()])
def test_only_bytes_are_decoded(raw):
    """Any other type than bytes is InvalidData too."""
    for read in (codec.decode_plain, codec.decode_message, lambda raw: codec.decode(AgentState, raw)):
        with pytest.raises(InvalidData):
            read(raw)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_callers_data_is_checked_where_it_is_written(name):
    """Data that would not come back the same is InvalidData with its path when it is written, never changed."""
    given = HOSTILE[name]
    message = Message.user("x", metadata={"given": given})
    state = AgentState().with_metadata("given", given)
    inside = AgentState().with_messages(message)
    for write in (lambda: codec.encode_message(message), message.to_dict, state.to_dict, inside.to_dict):
        _, error = tried(write)
        if error is None:
            back = Message.from_dict(message.to_dict()).metadata["given"]
            assert back == (list(given) if isinstance(given, tuple) else given)
        else:
            assert "metadata.given" in error.path


NAN = float("nan")


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (Message.tool("c", {"a": NAN}), "$.parts[0].content.a"),
        (Message.assistant(tool_calls=[ToolCall("t", {"a": {1, 2}})]), "$.parts[0].arguments.a"),
        (Message.assistant(ToolCall("t", opaque=[NAN])), "$.parts[0].opaque[0]"),
        (Message.assistant("x", Opaque("acme", {"k": b"x"})), "$.parts[1].body.k"),
        (Message.user(UnknownPart({"type": "new", "k": NAN})), "$.parts[0].body.k"),
        (Message.user("x", metadata={"when": START}), "$.metadata.when"),
        (Message("user", unknown={"x": NAN}), "$.x"),
        (Message("user", unknown={"metadata": {}}), "$.metadata"),
        (Message("user", (Text("x", unknown={"type": "y"}),)), "$.parts[0].type"),
        (Message("user", (Text(5),)), "$.parts[0].text"),
        (Message("tool", (ToolResult(5, "x"),)), "$.parts[0].call_id"),
        (Message("user", (), 5), "$.id"),
        (Message("user", (Text("\ud800"),)), "$"),
    ],
)
def test_a_message_that_could_not_be_read_again_is_not_written(message, path):
    """A message whose parts are of wrong types, or hold other values than JSON, is InvalidData with the path."""
    for write in (codec.encode_message, Message.to_dict):
        with pytest.raises(InvalidData) as caught:
            write(message)
        assert caught.value.path.startswith(path)


@pytest.mark.parametrize("given", [2**64, -(2**63) - 1, [2**70], deep(lambda node: [node], 101)])
def test_what_comes_back_equal_can_still_be_out_of_bounds(given):
    """JSON can have integers of any size and any depth, so comparing the values that come back does not find these."""
    for message in (Message.tool("c", given), Message.user("x", metadata={"a": given})):
        with pytest.raises(InvalidData):
            codec.encode_message(message)


@given(messages(), st.integers(0, 150))
def test_the_quick_look_and_the_close_one_agree(message, brackets):
    """A message has the same bytes and comes back the same from the quick check and the full one."""
    told = message.with_metadata(code="[" * brackets)  # too many for the quick check beyond 100
    for each in (message, told):
        raw, settled = codec.encode_settled(each)
        assert raw == codec.encode(each, lambda span: 0)
        assert settled == each == codec.decode_message(raw)


def with_result(result: Any) -> AgentState:
    run = ToolExecution(ToolCall("t"), START, result=result)
    return AgentState().with_current_step(AgentStep.of([], tool_executions=[run]))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (AgentState().with_metadata("a", NAN), "$.context.metadata.a"),
        (AgentState().with_metadata("a", 2**64), "$.context.metadata.a"),
        (AgentState().with_response_format({"a": {1}}), "$.context.response_format.a"),
        (AgentState().with_system_prompt(5), "$.context.system_prompt"),
        (AgentState().with_system_prompt("\ud800"), "$"),
        (AgentState().with_task(["x"]), "$.task"),
        (AgentState().with_model("offline"), "$.model"),
        (AgentState(execution_count=2**64), "$.execution_count"),
        (AgentState(created_at=datetime(2030, 1, 1)), "$.created_at"),
        (AgentState(context=AgentContext(transcript=[Message.user("x")])), "$.context.transcript"),
        (with_result({"a": NAN}), "$.execution.current_step.tool_executions[0].result.a"),
        (AgentStep(output_messages=[Message.user("x")]), "$.output_messages"),
        (AgentStep(inference_response=InferenceResponse(usage=Usage(cost=NAN))), "$.inference_response.usage.cost"),
        (StepExecution(AgentStep(), datetime(2030, 1, 1)), "$.started_at"),
        (AgentDefinition("a", metadata={"a": object()}), "$.metadata.a"),
        (AgentSessionInfo("a", "b", status="archived"), "$.status"),
    ],
)
def test_a_value_that_could_not_be_read_again_is_not_written(value, path):
    """A value with a field of a wrong type, or with data that JSON cannot hold, is InvalidData with the path."""
    for write in (Value.to_dict, lambda value: codec.encode(value, lambda span: 0)):
        with pytest.raises(InvalidData) as caught:
            write(value)
        assert caught.value.path.startswith(path)


def test_a_mapping_is_checked_too():
    """A mapping that is encoded by itself follows the same rule."""
    assert codec.encode({"a": [1, None]}) == b'{"a":[1,null]}'
    for wrong in ({"a": NAN}, {"a": {1}}, {"a": START}, {5: 1}):
        with pytest.raises(InvalidData):
            codec.encode(wrong)


def test_what_is_too_large_is_not_written(monkeypatch):
    """Bytes over the cap are InvalidData with both numbers."""
    for module in (codec.messages, codec.values):
        monkeypatch.setattr(module, "MAX_BYTES", 1000)
    codec.encode_message(Message.user("x" * 800))
    with pytest.raises(InvalidData, match="1,000"):
        codec.encode_message(Message.user("x" * 1000))


def test_only_messages_are_encoded_as_messages():
    """A text in place of a message is InvalidData."""
    with pytest.raises(InvalidData):
        codec.encode_message("hi")


def test_a_transcript_cannot_be_encoded_without_names_for_its_logs():
    """Bytes refer to logs, so these need names."""
    state = AgentState().with_messages(Message.user("hi"))
    with pytest.raises(InvalidData, match="named"):
        codec.encode(state)
    with pytest.raises(InvalidData):
        codec.decode(AgentState, codec.encode(state, lambda span: 0))


@pytest.mark.parametrize(
    ("logs", "path"),
    [
        (5, "$.logs"),
        ({"0": 5}, "$.logs.0"),
        ({"0": {}}, "$.logs.0"),
        ({"0": {"base": 0}}, "$.logs.0"),
        ({"0": {"base": -1, "messages": []}}, "$.logs.0"),
        ({"0": {"base": "0", "messages": []}}, "$.logs.0.base"),
        ({"0": {"base": 0, "messages": [], "colour": 1}}, "$.logs.0"),
        ({"0": {"base": 0, "ref": ["store"]}}, "$.logs.0.ref"),
        ({"0": {"base": 0, "messages": [{"role": "robot"}]}}, "$.logs.0.messages[0].role"),
        ({"0": {"base": 0, "messages": [{"role": "user", "id": 5}]}}, "$.logs.0.messages[0].id"),
        ({"0": {"base": 0, "messages": []}}, "$.context.transcript"),
        ({"0": {"base": 1, "messages": [{"role": "user"}]}}, "$.context.transcript"),
        ({"1": {"base": 0, "messages": [{"role": "user"}]}}, "$.context.transcript"),
    ],
)
def test_logs_hold_what_is_named(logs, path):
    """A log of a wrong form, or one without a named span, is InvalidData at its place."""
    with pytest.raises(InvalidData) as caught:
        AgentState.from_dict({"format": 1, "context": {"transcript": [["0", 0, 1]]}, "logs": logs})
    assert caught.value.path == path


def test_unread_spans_are_no_longer_than_a_length_can_be():
    """Unread spans cannot add up to a view that is too long for Python's len()."""
    document = {"format": 1, "context": {"transcript": HOSTILE["endless unread spans"]}}
    with pytest.raises(InvalidData):
        AgentState.from_dict({**document, "logs": {"0": {"base": 0, "ref": ["store", 1]}}})


def test_a_path_is_not_as_long_as_the_data():
    """The path of a deep value is cut short, so that an error can be printed."""
    with pytest.raises(InvalidData) as caught:
        codec.check_json(deep(lambda node: {"a" * 1000: node}, 200))
    assert len(str(caught.value)) < 1000


@given(json_values)
def test_json_is_json(value):
    """Any JSON passes the check, and comes back."""
    codec.check_json(value)
    assert codec.decode_plain(codec.encode({"value": value})) == {"value": value}


def test_deep_data_comes_back_wherever_it_stands():
    """Data of the allowed depth can be read again, at any depth of a document."""
    data = deep(lambda node: [node], codec.MAX_DEPTH)
    state = with_result(data).with_messages(Message.tool("c", data, metadata={"a": data[0]}))
    assert_comes_back(state.with_metadata("a", data[0]))
    for too_deep in (with_result([data]), AgentState().with_messages(Message.tool("c", [data]))):
        with pytest.raises(InvalidData, match="nested deeper"):
            too_deep.to_dict()


def test_native_types_pass_the_check_for_typed_fields():
    """check_json accepts datetimes and bytes, which a loader of TOML or YAML returns for fields of those types."""
    codec.check_json({"deadline": START, "data": b"x"})
    budget = codec.convert(ExecutionBudget, {"deadline": START + timedelta(days=1)})
    assert budget.deadline == START + timedelta(days=1)
