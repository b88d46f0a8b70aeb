"""Commands that move sessions: into files and out of them, and from store to store."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import click
import msgspec

from perdure.cli.errors import CONFLICT, DAMAGED, Failure
from perdure.cli.hints import command
from perdure.cli.options import session_argument, settings_of, store_command
from perdure.cli.session_ids import named
from perdure.cli.setup import agent_of, keys_in, on_sessions, owner_of, require_kind, require_store, run, store_url
from perdure.cli.terminal import counted, line, note, print_json, progress, say, told_of_interruption

if TYPE_CHECKING:
    from perdure.adapters.importing import ImportReport
    from perdure.archive.copying import CopyReport
    from perdure.archive.moving import MoveReport
    from perdure.sessions.conversations import Format
    from perdure.sessions.sessions import Sessions
    from perdure.stores.store import Store

_SQLITE = b"SQLite format 3\0"
"""The beginning of every file of SQLite."""
_KEPT = "The sessions that have arrived are kept. Repeat the command to continue."


@store_command()
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@click.option("-o", "--output", metavar="FILE", default="-", help="Where to write. [stdout]")
@click.option(
    "--format",
    type=click.Choice(["perdure", "openai", "markdown"]),
    default="perdure",
    help="As what: all there is of them, to be imported again, or the conversations alone. [perdure]",
)
@click.option("--all", "history", is_flag=True, help="Write all that was said, not only what the model is shown.")
def export(ctx: click.Context, sessions: tuple[str, ...], output: str, format: Format, history: bool) -> None:
    """Write each SESSION, or all of them, with their versions and runs into one file of JSON Lines.

    --format openai writes the messages of one SESSION as a JSON array, and of several as a line each; --format markdown
    writes what people read.
    """
    if history and format == "perdure":
        raise click.UsageError("--all goes with --format openai or markdown; this format has all in any case.")
    if format == "perdure" and output == "-" and sys.stdout.isatty():
        raise click.UsageError("Say where to write: -o FILE, or into a pipe.")
    target: str | BinaryIO = sys.stdout.buffer if output == "-" else output

    async def work(store: Sessions) -> MoveReport:
        chosen = [await named(store, each) for each in sessions] or None
        with progress("exporting") as tell:
            return await store.export(target, chosen, format=format, history=history, progress=tell)

    with told_of_interruption("No file was written." if output != "-" else "The output is incomplete."):
        report = on_sessions(ctx, work)
    note(_told("exported", report))
    if not report.sessions and (owner := owner_of(ctx)):
        note(f"{owner!r} has no session in this store. Check the name.")


@store_command("import", json=True, agent=True)
@click.argument("file", metavar="SOURCE")
@click.option(
    "--format",
    type=click.Choice(["perdure", "openai"]),
    default="perdure",
    help="What SOURCE is: an export, or OpenAI's messages, as an array or as lines. [perdure]",
)
@click.option(
    "--from",
    "framework",
    type=click.Choice(
        ["openai-agents", "langgraph", "adk", "google-adk", "agno", "claude", "claude-agent-sdk", "strands"]
    ),
    help="Whose SOURCE is: the SQLite file, the transcripts or the directory that this library has written.",
)
def import_(
    ctx: click.Context, file: str, format: Literal["perdure", "openai"], framework: str | None, as_json: bool
) -> None:
    """Import the sessions of SOURCE, a file that export has written; - is stdin. Existing ones are skipped.

    Of messages in OpenAI's form it makes one new session, or one for each line {"messages": […]}, and prints the ids.

    With --from it takes in what another library has stored. Repeat it at any time: only what is new is added.
    """
    source: str | BinaryIO = sys.stdin.buffer if file == "-" else file
    if settings_of(ctx).agent and (format == "perdure" or framework is not None):
        raise click.UsageError("--agent goes with --format openai; sessions that were exported have their own.")
    if framework is not None:
        if format != "perdure" or file == "-":
            raise click.UsageError("--from goes without --format, and needs a file or a directory.")
        _import_from(ctx, framework, file, as_json)
        return
    if file != "-" and _is_database(file):
        raise click.UsageError(f"{file} is a SQLite file. Say which library has written it, such as --from langgraph.")

    async def work(store: Sessions) -> MoveReport:
        agent = agent_of(ctx) if format == "openai" else None
        with progress("importing") as tell:
            return await store.import_(source, format=format, agent=agent, progress=tell)

    with told_of_interruption(_KEPT), _told_of_others():
        report = on_sessions(ctx, work, must_exist=False, begins=True)
    if as_json:
        print_json(msgspec.to_builtins(report, enc_hook=str))  # ids are texts of a type of their own
        return
    for session_id in getattr(report, "created", ()):
        say(session_id)
    told = _told("imported", report)
    note(told) if format == "openai" else say(told)


def _is_database(file: str) -> bool:
    try:
        with Path(file).open("rb") as found:
            return found.read(len(_SQLITE)) == _SQLITE
    except OSError:  # the import says what is wrong with it
        return False


def _import_from(ctx: click.Context, framework: str, source: str, as_json: bool) -> None:
    from perdure.adapters.importing import import_from, read_source

    read_source(framework, source)  # first, so that a source that cannot be read creates no store

    async def work(sessions: Sessions) -> ImportReport:
        with progress("importing") as tell:
            return await import_from(
                cast("Store", sessions.store), framework, source, owner=owner_of(ctx), progress=tell
            )

    with told_of_interruption(_KEPT):
        report = on_sessions(ctx, work, must_exist=False, begins=True)
    if as_json:
        print_json(msgspec.to_builtins(report, enc_hook=str))
    else:
        say(_told("imported", report))
        for each in report.refused:
            note(f"✗ {line(each.reason)}")
        _tell_diverged(report.diverged)
    if report.refused:
        ctx.exit(CONFLICT)


def _tell_diverged(threads: Sequence[str]) -> None:
    """Explain which threads have continued on both sides, if any."""
    if threads:
        named = ", ".join(map(line, threads))
        stays = "The conversation of this store stays, and what is new in the source is a branch beside it."
        note(
            f"{counted(len(threads), 'thread')} diverged: {named}. {stays} Stop the old program before the last import."
        )


@store_command(json=True)
@click.argument("urls", metavar="[SOURCE] TARGET", nargs=-1, required=True)
@click.option("--unsealed", is_flag=True, help="Write the copy without encryption, whatever --keys says.")
def copy(ctx: click.Context, urls: tuple[str, ...], as_json: bool, unsealed: bool) -> None:
    """Copy every session of the store SOURCE into the store TARGET, both URLs, and compare both sides.

    Without SOURCE it is the store that --store and the settings name. It may be interrupted and repeated. With --keys
    both are opened with that key ring, so that the copy is sealed.
    """
    if owner_of(ctx):
        raise click.UsageError("A copy is of the whole store; leave --owner out, or export and import.")
    if len(urls) > 2:
        raise click.UsageError("Name a store to copy from and one to copy into, or only the second.")
    if len(urls) == 2:
        settings_of(ctx).store = urls[0]
    with told_of_interruption(_KEPT), _told_of_others(urls[-1]):
        report = run(_copied(ctx, urls[-1], unsealed))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        say(f"{_told('copied', report)}, {report.verified:,} verified")
        for session_id in report.differing:
            note(f"differs: {session_id}. It was changed meanwhile; copy again when it is at rest.")
    if report.differing:
        ctx.exit(DAMAGED)


async def _copied(ctx: click.Context, target: str, unsealed: bool) -> CopyReport:
    from contextlib import AsyncExitStack

    from perdure.archive import copying
    from perdure.errors import ConfigurationError
    from perdure.protocols import ArchivingStore
    from perdure.sessions.default_store import as_url
    from perdure.stores.urls import store_of

    source_url, target_url = store_url(ctx).value, as_url(target)
    if source_url == target_url:
        raise click.UsageError("That is the store itself. Name another to copy into.")
    require_store(ctx)
    ring = keys_in(ctx)
    async with AsyncExitStack() as stack:
        stores: list[Any] = []
        for url in (source_url, target_url):
            require_kind(url)
            store = store_of(url, keys=None if unsealed and url == target_url else ring)
            if not isinstance(store, ArchivingStore):
                raise ConfigurationError(f"A {type(store).__name__} cannot be copied from or into.")
            stores.append(await stack.enter_async_context(store))  # type: ignore[arg-type]  # ours all can
        with progress("copying") as tell:
            return await copying.copy(*stores, progress=tell)


@contextmanager
def _told_of_others(target: str | None = None) -> Iterator[None]:
    """Explain what to do if another session in the target store has the id of one that arrives."""
    from perdure.errors import SessionConflict

    try:
        yield
    except SessionConflict as error:
        if not error.found or not error.expected:
            raise
        ctx = click.get_current_context()
        # The command in the advice has to name the store that the session is in, not the one it comes from.
        settings_of(ctx).store = target or settings_of(ctx).store
        there = f"Session {error.session_id!r} is in this store already (version {error.found})"
        arrives = f"it is not the one to be brought in (version {error.expected})"
        erase = command("purge", error.session_id, "--yes")
        advice = f"Bring it into another store, or erase the one that is there first: {erase}"
        raise Failure(f"{there}, and {arrives}. {advice}", CONFLICT) from error


def _told(done: str, report: MoveReport | ImportReport) -> str:
    were = "was" if report.skipped == 1 else "were"
    skipped = f", {report.skipped:,} {were} there already" if report.skipped else ""
    return f"{done} {counted(report.sessions, 'session')} with {counted(report.messages, 'message')}{skipped}"
