"""The transcript: a piece table that behaves like a list."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from tests.strategies import transcripts

from perdure.errors import InvalidData, NotLoaded
from perdure.model.message import Envelope, Message, ToolCall, ToolResult
from perdure.model.transcript import Block, LogRef, Span, Tape, Transcript, every_span


def said(*texts: str) -> list[Message]:
    return [Message.user(text) for text in texts]


def texts_of(transcript: Transcript) -> list[str]:
    return [message.text for message in transcript]


def numbered(count: int) -> Transcript:
    return Transcript.of(said(*map(str, range(count))))


class Covered:
    """The plain model of a block: the messages it shows, and the items it covers."""

    def __init__(self, shown: list[Message], items: list[Any]) -> None:
        self.shown = shown
        self.items = items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Covered) and (self.shown, self.items) == (other.shown, other.items)


Items = list[Any]


def shown_by(item: Message | Covered) -> list[Message]:
    return item.shown if isinstance(item, Covered) else [item]


def view_of(items: Items) -> list[Message]:
    return [message for item in items for message in shown_by(item)]


def cut_items(items: Items, start: int, stop: int) -> Items:
    """Return the items from `start` to `stop`: a block cut through dissolves, one without a view goes with the next."""
    if (start, stop) == (0, len(view_of(items))):
        return items
    kept: Items = []
    place = 0
    for number, item in enumerate(items):
        shown = shown_by(item)
        wanted = [message for at, message in enumerate(shown, place) if start <= at < stop]
        to_the_end = start < stop == place and not view_of(items[number:])
        if (shown and wanted == shown) or (not shown and start <= place and (place < stop or to_the_end)):
            kept.append(item)
        else:
            kept += wanted
        place += len(shown)
    return kept


def first_whole_cut(view: list[Message], at: int) -> int:
    """Try every place: return the last one at or before `at` that parts no result from its call."""
    pairs = []
    for place, message in enumerate(view):
        for result in message.tool_results:
            homes = [i for i in range(place + 1) if any(c.id == result.call_id for c in view[i].tool_calls)]
            pairs += [(homes[-1], place)] if homes else []
    return max(p for p in range(at + 1) if not any(call < p <= result for call, result in pairs))


some_messages = st.lists(
    st.sampled_from(["user", "call", "result", "both"]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from(["c0", "c1", "c2"]))  # ids repeat, as in real sessions
    ),
    max_size=4,
)


def make(kinds: list[tuple[str, str]]) -> list[Message]:
    made = {
        "user": lambda _: Message.user("hi"),
        "call": lambda id: Message.assistant(tool_calls=[ToolCall("look", id=id)]),
        "result": lambda id: Message.tool(id, "seen"),
        "both": lambda id: Message.assistant(ToolCall("look", id=id), ToolResult(id, "seen")),
    }
    return [made[kind](id) for kind, id in kinds]


class AgainstAList(RuleBasedStateMachine):
    """Every verb on any value ever made, older ones too, against plain lists; and no value ever changes."""

    @initialize()
    def start(self) -> None:
        self.values: list[tuple[Transcript, Items]] = [(Transcript(), [])]

    def pick(self, data: st.DataObject) -> tuple[Transcript, Items]:
        newest = len(self.values) - 1
        return self.values[data.draw(st.just(newest) | st.integers(0, newest), label="of value")]

    def keep(self, transcript: Transcript, items: Items) -> None:
        self.values.append((transcript, items))

    @rule(data=st.data(), kinds=some_messages)
    def append(self, data: st.DataObject, kinds: list[tuple[str, str]]) -> None:
        transcript, items = self.pick(data)
        new = make(kinds)
        self.keep(transcript.append(*new), items + new)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        transcript, items = self.pick(data)
        start = data.draw(st.integers(0, len(transcript)))
        stop = data.draw(st.integers(start, len(transcript)))
        self.keep(transcript.cut(start, stop), cut_items(items, start, stop))

    @rule(data=st.data())
    def slice(self, data: st.DataObject) -> None:
        transcript, items = self.pick(data)
        bounds = st.none() | st.integers(-len(transcript) - 2, len(transcript) + 2)
        wanted = slice(data.draw(bounds), data.draw(bounds))
        assert list(transcript[wanted]) == view_of(items)[wanted]

    @rule(data=st.data(), keep_last=st.integers(0, 8))
    def trim(self, data: st.DataObject, keep_last: int) -> None:
        transcript, items = self.pick(data)
        view = view_of(items)
        start = first_whole_cut(view, max(0, len(view) - keep_last))
        trimmed = transcript.trim(keep_last)
        assert len(trimmed) >= min(keep_last, len(transcript))
        self.keep(trimmed, cut_items(items, start, len(view)))

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        transcript, _ = self.pick(data)
        self.keep(transcript.reset(), [])

    @rule(data=st.data(), kinds=some_messages)
    def cover(self, data: st.DataObject, kinds: list[tuple[str, str]]) -> None:
        transcript, items = self.pick(data)
        view = view_of(items)
        start = data.draw(st.integers(0, len(view)))
        stop = data.draw(st.integers(0, len(view)))
        edges = [len(view_of(items[:count])) for count in range(len(items) + 1)]
        if not (start < stop and start in edges and stop in edges):
            with pytest.raises(InvalidData):
                transcript.cover(start, stop, [], by="test")
            return
        shown = make(kinds)
        block = Covered(shown, cut_items(items, start, stop))
        before, after = cut_items(items, 0, start) if start else [], []
        if stop < len(view):
            after = cut_items(items, stop, len(view))
        self.keep(transcript.cover(start, stop, shown, by="test"), [*before, block, *after])

    @rule(data=st.data())
    def uncover(self, data: st.DataObject) -> None:
        transcript, items = self.pick(data)
        places = [place for place, item in enumerate(items) if isinstance(item, Covered)]
        if not places:
            with pytest.raises(InvalidData):
                transcript.uncover()
            return
        place = data.draw(st.sampled_from(places))
        ids = [piece.id for piece in transcript.pieces if isinstance(piece, Block)]
        block_id = None if place == places[-1] and data.draw(st.booleans()) else ids[places.index(place)]
        self.keep(transcript.uncover(block_id), [*items[:place], *items[place].items, *items[place + 1 :]])

    @precondition(lambda self: len(self.values) > 1)
    @rule(data=st.data())
    def compare(self, data: st.DataObject) -> None:
        """Values of the same messages are equal on any tapes."""
        (one, ones), (other, others) = self.pick(data), self.pick(data)
        if not any(isinstance(item, Covered) for item in ones + others):
            assert (one == other) is (ones == others)
            assert one == Transcript.of(ones)

    @invariant()
    def no_value_has_changed(self) -> None:
        for transcript, items in self.values:
            view = view_of(items)
            assert list(transcript) == view
            assert len(transcript) == len(view)

    @invariant()
    def it_is_a_sequence(self) -> None:
        transcript, items = self.values[-1]
        view = view_of(items)
        assert list(reversed(transcript)) == view[::-1]
        assert [transcript[i] for i in range(-len(view), len(view))] == view + view
        assert [transcript.index(message) for message in view] == [view.index(message) for message in view]
        assert all(message in transcript for message in view)
        assert bool(transcript) is bool(view)

    @invariant()
    def nothing_that_is_covered_is_lost(self) -> None:
        transcript, items = self.values[-1]
        todo, every = list(items), []
        while todo:
            item = todo.pop(0)
            todo[:0] = [*item.items, *item.shown] if isinstance(item, Covered) else []
            every += [] if isinstance(item, Covered) else [item]
        assert [message for span in every_span(transcript.pieces) for message in span.messages()] == every

    @invariant()
    def pieces_are_in_normal_form(self) -> None:
        transcript, _ = self.values[-1]
        pieces = transcript.pieces
        assert all(len(piece) for piece in pieces if isinstance(piece, Span))
        for one, next_one in itertools.pairwise(pieces):
            if isinstance(one, Span) and isinstance(next_one, Span):
                assert one.tape is not next_one.tape or one.stop != next_one.start


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(stateful_step_count=20)


def test_appending_shares_the_tape():
    """A thousand appends make one piece on one tape, and the first value still shows one message."""
    first = Transcript.of(said("0"))
    last = first
    for number in range(1, 1000):
        last = last.append(Message.user(str(number)))
    assert len(last.pieces) == 1
    assert last.pieces[0].tape is first.pieces[0].tape
    assert len(first.pieces[0].tape.items) == 1000
    assert (len(first), len(last)) == (1, 1000)


def test_a_branch_starts_a_tape_of_its_own():
    """Of two values made from one, the second copies nothing, and neither shows the other's messages."""
    base = Transcript.of(said("a", "b"))
    one, other = base.append(*said("c")), base.append(*said("d"))
    assert (texts_of(base), texts_of(one), texts_of(other)) == (["a", "b"], ["a", "b", "c"], ["a", "b", "d"])
    assert other.pieces[0].tape is base.pieces[0].tape
    assert other.pieces[1].tape.items == [other[-1]]
    assert len(base.pieces[0].tape.items) == 3
    assert len(other.append(*said("e")).pieces) == 2


