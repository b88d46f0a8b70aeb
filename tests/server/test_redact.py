"""A service over a connection that redacts: what clients send and get has no secret in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.serving import serving
from tests.sessions.test_redact import CANARY, MARK, Model, stored, url_of

from perdure import redactors


@pytest.mark.parametrize("path", ["/api", "/v1", "/agui"])
async def test_a_canary_of_a_client_is_not_stored(path: str, tmp_path: Path) -> None:
    """It may come by the API, OpenAI's protocol or AG-UI: neither the answers nor the store have the secret."""
    told: list[str] = []
    async with serving(url_of("sqlite", tmp_path), driver=Model(), redact=redactors.DEFAULT) as served:
        ada = served.ada
        await ada.put("/api/sessions/a", json={})
        if path == "/api":
            told.append((await ada.post("/api/sessions/a/messages", json={"text": f"a {CANARY}", "wait": 20})).text)
            told.append((await ada.post("/api/sessions/a/rename", json={"name": f"n {CANARY}"})).text)
        elif path == "/v1":
            asked = {"model": "assistant", "input": f"a {CANARY}", "instructions": f"Keep {CANARY}"}
            told.append((await ada.post("/v1/responses", json=asked)).text)
            told.append((await ada.post("/v1/responses", json={**asked, "stream": True})).text)
        else:
            said = {"id": "u1", "role": "user", "content": f"a {CANARY}"}
            given = {"threadId": "t", "runId": "r", "messages": [said], "tools": [], "context": [], "state": {}}
            told.append((await ada.post("/agui", json={**given, "forwardedProps": {}})).text)
        told += [(await ada.get(f"/api/sessions/a/{what}")).text for what in ("messages", "events", "record")]
    assert MARK in "".join(told)
    assert not [each for each in told if CANARY in each]
    assert not [raw for raw in stored("sqlite", tmp_path) if CANARY.encode() in raw]
