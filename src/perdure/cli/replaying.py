"""The command that runs stored sessions again and compares the results: real sessions as regression tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from perdure.cli.errors import FAILED, NOT_FOUND, USAGE, Failure
from perdure.cli.options import (
    last_option,
    session_argument,
    settings_of,
    since_option,
    store_command,
)
from perdure.cli.session_ids import named
from perdure.cli.setup import on_sessions, typed_agents
from perdure.cli.short_ids import learn, shown
from perdure.cli.terminal import console, counted, is_terminal, line, note, print_json, print_table, progress, safe
from perdure.errors import ConfigurationError, InvalidSessionId, PerdureError, SessionNotFound

if TYPE_CHECKING:
    from perdure.replay import Recording, Replay, ReplayResult, Rule
    from perdure.sessions.sessions import Sessions

_TOOLS = ("recorded", "live")
_PAGE = 200
_STYLES = {"+": "green", "-": "red", "~": "yellow"}
_COLUMNS = ("SESSION", "STEPS", "SAME", "ANSWERS", "CALLS", "TOKENS", "COST", "RESULT")


def _max_time(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    from perdure.cli.durations import span

    return span(ctx, param, value)


@store_command(json=True, agent=True)
@session_argument("sources", nargs=-1, metavar="[SESSION|FILE]...")
@click.option("--all", "everything", is_flag=True, help="Every session, without those of sub-agents.")
@click.option("--tag", metavar="TAG", help="Only sessions with this tag.")
@click.option("--agent-name", "agent_name", metavar="NAME", help="Only this agent's sessions.")
@since_option("updated_after", "sessions changed")
@last_option(help="Only the last N sessions, by when they were changed.")
@click.option("--system-prompt", metavar="TEXT", help="Give the agent this prompt.")
@click.option(
    "--on-unmatched",
    type=click.Choice(["error", "live", "stop"]),
    default="error",
    show_default=True,
    help="What becomes of a call that is not on record: the model is told so, it is made, or the turn ends.",
)
@click.option(
    "--history",
    type=click.Choice(["recorded", "replayed"]),
    default="recorded",
    show_default=True,
    help="What a turn begins with: the history on record, or the new answers of the turns before.",
)
@click.option(
    "--fail-on",
    metavar="RULE",
    multiple=True,
    help="What counts as different: any, answers, calls, results, ends, cost=RATIO or tokens=RATIO; may be repeated.",
)
@click.option("--children", is_flag=True, help="Replay the sessions of sub-agents, too.")
@click.option("--keep", is_flag=True, help="Keep what was replayed in the store, as sessions with the tag replay.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, metavar="N", show_default=True, help="How many at once.")
@click.option("--max-cost", type=click.FloatRange(0), metavar="DOLLARS", help="Begin no step beyond this cost.")
@click.option("--max-time", callback=_max_time, metavar="SPAN", help="Stop after this time. Units: s, min, h, d, w.")
def replay(ctx: click.Context, sources: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Run stored sessions again, and show step by step what is different. The stored sessions stay as they are.

    A FILE is one that `perdure export` has written. Tool calls are answered from the record: --tools FILE.py shows the
    model what the tools are, and --tools live has them called. With --model recorded, the answers on record are given.
    The exit code is 0 if all is the same, 1 if not, and 2 if a session could not be replayed.
    """
    asked = {"tag": given["tag"], "agent": given["agent_name"], "updated_after": given["updated_after"]}
    wanted = {name: value for name, value in asked.items() if value is not None}
    if bool(sources) == bool(wanted or given["everything"] or given["last"]):
        raise click.UsageError("Name the sessions or files, or which by --all, --tag, --agent-name, --since or --last.")
    mode = _mode_of(ctx)
    files = frozenset(filter(os.path.isfile, sources))
    if sources and files.issuperset(sources) and not given["keep"]:
        settings_of(ctx).store = "memory://"  # nothing is read from a store, and none is begun
    options = _Options(ctx, mode, given)

    async def work(sessions: Sessions) -> list[_Row]:
        found = [each async for each in _found(sessions, sources, files, wanted, given["last"])]
        if not found:
            raise Failure("No session matches, so nothing was replayed.", USAGE)
        return await _all(sessions, found, options, as_json)

    rows = on_sessions(ctx, work, must_exist=settings_of(ctx).store != "memory://", begins=True)
    code = _exit_code(rows)
    if code:
        ctx.exit(code)


