"""Browsers sign in and out, and are sent to pages of this service only."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from tests.server.serving import Served, client_of, in_service, serving

from perdure.server import gate
from perdure.server.pages.login import local
from perdure.server.settings import Settings

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@in_service
async def test_a_code_signs_one_browser_in(served: Served) -> None:
    """It signs in once, and holds until the browser signs out."""
    code = served.service.gate.invite()
    async with client_of(served.app, None) as browser:
        seen = await browser.get("/approvals?x=1")
        assert (seen.status_code, seen.headers["Location"]) == (303, "/login?next=/approvals%3Fx%3D1")
        entered = await browser.get("/login", params={"code": code, "next": "/approvals?x=1"})
        assert (entered.status_code, entered.headers["Location"]) == (303, "/approvals?x=1")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(entered.headers["Set-Cookie"].split("; "))
        assert "Secure" not in entered.headers["Set-Cookie"]
        assert (await browser.get("/api/sessions")).status_code == 200
        secret = browser.cookies["perdure"]
        left = await browser.post("/logout", content=b"", headers=FORM)
        assert (left.status_code, left.headers["Location"]) == (303, "/login")
        again = await served.nobody.get("/api/sessions", headers={"Cookie": f"perdure={secret}"})
        assert again.status_code == 401
    late = await served.nobody.get("/login", params={"code": code})
    assert late.status_code == 403
    assert "Set-Cookie" not in late.headers
    assert code not in late.text


@in_service
async def test_a_code_is_not_used_up_by_a_preview(served: Served) -> None:
    code = served.service.gate.invite()
    assert (await served.nobody.head("/login", params={"code": code})).status_code == 200
    ahead = await served.nobody.get("/login", params={"code": code}, headers={"Sec-Purpose": "prefetch"})
    assert ahead.status_code == 200
    assert (await served.nobody.get("/login", params={"code": code})).status_code == 303


@in_service
async def test_a_code_expires(served: Served) -> None:
    before = gate.INVITED_FOR
    gate.INVITED_FOR = 0.0
    try:
        code = served.service.gate.invite()
    finally:
        gate.INVITED_FOR = before
    assert (await served.nobody.get("/login", params={"code": code})).status_code == 403


@in_service
async def test_a_token_is_pasted(served: Served) -> None:
    """The browser reaches what the token reached before, and signing out does not drop the token."""
    secret = served.reader.headers["Authorization"].removeprefix("Bearer ")
    async with client_of(served.app, None) as browser:
        body = f"token={secret}&next=/cost".encode()
        entered = await browser.post("/login", content=body, headers={**FORM, "X-Forwarded-Proto": "https"})
        assert (entered.status_code, entered.headers["Location"]) == (303, "/cost")
        assert entered.headers["Set-Cookie"].endswith("; Secure")
        cookie = {"Cookie": f"perdure={secret}"}
        assert (await browser.put("/api/sessions/a", json={}, headers=cookie)).status_code == 403
        await browser.post("/logout", content=b"", headers={**FORM, **cookie})
    assert (await served.reader.get("/api/sessions")).status_code == 200
    wrong = await served.nobody.post("/login", content=b"token=pdr_nothing", headers=FORM)
    assert "/approvals" not in wrong.text  # nor any other page behind the sign-in
    assert (wrong.status_code, "Set-Cookie" in wrong.headers) == (403, False)


@in_service
async def test_another_site_signs_nobody_in(served: Served) -> None:
    secret = served.ada.headers["Authorization"].removeprefix("Bearer ")
    foreign = {**FORM, "Origin": "https://evil.example"}
    assert (await served.nobody.post("/login", content=f"token={secret}".encode(), headers=foreign)).status_code == 403
    assert (await served.nobody.post("/logout", content=b"", headers=foreign)).status_code == 403


@pytest.mark.parametrize(
    "elsewhere",
    [
        *("//evil.example", "/\\evil.example", "\\/evil.example", "https://evil.example", "evil.example", ""),
        *("/\t/evil.example", "/\r\nSet-Cookie: a=b", "javascript:alert(1)", "/a\\..\\b", "\x00/", " //evil.example"),
    ],
)
@in_service
async def test_nobody_is_sent_elsewhere(served: Served, elsewhere: str) -> None:
    assert local(elsewhere) == "/"
    code = served.service.gate.invite()
    sent = await served.nobody.get(f"/login?code={code}&next={quote(elsewhere)}")
    assert (sent.status_code, sent.headers["Location"]) == (303, "/")
    shown = await served.nobody.get(f"/login?next={quote(elsewhere)}")
    assert 'name="next" value="/"' in shown.text


def test_a_path_of_this_service_is_kept() -> None:
    assert local("/sessions/a?version=3&q=é#x") == "/sessions/a?version=3&q=%C3%A9#x"


@in_service
async def test_what_is_shown_is_escaped(served: Served) -> None:
    shown = await served.nobody.get("/login", params={"next": '/"><script>alert(1)</script>'})
    assert "<script>" not in shown.text
    assert "alert(1)" not in shown.text.replace("&lt;script&gt;alert(1)", "")


@in_service
async def test_a_link_cannot_sign_anybody_in_by_a_token(served: Served) -> None:
    """The link's maker would read what is written under their own token. Only a form of this service takes one."""
    secret = served.bob.headers["Authorization"].removeprefix("Bearer ")
    linked = await served.nobody.get("/login", params={"code": secret})
    assert (linked.status_code, "Set-Cookie" in linked.headers) == (403, False)
    assert secret not in linked.text


async def test_a_header_that_comes_twice_names_nobody(tmp_path: Path) -> None:
    """A client can send the proxy's header, and a proxy may add its own after it."""
    settings = Settings(owner_header="X-User", proxy="127.0.0.1")
    async with serving(f"sqlite:///{tmp_path}/served.db", settings) as served:
        assert (await served.nobody.get("/api/sessions", headers=[("X-User", "ada")])).status_code == 200
        twice = [("X-User", "ada"), ("X-User", "eve")]
        assert (await served.nobody.get("/api/sessions", headers=twice)).status_code == 401


def test_the_address_that_is_printed_can_be_opened() -> None:
    shown = {host: Settings(host=host).url for host in ("127.0.0.1", "0.0.0.0", "::", "10.0.0.5", "::1", "localhost")}
    assert shown == {
        "127.0.0.1": "http://127.0.0.1:7433",
        "0.0.0.0": "http://127.0.0.1:7433",
        "::": "http://127.0.0.1:7433",
        "10.0.0.5": "http://10.0.0.5:7433",
        "::1": "http://[::1]:7433",
        "localhost": "http://localhost:7433",
    }
