"""What one append puts on record, made ready to be written: the same bytes and checksums in every SQL store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from perdure import codec
from perdure.protocols import Entry
from perdure.stores.packing import pack_entries
from perdure.stores.rows import checksum

LAST = 2**63 - 1
"""No number of a row is greater."""


class Batch(msgspec.Struct, frozen=True):
    """What one append puts on record, packed; and how far in it each run reaches, counted from its first entry."""

    count: int
    run: str | None
    reach: Mapping[str, tuple[int, int]]
    body: bytes


def prepare_batch(entries: Sequence[Entry]) -> Batch | None:
    """Entries made ready for the writer; InvalidData before anything is written."""
    if not entries:
        return None
    reach: dict[str, tuple[int, int]] = {}
    for place, entry in enumerate(entries):
        if entry.run is not None:
            reach[entry.run] = (reach.get(entry.run, (place, place))[0], place)
    run, body = pack_entries(prepare_entries(entries))
    return Batch(len(entries), run, reach, body)


def prepare_entries(entries: Iterable[Entry]) -> list[tuple[Entry, bytes]]:
    """Entries with their bytes; InvalidData before anything is written."""
    prepared = []
    for entry in entries:
        codec.check_text(f"{entry.kind}/{entry.run}", "$.kind")
        prepared.append((entry, codec.encode_json(entry.body, f"$.{entry.kind}")))
    return prepared


def batch_checksum(sid: int, last: int, batch: Batch) -> int:
    return checksum(batch.body, sid, last, checksum(f"{batch.run}/{batch.count}".encode()))


def entry_checksum(sid: int, seq: int, run: str | None, kind: str, body: bytes) -> int:
    return checksum(body, sid, seq, checksum(f"{run}/{kind}".encode()))
