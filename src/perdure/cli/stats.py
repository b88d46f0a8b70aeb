"""The command that counts what runs have used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.options import agent_name_option, json_option, store_options
from perdure.cli.progress import progress
from perdure.cli.setup import opened, run
from perdure.cli.shapes import of_usage
from perdure.cli.spans import moment
from perdure.cli.terminal import console, is_terminal, note, print_json, print_table, width
from perdure.model.usage import Usage

if TYPE_CHECKING:
    from perdure.model.record import LoopRecord
    from perdure.model.session import AgentSessionInfo
    from perdure.sessions.sessions import Sessions

_BAR, _TABLE = 40, 50
Key = tuple[str, str]


@dataclass
class Run:
    """What one run has used."""

    agent: str
    model: str
    at: datetime | None
    usage: Usage

    @property
    def day(self) -> str:
        return self.at.date().isoformat() if self.at else "unknown"


@click.command()
@click.option("--by", type=click.Choice(["agent", "model", "day"]), help="Only by this. [all three]")
@agent_name_option
@click.option("--since", callback=moment, metavar="TIME", help="Only runs since: 2h, 3d, or a date.")
@json_option
@store_options
@click.pass_context
def stats(ctx: click.Context, by: str | None, agent: str | None, since: datetime | None, as_json: bool) -> None:
    """Count tokens and cost by agent, model and day. What a sub-agent has used counts for it, not for its caller."""

    async def work() -> list[Run]:
        async with opened(ctx, must_exist=True) as sessions:
            return await runs_in(sessions, since)

    found = [each for each in run(work()) if agent in (None, each.agent)]
    groups = {name: _summed(found, name) for name in ([by] if by else ["agent", "model", "day"])}
    if as_json:
        total = _row("total", found)
        print_json({"total": total, **{f"by_{name}": rows for name, rows in groups.items()}})
        return
    if not found:
        note("No runs here.")
        return
    for name, rows in groups.items():
        print_costs(name, rows)


async def runs_in(sessions: Sessions, since: datetime | None = None) -> list[Run]:
    """Every run since a time. A caller's usage holds that of its sub-agents, which is taken out of it here."""
    runs: dict[Key, Run] = {}
    spawned: list[tuple[Key, Usage]] = []
    with progress("counting") as tell:
        infos = await _infos(sessions, since)
        for done, info in enumerate(infos, 1):
            found = _runs_of(info, await _loops(sessions, info.id))
            runs |= found
            if info.spawn_ref is not None:
                ref = info.spawn_ref
                used = sum((each.usage for each in found.values()), start=Usage())
                spawned.append(((ref.parent_session_id, ref.parent_loop_id), used))
            tell(done, len(infos))
    for caller, used in spawned:
        if caller in runs:
            runs[caller].usage = _without(runs[caller].usage, used)
    return [each for each in runs.values() if since is None or (each.at is not None and each.at >= since)]


async def _infos(sessions: Sessions, since: datetime | None) -> list[AgentSessionInfo]:
    found: list[AgentSessionInfo] = []
    after: str | None = None
    while True:
        more: dict[str, Any] = {"updated_after": since} if since else {}
        page = await sessions.list(limit=1000, after=after, **more)
        found += page
        if page.next is None:
            return found
        after = page.next


async def _loops(sessions: Sessions, session_id: str) -> list[LoopRecord]:
    """The headers of a session's runs. That of one that has not ended does not know what it has used: it is read."""
    headers = (await sessions.record(session_id)).loops
    return [each if each.status.is_over else await sessions.loop(session_id, each.loop_id) for each in headers]


def _runs_of(info: AgentSessionInfo, loops: Iterable[LoopRecord]) -> dict[Key, Run]:
    runs: dict[Key, Run] = {}
    for loop in loops:
        usage = loop.usage
        group = loop.parallel_group
        if group is not None and group.all_loop_ids[0] == loop.loop_id:
            usage = usage + group.evaluation_usage
        runs[info.id, loop.loop_id] = Run(info.agent_name, _model_of(loop), loop.started_at, usage)
    return runs


def _model_of(loop: LoopRecord) -> str:
    if loop.config is not None:
        return loop.config.model
    return "none (compaction)" if loop.continuation_kind.kind == "compaction" else "unknown"


def _without(usage: Usage, part: Usage) -> Usage:
    """A usage less a part of it; a run that was killed may not have counted the part yet."""
    fields = of_usage(usage)
    return Usage(**{name: max(0, amount - getattr(part, name)) for name, amount in fields.items()})


def _summed(runs: Iterable[Run], name: str) -> list[dict[str, Any]]:
    groups: dict[str, list[Run]] = {}
    for each in runs:
        groups.setdefault(getattr(each, name), []).append(each)
    return [_row(key, groups[key]) for key in sorted(groups)]


def _row(key: str, runs: list[Run]) -> dict[str, Any]:
    return {"key": key, "runs": len(runs), **of_usage(sum((each.usage for each in runs), start=Usage()))}


def print_costs(name: str, rows: list[dict[str, Any]]) -> None:
    """A table of sums, with a bar for each in a terminal."""
    counted = "cost" if any(row["cost"] for row in rows) else "output_tokens"
    most = max((row[counted] for row in rows), default=0) or 1
    columns = [name.upper(), "RUNS", "INPUT", "OUTPUT", "COST"]
    lines = [
        [row["key"], row["runs"], f"{row['input_tokens']:,}", f"{row['output_tokens']:,}", f"${row['cost']:.4f}"]
        for row in rows
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
