"""Commands that change what a session shows, or its status, name and tags."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from perdure.cli.errors import NOT_SET_UP, Failure
from perdure.cli.hints import command
from perdure.cli.options import later_option, session_argument, settings_of, store_command, version_option
from perdure.cli.session_ids import on_session
from perdure.cli.terminal import at_time, counted, line, note, print_json, print_length, say
from perdure.errors import InvalidData, KeyForgotten
from perdure.model.retention import is_hold

if TYPE_CHECKING:
    from perdure.model.ids import SessionId
    from perdure.model.session import AgentSession
    from perdure.model.transcript import Block, Piece, Transcript
    from perdure.sessions.sessions import Sessions

NOTHING_TO_DO = "There is nothing to compact."
_DONE = {
    "llm": "what is older is summed up",
    "truncate": "what is older is cut off, not summed up",
    "observation_mask": "older tool results are hidden",
}


def _counted(ctx: click.Context, session: str, verb: Callable[[Sessions, str], Awaitable[int]], as_json: bool) -> None:
    """Carry out a verb that returns how many messages are shown, and print that."""
    print_length(*on_session(ctx, session, verb, of_words=True), as_json)


@store_command(json=True)
@session_argument()
@click.argument("new", required=False)
@click.option("--at", metavar="WHERE", help="After this many messages, or at a message by its id.")
@version_option("As it was at this version.")
def fork(ctx: click.Context, session: str, new: str | None, at: str | None, version: int | None, as_json: bool) -> None:
    """Begin a new session, with the id NEW or one of its own, where SESSION stands. Prints its id."""

    async def verb(sessions: Sessions, session_id: str) -> AgentSession:
        return await (await sessions.fork(session_id, new, at=_place(at), version=version)).session()

    session_id, made = on_session(ctx, session, verb, of_words=True)
    if as_json:
        print_json({"session": made.id, "parent": session_id})
    else:
        say(made.id)
    _tell_of_open_calls(session_id, made.state.transcript)


def _tell_of_open_calls(parent: str, view: Transcript) -> None:
    """Print a note if a fork ends in calls without results, with the command to fork before them."""
    # From the end: results come after their calls, and only the last calls can be without some.
    answered: set[str] = set()
    for place in range(len(view) - 1, -1, -1):
        message = view[place]
        if message.tool_calls:
            names = [line(call.name) for call in message.tool_calls if call.id not in answered]
            if names:
                earlier = command("fork", parent, "--at", place)
                note(
                    f"The fork ends in {counted(len(names), 'tool call')} without a result: {', '.join(names)}. "
                    f"Some frameworks refuse to continue there. To fork before that: {earlier}"
                )
            return
        if not message.tool_results:
            return
        answered.update(result.call_id for result in message.tool_results)


def _place(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


@store_command(json=True)
@session_argument()
@click.argument("keep_last", type=click.IntRange(0))
def trim(ctx: click.Context, session: str, keep_last: int, as_json: bool) -> None:
    """Show the model the last KEEP_LAST messages of SESSION only. Nothing is lost: undo shows the rest again."""
    _counted(ctx, session, lambda sessions, session_id: sessions.trim(session_id, keep_last), as_json)


@store_command(json=True, agent=True)
@session_argument()
@click.option("--keep-last", type=click.IntRange(0), metavar="N", help="Leave the last N messages as they are. [12]")
@click.option(
    "--strategy",
    "compact_strategy",
    type=click.Choice(["llm", "truncate", "observation_mask"]),
    help="Summarise, cut off, or hide tool results. [a summary; with no model, or the offline one: cut off]",
)
@click.option("--token-threshold", type=click.IntRange(0), metavar="N", help="Do nothing below N tokens.")
@click.option(
    "--tool-output-max-chars", type=click.IntRange(0), metavar="N", help="Shorten tool results to N characters."
)
@click.option("--hard-limit-tokens", type=click.IntRange(0), metavar="N", help="Show at most N tokens.")
def compact(ctx: click.Context, /, session: str, as_json: bool, **options: Any) -> None:
    """Show the model a summary, or less, of what is older in SESSION. Nothing is lost: see uncompact."""
    options["model"] = settings_of(ctx).model
    given = {name: value for name, value in options.items() if value is not None}

    session_id, done = on_session(ctx, session, lambda sessions, key: compacted(sessions, key, **given))
    if done.by is None:
        note(f"{NOTHING_TO_DO} --keep-last says how many messages stay as they are.")
    if as_json:
        print_json({"session": session_id, "messages": done.shown, "before": done.before, "by": done.by})
    else:
        say(f"messages shown: {done.shown}{done.how}")


@store_command(json=True)
@session_argument()
@click.argument("block", required=False)
def uncompact(ctx: click.Context, session: str, block: str | None, as_json: bool) -> None:
    """Show again what the newest compaction of SESSION covers, or that of the id BLOCK."""
    session_id, done = on_session(ctx, session, lambda sessions, key: uncompacted(sessions, key, block))
    if as_json:
        print_length(session_id, done.shown, as_json)
    else:
        say(f"messages shown: {done.shown}{done.how}")


@store_command(json=True)
@session_argument()
@click.argument("to", required=False)
@version_option("The same as a number for TO.")
def rewind(ctx: click.Context, session: str, to: str | None, version: int | None, as_json: bool) -> None:
    """Go back in SESSION to the version TO, or to the message with the id TO."""
    if to is not None and version is not None:
        raise click.UsageError("Say once where to go back to: TO or --version.")
    target = version if to is None else _place(to) or to
    if target is None:
        raise click.UsageError("Say where to go back to: a version, or the id of a message.")
    _counted(ctx, session, lambda sessions, session_id: sessions.rewind(session_id, target), as_json)


@store_command(json=True)
@session_argument()
def undo(ctx: click.Context, session: str, as_json: bool) -> None:
    """Take back the last change of what SESSION shows. In a thread of LangGraph that is one checkpoint, not a turn."""
    _counted(ctx, session, lambda sessions, session_id: sessions.undo(session_id), as_json)


@store_command(json=True)
@session_argument()
def reset(ctx: click.Context, session: str, as_json: bool) -> None:
    """Show the model nothing of what was said in SESSION so far. Nothing is lost: undo shows it again."""

    async def verb(sessions: Sessions, session_id: str) -> int:
        await sessions.reset(session_id)
        return await sessions.length(session_id)

    _counted(ctx, session, verb, as_json)


@store_command()
@session_argument()
@later_option(
    "--resume",
    "until",
    help="Have a worker open it again: in 30s, 10min, 2h, 3d, 4w, or at 2026-01-31T18:00 local time.",
)
def suspend(ctx: click.Context, session: str, until: datetime | None) -> None:
    """Close SESSION to messages until it is resumed."""
    session_id, _ = on_session(ctx, session, lambda sessions, session_id: sessions.suspend(session_id, until=until))
    say(f"{session_id} is suspended" + (f" until {at_time(until)}" if until else ""))


@store_command()
@session_argument()
def resume(ctx: click.Context, session: str) -> None:
    """Open SESSION again, which was suspended, completed or failed."""
    session_id, _ = on_session(ctx, session, lambda sessions, session_id: sessions.resume(session_id))
    say(f"{session_id} is active")


@store_command()
@session_argument()
@click.argument("name")
def rename(ctx: click.Context, session: str, name: str) -> None:
    """Give SESSION a NAME for people; '' takes it away."""
    from perdure.actions.metadata import RenameSession

    action = RenameSession(name or None)
    session_id, _ = on_session(ctx, session, lambda sessions, session_id: sessions.execute(session_id, action))
    say(f"{session_id} is named {name!r}" if name else f"{session_id} has no name")


@store_command()
@session_argument()
@click.argument("tags", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Take this tag away; may be repeated.")
def tag(ctx: click.Context, session: str, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add TAGS to SESSION, or take some away. Prints the tags it has then."""
    from perdure.actions.metadata import TagSession

    async def work(sessions: Sessions, session_id: SessionId) -> tuple[Sequence[str], set[str]]:
        try:
            before = (await sessions.info(session_id)).tags
        except KeyForgotten:
            if tags or not (remove and all(map(is_hold, remove))):
                raise
            return (), await _lift_holds(sessions, session_id, remove)
        action = TagSession(*tags, remove=remove)
        if sessions.owner is not None and action.lifts_hold:
            # The id as a text: without the owner, only the whole of it names the session.
            words = ("tag", str(session_id), *tags, *(word for each in remove for word in ("--remove", each)))
            raise Failure(
                f"These are the sessions of {sessions.owner!r}. An owner cannot lift a hold.\n"
                f"Without --owner and PERDURE_OWNER, type: {command(*words, owner=False)}",
                NOT_SET_UP,
            )
        changed = await sessions.execute(session_id, action)
        return changed.info.tags, set(remove).difference(before)

    session_id, (found, unknown) = on_session(ctx, session, work)
    for each in sorted(unknown):
        note(f"Session {session_id} does not have the tag {each!r}.")
    say(" ".join(found))


