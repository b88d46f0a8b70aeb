"""Sessions that become rows and come back, without a store in between."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.strategies import sessions, states

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData
from perdure.model.ids import now
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Tape, Transcript
from perdure.protocols import StoredAt
from perdure.stores.format.gathering import gathered
from perdure.stores.format.heads import FORMAT, INLINE, PREFIX, StoredHead, encode_head
from perdure.stores.format.placement import Placement, foreign_stretches, is_at_hand
from perdure.stores.format.rows import Values, check_row, checksum
from perdure.stores.tapes import TapeCache, consolidate
from perdure.testing.samples import fork, new_session, note, run_of, say, seen, show, texts

ORIGIN = "a store"


class Rows:
    """A store that consists of its rows alone: logs, heads and values."""

    def __init__(self) -> None:
        self.logs: dict[int | str, list[bytes]] = {}
        self.heads: dict[tuple[str, int], bytes] = {}
        self.values: Values = {}

    def keep(self, session: AgentSession, log: int = 1, written: dict[str, StoredAt] | None = None) -> AgentSession:
        placement = Placement(session, ORIGIN, written or {})
        rows = self.logs.setdefault(log, [])
        settled = placement.settle(LogRef(ORIGIN, log), len(rows))
        kept = AgentSession.reconstitute(settled, version=session.version + 1, updated_at=now())
        head, values, _ = encode_head(kept, "op")
        rows.extend(placement.new)
        self.heads[kept.id, kept.version] = head
        self.values.update(values)
        return kept

    def load(
        self, session_id: str, version: int, *, known: AgentSession | None = None, all: bool = False
    ) -> AgentSession:
        head = StoredHead(self.heads[session_id, version], session_id, version)
        values = gathered(head, self.values.__getitem__).values
        shelf = TapeCache(ORIGIN, known)
        wanted = [(log, 0, len(rows)) for log, rows in self.logs.items()] if all else head.wanted(values)
        for log, start, stop in shelf.missing(wanted):
            shelf.put(log, start, [codec.decode_message(row) for row in self.logs[log][start:stop]])
        return head.session(values, shelf.span)


def as_kept(session: AgentSession, kept: AgentSession) -> AgentSession:
    return AgentSession.reconstitute(session, version=kept.version, updated_at=kept.info.updated_at)


@given(sessions())
def test_any_session_comes_back_from_its_rows(session: AgentSession) -> None:
    """With all messages read it is equal; after a load it shows the same; and each message is one row."""
    rows = Rows()
    kept = rows.keep(session)
    assert kept == as_kept(session, kept)
    assert rows.load(session.id, 1, all=True) == kept
    assert seen(rows.load(session.id, 1)) == seen(kept)
    stored = [codec.decode_message(row).id for row in rows.logs[1]]
    assert len(stored) == len(set(stored))
    rows.keep(kept)
    assert len(rows.logs[1]) == len(stored)


@given(st.data())
def test_a_loaded_session_goes_on(data: st.DataObject) -> None:
    """Changes to a loaded session are kept like changes to a new one, whether or not it is consolidated."""
    rows = Rows()
    session = rows.keep(data.draw(sessions()))
    versions = [session]
    for _ in range(data.draw(st.integers(1, 2))):
        loaded = rows.load(
            session.id, versions[-1].version, all=True, known=data.draw(st.sampled_from([None, *versions]))
        )
        changed = loaded.with_state(data.draw(states(start=loaded.state, changes=3)))
        kept = rows.keep(changed)
        assert kept == as_kept(changed, kept)
        if data.draw(st.booleans()):
            kept = consolidate(kept)
            assert kept == as_kept(changed, kept)
        versions.append(kept)
    for version in versions:
        assert rows.load(session.id, version.version, all=True) == version
        assert seen(rows.load(session.id, version.version)) == seen(version)
        assert seen(rows.load(session.id, version.version, known=data.draw(st.sampled_from(versions)))) == seen(version)


def test_consolidating_changes_no_older_value() -> None:
    """Values that share tapes with a consolidated one still show what they showed."""
    rows = Rows()
    first = rows.keep(new_session("a", "b"))
    second = consolidate(rows.keep(say(first, "c")))
    branch = rows.keep(say(fork(second), "C"), log=2)
    third = consolidate(rows.keep(say(second, "d")))
    assert len(third.state.transcript.pieces) == 1
    assert [texts(each) for each in (first, second, third)] == [[*"ab"], [*"abc"], [*"abcd"]]
    assert texts(branch) == [*"abcC"]


@given(st.data())
def test_what_is_written_is_referred_to(data: st.DataObject) -> None:
    """Messages that are in a log already are not new, wherever they are in the log."""
    rows, session = Rows(), run_of(new_session(*"abc"))
    ahead = data.draw(st.lists(st.sampled_from([*session.state.messages]), unique_by=lambda each: each.id))
    rows.logs["branch"] = [codec.encode_message(message) for message in ahead]
    written = {message.id: StoredAt(LogRef(ORIGIN, "branch"), place) for place, message in enumerate(ahead)}
    kept = rows.keep(session, written=written)
    stored = {codec.decode_message(row).id for row in rows.logs[1]}
    assert stored.isdisjoint(written)
    assert rows.load(session.id, 1, all=True) == kept
    assert {log for log, _, _ in foreign_stretches(kept, LogRef(ORIGIN, 1))} == ({"branch"} if ahead else set())


def test_a_fork_names_its_parents_log() -> None:
    """A fork adds nothing to its parent's log; its own messages go to its own log."""
    rows = Rows()
    parent = rows.keep(run_of(new_session("a", "b")), log=1)
    child = rows.keep(say(fork(parent), "c"), log=2)
    assert [len(rows.logs[log]) for log in (1, 2)] == [5, 1]
    assert rows.load(child.id, 1, all=True) == child
    assert {log for log, _, _ in foreign_stretches(child, LogRef(ORIGIN, 2))} == {1}


