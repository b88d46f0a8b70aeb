"""The text of an answer that is being written, in a file beside the session's log.

`{id}.sketch` has one line for each piece. It is removed once its answer is in the log. A torn or damaged line ends it.
A file that comes back after a power cut belongs to an older state of the record, which its pieces tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perdure.stores.folder import Folder
from perdure.stores.tables import Record


def sketch_file(session_id: str) -> str:
    return f"{session_id}.sketch"


def read_sketches(folder: Folder, session_id: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start of each piece, its checksum and its body. The caller compares the checksums."""
    raw = folder.read(sketch_file(session_id)) or b""
    # What follows the last newline is a torn piece.
    for line in raw.split(b"\n")[:-1]:
        start, _, rest = line.partition(b" ")
        crc, _, body = rest.partition(b" ")
        if not (start.isdigit() and crc.isdigit()):
            return
        yield int(start), int(crc), body


def encode_sketches(rows: Iterable[Record]) -> bytes:
    ordered = sorted(rows, key=lambda row: int(row["start"]))
    return b"".join(b"%d %d %b\n" % (row["start"], row["crc"], row["body"]) for row in ordered)
