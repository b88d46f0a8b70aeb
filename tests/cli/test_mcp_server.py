"""`perdure mcp`: the official client talks to a real process, as an assistant's program does."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

import perdure


@asynccontextmanager
async def assisting(path: Path, *options: str) -> AsyncIterator[Client]:
    words = ["-m", "perdure", "mcp", "--store", f"sqlite:///{path}/a.db", "--model", "offline", *options]
    async with Client(StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))) as client:
        yield client


async def asked(client: Client, name: str, **arguments: Any) -> Any:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def stored(path: Path) -> str:
    """Write two owners' sessions. Return the id of ada's."""
    async with perdure.connect(f"sqlite:///{path}/a.db", model="offline") as sessions:
        for owner in ("ada", "bob"):
            chat = await sessions.of(owner).open("a")
            await chat.send(f"the parrot of {owner} is blue")
            await chat.send("something else")
            await chat.reset()
        return (await sessions.of("ada").open("a")).id


async def test_an_assistant_reads_its_past(tmp_path: Path) -> None:
    """It finds messages that are not shown any more, and reads around them, in its owner's sessions only."""
    hers = await stored(tmp_path)
    async with assisting(tmp_path, "--owner", "ada") as client:
        assert client.server_info.version == perdure.__version__
        assert [each.name for each in (await client.list_tools()).tools] == ["search_sessions", "read_session"]
        hits = (await asked(client, "search_sessions", words="parrot blue"))["hits"]
        assert {hit["session"] for hit in hits} == {hers}
        first = next(hit for hit in hits if hit["role"] == "user")
        read = await asked(client, "read_session", session=hers, around=first["message"])
        assert (read["total"], read["messages"][0]["text"]) == (4, "the parrot of ada is blue")
        page = await asked(client, "read_session", session=hers, after=1, limit=2)
        assert (len(page["messages"]), page["next"]) == (2, 3)
    async with assisting(tmp_path, "--owner", "bob") as client:
        theirs = await client.call_tool("read_session", {"session": hers})
        none = await client.call_tool("read_session", {"session": "x" + hers[1:]})
        assert theirs.is_error
        assert theirs.content[0].text.replace(hers, "") == none.content[0].text.replace("x" + hers[1:], "")


async def test_sending_has_to_be_allowed(tmp_path: Path) -> None:
    """With permission, a message is answered once, in an existing session or in a new one."""
    await stored(tmp_path)
    async with assisting(tmp_path, "--owner", "ada", "--allow-send") as client:
        made = await asked(client, "send", text="hello", key="k")
        assert "hello" in made["text"]
        again = await asked(client, "send", text="hello", session=made["session"], key="k")
        assert again["version"] == made["version"]
        lost = await asked(client, "send", text="hello", key="k")
        assert (lost["session"], lost["version"]) == (made["session"], made["version"])
        assert (await client.call_tool("send", {"text": "another", "key": "k"})).is_error
        wrong = await client.call_tool("send", {"text": "hello", "session": "nobody's"})
        assert wrong.is_error


async def test_a_graph_answers_in_its_thread(tmp_path: Path) -> None:
    """In a thread of LangGraph perdure's own agent would answer, so the message is refused."""
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
        await sessions.open("thread", agent=perdure.AgentDefinition("langgraph"))
        await sessions.execute("thread", perdure.WriteMetadata("langgraph", {"id": "c-1", "version": 1}))
        await sessions.open("own", agent=perdure.AgentDefinition("langgraph"))
    async with assisting(tmp_path, "--allow-send") as client:
        refused = await client.call_tool("send", {"text": "hello", "session": "thread"})
        assert refused.is_error
        assert "its graph answers" in refused.content[0].text
        # An agent of one's own may have this name: without the adapter's note it is no thread.
        assert not (await client.call_tool("send", {"text": "hello", "session": "own"})).is_error