def scattered(session: AgentSession, count: int) -> AgentSession:
    """Return the session with a view of that many pieces."""
    view = session.state.transcript
    return show(session, Transcript(piece for n in range(count) for piece in view.cut(2 * n, 2 * n + 1).pieces))


@pytest.mark.parametrize("count", [1, PREFIX, PREFIX + 1, 2 * PREFIX, 100])
def test_many_pieces_go_by_hash(count: int) -> None:
    """Beyond a number of pieces, the first ones are stored once, by hash, and come back in their places."""
    rows = Rows()
    kept = rows.keep(scattered(rows.keep(new_session(*map(str, range(2 * count)))), count))
    head = StoredHead(rows.heads[kept.id, 2], kept.id, 2).head
    assert ("prefix" in head.hashed) == (count > PREFIX)
    assert rows.load(kept.id, 2, all=True) == kept
    assert texts(rows.load(kept.id, 2)) == [str(2 * n) for n in range(count)]


def test_versions_share_the_prefix() -> None:
    """A turn on a view of many pieces does not store a second copy of them."""
    rows = Rows()
    kept = rows.keep(scattered(rows.keep(new_session(*map(str, range(200)))), 100))
    values = len(rows.values)
    for turn in range(3):
        kept = rows.keep(say(kept, str(turn)))
    assert len(rows.values) == values
    assert len(rows.heads[kept.id, 5]) < 2 * len(rows.heads[kept.id, 1]) + 32 * PREFIX


def test_what_is_large_goes_by_hash() -> None:
    """Large metadata, prompts and definitions, and those that many versions share, are stored once."""
    rows = Rows()
    large = note(new_session("a"), "notes", "x" * INLINE)
    kept = rows.keep(large.with_state(large.state.with_system_prompt("y" * INLINE)))
    head = StoredHead(rows.heads[kept.id, 1], kept.id, 1).head
    assert {*head.hashed} == {"metadata", "system_prompt"}
    values = len(rows.values)
    again = rows.keep(say(kept, "b"))
    assert len(rows.values) == values
    assert rows.load(kept.id, 2, all=True) == again
    assert b"x" * 20 not in rows.heads[kept.id, 2]


