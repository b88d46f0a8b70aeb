"""Commands that back up whole stores, and restore them from a backup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli.checking import name_keys, problem_form, say_problem
from perdure.cli.errors import DAMAGED
from perdure.cli.hints import command
from perdure.cli.options import store_command
from perdure.cli.setup import keys_in, on_sessions, owner_of, require_kind, run, shown_url, store_url
from perdure.cli.terminal import counted, line, note, print_json, progress, say

if TYPE_CHECKING:
    from perdure.archive.backups import Backup, BackupReport, RestoreReport, VerifyReport
    from perdure.errors import BackupDamaged
    from perdure.sessions.sessions import Sessions

_WHOLE = "A backup is of the whole store; leave --owner out, or export that owner's sessions."
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@store_command(json=True, owner=False)
@click.argument("target", metavar="TARGET")
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Remove older backups of this store: N are left.")
@click.option("--full", is_flag=True, help="Write everything again, also what is in TARGET already.")
@click.option("--list", "listing", is_flag=True, help="Show the backups in TARGET.")
@click.option("--verify", is_flag=True, help="Check every byte in TARGET, and say which backups are whole.")
def backup(
    ctx: click.Context, target: str, keep: int | None, full: bool, listing: bool, verify: bool, as_json: bool
) -> None:
    """Add a backup of the store to the directory TARGET, while others use the store. Prints its id.

    Only what has changed since the last one is written. Killed at any time, it leaves the others whole.
    """
    if owner_of(ctx):
        raise click.UsageError(_WHOLE)
    if not target:
        raise click.UsageError("TARGET is empty. Name the directory for the backups.")
    if listing + verify + bool(keep or full) > 1:
        raise click.UsageError("Name one of --list, --verify, or what to back up.")
    if listing:
        _list(target, as_json)
    elif verify:
        _verify(ctx, target, as_json)
    else:
        _back_up(ctx, target, keep, full, as_json)


def _back_up(ctx: click.Context, target: str, keep: int | None, full: bool, as_json: bool) -> None:
    async def work(sessions: Sessions) -> BackupReport:
        with progress("backing up (MB)") as tell:
            told = _in_megabytes(tell)
            return await sessions.backup(target, keep=keep, full=full, gentle=False, progress=told)

    try:
        report = on_sessions(ctx, work)
    except KeyboardInterrupt:
        note("No backup was added. Those that were there are whole; the next one clears up.")
        raise
    if as_json:
        print_json({**_form(report.backup), "removed": list(report.removed), "freed": report.freed})
        return
    say(report.backup.id)
    removed = f", {counted(len(report.removed), 'older one')} removed" if report.removed else ""
    note(f"{_told(report.backup)}, {_size(report.backup.added)} of it new{removed}")


def _list(target: str, as_json: bool) -> None:
    from perdure.archive.backups import list_backups

    found = run(_awaited(list_backups, target))
    for each in found:
        if as_json:
            print_json(_form(each))
        else:
            of = f"{each.engine} {each.store[:8]}"
            say(f"{each.id}  {each.at.isoformat(timespec='seconds')}  {of}  {_told(each)}, {_size(each.added)} new")
    if unread := len([*Path(target).glob("backups/*.json")]) - len(found):
        note(f"{counted(unread, 'backup')} cannot be read. To see why: {command('backup', '--verify', target)}")
    elif not found:
        note("No backup is in it yet.")


def _verify(ctx: click.Context, target: str, as_json: bool) -> None:
    from perdure.archive.backups import verify_backups

    async def work() -> VerifyReport:
        with progress("verifying (MB)") as tell:
            return await verify_backups(target, progress=_in_megabytes(tell))

    report = run(work())
    if as_json:
        problems, unneeded = [
            [{"file": each.path, "chunk": each.chunk, "what": each.reason} for each in found]
            for found in (report.problems, report.unneeded)
        ]
        damaged = [{"id": key, "what": what} for key, what in report.damaged]
        whole = [_form(each) for each in report.backups]
        print_json(
            {
                "backups": whole,
                "damaged": damaged,
                "problems": problems,
                "unneeded": unneeded,
                "chunks": report.chunks,
                "bytes": report.bytes,
            }
        )
    else:
        for problem in report.problems:
            say(f"✗ {line(problem.position)}: {line(problem.reason)}")
        for key, what in report.damaged:
            say(f"✗ backup {key}: {line(what)}")
        say(f"{counted(len(report.backups), 'backup')} whole, {counted(len(report.damaged), 'backup')} damaged")
        for problem in report.unneeded:
            note(_harmless(problem))
    if not report.is_sound:
        for advice in _what_helps(target, report):
            note(advice)
        ctx.exit(DAMAGED)


def _what_helps(target: str, report: VerifyReport) -> Iterator[str]:
    if report.backups:
        yield "Restore one that is whole with --at."
    manifests = [each.path for each in report.problems if Path(each.path).parent.name == "backups"]
    for path in manifests:
        yield f"A backup is lost with its manifest. To remove it: rm {quote(path)}"
    if len(report.damaged) > len(manifests) or len(report.problems) > len(manifests):
        yield f"To have sound chunks again: {command('backup', target, '--full')}"


def _harmless(problem: BackupDamaged) -> str:
    """Return the note about damage that no backup suffers from."""
    what = f"No backup needs what is damaged in {line(problem.position)} ({line(problem.reason)})."
    if problem.chunk is None:
        return f"{what} To remove it: rm {quote(problem.path)}"
    return f"{what} It goes with the last backup that uses the file: backup --keep N."


def restore_store(ctx: click.Context, target: str, at: str | None, verify: bool, as_json: bool) -> None:
    """Restore the store that --store and the settings name from a directory of backups."""
    from perdure.archive.backups import restore
    from perdure.stores.urls import store_of

    if owner_of(ctx):
        raise click.UsageError(_WHOLE)
    if not target or at == "":
        raise click.UsageError("--from and --at need a value: the directory of backups, and a backup's id or a time.")
    url = store_url(ctx).value
    require_kind(url)
    # A restore alone needs no keys: the ring may be brought back after the store.
    store = store_of(url, keys=keys_in(ctx) if verify else None)

    async def work() -> RestoreReport:
        with progress("restoring (MB)") as tell:
            return await restore(target, store, at=_chosen(at), verify=verify, progress=_in_megabytes(tell))

    try:
        report = run(work())
    except KeyboardInterrupt:
        note("The store is not restored, and says so when it is opened. Repeat the command.")
        raise
    if as_json:
        problems = [problem_form(each) for each in report.problems]
        print_json({**_form(report.backup), "interrupted": report.lapsed, "verified": verify, "problems": problems})
    else:
        for each in report.problems:
            say_problem(each)
        checked = f", verified: {counted(len(report.problems), 'problem') if report.problems else 'no problems'}"
        say(f"restored {report.backup.id} into {shown_url(url)}: {_told(report.backup)}{checked if verify else ''}")
        if any(each.needs_key for each in report.problems) and keys_in(ctx) is None:
            note(name_keys("fsck"))
        if report.lapsed:
            note(f"{counted(report.lapsed, 'run')} under way then. To continue: {command('recover', tools=True)}")
    if report.problems:
        ctx.exit(DAMAGED)


def _chosen(at: str | None) -> str | datetime | None:
    """Return a time if a text is one, such as `2h` or a date. Any other text is a backup's id, or its beginning."""
    from perdure.cli.durations import moment

    if at is None:
        return None
    try:
        ctx = click.get_current_context()
        # An id has eight digits and then a dash. A date has a dash earlier, and a span has none.
        return at if "-" in at and at[:8].isdigit() else moment(ctx, ctx.command.params[0], at)
    except click.BadParameter:
        return at


async def _awaited(function: Callable[..., Any], *given: Any) -> Any:
    return await function(*given)


def _in_megabytes(tell: Callable[[int, int], None]) -> Callable[[int, int], None]:
    return lambda done, total: tell(done >> 20, max(total >> 20, 1))


def _form(backup: Backup) -> dict[str, Any]:
    """Return a backup in the form that --json prints. Scripts rely on its names."""
    form: dict[str, Any] = msgspec.to_builtins(backup)
    names = ("id", "store", "engine", "schema", "release", "at", "counts", "bytes", "added")
    return {name: form[name] for name in names}


def _told(backup: Backup) -> str:
    return f"{counted(backup.counts.get('session', 0), 'session')}, {_size(backup.bytes)}"


def _size(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 10 else f"{size:.1f} {_UNITS[unit]}"
