"""Commands that keep a store in order: they move, check and erase sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import click
import msgspec

from perdure.cli.errors import CONFLICT, DAMAGED, Failure
from perdure.cli.hints import command
from perdure.cli.options import older_option, session_argument, settings_of, status_option, store_command
from perdure.cli.session_ids import named, on_session
from perdure.cli.setup import agent_of, keys_in, on_sessions, owner_of, require_store, run, store_url
from perdure.cli.terminal import counted, line, note, print_json, progress, say
from perdure.errors import InvalidData

if TYPE_CHECKING:
    from perdure.adapters.importing import ImportReport
    from perdure.archive.checking import FsckReport
    from perdure.archive.copying import CopyReport
    from perdure.archive.moving import MoveReport
    from perdure.archive.repairing import RepairReport
    from perdure.model.session import AgentSessionInfo
    from perdure.protocols import Forgotten, Problem
    from perdure.sessions.conversations import Format
    from perdure.sessions.sessions import Sessions
    from perdure.stores.store import Store

_KEPT = "The sessions that have arrived are kept. Repeat the command to go on."
_SHOWN = 5
"""The most ids that a note names."""
_yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


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

    with _told_of_interruption("No file was written." if output != "-" else "What was written is not whole."):
        report = on_sessions(ctx, work)
    note(_told("exported", report))


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
    """Take in the sessions of SOURCE, a file that export has written; - is stdin. Those that are there are skipped.

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

    async def work(store: Sessions) -> MoveReport:
        agent = agent_of(ctx) if format == "openai" else None
        with progress("importing") as tell:
            return await store.import_(source, format=format, agent=agent, progress=tell)

    with _told_of_interruption(_KEPT), _told_of_others():
        report = on_sessions(ctx, work, must_exist=False, begins=True)
    if as_json:
        print_json(msgspec.to_builtins(report, enc_hook=str))  # ids are texts of a type of their own
        return
    for session_id in getattr(report, "created", ()):
        say(session_id)
    told = _told("imported", report)
    note(told) if format == "openai" else say(told)


def _import_from(ctx: click.Context, framework: str, source: str, as_json: bool) -> None:
    from perdure.adapters.importing import import_from

    async def work(sessions: Sessions) -> ImportReport:
        with progress("importing") as tell:
            return await import_from(
                cast("Store", sessions.store), framework, source, owner=owner_of(ctx), progress=tell
            )

    with _told_of_interruption(_KEPT):
        report = on_sessions(ctx, work, must_exist=False, begins=True)
    if as_json:
        print_json(msgspec.to_builtins(report, enc_hook=str))
    else:
        say(_told("imported", report))
        for each in report.refused:
            note(f"✗ {line(each.reason)}")
    if report.refused:
        ctx.exit(CONFLICT)


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
    with _told_of_interruption(_KEPT), _told_of_others(urls[-1]):
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
    from perdure.cli.setup import keys_in, require_kind, require_store
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
def _told_of_interruption(text: str) -> Iterator[None]:
    """Print what became of the work if it is stopped with Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        note(text)
        raise


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
            note(_name_keys("fsck", *([] if session is None else [session])))
        elif not all(each.needs_key for each in report.problems) and session is None:
            note(f"What can be repaired without guessing: {command('fsck', '--repair', '--dry-run')}")
    if report.problems:
        ctx.exit(DAMAGED)


def _repair(ctx: click.Context, dry_run: bool, as_json: bool) -> None:
    async def work(sessions: Sessions) -> RepairReport:
        from perdure.archive.repairing import repair

        with progress("repairing") as tell:
            return await repair(sessions.store, dry_run=dry_run, progress=tell)

    with _told_of_interruption("What was repaired so far is kept. Repeat the command to go on."):
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
        say(f"{len(report.found)} found, {len(report.repaired)} {done}, {len(report.left)} left")
        if any(each.needs_key for each in report.left) and keys_in(ctx) is None:
            note(_name_keys("fsck", "--repair", *(["--dry-run"] if dry_run else [])))
        elif not all(each.needs_key for each in report.left):
            note("What is left, a backup has: perdure restore --from TARGET --store URL --verify, into another place.")
    if report.left or (dry_run and report.repaired):
        ctx.exit(DAMAGED)


def _name_keys(*words: str) -> str:
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


def _confirm(yes: bool, what: str) -> None:
    """Ask before content is lost for good. Only the commands that call this lose anything."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {what} for good. Add --yes if you mean it.")
    click.confirm(f"{what[0].upper()}{what[1:]} for good?", abort=True)


