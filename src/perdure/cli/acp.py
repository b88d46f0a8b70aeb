"""The command that serves an agent to an editor, over standard input and output."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, cast

import click

from perdure.cli.log_lines import log_lines
from perdure.cli.options import store_command
from perdure.cli.setup import run
from perdure.errors import ConfigurationError

_MOST_BYTES = 50 * 1024 * 1024
"""The longest message that an editor can send. It is large, since messages may contain images."""


@store_command(agent=True)
def acp(ctx: click.Context, /) -> None:
    """Serve an agent to an editor that speaks the Agent Client Protocol (ACP).

    The editor starts this command, and talks to it over standard input and output. Its conversations are sessions of
    the store: they survive the editor, and every other command sees them. Logs go to standard error.
    """
    if sys.stdin.isatty():
        raise click.UsageError("An editor starts this command, and talks to it. Name it in the editor's settings.", ctx)
    with log_lines(as_json=False):
        run(_serve(ctx))


async def _serve(ctx: click.Context) -> None:
    try:
        from acp import run_agent

        from perdure.cli.acp_agent import EditorsAgent
    except ImportError as error:
        problem = f"Editors are talked to with the package agent-client-protocol ({error})."
        raise ConfigurationError(problem, "pip install 'perdure[acp]'") from None
    reader, writer = await _protocol_streams()
    async with EditorsAgent(ctx) as agent:
        # A method that the agent does not have, such as one that sets a mode, is answered with "method not found".
        await run_agent(cast(Any, agent), writer, reader, use_unstable_protocol=True)


async def _protocol_streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of the protocol. All other output goes to standard error, or it would break the protocol.

    That includes the output of tools, and of processes that they start.
    """
    from acp.stdio import stdio_streams

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # the descriptor, and not only sys.stdout: a process that a tool starts inherits it
    printed, sys.stdout = sys.stdout, open(kept, "w", closefd=False)  # noqa: SIM115, ASYNC230  # open until the end
    try:
        return await stdio_streams(limit=_MOST_BYTES)
    finally:
        sys.stdout = printed
