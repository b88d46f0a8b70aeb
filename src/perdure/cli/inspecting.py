"""The command that writes the inspector's pages into files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perdure.cli.options import session_argument, store_command
from perdure.cli.session_ids import named
from perdure.cli.setup import on_sessions
from perdure.cli.terminal import counted, note, progress, say
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.server.pages.static_site import SiteReport
    from perdure.sessions.sessions import Sessions


@store_command()
@session_argument("sessions", nargs=-1, metavar="SESSION...")
@click.option(
    "--static", "folder", metavar="DIR", type=click.Path(file_okay=False), help="Write the pages into this directory."
)
@click.option("--force", is_flag=True, help="Write over files that are there.")
def inspect(ctx: click.Context, sessions: tuple[str, ...], folder: str | None, force: bool) -> None:
    """Write the inspector's pages about each SESSION into files that need no server: open index.html in a browser.

    The pages are those of the inspector, without its forms. They hold all that was said: give them to nobody who may
    not read the sessions. The inspector itself is opened by `perdure serve`.
    """
    if folder is None:
        raise click.UsageError("To look at sessions in a browser: perdure serve. To write pages: --static DIR SESSION.")
    if not sessions:
        raise click.UsageError("Name the sessions to write pages about: perdure inspect --static DIR SESSION.")
    target = Path(folder)
    if not force and target.is_dir() and any(target.iterdir()):
        raise click.UsageError(f"{target} is not empty. Choose another directory, or add --force.")
    report = on_sessions(ctx, lambda opened: _written(opened, sessions, target))
    say(str(target / "index.html"))
    note(f"wrote {counted(report.pages, 'file')} about {counted(report.sessions, 'session')}")
    if not report.is_whole:
        note("A session has more pages than were written: some older versions are left out.")


async def _written(opened: Sessions, given: tuple[str, ...], target: Path) -> SiteReport:
    try:
        # Jinja2 comes with an extra: the command itself has to load without it.
        from perdure.server.pages.static_site import write_site
    except ImportError as error:
        raise ConfigurationError(f"Pages need more packages ({error}).", "pip install 'perdure[serve]'") from None
    chosen = [await named(opened, each) for each in given]
    with progress("writing") as tell:
        return await write_site(opened, chosen, target, tell=tell)
