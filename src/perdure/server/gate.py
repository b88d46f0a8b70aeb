"""The gate, which knows callers by a bearer's token, a browser's cookie, or a proxy that has signed somebody in."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from http.cookies import CookieError, SimpleCookie

import msgspec
from starlette.datastructures import Headers

from perdure.model.ids import now
from perdure.model.session import check_owner
from perdure.protocols import Token, TokenBook
from perdure.server.settings import Settings
from perdure.server.tokens import digest_of, holder_of, new_token

COOKIE = "perdure"
BROWSER = "browser"
"""The name of the tokens that browsers are given."""
INVITED_FOR = 900.0
"""Seconds within which an invitation has to be used, since what was printed may end up in a log."""
_SIGNED_IN_FOR = timedelta(days=7)
_TRUSTED_FOR = 2.0
"""Seconds that a token is trusted without another look. A token that was revoked works for this long at most."""
_REMEMBERED = 1024


class Caller(msgspec.Struct, frozen=True):
    """A caller: the owner whose sessions it reaches, and the right to change them."""

    owner: str | None
    """None reaches the sessions of every owner."""
    may_write: bool = True
    token: str | None = None
    """The digest of the caller's token, or None if a proxy vouches for the caller."""


class Gate:
    """The knowledge of callers by their secrets. A request without a valid one has no caller."""

    def __init__(self, book: TokenBook, settings: Settings, owner: str | None = None) -> None:
        self._book = book
        self._settings = settings
        self.owner = owner
        """The owner that the service is limited to, or None for all owners."""
        self._invitations: dict[str, float] = {}
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()

    async def caller(self, headers: Headers, address: str | None) -> Caller | None:
        """Return the caller of a request with these headers, or None if it is not known."""
        if self._settings.owner_header is not None and address == self._settings.proxy:
            named = headers.getlist(self._settings.owner_header)
            # A client may have sent the header too, and the proxy may have added its own. Then neither counts.
            return self._vouched_for(named[0]) if len(named) == 1 else None
        kind, _, secret = headers.get("authorization", "").partition(" ")
        # A request with this header means that secret, and not the one in its cookie.
        if kind:
            return await self.holder(secret.strip()) if kind.lower() == "bearer" else None
        cookie = self.secret_in(headers)
        return None if cookie is None else await self.holder(cookie)

    def secret_in(self, headers: Mapping[str, str]) -> str | None:
        """Return the secret in a browser's cookie."""
        return _cookie_in(headers.get("cookie", ""))

    def _vouched_for(self, owner: str) -> Caller | None:
        if not owner:
            return None
        check_owner(owner)
        return Caller(owner) if self.owner in (None, owner) else None

    async def holder(self, secret: str) -> Caller | None:
        """Return the caller that holds a token, or None if the token is not valid."""
        digest = digest_of(secret)
        until, known = self._known.get(digest, (0.0, None))
        if time.monotonic() < until:
            return known
        found = self._as_caller(await holder_of(self._book, secret))
        self._known[digest] = (time.monotonic() + _TRUSTED_FOR, found)
        self._known.move_to_end(digest)
        # Wrong secrets are remembered too, so anybody could fill the memory.
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def is_valid(self, caller: Caller) -> bool:
        """Tell whether a caller's token is still valid, for streams that stay open."""
        if caller.token is None:
            return True
        token = await self._book.token(caller.token)
        return token is not None and (token.expires_at is None or token.expires_at > now())

    def _as_caller(self, token: Token | None) -> Caller | None:
        if token is None or (self.owner is not None and token.owner not in (None, self.owner)):
            return None
        return Caller(token.owner if self.owner is None else self.owner, token.may_write, token.digest)

    def invite(self) -> str:
        """Return a code that signs one browser in, once, within the next minutes."""
        code = secrets.token_urlsafe(32)
        self._invitations[digest_of(code)] = time.monotonic() + INVITED_FOR
        return code

    async def admit(self, given: str) -> str | None:
        """Return the secret for the cookie of a browser that brings an invitation or a token, or None."""
        return await self.admit_invited(given) or (given if await self.holder(given) is not None else None)

    async def admit_invited(self, code: str) -> str | None:
        """Return the secret for the cookie of a browser that brings an invitation, or None."""
        # Removed before it is checked, so that a code works once.
        if time.monotonic() >= self._invitations.pop(digest_of(code), 0.0):
            return None
        secret, _ = await new_token(self._book, self.owner, expires_at=now() + _SIGNED_IN_FOR, name=BROWSER)
        return secret

    async def leave(self, secret: str) -> None:
        """Sign a browser out. A token that was made for it is dropped, and one that its user has brought stays."""
        token = await holder_of(self._book, secret)
        if token is not None and token.name == BROWSER:
            await self._book.drop_token(token.id)
            self._known.pop(digest_of(secret), None)


def _cookie_in(header: str) -> str | None:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:  # other programs on this host may set cookies of any form
        return None
    return None if found is None else found.value


def cookie_header(secret: str | None, *, is_secure: bool) -> str:
    """Return the header that gives a browser its cookie, or takes it away."""
    # HttpOnly hides it from scripts, and SameSite=Strict from requests that other sites cause.
    age = 0 if secret is None else int(_SIGNED_IN_FOR.total_seconds())
    secure = "; Secure" if is_secure else ""
    return f"{COOKIE}={secret or ''}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{secure}"
