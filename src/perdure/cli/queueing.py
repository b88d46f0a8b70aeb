"""Commands about work for workers: the queue of waiting messages, parked sessions, and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.errors import NOT_ALLOWED, NOT_FOUND, Failure
from perdure.cli.hints import command
from perdure.cli.options import limit_option, session_argument, settings_of, store_command
from perdure.cli.session_ids import named, on_session
from perdure.cli.setup import begun, continued, on_sessions, use_model
from perdure.cli.short_ids import learn, shown
from perdure.cli.terminal import age, counted, is_terminal, line, note, print_json, print_table, say, to_come
from perdure.errors import InvalidData, RunFailed
from perdure.model.ids import now
from perdure.protocols import SCHEDULE, check_priority
from perdure.sessions.json_forms import moment_of, of_backlog, of_timer
from perdure.sessions.timing import UNTIL, next_time

if TYPE_CHECKING:
    from perdure.protocols import Timer
    from perdure.sessions.operating import Backlog
    from perdure.sessions.sessions import Sessions

_COLUMNS = ("SESSION", "STATE", "PRIORITY", "MESSAGES", "WHEN", "WHAT", "OWNER")
_SPARE = ("OWNER", "PRIORITY", "MESSAGES", "WHEN")
Row = tuple[object, ...]


@store_command(json=True)
@click.argument("verb", type=click.Choice(["ls", "retry", "drop"]), default="ls", metavar="[ls|retry|drop]")
@session_argument(required=False, metavar="[SESSION]")
@click.argument("name", required=False)
@limit_option(100)
def queue(ctx: click.Context, verb: str, session: str | None, name: str | None, limit: int, as_json: bool) -> None:
    """Show what waits for workers, what they run, what is delayed and what is parked.

    `retry SESSION` opens a session that is parked, and a worker sends what waits there. `drop SESSION` takes back the
    messages that wait in it, and says which: each is on record as refused. `drop SESSION NAME` takes back what is to be
    sent later under that name.
    """
    if (verb == "ls") != (session is None) or (name is not None and verb != "drop"):
        raise click.UsageError(
            "Type: perdure queue, or perdure queue retry SESSION, or perdure queue drop SESSION [NAME]."
        )
    if session is None:
        _show(ctx, limit, as_json)
    elif verb == "retry":
        _open(ctx, session, as_json)
    elif name is None:
        _drop(ctx, session, as_json)
    else:
        _drop_timer(ctx, session, name, as_json)


def _show(ctx: click.Context, limit: int, as_json: bool) -> None:
    async def work(sessions: Sessions) -> Backlog:
        found = await sessions.queue(limit=limit)
        if not as_json:
            parts = (found.waiting, found.held, found.running, found.delayed, found.parked)
            await learn(sessions, [each.session_id for part in parts for each in part])
        return found

    found = on_sessions(ctx, work)
    if as_json:
        print_json(of_backlog(found))
        return
    rows = [*_rows(found)]
    if rows:
        print_table(_COLUMNS, rows, right=("PRIORITY", "MESSAGES"), spare=_SPARE, flexible=("WHAT",))
    elif is_terminal():
        note("Nothing waits, runs, is delayed or parked.")
    if len(found.waiting) == limit:
        note(f"More may wait. Add --limit {limit * 2}.")
    for each in found.parked[:1]:
        note(f"To open a session that is parked: {command('queue', 'retry', each.session_id)}")


def _rows(found: Backlog) -> Iterator[Row]:
    for run in found.running:
        since = "" if run.since is None else age(moment_of(run.since))
        state = "running" if not run.lapsed else "handed over" if run.session_id in found.handed_over else "killed"
        yield shown(run.session_id), state, "", "", since, run.holder, run.owner or ""
    for each in found.waiting:
        since = age(moment_of(each.since))
        yield shown(each.session_id), "waiting", each.priority, each.count, since, "", each.owner or ""
    for each in found.held:
        since, why = age(moment_of(each.since)), "behind a decision or a pause"
        yield shown(each.session_id), "held", each.priority, each.count, since, why, each.owner or ""
    for timer in found.delayed:
        when = to_come(moment_of(timer.due))
        yield shown(timer.session_id), "delayed", timer.priority, "", when, _described(timer), ""
    for one in found.parked:
        since = "" if one.why is None else age(datetime.fromisoformat(one.why.at))
        why = "" if one.why is None else f"{one.why.reason} ({counted(one.why.tries, 'death')})"
        yield shown(one.session_id), "parked", "", one.waiting, since, why, one.owner or ""


def _described(timer: Timer) -> str:
    """Return the name of a timer, its schedule, and its message."""
    again = "" if timer.cron is None else f" ({' '.join(filter(None, (timer.cron, timer.timezone)))})"
    said = "resumes the session" if timer.name == UNTIL else of_timer(timer)["text"]
    return f"{timer.name}{again}: {said}" if said else f"{timer.name}{again}"


def _open(ctx: click.Context, session: str, as_json: bool) -> None:
    async def verb(sessions: Sessions, session_id: str) -> int:
        try:
            await sessions.unpark(session_id)
        except InvalidData:
            raise Failure(f"Session {session_id!r} is not parked. Type: {command('queue')}", NOT_ALLOWED) from None
        found = (await sessions.queue(limit=10_000)).waiting
        return next((each.count for each in found if each.session_id == session_id), 0)

    session_id, count = on_session(ctx, session, verb)
    if as_json:
        print_json({"session": session_id, "waiting": count})
        return
    say(f"{session_id} is active; for a worker: {counted(count, 'message')}")
    note("The message whose run was ended is not among them. Send it again if it is still wanted.")


def _drop(ctx: click.Context, session: str, as_json: bool) -> None:
    session_id, dropped = on_session(ctx, session, lambda sessions, session_id: sessions.drop_waiting(session_id))
    if as_json:
        print_json({"session": session_id, "dropped": [{"key": each.key, "text": each.text} for each in dropped]})
        return
    for each in dropped:
        say(f"dropped\t{line(each.key or '-')}\t{line(each.text)}")
    if not dropped:
        say(f"nothing waits in {session_id}")


def _drop_timer(ctx: click.Context, session: str, name: str, as_json: bool) -> None:
    async def verb(sessions: Sessions, session_id: str) -> Failure | None:
        is_gone = await sessions.drop_timer(session_id, name)
        return None if is_gone else await _why_not_dropped(sessions, session_id, name)

    session_id, why_not = on_session(ctx, session, verb)
    _tell_of_dropped(session_id, name, why_not, as_json)
    if name == UNTIL and not as_json:
        note(f"{session_id} stays suspended. To open it: {command('resume', session_id)}")


async def _why_not_dropped(sessions: Sessions, session_id: str, name: str) -> Failure:
    """Explain why no message under a name could be taken back."""
    try:
        found = await sessions.result(session_id, name)
    except RunFailed:
        return Failure(f"The message {name!r} was sent and its run failed, so it cannot be taken back.", NOT_ALLOWED)
    if found is None:
        unknown = f"Nothing is to be sent to session {session_id!r} under {name!r}."
        return Failure(f"{unknown} Type: {command('queue')}", NOT_FOUND)
    if found.queued and not found.running:
        waits = f"The message {name!r} waits in session {session_id!r} already."
        return Failure(
            f"{waits} To take back all that waits there: {command('queue', 'drop', session_id)}", NOT_ALLOWED
        )
    done = "is being answered" if found.queued else "is answered"
    return Failure(f"The message {name!r} {done}, so it cannot be taken back.", NOT_ALLOWED)


def _tell_of_dropped(session_id: str, name: str, why_not: Failure | None, as_json: bool) -> None:
    if as_json:
        print_json({"session": session_id, "name": name, "dropped": why_not is None})
    elif why_not is None:
        say(f"dropped\t{line(name)}")
    if why_not is not None:
        raise why_not


_VERBS = "Type: perdure schedule, or perdure schedule add NAME TEXT --cron '0 7 * * MON', or … remove NAME."


@store_command(json=True, agent=True)
@click.argument("verb", type=click.Choice(["ls", "add", "remove"]), default="ls", metavar="[ls|add|remove]")
@click.argument("name", required=False)
@click.argument("text", required=False)
@click.option("--cron", metavar="WHEN", help="When to send it: minute, hour, day, month, weekday, as '0 7 * * MON'.")
@click.option("--timezone", metavar="ZONE", help="Where it is that time, such as Europe/Oslo. [UTC]")
@click.option("-s", "--session", metavar="SESSION", help="Who gets it. [the session NAME, which is begun if need be]")
@click.option("--priority", type=int, default=0, metavar="N", show_default=True, help="How urgent it is.")
def schedule(
    ctx: click.Context, /, verb: str, name: str | None, session: str | None, as_json: bool, **given: Any
) -> None:
    """Have a message sent to a session again and again, by a worker. Without a verb, list what is scheduled.

    `add NAME TEXT` replaces the schedule of that name in the session; `remove NAME` ends it. A session that is begun
    for it needs a model, and has the --agent.
    """
    if verb == "add" and given["text"] is not None and given["cron"] is None:
        raise click.UsageError("--cron is missing: when is it to be sent? Such as --cron '0 7 * * MON'.")
    if given["text"] is not None and not given["text"].strip():
        raise click.UsageError("The text is empty, so there is nothing to say.")
    is_said = given["text"] is not None and given["cron"] is not None
    if (name is None) != (verb == "ls") or is_said != (verb == "add"):
        raise click.UsageError(_VERBS)
    if name is None:
        _show_schedules(on_sessions(ctx, lambda sessions: sessions.schedules()), as_json)
    elif verb == "add":
        _show_schedules([_schedule(ctx, name, session, **given)], as_json)
    else:
        _unschedule(ctx, name, session, as_json)


def _schedule(ctx: click.Context, name: str, session: str | None, *, text: str, **when: Any) -> Timer:
    async def work(sessions: Sessions) -> Timer:
        next_time(when["cron"], when["timezone"], now())  # checked first, so that a mistake creates no session
        check_priority(when["priority"])
        if session is None and not await sessions.exists(name):
            target = (await begun(ctx, sessions, name)).id
        else:
            target = await named(sessions, session) if session is not None else (await sessions.info(name)).id
            await continued(ctx, sessions, target)
            if settings_of(ctx).model is not None:
                await use_model(ctx, sessions, target)  # stored now: the worker that sends it does not see --model
        return await sessions.schedule(name, text, session_id=target, **when)

    return on_sessions(ctx, work, must_exist=session is not None, begins=session is None)


def _unschedule(ctx: click.Context, name: str, session: str | None, as_json: bool) -> None:
    async def work(sessions: Sessions) -> tuple[str, Failure | None]:
        target = name if session is None else await named(sessions, session)
        if await sessions.exists(target) and await sessions.unschedule(name, target):
            return (await sessions.info(target)).id, None
        others = [each.session_id for each in await sessions.schedules() if each.name == SCHEDULE + name]
        if not others:
            return target, Failure(f"No schedule has the name {name!r}. Type: {command('schedule')}", NOT_FOUND)
        there = f"The schedule {name!r} is in session {others[0]!r}."
        remove = command("schedule", "remove", name, "-s", others[0])
        return target, Failure(f"{there} Type: {remove}", NOT_FOUND)

    session_id, why_not = on_sessions(ctx, work)
    _tell_of_dropped(session_id, SCHEDULE + name, why_not, as_json)


def _show_schedules(timers: Sequence[Timer], as_json: bool) -> None:
    if as_json:
        for each in timers:
            print_json(of_timer(each))
    elif timers:
        rows = [(each.session_id, to_come(moment_of(each.due)), _described(each)) for each in timers]
        print_table(("SESSION", "NEXT", "WHAT"), rows, flexible=("WHAT",))
    elif is_terminal():
        note("Nothing is scheduled.")
