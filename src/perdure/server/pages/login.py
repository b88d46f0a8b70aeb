"""Sign a browser in, and out again."""

from __future__ import annotations

from string import punctuation
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from perdure.server.call import Call
from perdure.server.gate import cookie_header
from perdure.server.pages.render import page

_WRONG = "This is not a valid code or token: it was used, has expired, or was mistyped."


class LoginQuery(msgspec.Struct, kw_only=True):
    code: str | None = None
    """The code that `perdure serve` has printed. It works once."""
    next: str = "/"
    """The page to show afterwards."""


class LoginForm(msgspec.Struct, kw_only=True):
    token: str = ""
    next: str = "/"


class Nothing(msgspec.Struct):
    """A form without fields."""


async def get_login(call: Call) -> Response:
    """Sign a browser in by the code in its address. Without one, show a form for a token."""
    asked: LoginQuery = call.query
    if asked.code is None or not _is_visit(call):
        return page(call, "login.html", next=local(asked.next), problem=None)
    # Not by a token: a link on another site could sign a user in as its author, who could read what the user writes.
    return _admitted(call, await call.service.gate.admit_invited(asked.code), asked.next)


def _is_visit(call: Call) -> bool:
    """Tell whether a person looks at the page. A preview, or a browser that fetches ahead, must not use the code up."""
    headers = call.request.headers
    return call.request.method == "GET" and "sec-purpose" not in headers and "purpose" not in headers


async def post_login(call: Call) -> Response:
    """Sign a browser in by the token that a person has pasted."""
    asked: LoginForm = call.body
    # A token that was copied often has a line break at its end.
    return _admitted(call, await call.service.gate.admit(asked.token.strip()), asked.next)


async def post_logout(call: Call) -> Response:
    """Sign a browser out. The token that was made for it stops working."""
    secret = call.service.gate.secret_in(call.request.headers)
    if secret is not None:
        await call.service.gate.leave(secret)
    return _sent_on(call, "/login", None)


def _admitted(call: Call, secret: str | None, following: str) -> Response:
    if secret is None:
        return page(call, "login.html", 403, next=local(following), problem=_WRONG)
    return _sent_on(call, local(following), secret)


def _sent_on(call: Call, path: str, secret: str | None) -> Response:
    # A proxy sets this header. A client that sets it only keeps its own browser from sending the cookie without TLS.
    is_secure = call.request.headers.get("x-forwarded-proto", "").lower() == "https"
    return Response(None, 303, {"Location": path, "Set-Cookie": cookie_header(secret, is_secure=is_secure)})


def local(path: str) -> str:
    """Return a path of this service in a form for a header. Return `/` for one that could lead a browser elsewhere."""
    # Browsers take both `//` and `/\` for the beginning of another host.
    is_path = path.startswith("/") and not path.startswith("//") and path.isprintable() and "\\" not in path
    return quote(path, safe=punctuation) if is_path else "/"
