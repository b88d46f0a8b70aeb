"""What the PostgreSQL store sends: text without NULs, and rows whose bytes stand in one piece."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from perdure.stores.format.rows import checksum
from perdure.stores.postgres.orders import Parcel
from perdure.stores.postgres.rows import plain, restored


@given(st.text(alphabet=st.sampled_from("\x00\\0a'%é")))
def test_any_text_survives(text: str) -> None:
    """It holds no NUL on its way, and comes back as it was."""
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
    parcel.put_messages(3, log, start, bodies)
    sent = parcel.parameters()
    rows = json.loads(sent["msgs"])
    assert [row["pos"] for row in rows] == [*range(start, start + len(bodies))]
    for row, body in zip(rows, bodies, strict=True):
        assert sent["blob"][row["start"] - 1 : row["start"] - 1 + row["size"]] == body
        assert row["crc"] == checksum(body, log, row["pos"])