class _Source(NamedTuple):
    """A session, or a file of sessions, as a person has named it."""

    name: str
    is_file: bool
    error: str | None = None
    """The error, if no session has that name."""


class _Options:
    """The options of the command, which are the same for every session."""

    def __init__(self, ctx: click.Context, mode: str, given: dict[str, Any]) -> None:
        from datetime import timedelta

        from perdure.model.execution import ExecutionBudget
        from perdure.model.ids import now
        from perdure.replay import Allowance, Rule

        agents = typed_agents(ctx)
        model, span = settings_of(ctx).model, given["max_time"]
        deadline = None if span is None else now() + timedelta(seconds=span)
        self.rules: Sequence[Rule] = [Rule.of(each) for each in given["fail_on"] or ("any",)]
        self.jobs: int = given["jobs"]
        self.keep: bool = given["keep"]
        self._facts: dict[str, Any] = {
            "tools": mode,
            "model": model,
            "agent": agents[0] if agents else None,
            "budget": Allowance(ExecutionBudget(max_cost=given["max_cost"], deadline=deadline)),
            **{name: given[name] for name in ("system_prompt", "on_unmatched", "history", "children")},
        }

    def replay(self, recording: Recording, sessions: Sessions) -> Replay:
        from perdure.replay import Replay

        return Replay(recording, loops=sessions.loops, into=sessions if self.keep else None, **self._facts)


class _Row(NamedTuple):
    """The result of one session."""

    name: str
    result: ReplayResult | None = None
    broken: tuple[str, ...] = ()
    error: str | None = None

    @property
    def told(self) -> str:
        if self.error is not None:
            return f"error: {self.error}"
        if self.result is None or not self.result.turns:
            return "nothing to replay"
        return f"different: {', '.join(self.broken)}" if self.broken else "same" if self.result.is_same else "passed"


def _mode_of(ctx: click.Context) -> str:
    """Return how calls are answered. Remove that word from --tools in the settings, so that only files are left."""
    settings = settings_of(ctx)
    modes = [each for each in settings.tools if each in _TOOLS]
    if len(set(modes)) > 1:
        raise click.UsageError("--tools is recorded or live, not both.")
    settings.tools = tuple(each for each in settings.tools if each not in _TOOLS)
    return modes[0] if modes else "recorded"


async def _found(
    sessions: Sessions, sources: Sequence[str], files: Collection[str], wanted: dict[str, Any], last: int | None
) -> AsyncIterator[_Source]:
    for source in sources:
        if source in files:
            yield _Source(source, True)
            continue
        try:
            yield _Source(await named(sessions, source), False)
        except (Failure, PerdureError) as failed:
            error: Exception = failed
            # A path with a slash is not an id either: that is the context of the failure.
            is_unknown = isinstance(failed, SessionNotFound) or isinstance(failed.__context__, InvalidSessionId)
            if is_unknown and (source.endswith((".json", ".jsonl")) or "/" in source):
                error = Failure(f"No file {source} exists, and no session has that name.", NOT_FOUND)
            if len(sources) == 1:  # nothing else to replay: the command fails as usual, with its own exit code
                raise error from None
            yield _Source(source, False, str(error))
    after, left = None, last
    while not sources:
        size = min(_PAGE, left or _PAGE)
        page = await sessions.headers(**wanted, top_level=True, order="updated", limit=size, after=after)
        for damage in page.damaged:
            note(f"damaged: {damage}")
        for info in page:
            yield _Source(info.id, False)
        after, left = page.next, None if left is None else left - len(page)
        if after is None or left == 0:
            return


async def _all(sessions: Sessions, found: Sequence[_Source], options: _Options, as_json: bool) -> list[_Row]:
    """Replay sessions, several at once. If that is interrupted, print the results that are there."""
    rows: dict[int, list[_Row]] = {}
    places = asyncio.Semaphore(options.jobs)
    with progress("replaying") as tell:
        alone = tell if len(found) == 1 else None

        async def one(place: int, source: _Source) -> None:
            async with places:
                rows[place] = await _rows_of(sessions, source, options, alone)
            if alone is None:
                tell(len(rows), len(found))

        try:
            async with asyncio.TaskGroup() as group:
                for place, source in enumerate(found):
                    group.create_task(one(place, source))
        except asyncio.CancelledError:
            if len(found) > 1:
                _print(_in_order(rows), as_json)
            raise
    await learn(sessions, [each.name for each in found if not each.is_file and each.error is None])
    _print(_in_order(rows), as_json)
    return _in_order(rows)