def test_what_is_cut_is_not_copied():
    """Cuts, trims and covers name spans of the same tape, of any length."""
    whole = numbered(1000)
    tape = whole.pieces[0].tape
    for part in (whole[10:990], whole.trim(5), whole.cover(0, 900, [], by="x")):
        assert {span.tape for span in every_span(part.pieces)} == {tape}
        assert len(part.pieces) <= 2


def test_a_trimmed_view_goes_on_growing_on_its_tape():
    """A view that lost its beginning appends in place, so pieces do not add up over turns."""
    view = numbered(10)
    for number in range(100):
        view = view.append(Message.user(str(number))).trim(10)
    assert len(view.pieces) == 1


def test_a_stored_tape_is_never_appended_to():
    """Messages after a stored span are on a tape of their own until they are saved."""
    stored = Tape(said("a", "b"), LogRef("store", 1))
    view = Transcript([Span(stored, 0, 2)]).append(*said("c"))
    assert (len(stored.items), len(view.pieces), len(view)) == (2, 2, 3)


def test_appending_nothing_changes_nothing():
    """An append without messages is the same value."""
    view = numbered(3)
    assert view.append() is view
    assert Transcript().append() == Transcript()


class Interleaved(list[Message]):
    """A tape's list to which another thread appends just before the caller."""

    first: tuple[Message, ...] = ()

    def extend(self, messages: Any) -> None:
        other, self.first = self.first, ()
        super().extend(other)
        super().extend(messages)


