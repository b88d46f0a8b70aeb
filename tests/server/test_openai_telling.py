"""Events of a response: what a client gets when a model begins its answer again, or a process dies."""

from __future__ import annotations

from typing import Any

from perdure.model.ids import SessionId, now
from perdure.model.loop_events import AgentStart, MessageEnd
from perdure.model.message import Message, Text, Thinking
from perdure.model.session import AgentSessionInfo
from perdure.protocols import JournalEntry
from perdure.server.feeds import Piece
from perdure.server.openai.finding import Found
from perdure.server.openai.ids import ResponseId, conversation_id, handle_of, handled, session_of
from perdure.server.openai.telling import Telling

RUN = "r1"


def _found() -> Found:
    at = now()
    info = AgentSessionInfo(id=SessionId("a"), agent_name="clerk", created_at=at, updated_at=at)
    start = JournalEntry(11, "agent_start", {"at": at.isoformat()}, RUN)
    return Found(id=ResponseId(SessionId("a"), "k"), info=info, state="running", asked={}, run=RUN, entries=[start])


def _begun(after: int = -1) -> Telling:
    telling = Telling(_found(), after)
    assert list(telling.take(AgentStart(loop_id=RUN, cursor=11))) == []
    return telling


def _message(text: str, **metadata: Any) -> MessageEnd:
    parts = (Thinking("hm"), Text(text))
    return MessageEnd(
        loop_id=RUN, cursor=14, message=Message("assistant", parts, "m", {"execution_id": RUN, **metadata})
    )


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def test_an_answer_that_begins_again_is_another_item() -> None:
    """The item of the first attempt is closed as incomplete, and the response does not have it."""
    telling = _begun()
    told = [*telling.hear(Piece(RUN, "m", 0, 0, "Hel"))]
    told += telling.hear(Piece(RUN, "m", 1, 0, "Good "))
    told += telling.take(_message("Good morning."))
    done = [event["item"].get("status") for event in told if event["type"] == "response.output_item.done"]
    assert done[:2] == ["incomplete", "completed"]
    assert [item["type"] for item in telling.output] == ["message", "reasoning"]
    assert telling.output[0]["content"][0]["text"] == "Good morning."
    numbers = [event["sequence_number"] for event in told]
    assert numbers == sorted(set(numbers))


def test_an_answer_that_comes_out_otherwise_is_another_item() -> None:
    telling = _begun()
    told = [*telling.hear(Piece(RUN, "m", 0, 0, "Hel")), *telling.take(_message("Good morning."))]
    assert _text(told) == "HelGood morning."
    assert [item["type"] for item in telling.output] == ["message", "reasoning"]


def test_an_answer_that_a_killed_process_left_is_void() -> None:
    telling = _begun()
    told = [
        *telling.hear(Piece(RUN, "m", 0, 0, "Hel")),
        *telling.take(_message("Hel", incomplete=True, superseded=True)),
    ]
    assert told[-1]["item"]["status"] == "incomplete"
    assert telling.output == []


def test_every_character_is_a_place_to_continue_from() -> None:
    """From any event, the record gives the rest, and nothing twice."""
    text = "Good morning."
    for length in range(1, len(text)):
        told = [*_begun().hear(Piece(RUN, "m", 0, 0, text[:length]))]
        rest = [*_begun(told[-1]["sequence_number"]).take(_message(text))]
        assert _text(told) + _text(rest) == text
        kinds = [event["type"] for event in told + rest]
        assert kinds.count("response.output_item.added") == 2  # the answer, and the reasoning before it
        pieces = [*_begun(told[-1]["sequence_number"]).hear(Piece(RUN, "m", 0, 0, text))]
        assert _text(told) + _text(pieces) == text


def test_what_was_told_of_a_void_answer_is_taken_back_by_another_stream() -> None:
    """A client that saw the first attempt gets its end, then the second one, whole or not."""
    (*_, piece) = _begun().hear(Piece(RUN, "m", 0, 0, "Hel"))
    for more in (
        [*_begun(piece["sequence_number"]).hear(Piece(RUN, "m", 1, 0, "Good "))],
        [*_begun(piece["sequence_number"]).take(_message("Hel", incomplete=True, superseded=True))],
    ):
        assert (more[0]["type"], more[0]["item"]["status"]) == ("response.output_item.done", "incomplete")
        assert more[0]["output_index"] == 0
        assert more[0]["sequence_number"] > piece["sequence_number"]
    (*_, second) = _begun(piece["sequence_number"]).hear(Piece(RUN, "m", 1, 0, "Good "))
    assert _text([*_begun(second["sequence_number"]).take(_message("Good morning."))]) == "morning."


def test_ids_say_one_thing_in_one_way() -> None:
    made = ResponseId(SessionId("a.b"), "k", 7)
    assert ResponseId.of(str(made)) == made
    assert session_of(conversation_id("a.b")) == "a.b"
    assert handled(handle_of("a.b", 3)) == ("a.b", 3)
    for wrong in ("", "resp_", "resp_!", str(made) + "=", str(made)[:-1], conversation_id("a.b"), "resp_é"):
        assert ResponseId.of(wrong) is None
        assert handled(wrong) is None
    assert session_of(str(made)) is None
