"""The command that shows events: those on record, and those to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.naming import named
from perdure.cli.options import json_option, last_option, session_argument, store_options
from perdure.cli.setup import opened, run
from perdure.cli.terminal import counted, is_terminal, line, print_json, safe, width

if TYPE_CHECKING:
    from perdure.model.loop_events import AnyLoopEvent

_BEFORE = 52
"""How wide the columns before an event's words are."""


@click.command()
@session_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on with those to come, from whichever process.")
@click.option("--after", type=click.IntRange(0), metavar="CURSOR", help="Only those behind this one.")
@last_option(help="Only the last N events.")
@json_option
@store_options
@click.pass_context
def events(ctx: click.Context, session: str, follow: bool, after: int | None, last: int | None, as_json: bool) -> None:
    """Show what happened in the runs of SESSION, one event a line: cursor, time, run, kind, what."""

    async def work() -> None:
        async with opened(ctx, must_exist=True) as sessions:
            session_id = await named(sessions, session)
            async for event in sessions.events(session_id, after=after, last=last, follow=follow):
                if as_json:
                    print_json(event.to_dict())
                else:
                    _print_event(event)

    run(work())


def _print_event(event: AnyLoopEvent) -> None:
    kind = type(event).__struct_config__.tag
    fields = (event.cursor or "", event.at.isoformat(timespec="milliseconds"), event.loop_id, kind, _told(event))
    if not is_terminal():
        click.echo("\t".join(line(field) for field in fields))
        return
    at = f"{event.at:%H:%M:%S.%f}"[:-3]
    told = line(fields[-1], max(20, (width() or 100) - _BEFORE))
    click.echo(f"{event.cursor or '':>6}  {at}  {safe(event.loop_id[-6:])}  {safe(str(kind)):<20}  {told}")


def _told(event: AnyLoopEvent) -> str:
    """What an event says, in a few words."""
    told = _WORDS.get(type(event).__name__)
    return told(event) if told else ""


_WORDS: dict[str, Callable[[Any], str]] = {
    "AgentStart": lambda event: (event.config.model if event.config else "") + (" resumed" if event.resumed else ""),
    "TurnStart": lambda event: f"step {event.index}",
    "MessageEnd": lambda event: (
        f"{event.message.role}: {event.message.text}" + "".join(f" → {call.name}" for call in event.message.tool_calls)
    ),
    "ToolExecutionStart": lambda event: f"{event.call.name} {dict(event.call.arguments)}",
    "ToolExecutionEnd": lambda event: (
        f"{event.execution.call.name} = "
        + (event.execution.error.message if event.execution.error else str(event.execution.result))
    ),
    "AgentEnd": lambda event: f"{event.status.value} {counted(event.usage.total_tokens, 'token')}",
    "InputRejected": lambda event: event.reason,
    "Compaction": lambda event: f"{event.block.by} covers {counted(event.block.covered, 'message')}",
    "ParallelLoopStart": lambda event: counted(len(event.loop_ids), "branch"),
    "ParallelLoopEnd": lambda event: f"selected {event.selected_loop_id}",
    "Redacted": lambda event: counted(len(event.message_ids), "message"),
    "UnknownEvent": lambda event: event.kind,
}
