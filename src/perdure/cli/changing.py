"""Commands that change what a session shows, or what is known about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.naming import named
from perdure.cli.options import agent_options, json_option, session_argument, settings_of, store_options, version_option
from perdure.cli.setup import opened, run
from perdure.cli.terminal import note, print_json, say

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

Verb = Callable[["Sessions", str], Awaitable[Any]]


def _carry_out(ctx: click.Context, session: str, verb: Verb) -> tuple[str, Any]:
    """A verb on the session that an argument names; its id, and what the verb returns."""

    async def work() -> tuple[str, Any]:
        async with opened(ctx, must_exist=True) as sessions:
            session_id = await named(sessions, session)
            return session_id, await verb(sessions, session_id)

    return run(work())


def _counted(ctx: click.Context, session: str, verb: Verb, as_json: bool) -> None:
    """A verb that returns how many messages are shown then."""
    session_id, count = _carry_out(ctx, session, verb)
    if as_json:
        print_json({"session": session_id, "messages": count})
    else:
        say(f"messages shown: {count}")


@click.command()
@session_argument()
@click.argument("new", required=False)
@click.option("--at", metavar="WHERE", help="After so many messages, or at a message by its id.")
@version_option("As it stood at this version.")
@json_option
@store_options
@click.pass_context
def fork(ctx: click.Context, session: str, new: str | None, at: str | None, version: int | None, as_json: bool) -> None:
    """Begin a new session, with the id NEW or one of its own, where SESSION stands. Prints its id."""

    async def verb(sessions: Sessions, session_id: str) -> str:
        return (await sessions.fork(session_id, new, at=_place(at), version=version)).id

    session_id, made = _carry_out(ctx, session, verb)
    if as_json:
        print_json({"session": made, "parent": session_id})
    else:
        say(made)


def _place(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


@click.command()
@session_argument()
@click.argument("keep_last", type=click.IntRange(0))
@json_option
@store_options
@click.pass_context
def trim(ctx: click.Context, session: str, keep_last: int, as_json: bool) -> None:
    """Show the model the last KEEP_LAST messages of SESSION only. Nothing is lost: undo shows the rest again."""
    _counted(ctx, session, lambda sessions, session_id: sessions.trim(session_id, keep_last), as_json)


@click.command()
@session_argument()
@click.option("--keep-last", type=click.IntRange(0), metavar="N", help="Leave so many messages as they are. [12]")
@click.option(
    "--strategy",
    "compact_strategy",
    type=click.Choice(["llm", "truncate", "observation_mask"]),
    help="Summarise, cut off, or hide tool results. [a summary, if there is a model]",
)
@click.option("--token-threshold", type=click.IntRange(0), metavar="N", help="Do nothing below so many tokens.")
@click.option(
    "--tool-output-max-chars", type=click.IntRange(0), metavar="N", help="Shorten tool results to so many characters."
)
@click.option("--hard-limit-tokens", type=click.IntRange(0), metavar="N", help="Show no more than so many tokens.")
@json_option
@agent_options
@store_options
@click.pass_context
def compact(ctx: click.Context, /, session: str, as_json: bool, **options: Any) -> None:
    """Show the model a summary, or less, of what is older in SESSION. Nothing is lost: see uncompact."""
    from perdure.cli.compactions import NOTHING_TO_DO, compacted

    options["model"] = settings_of(ctx).model
    given = {name: value for name, value in options.items() if value is not None}

    session_id, done = _carry_out(ctx, session, lambda sessions, key: compacted(sessions, key, **given))
    if done.by is None:
        note(f"{NOTHING_TO_DO} --keep-last says how many messages stay as they are.")
    if as_json:
        print_json({"session": session_id, "messages": done.shown, "before": done.before, "by": done.by})
    else:
        say(f"messages shown: {done.shown} of {done.before}{done.how}")


@click.command()
@session_argument()
@click.argument("block", required=False)
@json_option
@store_options
@click.pass_context
def uncompact(ctx: click.Context, session: str, block: str | None, as_json: bool) -> None:
    """Show again what the newest compaction of SESSION covers, or that of the id BLOCK."""
    _counted(ctx, session, lambda sessions, session_id: sessions.uncompact(session_id, block), as_json)


@click.command()
@session_argument()
@click.argument("to")
@json_option
@store_options
@click.pass_context
def rewind(ctx: click.Context, session: str, to: str, as_json: bool) -> None:
    """Go back in SESSION to the version TO, or to the message with the id TO."""
    target = _place(to) or to
    _counted(ctx, session, lambda sessions, session_id: sessions.rewind(session_id, target), as_json)


@click.command()
@session_argument()
@json_option
@store_options
@click.pass_context
def undo(ctx: click.Context, session: str, as_json: bool) -> None:
    """Take back the last change of what SESSION shows."""
    _counted(ctx, session, lambda sessions, session_id: sessions.undo(session_id), as_json)


@click.command()
@session_argument()
@json_option
@store_options
@click.pass_context
def reset(ctx: click.Context, session: str, as_json: bool) -> None:
    """Show the model nothing of what was said in SESSION so far. Nothing is lost: undo shows it again."""

    async def verb(sessions: Sessions, session_id: str) -> int:
        await sessions.reset(session_id)
        return await sessions.length(session_id)

    _counted(ctx, session, verb, as_json)


@click.command()
@session_argument()
@store_options
@click.pass_context
def suspend(ctx: click.Context, session: str) -> None:
    """Close SESSION to messages until it is resumed."""
    session_id, _ = _carry_out(ctx, session, lambda sessions, session_id: sessions.suspend(session_id))
    say(f"{session_id} is suspended")


@click.command()
@session_argument()
@store_options
@click.pass_context
def resume(ctx: click.Context, session: str) -> None:
    """Open SESSION again, which was suspended, completed or failed."""
    session_id, _ = _carry_out(ctx, session, lambda sessions, session_id: sessions.resume(session_id))
    say(f"{session_id} is active")


@click.command()
@session_argument()
@click.argument("name")
@store_options
@click.pass_context
def rename(ctx: click.Context, session: str, name: str) -> None:
    """Give SESSION a NAME for people; '' takes it away."""
    from perdure.actions.metadata import RenameSession

    action = RenameSession(name or None)
    session_id, _ = _carry_out(ctx, session, lambda sessions, session_id: sessions.execute(session_id, action))
    say(f"{session_id} is named {name!r}" if name else f"{session_id} has no name")


@click.command()
@session_argument()
@click.argument("tags", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Take this tag away; may be repeated.")
@store_options
@click.pass_context
def tag(ctx: click.Context, session: str, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add TAGS to SESSION, or take some away. Prints the tags it has then."""
    from perdure.actions.metadata import TagSession

    action = TagSession(*tags, remove=remove)
    _, changed = _carry_out(ctx, session, lambda sessions, session_id: sessions.execute(session_id, action))
    say(" ".join(changed.info.tags))


@click.command()
@session_argument()
@store_options
@click.pass_context
def delete(ctx: click.Context, session: str) -> None:
    """Hide SESSION from lists for good; `purge --status deleted` erases it."""
    from perdure.actions.lifecycle import DeleteSession

    session_id, _ = _carry_out(ctx, session, lambda sessions, key: sessions.execute(key, DeleteSession()))
    say(f"{session_id} is deleted")