async def _lift_holds(sessions: Sessions, session_id: SessionId, tags: Sequence[str]) -> set[str]:
    """Lift holds from a session that cannot be read. Return those that it does not have."""
    unknown: set[str] = set()
    for each in tags:
        _, colon, case = each.partition(":")
        try:
            await sessions.lift_hold(session_id, case if colon else None)
        except InvalidData:
            unknown.add(each)
    note(f"What {session_id} said is erased: its key was forgotten. To erase the rest: {command('erase', session_id)}")
    return unknown


@store_command()
@session_argument()
def delete(ctx: click.Context, session: str) -> None:
    """Hide SESSION from lists. `restore` takes that back, `erase` erases it for good."""
    session_id, _ = on_session(ctx, session, lambda sessions, key: sessions.delete(key))
    say(f"{session_id} is deleted")


@store_command(json=True)
@session_argument(required=False, metavar="[SESSION]")
@click.option("--from", "target", metavar="TARGET", help="Put the whole store back from this directory of backups.")
@click.option("--at", metavar="WHEN", help="The backup of this id, or the last before: 2h, 3d, or a date. [the newest]")
@click.option("--verify", is_flag=True, help="Check the restored store as fsck does, and count its rows.")
def restore(
    ctx: click.Context, session: str | None, target: str | None, at: str | None, verify: bool, as_json: bool
) -> None:
    """Take back that SESSION was deleted, or put a whole store back with --from, into a place that has no sessions.

    A session has the status from before. A store is as it was when the backup was made; its runs can be recovered.
    """
    if (session is None) == (target is None):
        raise click.UsageError("Name a session that was deleted, or the directory of backups with --from.")
    if target is not None:
        from perdure.cli.backing_up import restore_store

        restore_store(ctx, target, at, verify, as_json)
        return
    if at is not None or verify:
        raise click.UsageError("--at and --verify go with --from.")
    assert session is not None
    session_id, status = on_session(ctx, session, _restored)
    if as_json:
        print_json({"session": session_id, "status": status})
        return
    say(f"{session_id} is {status}")