@pytest.mark.parametrize("others", [1, 2, 3])
def test_an_append_that_another_thread_overtook_shows_its_own_messages(others):
    """A value never shows another thread's append between its read of the tape and its write."""
    items = Interleaved(said("a"))
    base = Transcript([Span(Tape(items), 0, 1)])
    items.first = tuple(said(*"xyz"[:others]))
    assert texts_of(base.append(*said("b", "c"))) == ["a", "b", "c"]
    assert texts_of(base) == ["a"]


def test_threads_that_share_a_value_do_not_see_each_other():
    """Many threads that append to one value each get exactly their own messages."""
    base = numbered(3)
    wrong: list[list[str]] = []

    def append(name: str) -> None:
        for count in range(300):
            mine = base.append(*said(f"{name}{count}"))
            mine = mine.append(*said("and", "more"))
            if texts_of(mine)[3:] != [f"{name}{count}", "and", "more"]:
                wrong.append(texts_of(mine))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=append, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_slices_take_steps_of_one_only():
    """A slice with another step is InvalidData."""
    assert texts_of(numbered(5)[1:3:1]) == ["1", "2"]
    for step in (2, -1):
        with pytest.raises(InvalidData):
            numbered(5)[::step]


def test_places_outside_are_index_errors():
    """An index beyond either end is an IndexError, as for a list."""
    for place in (3, -4, 10**20):
        with pytest.raises(IndexError):
            numbered(3)[place]
    with pytest.raises(IndexError):
        Transcript()[0]


def test_index_finds_a_message_by_id_within_bounds():
    """index() takes a message or an id, and bounds as a list's does."""
    view = numbered(6).append(Message.user("again", id="twice"), Message.user("again", id="twice"))
    assert view.index(view[4]) == view.index(view[4].id) == 4
    assert (view.index("twice"), view.index("twice", 7), view.index("twice", -1)) == (6, 7, 7)
    for bounds in ((0, 6), (0, -2), (8,)):
        with pytest.raises(ValueError, match="not in this transcript"):
            view.index("twice", *bounds)


def test_equality_looks_at_messages_not_at_tapes():
    """Equal messages on other tapes are equal; equal views over different messages are not."""
    messages = said("a", "b", "c")
    one = Transcript.of(messages)
    other = Transcript.of(messages[:1]).append(messages[1])
    other.append(Message.user("elsewhere"))
    assert one == other.append(messages[2])
    assert one != Transcript.of(messages[:2])
    assert one != messages
    assert one.cover(0, 1, messages[:1], by="x") != one
    with pytest.raises(TypeError):
        hash(one)


def test_blocks_differ_by_everything_they_hold():
    """Two blocks with one view are equal only if they cover the same and have equal fields."""
    view = numbered(4)
    one = view.cover(0, 2, said("sum"), by="x")
    (block, rest) = one.pieces
    assert Transcript([block, rest]) == one
    for change in ({"by": "y"}, {"id": "other"}, {"tokens_after": 3}, {"covered": ()}, {"unknown": {"a": 1}}):
        assert Transcript([replace(block, **change), rest]) != one


