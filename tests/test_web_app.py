"""The web app of the examples, served for real: answers stream to each user, and outlive the request."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "web_app:app", "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "CHAT_STORE": f"sqlite:///{tmp_path / 'chats.db'}"}
    server = subprocess.Popen([*command, "--app-dir", str(EXAMPLES)], env=environment, cwd=tmp_path)
    try:
        _wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def say(url: str, user: str, text: str, key: str) -> tuple[str, list[str]]:
    """Send a message; return the text that was streamed, and the ids of the events."""
    body = {"text": text, "key": key}
    with httpx.stream("POST", f"{url}/chats/order-7", json=body, headers={"X-User": user}, timeout=30) as answer:
        assert answer.status_code == 200
        return _read(answer)


def _read(answer: httpx.Response) -> tuple[str, list[str]]:
    text, ids, event = "", [], ""
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "id":
            ids.append(value)
        elif name == "data" and event == "text":
            text += value
    return text, ids


def test_every_user_has_chats_of_their_own(url: str) -> None:
    assert say(url, "ada", "What is 2 + 3?", "one")[0] == say(url, "ada", "What is 2 + 3?", "one")[0] != ""
    said, ids = say(url, "bob", "Hello", "one")
    assert said
    assert ids
    for user in ("ada", "bob"):
        page = httpx.get(f"{url}/chats", headers={"X-User": user}).json()
        assert len(page["chats"]) == 1
    hers = httpx.get(f"{url}/chats", headers={"X-User": "ada"}).json()["chats"][0]["chat"]
    assert httpx.get(f"{url}/chats", headers={"X-User": "bob"}).json()["chats"][0]["chat"] != hers


def test_a_browser_that_left_reads_on(url: str) -> None:
    """It is given what it has missed, by the id of the last event that it saw, and nothing twice."""
    whole, ids = say(url, "ada", "Tell me a long story about a fox, a dog and a river", "one")
    headers = {"X-User": "ada", "Last-Event-ID": ids[0]}
    with httpx.stream("GET", f"{url}/chats/order-7", headers=headers, timeout=30) as answer:
        rest, _ = _read(answer)
    assert whole.endswith(rest)
    assert len(rest) < len(whole)


def test_bad_input_is_told(url: str) -> None:
    body = {"text": "", "key": "one"}
    refused = httpx.post(f"{url}/chats/order-7", json=body, headers={"X-User": "ada"}, timeout=30)
    assert (refused.status_code, "error" in refused.json()) == (400, True)
    assert httpx.get(f"{url}/chats/a%20b", headers={"X-User": "ada"}, timeout=30).status_code == 400
