"""Rows that the PostgreSQL store sends: text without NULs, and the bytes of all rows in one piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.model.ids import SessionId
from perdure.stores.engine import Interfered
from perdure.stores.format.rows import checksum
from perdure.stores.jobs import erasing
from perdure.stores.jobs.claiming import COLUMNS_OF_FACTS
from perdure.stores.postgres.parcel import Parcel
from perdure.stores.postgres.rows import plain, queries_of, restored


@given(st.text(alphabet=st.sampled_from("\x00\\0a'%é")))
def test_any_text_survives(text: str) -> None:
    """It is sent without NULs, and comes back as it was."""
    assert "\x00" not in plain(text)
    assert restored(plain(text)) == text


@given(st.text(alphabet=st.sampled_from("\x00\\0a")), st.text(alphabet=st.sampled_from("\x00\\0a")))
def test_different_texts_stay_different(one: str, other: str) -> None:
    """A filter finds what was stored, and nothing else."""
    assert (plain(one) == plain(other)) == (one == other)


@given(st.lists(st.binary(max_size=20)), st.integers(1, 2**40), st.integers(0, 2**40))
def test_each_row_finds_its_bytes(bodies: list[bytes], log: int, start: int) -> None:
    """A row names where its bytes begin, from 1 as SQL counts, and its checksum is that of its place."""
    parcel = Parcel()
    parcel.bytes_at(b"before")
    row = parcel.messages(log, start, bodies)
    blob = parcel.statement("", waits=False)[1]["blob"]
    if not bodies:
        assert row == {}
        return
    assert (row["said_in"], row["said_from"]) == (log, start)
    told = zip(row["said_sums"], row["said_starts"], row["said_sizes"], bodies, strict=True)
    for pos, (crc, first, size, body) in enumerate(told, start):
        assert blob[first - 1 : first - 1 + size] == body
        assert crc == checksum(body, log, pos)


def test_a_job_begins_again_if_the_session_it_reads_is_not_the_one_it_locked() -> None:
    """It waited for an erasure and locked nothing; by then the session had been created again, under another number."""
    queries = queries_of(erasing.delete(SessionId("s")), 0.0)
    asked = next(queries)[0]
    while "FOR UPDATE" not in asked:  # callers and holds are looked for first
        asked = queries.send([])[0]
    facts = queries.send([])
    while "epoch" not in facts[0]:
        facts = queries.send([])
    assert "FROM session" in facts[0]
    created_again = dict.fromkeys(COLUMNS_OF_FACTS) | {"sid": 5}
    with pytest.raises(Interfered, match="was created while its row was waited for"):
        queries.send([(*created_again.values(),)])