@given(transcripts())
def test_copies_are_equal(transcript):
    """deepcopy and pickle give an equal, independent transcript."""
    for twin in (copy.deepcopy(transcript), pickle.loads(pickle.dumps(transcript))):
        assert twin == transcript
        assert len(twin.append(Message.user("x"))) == len(transcript) + 1


def test_copying_an_unread_span_costs_nothing():
    """An unread span of a trillion messages is copied without making room for them."""
    unread = Transcript([Span(Tape(None, LogRef("store", 1)), 0, 10**12)])
    assert copy.deepcopy(unread) == unread
    assert pickle.loads(pickle.dumps(unread)) == unread


CALL, OTHER = ToolCall("look", id="c"), ToolCall("look", id="d")


@pytest.mark.parametrize(
    ("conversation", "keep_last", "kept"),
    [
        ([("user",), ("call", "c"), ("result", "c"), ("user",)], 2, 3),
        ([("user",), ("call", "c"), ("result", "c"), ("user",)], 1, 1),
        ([("call", "c"), ("call", "d"), ("result", "c"), ("result", "d")], 1, 4),
        ([("call", "c"), ("result", "c"), ("call", "c"), ("result", "c")], 3, 4),
        ([("user",), ("result", "gone"), ("user",)], 2, 2),
        ([("call", "c"), ("result", "c"), ("result", "gone")], 2, 3),
        ([("call", "c"), ("result", "c"), ("result", "gone")], 1, 1),
        ([("result", "c"), ("call", "c")], 2, 2),
        ([("user",), ("both", "c")], 1, 1),
        ([("user",), ("user",)], 0, 0),
        ([("user",), ("user",)], 9, 2),
    ],
)
def test_trim_never_parts_a_result_from_its_call(conversation, keep_last, kept):
    """The cut moves earlier until every kept result that has a call keeps it; ids may repeat, and calls be missing."""
    view = Transcript.of(make([(kind, *rest) if rest else (kind, "") for kind, *rest in conversation]))
    assert len(view.trim(keep_last)) == kept


def test_trimming_to_less_than_nothing_is_refused():
    """A negative number to keep is InvalidData."""
    with pytest.raises(InvalidData) as caught:
        numbered(3).trim(-1)
    assert caught.value.path == "$.keep_last"


def test_cover_shows_a_summary_and_keeps_what_it_covers():
    """A block shows its own messages, its author and its time, and restores the messages it covers."""
    view = numbered(6)
    covered = view.cover(1, 4, said("sum"), by="llm", tokens_before=90, tokens_after=9)
    assert texts_of(covered) == ["0", "sum", "4", "5"]
    (block,) = covered.blocks()
    assert (block.by, block.tokens_before, block.tokens_after) == ("llm", 90, 9)
    assert block.id
    assert block.at is not None
    assert covered.uncover() == covered.uncover(block.id) == view


def test_blocks_nest_and_come_off_from_the_outside():
    """A block may cover blocks; blocks() names all of them, outermost first, and uncover() removes one."""
    inner = numbered(6).cover(0, 2, said("in"), by="1")
    outer = inner.cover(0, 3, said("out"), by="2")
    assert [block.by for block in outer.blocks()] == ["2", "1"]
    assert outer.uncover() == inner
    with pytest.raises(InvalidData, match="no such"):
        outer.uncover(next(inner.blocks()).id)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 2), (0, 9), (0, 2), (2, 5)])
def test_cover_takes_whole_blocks(start, stop):
    """A range that is empty, outside the view, or ends inside a block is InvalidData."""
    view = numbered(4).cover(1, 2, said("a", "b"), by="x")
    with pytest.raises(InvalidData):
        view.cover(start, stop, said("sum"), by="y")


def test_a_cut_through_a_block_leaves_the_rest_of_what_it_showed():
    """A block that a cut goes through dissolves into the rest of its view."""
    view = numbered(4).cover(0, 3, said("a", "b"), by="x")
    assert texts_of(view[1:]) == ["b", "3"]
    assert not list(view[1:].blocks())


def test_a_block_that_shows_nothing_survives_other_verbs():
    """A block may hide messages without a summary, and can still be removed after other verbs."""
    view = numbered(6)
    hidden = view.cover(2, 4, [], by="x")
    assert texts_of(hidden) == ["0", "1", "4", "5"]
    for after in (hidden[:], hidden.trim(99), hidden.append(*said("6")), hidden.cover(0, 1, said("0"), by="y")):
        assert "2" in texts_of(after.uncover(next(hidden.blocks()).id))
    nothing = view.cover(0, 6, [], by="x")
    assert (len(nothing), nothing.trim(0).uncover()) == (0, view)


