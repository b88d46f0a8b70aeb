"""Commands that bring sessions from one place to another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import msgspec

from perdure.cli.errors import DAMAGED
from perdure.cli.naming import named
from perdure.cli.options import json_option, session_argument, settings_of, store_options
from perdure.cli.progress import progress
from perdure.cli.setup import opened, run, store_url
from perdure.cli.terminal import counted, note, print_json, say

if TYPE_CHECKING:
    from perdure.archive import MoveReport
    from perdure.copying import CopyReport

_KEPT = "The sessions that have arrived are kept. Repeat the command to go on."


@click.command()
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@click.option("-o", "--output", metavar="FILE", default="-", help="Where to write. [stdout]")
@store_options
@click.pass_context
def export(ctx: click.Context, sessions: tuple[str, ...], output: str) -> None:
    """Write each SESSION, or all of them, with their versions and runs into one file of JSON Lines."""
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError("Say where to write: -o FILE, or into a pipe.")
    target: str | BinaryIO = sys.stdout.buffer if output == "-" else output

    async def work() -> MoveReport:
        async with opened(ctx, must_exist=True) as store:
            chosen = [await named(store, each) for each in sessions] or None
            with progress("exporting") as tell:
                return await store.export(target, chosen, progress=tell)

    with _told_of_interruption("No file was written." if output != "-" else "What was written is not whole."):
        report = run(work())
    note(_told("exported", report))


@click.command("import")
@click.argument("file")
@json_option
@store_options
@click.pass_context
def import_(ctx: click.Context, file: str, as_json: bool) -> None:
    """Take in the sessions of FILE, which export has written; - is stdin. Those that are there are skipped."""
    source: str | BinaryIO = sys.stdin.buffer if file == "-" else file

    async def work() -> MoveReport:
        async with opened(ctx) as store:
            with progress("importing") as tell:
                return await store.import_(source, progress=tell)

    with _told_of_interruption(_KEPT):
        report = run(work())
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        say(_told("imported", report))


@click.command()
@click.argument("urls", metavar="[SOURCE] TARGET", nargs=-1, required=True)
@json_option
@store_options
@click.pass_context
def copy(ctx: click.Context, urls: tuple[str, ...], as_json: bool) -> None:
    """Copy every session of the store SOURCE into the store TARGET, both URLs, and compare both sides.

    Without SOURCE it is the store that --store and the settings name. It may be interrupted and repeated.
    """
    if settings_of(ctx).owner:
        raise click.UsageError("A copy is of the whole store; leave --owner out, or export and import.")
    if len(urls) > 2:
        raise click.UsageError("Name a store to copy from and one to copy into, or only the second.")
    if len(urls) == 2:
        settings_of(ctx).store = urls[0]
    with _told_of_interruption(_KEPT), _on_target(ctx, urls[-1]):
        report = run(_copied(ctx, urls[-1]))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        say(f"{_told('copied', report)}, {report.verified:,} verified")
        for session_id in report.differing:
            note(f"differs: {session_id}. It was changed meanwhile; copy again when it is at rest.")
    if report.differing:
        ctx.exit(DAMAGED)


async def _copied(ctx: click.Context, target: str) -> CopyReport:
    from contextlib import AsyncExitStack

    from perdure import copying
    from perdure.archive import ArchivingStore
    from perdure.cli.setup import as_url, require_kind, require_store
    from perdure.errors import ConfigurationError
    from perdure.stores.urls import store_of

    source_url, target_url = store_url(ctx).value, as_url(target)
    if source_url == target_url:
        raise click.UsageError("That is the store itself. Name another to copy into.")
    require_store(ctx)
    async with AsyncExitStack() as stack:
        stores: list[Any] = []
        for url in (source_url, target_url):
            require_kind(url)
            store = store_of(url)
            if not isinstance(store, ArchivingStore):
                raise ConfigurationError(f"A {type(store).__name__} cannot be copied from or into.")
            stores.append(await stack.enter_async_context(store))  # type: ignore[arg-type]  # ours all can
        with progress("copying") as tell:
            return await copying.copy(*stores, progress=tell)


@contextmanager
def _told_of_interruption(text: str) -> Iterator[None]:
    """Say what became of the work if it is stopped with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        note(text)
        raise


@contextmanager
def _on_target(ctx: click.Context, target: str) -> Iterator[None]:
    """Have what is said of a conflict, which is one in the store copied into, be about that store."""
    from perdure.errors import SessionConflict

    try:
        yield
    except SessionConflict:
        settings_of(ctx).store = target
        raise


def _told(done: str, report: MoveReport | CopyReport) -> str:
    were = "was" if report.skipped == 1 else "were"
    skipped = f", {report.skipped:,} {were} there already" if report.skipped else ""
    return f"{done} {counted(report.sessions, 'session')} with {counted(report.messages, 'message')}{skipped}"