@store_command()
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@click.option("--of", "whose", metavar="OWNER", help="Erase all sessions of this owner, hidden ones too.")
@click.option("--forget-key", is_flag=True, help="With --of and --keys: destroy the owner's data keys, too.")
@_yes
def erase(ctx: click.Context, sessions: tuple[str, ...], whose: str | None, forget_key: bool, yes: bool) -> None:
    """Erase each SESSION for good, with their sub-agents' sessions, or all that an owner has. Prints how many.

    What forks of a SESSION show stays. Runs of the owner that are under way are asked to stop first.
    """
    if bool(sessions) == bool(whose):
        raise click.UsageError("Name the sessions, or whose by --of.")
    if forget_key and whose is None:
        raise click.UsageError("--forget-key goes with --of: a key is an owner's, not a session's.")
    if whose is None:
        _erase_each(ctx, sessions, yes)
        return
    _confirm(yes, f"erase all that {whose!r} has")
    receipt = on_sessions(ctx, lambda store: store.erase_owner(whose, forget_key=forget_key))
    say(f"sessions erased: {len(receipt.erased)}")
    if forget_key:
        say(f"keys forgotten: {receipt.keys_forgotten}")
    if receipt.held:
        shown = ", ".join(f"{each} ({tag})" for each, tag in [*receipt.held.items()][:_SHOWN])
        note(f"{counted(len(receipt.held), 'session')} under hold stay: {shown}")
    running = [each for each in receipt.left if each not in receipt.held]
    if running:
        left = ", ".join(running[:_SHOWN])
        raise Failure(f"{counted(len(running), 'session')} still running: {left}. Repeat it once they end.", CONFLICT)


def _erase_each(ctx: click.Context, sessions: tuple[str, ...], yes: bool) -> None:
    async def find(store: Sessions) -> list[str]:
        return [await named(store, each) for each in sessions]

    async def work(store: Sessions) -> int:
        return sum([len(await store.erase(session_id)) for session_id in found])

    # The ids are looked up first: a person has to see in full which sessions a short form means.
    found = on_sessions(ctx, find)
    _confirm(yes, f"erase {', '.join(found)}")
    say(f"sessions erased: {on_sessions(ctx, work)}")


@store_command(json=True)
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@older_option("older_than")
@status_option
@click.option("--policy", "policy", metavar="FILE", help="Erase what is over by the rules of a TOML file.")
@click.option("--age", metavar="SPAN", help="The same by a rule: sessions that were created so long ago, such as 1y.")
@click.option("--idle", metavar="SPAN", help="Sessions that were not updated for so long, such as 90d.")
@click.option(
    "--versions", type=click.IntRange(1), metavar="N", help="Older versions of sessions, except for the last N."
)
@click.option("--dry-run", is_flag=True, help="Say what the rules would erase, and how many bytes. Erase nothing.")
@_yes
def purge(
    ctx: click.Context,
    sessions: tuple[str, ...],
    older_than: datetime | None,
    status: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **rules: Any,
) -> None:
    """Erase all sessions of an age or status, or each SESSION, with their sub-agents' sessions. Prints how many.

    What their forks show stays. So do sessions under hold: those with a tag hold, or hold: and the name of a case.

    --policy, --age, --idle and --versions erase by rules. Sessions in use stay then: they run, wait for a person, or
    have messages or timers. Rules that sessions have of their own come before these.
    """
    by_rules = any(value is not None for value in rules.values())
    if bool(sessions) + bool(older_than or status) + by_rules != 1:
        raise click.UsageError(
            "Name the sessions; or which by --older-than and --status; or rules: --policy, --age, --idle, --versions."
        )
    if by_rules:
        from perdure.cli.retaining import apply_policy, policy_of

        policy = policy_of(rules["policy"], rules["age"], rules["idle"], rules["versions"])
        if not dry_run:
            _confirm(yes, "erase what is over by these rules")
        apply_policy(ctx, policy, dry_run=dry_run, as_json=as_json)
        return
    if dry_run or as_json:
        raise click.UsageError("--dry-run and --json go with rules: --policy, --age, --idle or --versions.")
    if sessions:
        _erase_each(ctx, sessions, yes)
        return
    _confirm(yes, "erase these sessions")

    async def work(store: Sessions) -> tuple[int, dict[str, str]]:
        erased = await store.purge(older_than=older_than, status=status)
        return erased, await _held(store, older_than, status)

    erased, held = on_sessions(ctx, work)
    say(f"sessions erased: {erased}")
    if held:
        shown = ", ".join(f"{each} ({tag})" for each, tag in [*held.items()][:_SHOWN])
        note(f"{counted(len(held), 'session')} under hold stay: {shown}{', …' if len(held) > _SHOWN else ''}")


