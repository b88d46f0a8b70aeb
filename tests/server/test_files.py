"""The HTTP API: images and files of messages, read by their hashes."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

from tests.server.serving import Served, in_service

PNG = b"\x89PNG\r\n\x1a\n" + bytes(5_000)
PAGE = b"<html><script>alert(1)</script>" + b" " * 5_000


async def attach(served: Served, kind: str, body: bytes) -> str:
    """Say something with a file in the session `a` of ada. Return the address of the file."""
    await served.ada.put("/api/sessions/a", json={})
    url = f"data:{kind};base64,{b64encode(body).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    said = await served.ada.post("/api/sessions/a/messages", json={"messages": [{"role": "user", "content": content}]})
    assert said.status_code == 200, said.text
    shown = (await served.ada.get("/api/sessions/a/messages")).json()["messages"][-2]["parts"][0]
    assert shown["hash"] == sha256(body).hexdigest()
    return f"/api/sessions/a/files/{shown['hash']}"


@in_service
async def test_an_image_is_read_back(served: Served) -> None:
    """It comes with its type, and once: a client that has it gets a 304."""
    path = await attach(served, "image/png", PNG)
    file = await served.ada.get(path)
    assert (file.status_code, file.content, file.headers["content-type"]) == (200, PNG, "image/png")
    assert file.headers["x-content-type-options"] == "nosniff"
    assert "content-disposition" not in file.headers
    again = await served.ada.get(path, headers={"If-None-Match": file.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@in_service
async def test_a_file_that_could_run_is_only_saved(served: Served) -> None:
    """Its bytes decide, not the type that the sender has named."""
    file = await served.ada.get(await attach(served, "image/png", PAGE))
    assert (file.content, file.headers["content-type"]) == (PAGE, "application/octet-stream")
    assert file.headers["content-disposition"].startswith("attachment")
    assert file.headers["x-content-type-options"] == "nosniff"


@in_service
async def test_a_hash_is_not_a_permission(served: Served) -> None:
    """Neither another owner nor another session can read the file, or learn that it exists."""
    path = await attach(served, "image/png", PNG)
    await served.bob.put("/api/sessions/a", json={})
    await served.ada.put("/api/sessions/b", json={})
    theirs = await served.bob.get(path)
    elsewhere = await served.ada.get(path.replace("/a/", "/b/"))
    missing = await served.ada.get("/api/sessions/a/files/" + "0" * 64)
    wrong = await served.ada.get("/api/sessions/a/files/x")
    assert [each.status_code for each in (theirs, elsewhere, missing, wrong)] == [404] * 4
    assert theirs.json() == elsewhere.json() == missing.json() == wrong.json()
    assert (await served.ada.get(path.replace("/a/", "/none/"))).json()["title"] == "SessionNotFound"
