"""`perdure serve` as a person starts it: signs in, answers, drains, hands over, and is killed in the middle."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tests.server.serve_process import PATIENCE, Event, Serving, served_in, stream, until

import perdure
from perdure import AgentDefinition
from perdure.cli.main import cli
from perdure.cli.serving import _require_guarded, warn_of_missing_models
from perdure.errors import ConfigurationError
from perdure.model.ids import now
from perdure.server.gate import BROWSER
from perdure.server.listening import bound
from perdure.server.service import Service
from perdure.server.settings import Settings
from perdure.server.tokens import new_token

ROUNDS = 50 if os.environ.get("PERDURE_TORTURE") else 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with served_in(tmp_path) as found:
        yield found


def ask(client: httpx.Client, number: int, **options: Any) -> httpx.Response:
    body = {"text": f"add(a={number}, b=1)", **options}
    return client.post("/api/sessions/a/messages", json=body, headers={"Idempotency-Key": f"k{number}"})


def test_it_is_signed_in_to_once(server: Serving) -> None:
    """A person signs in by the address that it prints; programs bring a token. No secret is logged.

    A browser that it opens gets a file with a code of its own, since other users can see command lines.
    """
    (server.where / "browser").write_text('cp --preserve=mode "${1#file://}" opening && mv opening opened')
    server.start_working("--open", DISPLAY=":0", BROWSER="sh browser %s")
    address = server.said["sign_in"]
    require_opened(server, address)
    assert address.startswith(f"{server.url}/login?code=")
    with httpx.Client() as browser:
        assert browser.get(address).status_code == 303
        assert browser.get(f"{server.url}/api/sessions").status_code == 200
    assert httpx.get(address).status_code == 403
    assert httpx.get(f"{server.url}/api/sessions").status_code == 401
    wrong = {"Authorization": "Bearer pdr_" + "x" * 43}
    assert httpx.get(f"{server.url}/api/sessions", headers=wrong).status_code == 401
    with server.client("ada") as ada:
        ada.put("/api/sessions/a", json={})
        answered = ask(ada, 5)
        assert "6" in answered.json()["text"]
        assert "server" not in answered.headers
    require_bounded_headers(server)
    server.signal()
    assert server.ended() == 0
    assert '"event": "started"' in server.log
    for secret in ("code=", "pdr_", "/api/"):
        assert secret not in server.log


def require_opened(server: Serving, printed: str) -> None:
    opened = server.where / "opened"
    until(opened.exists)
    (address,) = re.findall(r"url=(http[^\"]+)", opened.read_text())
    assert address != printed
    assert opened.stat().st_mode & 0o777 == 0o600
    assert [httpx.get(address).status_code for _ in range(2)] == [303, 403]


def require_bounded_headers(server: Serving) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 70_000)
        client.settimeout(PATIENCE)
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_a_stream_is_told_when_the_service_stops(server: Serving) -> None:
    """It ends with a reason; the run under way is drained, and a request is refused with the reason."""
    server.start_working()
    server.hold(1)
    with server.client("ada") as ada:
        ada.put("/api/sessions/a", json={})
        assert ask(ada, 1, wait=0).status_code == 202
        server.until_begun(1)
        with stream(ada, "a") as events:
            assert next(events).kind == "agent_start"
            server.signal()
            *_, last = events
        assert (last.kind, last.data) == ("end", {"reason": "shutdown"})
        ready = ada.get("/readyz")
        assert (ready.status_code, ready.text) == (503, "stopping\n")
        taken = ada.post("/api/sessions/a/messages", json={"text": "more", "wait": 20})
        assert taken.status_code == 202
        server.release(1)
        assert server.ended() == 0
        assert '"handed_over": []' in server.log
        server.start_working()
        assert "2" in ada.get("/api/sessions/a/replies/k1", params={"wait": 0}).json()["text"]
        assert ada.get(taken.headers["Location"], params={"wait": 30}).status_code == 200
        assert len(ada.get("/api/sessions/a/runs").json()["runs"]) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(("drain", "signals"), [("1s", 1), ("10min", 2)])
def test_what_is_not_drained_is_handed_over(server: Serving, drain: str, signals: int) -> None:
    """This happens after a while, or at once at a second signal. The next process ends it as the same run."""
    server.start_working("--drain", drain)
    server.hold(1)
    with server.client("ada") as ada:
        ada.put("/api/sessions/a", json={})
        ask(ada, 1, wait=0)
        server.until_begun(1)
        for _ in range(signals):
            server.signal(signal.SIGINT)
            time.sleep(0.2)
        assert server.ended() == 0
        assert '"handed_over": ["' in server.log
        server.release(1)
        server.start_working()
        found = ada.get("/api/sessions/a/replies/k1", params={"wait": 30})
        assert "2" in found.json()["text"]
        assert len(ada.get("/api/sessions/a/runs").json()["runs"]) == 1


def test_without_agents_messages_wait_for_workers(server: Serving) -> None:
    """A proxy is believed by its own address only."""
    (server.where / "served.db").touch()
    server.start("--owner-header", "X-User", "--trust-proxy", "127.0.0.2")
    ada = {"X-User": "ada"}
    forged = {**ada, "X-Forwarded-For": "127.0.0.2"}
    assert httpx.get(f"{server.url}/api/sessions", headers=forged).status_code == 401
    with httpx.Client(base_url=server.url, transport=httpx.HTTPTransport(local_address="127.0.0.2")) as proxy:
        proxy.put("/api/sessions/a", json={}, headers=ada)
        assert (
            proxy.post("/api/sessions/a/messages", json={"text": "hello", "wait": 0.1}, headers=ada).status_code == 202
        )
        assert proxy.get("/api/sessions").status_code == 401
        waiting = proxy.get("/api/queue", headers=ada).json()["waiting"]
        assert [each["owner"] for each in waiting] == ["ada"]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Start it in this process, with options that it refuses."""
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{tmp_path}/served.db")

    def start(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["serve", *options], prog_name="perdure")
        assert done.stdout == ""
        return done.exit_code, done.stderr

    return start