@given(st.data())
def test_a_damaged_head_is_corrupt_or_readable(data: st.DataObject) -> None:
    """Any bytes in place of a head or a value are readable, or raise CorruptRecord and nothing else."""
    rows = Rows()
    session = run_of(note(new_session("a", "b", "c", owner="ann", tags=("vip",)), "notes", "x" * INLINE))
    kept = rows.keep(show(session, session.state.transcript.cover(0, 2, [Message.user("ab")], by="test")))
    parts = [rows.heads[kept.id, 1], *rows.values.values()]
    chosen = data.draw(st.integers(0, len(parts) - 1))
    damaged = bytearray(parts[chosen])
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    if chosen == 0:
        rows.heads[kept.id, 1] = bytes(damaged)
    else:
        rows.values[[*rows.values][chosen - 1]] = bytes(damaged)
    with suppress(CorruptRecord):
        head = StoredHead(rows.heads[kept.id, 1], kept.id, 1)
        assume(set(head.hashes(rows.values)) <= set(rows.values))
        head.wanted(rows.values)
        head.session(rows.values, TapeCache(ORIGIN).span)


def test_a_head_of_another_session_or_version_is_corrupt() -> None:
    """A head says whose it is, and is not taken for another session's or version's."""
    rows = Rows()
    kept = rows.keep(new_session("a"))
    for session_id, version in (("other", 1), (kept.id, 2)):
        with pytest.raises(CorruptRecord):
            StoredHead(rows.heads[kept.id, 1], session_id, version)


def test_a_head_of_a_newer_format_is_refused() -> None:
    """A head in a newer release's format raises an error instead of being guessed at."""
    rows = Rows()
    kept = rows.keep(new_session("a"))
    plain = msgspec.json.decode(rows.heads[kept.id, 1])
    raw = msgspec.json.encode({**plain, "format": FORMAT + 1})
    with pytest.raises((CorruptRecord, InvalidData), match="format"):
        StoredHead(raw, kept.id, 1)


def test_unread_messages_are_not_at_hand() -> None:
    """A view with messages that a load has left in the store is known to be incomplete."""
    rows = Rows()
    full = rows.keep(new_session("a", "b", "c"))
    covered = rows.keep(show(full, full.state.transcript.cover(0, 2, [Message.user("ab")], by="test")))
    loaded = rows.load(covered.id, 2)
    assert is_at_hand(loaded)
    opened = show(loaded, loaded.state.transcript.uncover())
    assert not is_at_hand(opened)
    assert consolidate(opened) == opened


numbers = st.integers(0, 30)
stretches = st.tuples(st.sampled_from([1, 2, "b"]), numbers, st.integers(1, 9)).map(lambda s: (s[0], s[1], s[1] + s[2]))
LOGS = {log: [Message.user(f"{log}/{place}") for place in range(40)] for log in (1, 2, "b")}


def tapes_of(known: Iterable[tuple[int | str, int, int]]) -> list[Tape]:
    return [Tape(LOGS[log][start:stop], LogRef(ORIGIN, log), start) for log, start, stop in known]


@given(st.lists(stretches, max_size=5), st.lists(stretches, max_size=5))
@example(known=[(1, 1, 2), (1, 0, 1)], wanted=[(1, 0, 2)])
def test_a_shelf_gives_all_that_was_wanted(
    known: list[tuple[int | str, int, int]], wanted: list[tuple[int | str, int, int]]
) -> None:
    """After missing messages are read, the shelf has every wanted stretch, and the right one."""
    shelf = TapeCache(ORIGIN)
    for tape in tapes_of(known):
        shelf._keep(tape)
    for log, start, stop in shelf.missing(wanted):
        shelf.put(log, start, LOGS[log][start:stop])
    for log, start, stop in wanted:
        assert shelf.span(log, start, stop).messages() == LOGS[log][start:stop]
    assert shelf.missing(wanted) == []


@given(st.binary(max_size=40), st.lists(st.integers(0, 2**40), min_size=1, max_size=3), st.data())
def test_a_checksum_knows_bytes_and_place(body: bytes, place: list[int], data: st.DataObject) -> None:
    """One changed bit, or a neighbouring place, gives another checksum."""
    right = checksum(body, *place)
    if body:
        changed = bytearray(body)
        changed[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(bytes(changed), *place) != right
        moved = [*place[:-1], place[-1] + data.draw(st.integers(1, 1000))]
        assert checksum(body, *moved) != right


@pytest.mark.parametrize(("body", "place"), [(b"{}", ""), (b"{}", None), ("{}", 1), (None, 1)])
def test_a_column_of_another_type_is_damage(body: Any, place: Any) -> None:
    """A flipped bit in a row's header turns a number into a text."""
    with pytest.raises(CorruptRecord):
        check_row(body, checksum(b"{}", 1, 1), "alpha", "version 1", 1, place)
