"""Access tokens: a row for each, found by the digest of its secret, by its id or by its owner.

The body has all that a token may do, and its checksum protects it. A damaged row gives no access: a flag or an owner
that damage has changed might allow more than was granted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import CorruptRecord, InvalidData
from perdure.protocols import Token
from perdure.stores.engine import Delete, Insert, Job, Lock, Row, Select, Update
from perdure.stores.format.rows import checksum
from perdure.stores.jobs.erasing import count_erasure

COLUMNS = ("digest", "id", "owner", "crc", "body")
_ID = 12
"""The length of a token's id, which is the beginning of its digest."""


def add_token(token: Token) -> Job[None]:
    """Keep a token. Raise InvalidData if its id is taken: by the same secret, or by chance by the same beginning."""
    yield Lock()
    if (yield Select("token", ("id",), {"id": token.id})):
        raise InvalidData("$.token", f"there is a token {token.id!r} already; make another, with a new secret")
    body = msgspec.json.encode(token)
    yield Insert("token", COLUMNS, [(token.digest, token.id, token.owner, checksum(body), body)])


def token(digest: str) -> Job[Token | None]:
    for row in (yield Select("token", COLUMNS, {"digest": digest})):
        return token_of(row)
    # By the index of ids alone: a token that only that finds is damaged. No two tokens have the same id.
    if (yield Select("token", ("id",), {"id": digest[:_ID]})):
        raise _damaged(digest[:_ID], "it is noted, and its row is missing")
    return None


def tokens(owner: str | None) -> Job[list[Token]]:
    """Return tokens, oldest first."""
    rows = yield Select("token", COLUMNS, {} if owner is None else {"owner": owner})
    return sorted(map(token_of, rows), key=lambda each: (each.created_at, each.id))


def drop_token(token_id: str) -> Job[bool]:
    """Erase a token. Return True if it was there."""
    yield Lock()
    # An update returns the number of rows, and locks them. If two callers drop a token at once, only one gets True.
    ((found,),) = yield Update("token", {"id": token_id}, {"id": token_id})
    if found:
        yield Delete("token", {"id": token_id})
        yield from count_erasure()
    return bool(found)


def token_of(row: Row) -> Token:
    """Return the token in a row. Raise CorruptRecord unless the row is what was written."""
    digest, token_id, owner, crc, body = row
    try:
        if type(body) is not bytes or (crc is not None and crc != checksum(body)):
            raise _damaged(token_id, "its checksum does not match")
        found = msgspec.json.decode(body, type=Token)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(token_id, str(error)) from None
    if (found.digest, found.id, found.owner) != (digest, token_id, owner):
        raise _damaged(token_id, "its columns do not say what its body says")
    return found


def _damaged(token_id: Any, reason: str) -> CorruptRecord:
    advice = f"It gives no access. Type: perdure token revoke {token_id}, then make a new one."
    return CorruptRecord(None, f"token {token_id!r}", reason, advice)
