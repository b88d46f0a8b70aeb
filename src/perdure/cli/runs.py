"""Commands about runs: their events, and their usage and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.options import agent_name_option, last_option, session_argument, since_option, store_command
from perdure.cli.session_ids import on_session
from perdure.cli.setup import on_sessions
from perdure.cli.terminal import (
    console,
    counted,
    is_terminal,
    line,
    note,
    price,
    print_json,
    print_table,
    progress,
    safe,
    width,
)
from perdure.model.loop_events import UNTOLD
from perdure.sessions.graphs import WRITES, told_of_writes
from perdure.sessions.json_forms import of_usage
from perdure.sessions.spending import Part, Spending, Sum, redacted_in, spending_of, summed

if TYPE_CHECKING:
    from perdure.model.loop_events import AnyLoopEvent
    from perdure.sessions.sessions import Sessions

_BAR, _TABLE = 40, 50
_BEFORE = 52
"""The width of the columns before an event's words."""


@store_command(json=True)
@session_argument()
@click.option("-f", "--follow", is_flag=True, help="Continue with those to come, of any process.")
@click.option("--after", type=click.IntRange(0), metavar="CURSOR", help="Only those behind this one.")
@last_option(help="Only the last N events.")
def events(ctx: click.Context, session: str, follow: bool, after: int | None, last: int | None, as_json: bool) -> None:
    """Show what happened in the runs of SESSION, one event a line: cursor, time, run, kind, what."""

    async def verb(sessions: Sessions, session_id: str) -> None:
        async for event in sessions.events(session_id, after=after, last=last, follow=follow):
            if as_json:
                print_json(event.to_dict())
            else:
                _print_event(event)

    on_session(ctx, session, verb)


def _print_event(event: AnyLoopEvent) -> None:
    # An adapter's entry goes by its own name.
    kind = getattr(event, "kind", type(event).__struct_config__.tag)
    at = None if event.at == UNTOLD else event.at  # an entry that hands a run over tells no time
    written = "" if at is None else at.isoformat(timespec="milliseconds")
    fields = (event.cursor or "", written, event.loop_id, kind, _told(event))
    if not is_terminal():
        click.echo("\t".join(line(field) for field in fields))
        return
    shown = "" if at is None else f"{at:%H:%M:%S.%f}"[:-3]
    told = line(fields[-1], max(20, (width() or 100) - _BEFORE))
    click.echo(f"{event.cursor or '':>6}  {shown:<12}  {safe(event.loop_id[-6:])}  {safe(str(kind)):<20}  {told}")


def _told(event: AnyLoopEvent) -> str:
    """Return an event in a few words."""
    told = _WORDS.get(type(event).__name__)
    return told(event) if told else ""


def _told_of_entry(kind: str, body: Any) -> str:
    """Return an entry that belongs to no run in a few words: an adapter's, or that of a repair."""
    if kind == WRITES:
        return told_of_writes(body)
    match body:
        case {"repaired": [*repairs]} if kind == "repaired":
            return ", ".join(str(each.get("where")) for each in repairs if isinstance(each, Mapping))
    return ""


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
    "AgentEnd": lambda event: (
        f"{event.status.value} {counted(event.usage.total_tokens, 'token')}" + _redacted(event.redactions)
    ),
    "InputRejected": lambda event: event.reason,
    "Compaction": lambda event: f"{event.block.by} covers {counted(event.block.covered, 'message')}",
    "ParallelLoopStart": lambda event: counted(len(event.loop_ids), "branch"),
    "ParallelLoopEnd": lambda event: f"selected {event.selected_loop_id}",
    "Redacted": lambda event: counted(len(event.message_ids), "message"),
    "HoldChanged": lambda event: " ".join((*(f"+{tag}" for tag in event.placed), *(f"-{tag}" for tag in event.lifted))),
    "UnknownEvent": lambda event: _told_of_entry(event.kind, event.body),
}


@store_command(json=True)
@click.option("--by", type=click.Choice(["agent", "model", "day"]), help="Only by this. [all three]")
@agent_name_option
@since_option("since", "runs")
def stats(ctx: click.Context, by: Part | None, agent: str | None, since: datetime | None, as_json: bool) -> None:
    """Count tokens and cost by agent, model and day. What a sub-agent has used counts for it, not for its caller."""

    spent = on_sessions(ctx, lambda sessions: _counted(sessions, since))
    found = Spending([each for each in spent.runs if agent in (None, each.agent)], spent.is_whole)
    if spent.damaged:
        note(
            f"{counted(len(spent.damaged), 'session')} could not be read: {', '.join(spent.damaged)}. See perdure fsck."
        )
    redactions = redacted_in(found.runs)
    parts: tuple[Part, ...] = (by,) if by else ("agent", "model", "day")
    groups = {part: [_row(each) for each in found.by(part)] for part in parts}
    if as_json:
        total = _row(summed("total", found.runs))
        told = {"redactions": redactions, "damaged": spent.damaged}
        print_json({"total": total, **{f"by_{name}": rows for name, rows in groups.items()}, **told})
        return
    if not found.runs:
        note("No runs here.")
        return
    for name, rows in groups.items():
        print_costs(name, rows)
    if redactions:
        note(f"Before they were stored, messages were{_redacted(redactions)[1:]}.")


def _redacted(counts: Mapping[str, int]) -> str:
    """Return the redactors in words, each with the number of its replacements."""
    return ", redacted: " + ", ".join(f"{name} {count}" for name, count in counts.items()) if counts else ""


async def _counted(sessions: Sessions, since: datetime | None) -> Spending:
    with progress("counting") as tell:
        return await spending_of(sessions, since, tell=tell)


def _row(found: Sum) -> dict[str, Any]:
    return {"key": found.key, "runs": found.runs, **of_usage(found.usage)}


def print_costs(name: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of sums, with a bar for each in a terminal."""
    # Bars of costs would all be empty with free models, so they show tokens then.
    counted = "cost" if any(row["cost"] for row in rows) else "output_tokens"
    most = max((row[counted] for row in rows), default=0) or 1
    columns = [name.upper(), "RUNS", "INPUT", "OUTPUT", "COST"]
    lines = [
        [row["key"], row["runs"], f"{row['input_tokens']:,}", f"{row['output_tokens']:,}", price(row)] for row in rows
    ]
    if not is_terminal():
        print_table(columns, [(name, *_plain(row)) for row in rows])
        return
    longest = min(_BAR, (width() or 80) - _TABLE)
    for row, cells in zip(rows, lines, strict=True):
        cells.append("█" * round(longest * row[counted] / most))
    right = ("RUNS", "INPUT", "OUTPUT", "COST")
    print_table([*columns, "SHARE"], lines, right=right, spare=("SHARE", "RUNS", "INPUT", "OUTPUT", "COST"))
    console().print()


def _plain(row: dict[str, Any]) -> tuple[object, ...]:
    return (row["key"], row["runs"], row["input_tokens"], row["output_tokens"], f"{row['cost']:.6f}")
