"""Ids and the clock."""

from __future__ import annotations

import asyncio
import copy
import pickle
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidSessionId
from perdure.model import ids
from perdure.model.ids import SessionId

THEN = datetime(2031, 2, 3, tzinfo=UTC)


@pytest.mark.parametrize("text", ["a", "0", "Z9", "a.b", "a_b", "a-b", "a..b", "con", "x" * 200, "0" + "-" * 199])
def test_a_well_formed_id_is_taken_as_it_is(text):
    """An id of the allowed form is the same text."""
    assert SessionId(text) == text
    assert isinstance(SessionId(text), str)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        ".hidden",
        "../etc/passwd",
        "a/b",
        "a\\b",
        "/abs",
        "C:\\x",
        "a\x00b",
        "-rf",
        "_x",
        "a b",
        " a",
        "a\n",
        "a\r\n",
        "a:b",
        "a%2e",
        "ünï",
        "a\u0661",
        "a\u202e",
        "\uff0e\uff0e",
        "a\ud800",
        "x" * 201,
        "*",
        "a?b",
    ],
)
def test_any_other_text_is_refused(text):
    """An id that could leave its directory, or be read in two ways, is InvalidSessionId."""
    with pytest.raises(InvalidSessionId):
        SessionId(text)


def test_an_id_that_is_too_long_is_told_its_length():
    """It is cut off in the message, where it would look like a right one."""
    with pytest.raises(InvalidSessionId, match=r"^'x{79} is not a session id: it has 201 characters\. "):
        SessionId("x" * 201)


@pytest.mark.parametrize("value", [None, 5, b"abc", ["a"], object()])
def test_only_text_is_an_id(value):
    """A value that is not a text is refused in the same way."""
    with pytest.raises(InvalidSessionId):
        SessionId(value)


@given(st.text())
def test_what_is_accepted_is_safe_as_a_file_name(text):
    """Any accepted text stays within its directory."""
    try:
        accepted = SessionId(text)
    except InvalidSessionId:
        return
    assert accepted.isascii()
    assert 1 <= len(accepted) <= 200
    assert not set(accepted) & set("/\\\0: ")
    assert accepted not in (".", "..")


def test_an_id_is_kept_by_itself():
    """An id made from an id is that id, and copies and pickles stay ids."""
    made = SessionId.generate()
    assert SessionId(made) is made
    assert type(copy.deepcopy(made)) is SessionId
    assert type(pickle.loads(pickle.dumps(made))) is SessionId


def test_generated_ids_are_uuid7_and_sorted_by_time():
    """Generated ids are valid, distinct UUIDv7 texts that sort in order of creation."""
    made = [SessionId.generate() for _ in range(1000)]
    assert {uuid.UUID(each).version for each in made} == {7}
    assert sorted(set(made)) == made


def test_the_clock_gives_utc():
    """Without a replacement, now() is aware and in UTC."""
    assert ids.now().tzinfo is UTC


def test_clock_and_ids_are_replaced_within_a_block_only():
    """use() replaces only the given functions, nests, and ends with its block."""
    with ids.use(clock=lambda: THEN):
        assert ids.now() == THEN
        assert uuid.UUID(ids.new_id()).version == 7
        with ids.use(ids=lambda: "fixed"):
            assert (ids.now(), ids.new_id()) == (THEN, "fixed")
            assert SessionId.generate() == "fixed"
        assert ids.new_id() != "fixed"
    assert ids.now() != THEN


def test_an_error_ends_the_replacement_too():
    """A block left by an exception restores clock and ids."""
    with pytest.raises(KeyError), ids.use(clock=lambda: THEN, ids=lambda: "fixed"):
        raise KeyError
    assert ids.now() != THEN
    assert ids.new_id() != "fixed"


async def test_tasks_started_within_the_block_see_the_replacement_and_others_do_not():
    """A replacement holds for this task and those it starts, not for other tasks."""
    entered, seen = asyncio.Event(), asyncio.Event()

    async def neighbour() -> datetime:
        await entered.wait()
        try:
            return ids.now()
        finally:
            seen.set()

    async def child() -> datetime:
        return ids.now()

    beside = asyncio.create_task(neighbour())
    with ids.use(clock=lambda: THEN):
        entered.set()
        await seen.wait()
        assert await asyncio.create_task(child()) == THEN
    assert await beside != THEN


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4), st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_no_two_sequences_of_names_share_an_id(one: list[str], other: list[str]) -> None:
    """Names may have slashes, halves of surrogate pairs, and look like a made id."""
    assert (SessionId.of(*one) == SessionId.of(*other)) is (one == other)


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_the_id_of_names_is_one_and_is_not_changed_again(names: list[str]) -> None:
    made = SessionId.of(*names)
    assert SessionId(str(made)) == made
    assert SessionId.of(*names) == made


def test_a_name_that_is_an_id_stays_as_it_is() -> None:
    assert SessionId.of("order-7") == "order-7"
    made = SessionId.of("order 7", "ada")
    assert made.startswith("order-7-ada.h")
    assert SessionId.of(made) != made  # or it would stand for two


@pytest.mark.parametrize("names", [(), (5,), ("a", None)])
def test_names_are_texts(names: tuple[object, ...]) -> None:
    with pytest.raises(InvalidSessionId):
        SessionId.of(*names)  # type: ignore[arg-type]


@given(st.text(min_size=1), st.text(min_size=1))
def test_the_marks_of_two_owners_differ(one: str, other: str) -> None:
    assert (SessionId.under(one, "x") == SessionId.under(other, "x")) is (one == other)
    assert SessionId.under(one, SessionId.under(one, "x")) == SessionId.under(one, "x")


def test_a_name_that_is_too_long_with_its_mark_is_refused() -> None:
    SessionId.under("ada", "x" * 182)
    with pytest.raises(InvalidSessionId):
        SessionId.under("ada", "x" * 183)