def test_it_does_not_listen_beyond_this_machine_without_tokens(refused: Callable[..., tuple[int, str]]) -> None:
    code, said = refused("--host", "0.0.0.0", "--port", "0", "--workers", "1")
    assert code == 9
    assert "token new OWNER" in said


async def test_a_token_or_a_proxy_lets_it_be_reached(tmp_path: Path) -> None:
    """A browser's token does not count, since no program has it."""
    import perdure
    from perdure.server.tokens import token_book

    open_to_all = Settings(host="0.0.0.0")
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
        book = token_book(sessions.store)
        await _require_guarded(sessions, Settings())
        await _require_guarded(sessions, Settings(host="0.0.0.0", owner_header="X-User", proxy="10.0.0.5"))
        await new_token(book, None, name=BROWSER)
        with pytest.raises(ConfigurationError, match="nobody has a token"):
            await _require_guarded(sessions, open_to_all)
        _, made = await new_token(book, "ada")
        assert not made.is_expired(now())
        await _require_guarded(sessions, open_to_all)


def test_a_port_that_is_in_use_is_named(refused: Callable[..., tuple[int, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = refused("--port", str(port), "--workers", "1")
    assert code == 9
    assert f"Port {port} is in use" in said
    assert f"--port {port + 1}" in said


async def test_an_agent_without_a_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The log says why messages to its new sessions wait."""
    async with perdure.connect("memory://") as sessions:
        agents = [AgentDefinition("clerk"), AgentDefinition("helper", model="offline")]
        warn_of_missing_models(Service(sessions, agents=agents))
    assert [each.getMessage().split(":")[0] for each in caplog.records] == ["the agent 'clerk' names no model"]


def test_what_is_answered_is_sent_at_once() -> None:
    """asyncio does not recognise a socket without its protocol as TCP; each answer would wait for the client."""
    with bound("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1 port 80 cannot be listened on: .*Check --host"):
        bound("192.0.2.1", 80)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--owner-header", "X-User"), "Give both"),
        (("--owner", "ada", "--workers", "1"), "--workers 0"),
        ((), "No store is at"),
    ],
)
def test_what_is_typed_wrong_is_refused(
    refused: Callable[..., tuple[int, str]], options: tuple[str, ...], said: str
) -> None:
    code, told = refused(*options)
    assert code in (2, 9)
    assert said in told


def test_a_server_that_is_killed_in_the_middle_is_read_on_from(server: Serving) -> None:
    """The client comes back with the id of its last event: it gets every event once, and the run is recovered."""
    chance = random.Random(17)
    server.start_working()
    with server.client("ada") as ada:
        ada.put("/api/sessions/a", json={})
        seen: list[Event] = []
        for number in range(1, ROUNDS + 1):
            server.hold(number)
            ask(ada, number, wait=0)
            seen += _until_killed(server, ada, seen, chance.randint(1, 8))
            server.release(number)
            server.start_working()
            seen += _until_ended(ada, seen)
            found = ada.get(f"/api/sessions/a/replies/k{number}", params={"wait": 30})
            assert str(number + 1) in found.json()["text"], found.text
        record = list(_record(ada))
        assert [each.id for each in seen] == record
        said = ada.get("/api/sessions/a/messages", params={"limit": 200}).json()
        roles = [each["role"] for each in said["messages"]]
        assert roles == (["user", "assistant", "tool", "assistant"] * ROUNDS)[:200]
        assert said["total"] == 4 * ROUNDS


def _last(seen: list[Event]) -> int:
    return seen[-1].id or 0 if seen else 0


def _until_killed(server: Serving, client: httpx.Client, seen: list[Event], most: int) -> list[Event]:
    """Read until `most` events have come, or the tool has begun, and then kill the server."""
    found: list[Event] = []
    with stream(client, "a", _last(seen)) as events:
        for event in events:
            found += [event] if event.id is not None else []
            if len(found) == most or event.kind == "tool_execution_start":
                break
        server.kill()
        with suppress(httpx.TransportError):  # it is cut off
            found += [event for event in events if event.id is not None]
    return found


def _until_ended(client: httpx.Client, seen: list[Event]) -> list[Event]:
    """Come back, and read on until the run has ended."""
    found: list[Event] = []
    with stream(client, "a", _last(seen)) as events:
        for event in events:
            found += [event] if event.id is not None else []
            if event.kind == "agent_end":
                return found
    raise AssertionError("the stream has ended before the run")


def _record(client: httpx.Client) -> Iterator[int]:
    after: int | None = 0
    while after is not None:
        page = client.get("/api/sessions/a/events", params={"after": after, "limit": 200}).json()
        yield from (each["cursor"] for each in page["events"])
        after = page["next"]