async def _restored(sessions: Sessions, session_id: str) -> str:
    await sessions.restore(session_id)
    return (await sessions.info(session_id)).status.value


class Compacted(NamedTuple):
    """The result of a compaction: the number of messages shown, the number before, and the block that was made."""

    shown: int
    before: int
    block: Block | None
    """The block of the compaction. None if nothing was compacted."""

    @property
    def by(self) -> str | None:
        """The strategies that were used, joined by +. None if nothing was compacted."""
        return None if self.block is None else self.block.by

    @property
    def how(self) -> str:
        """The words that tell what was done with the rest. Empty if nothing was compacted.

        A block may show a note in place of what it covers, so the number of messages shown can be the same as before.
        """
        if self.block is None:
            return ""
        done = ", ".join(_DONE.get(each, f"by {each}") for each in self.block.by.split("+"))
        covered = counted(self.block.covered_count, "message")
        return f", before {self.before}; {len(self.block)} in place of {covered}: {done}"


class Uncompacted(NamedTuple):
    """The number of messages shown after a compaction was taken off, and the number of compactions left."""

    shown: int
    before: int
    left: int

    @property
    def how(self) -> str:
        left = f"; {counted(self.left, 'older compaction')} left" if self.left else ""
        return f", before {self.before}{left}"


async def compacted(sessions: Sessions, session_id: str, **options: Any) -> Compacted:
    """Compact what a session shows. Return how."""
    before = await sessions.session(session_id)
    shown = await sessions.compact(session_id, **options)
    known = {block.id for block in _blocks(before.state.transcript.pieces)}
    made = _blocks((await sessions.session(session_id)).state.transcript.pieces)
    new = [block for block in made if block.id not in known]
    return Compacted(shown, len(before.state.messages), new[0] if new else None)


async def uncompacted(sessions: Sessions, session_id: str, block: str | None = None) -> Uncompacted:
    """Take a compaction off. Return how many are left."""
    before = await sessions.length(session_id)
    shown = await sessions.uncompact(session_id, block)
    left = _blocks((await sessions.session(session_id)).state.transcript.pieces)
    return Uncompacted(shown, before, len(left))


def _blocks(pieces: Sequence[Piece]) -> list[Block]:
    """Return the compactions of a view, each before those that it covers."""
    from perdure.model.transcript import Block

    blocks = [piece for piece in pieces if isinstance(piece, Block)]
    return [each for block in blocks for each in (block, *_blocks(block.covered))]
