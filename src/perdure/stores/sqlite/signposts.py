"""Erasure of the words, or their beginnings, that FTS5 leaves in the table by which it finds the leaves of an index.

FTS5 finds a leaf by the first word on it, cut where it differs from the last word of the leaf before. `secure-delete`
takes a word out of the leaf, but not out of that table. Such a signpost is still right, and still contains the word.
Here it is replaced by the next word of the index. That is right too, and the index contains that word anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import partial

import apsw

from perdure.stores.sqlite.schema import first_row, rows_of

_MARK = b"0"
"""The byte that FTS5 puts before every word of its main index."""
# By instances: the other kinds of this table count the messages that have a word, which takes time.
_VOCABULARY = "CREATE VIRTUAL TABLE IF NOT EXISTS temp.vocabulary USING fts5vocab('main', 'message', 'instance')"
_NEXT = "SELECT CAST(term AS BLOB) FROM temp.vocabulary WHERE term >= CAST(? AS TEXT) LIMIT 1"


def remove_signposts(db: apsw.Connection, texts: Iterable[str]) -> None:
    """Remove the words of deleted texts from the signposts, unless another text has a word like them."""
    found = _signposts(db, _words(db, texts))
    if found:
        db.execute(_VOCABULARY)
    for segment, sign in found:
        behind = first_row(db, _NEXT, (sign,))
        if behind is None:  # no leaf behind it has a word either
            db.execute("DELETE FROM message_idx WHERE segid = ? AND term = ?", (segment, _MARK + sign))
        elif not behind[0].startswith(sign):
            values = (_MARK + behind[0], segment, _MARK + sign)
            db.execute("UPDATE message_idx SET term = ? WHERE segid = ? AND term = ?", values)


def _words(db: apsw.Connection, texts: Iterable[str]) -> list[bytes]:
    """Return the words of texts as the index has them, in its order."""
    tokenize = partial(db.fts5_tokenizer("unicode61", []), include_offsets=False, include_colocated=False)
    said = (tokenize(text.encode(), apsw.FTS5_TOKENIZE_DOCUMENT, None) for text in texts)
    return sorted({str(word).encode() for words in said for word in words})


def _signposts(db: apsw.Connection, words: list[bytes]) -> list[tuple[int, bytes]]:
    """Return the signposts that are one of these words, or the beginning of one, each with its segment.

    All signposts are read. There is one for about 4,000 bytes of the index, and a word may have left several.
    """
    rows = rows_of(db, "SELECT segid, term FROM message_idx WHERE term > ?", (_MARK,)) if words else []
    signs = [(segment, bytes(term)[len(_MARK) :]) for segment, term in rows]
    return [(segment, sign) for segment, sign in signs if _begins_one(sign, words)]


def _begins_one(sign: bytes, words: list[bytes]) -> bool:
    place = bisect_left(words, sign)
    return place < len(words) and words[place].startswith(sign)
