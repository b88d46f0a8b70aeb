"""MCP servers over streamable HTTP, on loopback."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.loop.mcp.scene import free_port, marked, results, serving_http

import perdure
from perdure import ConfigurationError, ToolCall
from perdure.testing import ScriptedDriver

TOKEN = "tok-of-the-test"


def files_in(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir() if path.is_file()]


async def test_a_server_with_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools are called with the token; a restarted server is connected to again, and a call that it died of is
    not repeated."""
    monkeypatch.setenv("MCP_TOKEN", TOKEN)
    ledger, port = tmp_path / "ledger", free_port()
    server = perdure.mcp(f"http://127.0.0.1:{port}/mcp", token_env="MCP_TOKEN")
    script = [[ToolCall("pid", {}), ToolCall("slow", {"seconds": 0.05})], ToolCall("die", {}), "done"]
    async with perdure.connect(f"sqlite:///{tmp_path}/s.db", tools=[server], driver=ScriptedDriver(script)) as app:
        chat = await app.open("a")
        pids = []
        for _ in range(2):
            with serving_http(ledger, port, TOKEN) as process:
                await chat.send("Go.")
                *_, (_, pid, _), (_, slow, _), (_, died, is_error) = results(await chat.session())
                pids.append((pid, process.pid))
                assert slow == "done at last"
                assert is_error
                assert died.startswith("ToolUnavailable: ")
        assert all(told == pid for told, pid in pids)
        assert ledger.read_text().splitlines().count("die") == 2
        with pytest.raises(ConfigurationError, match="cannot be reached"):
            await chat.send("Go.")


async def test_a_cancelled_call_is_cancelled_on_the_server(tmp_path: Path) -> None:
    ledger, port = tmp_path / "ledger", free_port()
    server = perdure.mcp(f"http://127.0.0.1:{port}/mcp", timeout=0.5)
    script = [ToolCall("slow", {"seconds": 60}), ToolCall("add", {"a": 1, "b": 1}), "done"]
    with serving_http(ledger, port):
        async with perdure.connect("memory://", tools=[server], driver=ScriptedDriver(script)) as app:
            chat = await app.open("a")
            await chat.send("Go.")
            (name, late, is_error), added = results(await chat.session())
            assert (name, is_error, added) == ("slow", True, ("add", 2, False))
            assert late.startswith("OutcomeUnknown: No result within 0.5 s.")
            await marked(ledger, "slow cancelled")


async def test_secrets_are_neither_stored_nor_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not in the database, an error, or the log."""
    caplog.set_level(logging.DEBUG, "perdure")
    monkeypatch.setenv("MCP_TOKEN", TOKEN)
    port, hush = free_port(), "hush-hush"
    server = perdure.mcp(f"http://127.0.0.1:{port}/mcp", token_env="MCP_TOKEN", headers={"X-Hush": hush})
    script = [ToolCall("fail", {"reason": "?"}), ToolCall("die", {}), "done"]
    database = tmp_path / "s.db"
    async with perdure.connect(f"sqlite:///{database}", tools=[server], driver=ScriptedDriver(script)) as app:
        with serving_http(tmp_path / "ledger", port, TOKEN):
            await (await app.open("a")).send("Go.")
        with pytest.raises(ConfigurationError) as caught:
            await (await app.open("a")).send("Go.")
    kept = b"".join(files_in(tmp_path)).decode("utf-8", "replace")
    for where in (kept, str(caught.value), caplog.text, repr(server)):
        assert TOKEN not in where
        assert hush not in where


async def test_a_wrong_or_missing_token_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the run begins, and says what to check."""
    monkeypatch.delenv("MCP_TOKEN", raising=False)
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with serving_http(tmp_path / "ledger", port, TOKEN):
        for server, said in (
            (perdure.mcp(url), "Check its command, or its URL and token"),
            (perdure.mcp(url, token_env="MCP_TOKEN"), "MCP_TOKEN is not set"),
        ):
            async with perdure.connect("memory://", tools=[server], driver=ScriptedDriver(["done"])) as app:
                with pytest.raises(ConfigurationError, match=said):
                    await (await app.open("a")).send("Go.")