def test_compactions_may_nest_without_end():
    """Thousands of compactions, each over the one before, can be walked, compared and removed."""
    view = numbered(2)
    for _ in range(5000):
        view = view.cover(0, 2, said("sum"), by="x").append(*said("more"))
    assert sum(1 for _ in view.blocks()) == 5000
    assert sum(len(span) for span in every_span(view.pieces)) == 2 + 5000 + 5000
    assert view == view[:]
    assert view == Transcript(view.pieces)
    assert texts_of(view.uncover()) == ["sum", "more", "more"]


def test_unread_messages_have_a_length_and_raise_when_read():
    """Messages left in the store are counted, covered and compared; reading them raises NotLoaded."""
    ref = LogRef("store", 7)
    unread = Transcript([Span(Tape(None, ref), 10, 20)])
    view = unread.append(*said("new"))
    assert (len(view), len(view[5:]), texts_of(view[10:])) == (11, 6, ["new"])
    assert unread == Transcript([Span(Tape(None, ref, 10), 10, 20)])
    assert unread != Transcript([Span(Tape(None, ref), 10, 19)])
    for read in (lambda: list(view), lambda: view[0], lambda: list(reversed(view))):
        with pytest.raises(NotLoaded, match="history"):
            read()
    assert texts_of(view.cover(0, 10, said("sum"), by="x")) == ["sum", "new"]


def test_it_prints_its_size_not_its_messages():
    """repr() has its length and the number of its pieces."""
    assert repr(numbered(3)) == "<Transcript of 3 messages in 1 pieces>"


def test_what_is_read_equals_what_is_not() -> None:
    """The same places in a log are the same messages, whichever side has read them."""
    log = LogRef("store", 1)
    messages = [Message.user(str(number)) for number in range(4)]
    read = Transcript([Span(Tape(messages, log), 0, 2), Span(Tape(messages[2:], log, 2), 2, 4)])
    unread = Transcript([Span(Tape(None, log), 0, 4)])
    assert read == unread == read
    assert read != Transcript([Span(Tape(None, log), 0, 3)])
    assert unread != Transcript([Span(Tape(None, LogRef("store", 2)), 0, 4)])
    covered = read.cover(0, 3, [Message.user("less")], by="test", block_id="b")
    assert covered != read
    assert covered.uncover("b") == unread


def test_what_a_store_keeps_on_a_block_is_no_part_of_it() -> None:
    """A store's note is neither compared, stored nor copied, and goes with the block."""
    (block,) = Transcript.of([Message.user("a")]).cover(0, 1, [Message.user("b")], by="test").pieces
    assert isinstance(block, Block)
    same = replace(block)
    block.__dict__["known"] = "to a store"
    assert block == same
    assert "known" not in repr(block)
    assert replace(block).__dict__ == copy.copy(block).__dict__ == {}


def hidden(number: int) -> Message:
    return Message("system", (Envelope("acme", number),), f"hidden-{number}")


def test_hidden_messages_are_not_counted() -> None:
    """The last messages are the last ones shown; hidden ones among and after them are included."""
    view = Transcript.of([*said("a"), hidden(1), *said("b"), hidden(2), *said("c"), hidden(3)])
    assert [view.place_of_last(count) for count in (-1, 0, 1, 2, 3, 4)] == [6, 6, 4, 2, 0, 0]
    assert [len(view.trim(count)) for count in (0, 1, 2, 3, 9)] == [0, 2, 4, 6, 6]


def test_views_may_differ_by_what_is_hidden() -> None:
    """A reader then sees no difference, whichever is longer, in one log or in two."""
    short = Transcript.of([*said("a", "b")])
    long = short.append(hidden(1), hidden(2))
    elsewhere = Transcript.of([hidden(3), *short])
    for other in (long, elsewhere, long[:1].append(*long[1:], hidden(4))):
        assert short.differs_by_hidden(other)
        assert other.differs_by_hidden(short)
    assert long.differs_by_hidden(elsewhere)
    for other in (short.append(*said("c")), long.append(*said("c")), short[:1], short):
        assert not short.differs_by_hidden(other)
    covered = short.cover(0, 1, short[:1], by="test")  # the same messages, in a block
    assert covered != short
    assert not covered.differs_by_hidden(short)
