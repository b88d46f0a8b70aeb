"""Access tokens: made once, shown once, and recognised by the digest that the store keeps.

A secret has 256 random bits, so a plain SHA-256 is enough: there are no likely secrets to try.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import datetime

from perdure.errors import ConfigurationError
from perdure.model.ids import now
from perdure.protocols import Token, TokenBook, is_token_book

# The prefix lets scanners for leaked secrets find one in a repository or a log.
_PREFIX = "pdr_"
_BYTES = 32
_SECRET = re.compile(_PREFIX + "[A-Za-z0-9_-]{43}")


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal: all that a store keeps of it."""
    # A text that is not Unicode has a digest too. An error would repeat the secret.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


async def new_token(
    book: TokenBook,
    owner: str | None,
    *,
    may_write: bool = True,
    expires_at: datetime | None = None,
    name: str | None = None,
) -> tuple[str, Token]:
    """Make a token for an owner's sessions, or with None for everybody's. Return its secret, which nobody keeps.

    Raise InvalidData, and keep no token, if it would have expired already.
    """
    secret = _PREFIX + secrets.token_urlsafe(_BYTES)
    token = Token(
        digest=digest_of(secret),
        owner=owner,
        may_write=may_write,
        created_at=now(),
        expires_at=expires_at,
        name=name,
    )
    await book.add_token(token)
    return secret, token


async def holder_of(book: TokenBook, secret: str) -> Token | None:
    """Return the token of a secret. Return None if there is none, if it has expired, or if no secret looks like that.

    Raise CorruptRecord if the token is damaged: it must not pass for one that opens anything.
    """
    if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
        return None
    digest = digest_of(secret)
    found = await book.token(digest)
    # The book may be anybody's, and may compare in another way than it should.
    if found is None or not hmac.compare_digest(found.digest, digest) or found.is_expired(now()):
        return None
    return found


def token_book(store: object) -> TokenBook:
    """Return a store as a keeper of access tokens. Raise ConfigurationError if it keeps none."""
    if not is_token_book(store):
        raise ConfigurationError(
            f"{type(store).__name__} does not keep access tokens.",
            "Use sqlite:///sessions.db or another store of perdure's, or implement perdure.protocols.TokenBook.",
        )
    return store
