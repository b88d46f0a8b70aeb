"""The command that checks a store, and repairs what follows from the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from perdure.cli.errors import DAMAGED
from perdure.cli.hints import command
from perdure.cli.options import session_argument, store_command
from perdure.cli.session_ids import named
from perdure.cli.setup import keys_in, on_sessions, owner_of, require_store, store_url
from perdure.cli.terminal import counted, line, note, print_json, progress, say, told_of_interruption

if TYPE_CHECKING:
    from perdure.archive.checking import FsckReport
    from perdure.archive.repairing import RepairReport
    from perdure.protocols import Problem
    from perdure.sessions.sessions import Sessions


@store_command(json=True)
@session_argument(required=False, metavar="[SESSION]")
@click.option("--repair", "mend", is_flag=True, help="Write again what follows from what is stored: indexes, notes.")
@click.option("--dry-run", is_flag=True, help="With --repair: change nothing, and say what would be repaired.")
@click.option("--accept-lost-commits", is_flag=True, help="First give up commits that a SQLite file's log has lost.")
def fsck(
    ctx: click.Context, session: str | None, mend: bool, dry_run: bool, accept_lost_commits: bool, as_json: bool
) -> None:
    """Verify every promise that the store, or SESSION, makes, and say how to repair what is wrong.

    --repair mends what can be mended without guessing, while others use the store. It changes nothing that was said.
    """
    if session is None and owner_of(ctx):
        raise click.UsageError("The check is of the whole store; leave --owner out, or name a session.")
    if dry_run and not mend:
        raise click.UsageError("--dry-run goes with --repair; a check changes nothing in any case.")
    if accept_lost_commits:
        _accept_lost_commits(ctx, session)
    if mend:
        if session is not None or owner_of(ctx):
            raise click.UsageError("A repair is of the whole store; leave the session out.")
        _repair(ctx, dry_run, as_json)
        return

    async def work(sessions: Sessions) -> FsckReport:
        from perdure.archive.checking import fsck as check

        session_id = None if session is None else await named(sessions, session)
        with progress("checking") as tell:
            return await check(sessions.store, session_id=session_id, progress=tell)

    report = on_sessions(ctx, work)
    if as_json:
        problems = [problem_form(each) for each in report.problems]
        print_json({"sessions": report.sessions, "messages": report.messages, "problems": problems})
    else:
        for each in report.problems:
            say_problem(each)
        found = counted(len(report.problems), "problem") if report.problems else "no problems"
        say(f"{counted(report.sessions, 'session')}, {counted(report.messages, 'message')}, {found}")
        if any(each.needs_key for each in report.problems) and keys_in(ctx) is None:
            note(name_keys("fsck", *([] if session is None else [session])))
        elif not all(each.needs_key for each in report.problems) and session is None:
            note(f"What can be repaired without guessing: {command('fsck', '--repair', '--dry-run')}")
    if report.problems:
        ctx.exit(DAMAGED)


def _repair(ctx: click.Context, dry_run: bool, as_json: bool) -> None:
    async def work(sessions: Sessions) -> RepairReport:
        from perdure.archive.repairing import repair

        with progress("repairing") as tell:
            return await repair(sessions.store, dry_run=dry_run, progress=tell)

    with told_of_interruption("What was repaired so far is kept. Repeat the command to continue."):
        report = on_sessions(ctx, work)
    if as_json:
        lists = {"found": report.found, "repaired": report.repaired, "left": report.left}
        print_json(
            {"dry_run": dry_run, **{name: [problem_form(each) for each in found] for name, found in lists.items()}}
        )
    else:
        for each in report.repaired:
            say(f"✓ {_where(each)}: {line(each.what)}")
        for each in report.left:
            say_problem(each)
        done = "would be repaired" if dry_run else "repaired"
        say(f"{len(report.repaired)} {done}, {len(report.left)} left")
        if any(each.needs_key for each in report.left) and keys_in(ctx) is None:
            note(name_keys("fsck", "--repair", *(["--dry-run"] if dry_run else [])))
        elif not all(each.needs_key for each in report.left):
            note("What is left, a backup has: perdure restore --from TARGET --store URL --verify, into another place.")
    if report.left or (dry_run and report.repaired):
        ctx.exit(DAMAGED)


def name_keys(*words: str) -> str:
    """Return the note that tells how to check a sealed store with its keys."""
    return f"The store is sealed. Give its master key in PERDURE_MASTER_KEY, and type: {command(*words)} --keys FILE"


def problem_form(problem: Problem) -> dict[str, str | None]:
    """Return a problem in the form that --json prints. Scripts rely on its names."""
    return {"session": problem.session_id, "where": problem.where, "what": problem.what, "repair": problem.repair}


def say_problem(problem: Problem) -> None:
    say(f"✗ {_where(problem)}: {line(problem.what)}\n  {line(problem.repair)}")


def _where(problem: Problem) -> str:
    return f"{problem.session_id}: {line(problem.where)}" if problem.session_id else line(problem.where)


def _accept_lost_commits(ctx: click.Context, session: str | None) -> None:
    """Let a SQLite file be used again without the commits that its log has lost."""
    url = store_url(ctx).value
    if session is not None or not url.startswith("sqlite:"):
        raise click.UsageError("--accept-lost-commits is for a whole store in a SQLite file; name no session.")
    require_store(ctx)
    from perdure.stores.urls import accept_lost_commits

    kept = accept_lost_commits(url)
    if kept is not None:
        note(f"The damaged log is kept as {kept}. It holds text of sessions: delete it when you do not need it.")