async def _held(sessions: Sessions, older_than: datetime | None, status: str | None) -> dict[str, str]:
    """Return the sessions that a purge has skipped because of a legal hold, each with its tag."""
    from perdure.model.session import SessionStatus
    from perdure.paging import all_infos
    from perdure.protocols import Filters

    found: list[str] = []
    for each in (status,) if status is not None else SessionStatus:
        filters: Filters = {"status": each}
        if older_than is not None:
            filters |= {"updated_before": older_than, "order": "updated"}
        found += [info.id for info in await all_infos(sessions.headers, **filters)]
    return {str(each): tag for each, tag in (await sessions.holds(found)).items()}


@store_command(json=True)
@session_argument()
@click.option(
    "--before", type=click.IntRange(1), metavar="N", required=True, help="Erase the versions older than this one."
)
@_yes
def forget(ctx: click.Context, session: str, before: int, yes: bool, as_json: bool) -> None:
    """Erase the versions of SESSION before N for good, and what only they show. Its newest version stays.

    What its forks show stays, and so does what a version shows or covers that is kept.
    """

    async def find(sessions: Sessions, session_id: str) -> AgentSessionInfo:
        return await sessions.info(session_id)

    async def verb(sessions: Sessions, session_id: str) -> Forgotten:
        return await sessions.forget(session_id, before=before)

    session_id, info = on_session(ctx, session, find)
    last = min(before, info.version) - 1
    if last >= info.first_version:
        _confirm(yes, f"erase versions {info.first_version} to {last} of {session_id}")
    _, erased = on_session(ctx, session_id, verb)
    if as_json:
        print_json({"session": session_id, **msgspec.to_builtins(erased)})
        return
    say(f"versions erased: {erased.versions}, messages: {erased.messages}, bytes: {erased.bytes}")


@store_command()
@session_argument()
@click.argument("messages", nargs=-1, required=True)
@click.option("--replacement", default="[redacted]", show_default=True, help="What stands there instead.")
@_yes
def redact(ctx: click.Context, session: str, messages: tuple[str, ...], replacement: str, yes: bool) -> None:
    """Replace what MESSAGES of SESSION, given by their ids, say: in every version, fork, summary and index."""
    if not yes:
        session, _ = on_session(ctx, session, partial(_require_said, message_ids=messages), of_words=True)
    _confirm(yes, f"replace {counted(len(messages), 'message')}")

    async def verb(sessions: Sessions, session_id: str) -> tuple[int, list[str]]:
        replaced = await sessions.redact(session_id, messages, replacement=replacement)
        return replaced, await _with_copies(sessions, session_id)

    _, (replaced, others) = on_session(ctx, session, verb, of_words=yes)
    say(f"messages replaced: {replaced}")
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        note(
            "Sub-agents and their callers have each other's texts in messages of their own. Sessions that may have "
            f"copies: {shown}. To see where a text still is: {command('search', 'TEXT')}"
        )


async def _require_said(sessions: Sessions, session_id: str, message_ids: Sequence[str]) -> None:
    """Raise InvalidData if a message does not exist, before a person is asked to confirm."""
    said = [*await sessions.history(session_id), *(await sessions.session(session_id)).state.messages]
    known = {message.id for message in said}
    for missing in (each for each in message_ids if each not in known):
        what = f"session {session_id!r} has no message {missing!r}"
        raise InvalidData("$", f"{what}. See the ids: {command('show', session_id, '--all')}")


async def _with_copies(sessions: Sessions, session_id: str) -> list[str]:
    """Return the sessions that a session exchanges texts with: that of its caller, and those of its sub-agents.

    A caller's session in which nothing was ever said has no copies. Some frameworks keep their agents below such one.
    """
    from perdure.actions.children import spawned_by

    caller = (await sessions.info(session_id)).spawn_ref
    spawned = [info.id for info in await spawned_by(sessions.store, session_id, deleted=True)]
    if caller is None:
        return list(spawned)
    said = await sessions.history(caller.parent_session_id)
    return [*([caller.parent_session_id] if said else []), *spawned]


@store_command()
def gc(ctx: click.Context) -> None:
    """Erase what erased sessions have left behind and nothing points to."""
    say(f"messages erased: {on_sessions(ctx, lambda store: store.gc())}")