def _in_order(rows: Mapping[int, Sequence[_Row]]) -> list[_Row]:
    return [row for _, some in sorted(rows.items()) for row in some]


async def _rows_of(
    sessions: Sessions, source: _Source, options: _Options, tell: Callable[[int, int], None] | None
) -> list[_Row]:
    """Return the results of a session, or of each in a file. One that cannot be replayed does not stop the others."""
    from perdure.replay import Recording

    if source.error is not None:
        return [_Row(source.name, error=source.error)]
    try:
        if source.is_file:
            recordings: Sequence[Recording] = await Recording.in_file(source.name)
        else:
            recordings = [await Recording.taken(sessions, source.name)]
    except PerdureError as error:
        return [_Row(source.name, error=str(error))]
    return [await _row_of(sessions, each, options, tell) for each in recordings]


async def _row_of(
    sessions: Sessions, recording: Recording, options: _Options, tell: Callable[[int, int], None] | None
) -> _Row:
    try:
        result = await options.replay(recording, sessions).run(progress=tell)
    except PerdureError as error:
        return _Row(recording.session_id, error=str(error))
    missing = _missing_in(result)
    if missing is not None:
        return _Row(recording.session_id, error=f"its model could not be asked: {missing}")
    broken = tuple(str(rule) for rule in options.rules if rule.is_broken(result))
    return _Row(recording.session_id, result, broken)


def _missing_in(result: ReplayResult) -> str | None:
    """Return what was not set up, such as a key, if a turn failed of that. It says nothing about a model's answers."""
    errors = [turn.replayed.errors[-1] for turn in result.turns if turn.fails and turn.replayed.errors]
    own = next((error.message for error in errors if error.type == ConfigurationError.__name__), None)
    return own or next(filter(None, map(_missing_in, result.children)), None)


def _print(rows: Sequence[_Row], as_json: bool) -> None:
    if as_json:
        for row in rows:
            told = {"session": row.name, "error": row.error} if row.result is None else row.result.to_dict()
            print_json({**told, "broken": list(row.broken)})
        return
    if len(rows) == 1:
        _print_steps(rows[0])
        return
    right = ("STEPS", "SAME", "ANSWERS", "CALLS", "TOKENS", "COST")
    print_table(_COLUMNS, [_cells(row) for row in rows], right=right, spare=("COST", "TOKENS"), flexible=("RESULT",))
    different, failed = sum(bool(row.broken) for row in rows), sum(row.error is not None for row in rows)
    note(f"{counted(len(rows), 'session')}: {different} different, {failed} with an error.")


def _cells(row: _Row) -> list[object]:
    result = row.result
    if result is None:
        return [shown(row.name), *[""] * 6, row.told]
    same = sum(step.is_same for step in result.steps)
    counts = (len(result.steps), same, result.changed_answers, result.changed_calls)
    return [shown(row.name), *counts, _ratio(result.token_ratio), _ratio(result.cost_ratio), row.told]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _print_steps(row: _Row) -> None:
    from perdure.replay.report import lines_of

    if row.result is None:
        note(f"{row.name}: {row.told}")
        return
    if not is_terminal():
        for told in lines_of(row.result):
            click.echo(safe(told))
    else:
        from rich.text import Text

        for told in lines_of(row.result):
            console().print(Text(safe(told), style=_STYLES.get(told.strip()[:1], "")), soft_wrap=True)
    spent = f"tokens {_ratio(row.result.token_ratio) or '?'}, cost {_ratio(row.result.cost_ratio) or '?'}"
    note(f"{line(row.told)} ({spent})")


def _exit_code(rows: Sequence[_Row]) -> int:
    if any(row.error is not None for row in rows) or not any(row.result and row.result.turns for row in rows):
        return USAGE
    return FAILED if any(row.broken for row in rows) else 0
