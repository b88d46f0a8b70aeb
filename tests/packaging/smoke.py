"""Use an installed perdure: with SQLite and in memory, on the command line, and with an extra.

`python -W error smoke.py [EXTRA]`, in an empty directory, by the Python of an environment that has perdure installed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import perdure

MODULES = {
    "acp": ("perdure.cli.acp_agent",),
    "claude": ("perdure.adapters.claude_agent_sdk",),
    "google-adk": ("perdure.adapters.google_adk",),
    "langgraph": ("perdure.adapters.langgraph", "perdure.adapters.langgraph_memory"),
    "llm": ("perdure.loop.drivers.provider_client",),
    "mcp": ("perdure.loop.mcp.link", "perdure.cli.mcp"),
    "openai-agents": ("perdure.adapters.openai_agents",),
    "otel": ("perdure.telemetry.spans", "perdure.telemetry.meters"),
    "postgres": ("perdure.stores.postgres.engine",),
    "pydantic-ai": ("perdure.adapters.pydantic_ai",),
    "serve": ("perdure.server.app", "perdure.server.openai.routes"),
    "strands": ("perdure.adapters.strands",),
    "workers": ("perdure.workers.procrastinate.dispatcher",),
}
"""The modules that only an extra makes importable."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def talk(url: str, *tools: object) -> None:
    """Let an agent call a tool, fork, and find the session again in the store."""
    async with perdure.connect(url, tools=[add, *tools], model="offline") as sessions:
        chat = await sessions.open("first")
        reply = await chat.send("What is 2 + 3?")
        assert reply.text == "The answer is 5.", reply.text
        branch = await chat.fork("second")
        assert len(await branch.history()) == len(await chat.history()) == 4
    if url != "memory://":
        async with perdure.connect(url) as sessions:
            assert len(await (await sessions.open("first")).history()) == 4


async def sealed() -> None:
    """Write a sealed store and read it."""
    ring = perdure.FileKeyRing("ring.json", master=bytes(32), create=True)
    async with perdure.connect("sqlite:///sealed.db", keys=ring, model="offline") as sessions:
        await (await sessions.open("secret")).send("Hello")
    assert b"Hello" not in await asyncio.to_thread(Path("sealed.db").read_bytes)


async def traced() -> None:
    """Trace a run."""
    async with perdure.connect("memory://", model="offline", telemetry=perdure.Telemetry()) as sessions:
        await (await sessions.open("traced")).send("Hello")


def pages() -> None:
    """Write the inspector's pages into files, which needs its templates."""
    command("inspect", "first", "--static", "pages", "--store", "sqlite:///smoke.db")
    assert list(Path("pages").rglob("*.html"))


USES: dict[str, Callable[[], object]] = {
    "encryption": lambda: asyncio.run(sealed()),
    "otel": lambda: asyncio.run(traced()),
    "serve": pages,
}


LACKED: dict[str, Callable[[], object]] = {
    "claude": lambda: import_module("perdure.adapters.claude_agent_sdk"),
    "encryption": lambda: asyncio.run(sealed()),
    "google-adk": lambda: import_module("perdure.adapters.google_adk"),
    "langgraph": lambda: import_module("perdure.adapters.langgraph"),
    "mcp": lambda: asyncio.run(talk("memory://", perdure.mcp("none"))),
    "openai-agents": lambda: import_module("perdure.adapters.openai_agents"),
    "otel": perdure.Telemetry,
    "postgres": lambda: perdure.store_of("postgresql://nobody@localhost/none"),
    "pydantic-ai": lambda: import_module("perdure.adapters.pydantic_ai"),
    "schema": lambda: perdure.external_tool("weather"),
    "strands": lambda: import_module("perdure.adapters.strands"),
}
"""Uses of extras that raise ConfigurationError without them."""


def require_told(extra: str) -> None:
    """Check that an extra's features name it if it is not installed."""
    told = "nothing"
    try:
        LACKED[extra]()
    except perdure.ConfigurationError as error:
        told = str(error)
    assert f"pip install 'perdure[{extra}]'" in told, f"{extra}: {told}"


def command(*arguments: str) -> str:
    """Run the command of this installation, with warnings as errors, and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "perdure", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"perdure {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def main(extra: str = "") -> None:
    here = Path(perdure.__file__)
    assert "site-packages" in here.parts, f"{here} is not an installation"
    assert here.with_name("py.typed").is_file()
    assert command("--version").split() == ["perdure", version("perdure")] == ["perdure", perdure.__version__]
    asyncio.run(talk("memory://"))
    asyncio.run(talk("sqlite:///smoke.db"))
    assert "tour" in command("--help")
    assert "The answer is 5." in command("show", "first", "--store", "sqlite:///smoke.db")
    if not extra:
        for lacked in LACKED:
            require_told(lacked)
        command("tour", "tour")
        for script in Path(sys.executable).parent.glob("perdure*"):
            subprocess.run([script, "--version"], check=True, capture_output=True)
    for module in MODULES.get(extra, ()):
        import_module(module)
    USES.get(extra, lambda: None)()


if __name__ == "__main__":
    main(*sys.argv[1:])
