"""Commands that erase for good: sessions, their older versions, and what erased ones have left."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli.confirming import confirm, yes_option
from perdure.cli.errors import CONFLICT, NOT_ALLOWED, NOT_SET_UP, Failure
from perdure.cli.hints import command
from perdure.cli.options import older_option, session_argument, status_option, store_command
from perdure.cli.session_ids import named, on_session
from perdure.cli.setup import keys_in, on_sessions
from perdure.cli.terminal import counted, note, print_json, say
from perdure.errors import PerdureError, SessionHeld
from perdure.protocols import Retains

if TYPE_CHECKING:
    from perdure.model.session import AgentSessionInfo
    from perdure.protocols import Forgotten
    from perdure.sessions.keeping import ErasureReceipt
    from perdure.sessions.sessions import Sessions

_SHOWN = 5
"""The most ids that a note names."""


@store_command()
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@click.option("--of", "whose", metavar="OWNER", help="Erase all sessions of this owner, hidden ones too.")
@click.option("--forget-key", is_flag=True, help="With --of and --keys: destroy the owner's data keys, too.")
@yes_option
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
    if forget_key and keys_in(ctx) is None:
        keyless = "This store was opened without keys, so no key can be forgotten."
        raise Failure(f"{keyless} Name the key ring: --keys FILE, or PERDURE_KEYS.", NOT_SET_UP)
    confirm(yes, f"erase all that {whose!r} has")

    async def work(store: Sessions) -> tuple[ErasureReceipt, list[str]]:
        receipt = await store.erase_owner(whose, forget_key=forget_key)
        return receipt, [await _held(store, each, tag) for each, tag in [*receipt.held.items()][:_SHOWN]]

    receipt, shown_as_held = on_sessions(ctx, work)
    if not (receipt.erased or receipt.left or receipt.held or receipt.keys_forgotten):
        note(f"{whose!r} has no session in this store. If none was erased before, check the name.")
    say(f"sessions erased: {len(receipt.erased)}")
    if forget_key:
        say(f"keys forgotten: {receipt.keys_forgotten}")
    held = ", ".join(shown_as_held)
    under_hold = f"{counted(len(receipt.held), 'session')} left, under hold: {held}" if held else ""
    running = [each for each in receipt.left if each not in receipt.held]
    if running:
        if held:
            note(under_hold)
        left = ", ".join(running[:_SHOWN])
        raise Failure(f"{counted(len(running), 'session')} still running: {left}. Repeat it once they end.", CONFLICT)
    if held:  # a script has to notice that not all is erased
        raise Failure(f"{under_hold}. Repeat it once the holds are lifted.", NOT_ALLOWED)


async def _held(store: Sessions, session_id: str, tag: str) -> str:
    """Return a held session's id with the tag of the hold, and say if it is its caller that has the tag."""
    try:
        has_tag = tag in (await store.info(session_id)).tags
    except PerdureError:  # it cannot be read; the tag alone is known
        has_tag = True
    return f"{session_id} ({tag})" if has_tag else f"{session_id} ({tag}, on the session that called it)"


def _erase_each(ctx: click.Context, sessions: tuple[str, ...], yes: bool) -> None:
    async def find(store: Sessions) -> list[str]:
        ids: list[str] = [*dict.fromkeys([await named(store, each) for each in sessions])]
        if isinstance(store.store, Retains):
            for session_id, tag in (await store.store.holds(ids)).items():  # before any of the others is erased
                raise SessionHeld(session_id, tag)
        return ids

    async def work(store: Sessions) -> int:
        erased = 0
        try:
            for session_id in found:
                erased += len(await store.erase(session_id))
        except PerdureError:
            if erased:  # a commit for each: what was erased before the error stays erased
                note(f"sessions erased before the error: {erased}")
            raise
        return erased

    # The ids are looked up first: a person has to see in full which sessions a short form means.
    found = on_sessions(ctx, find)
    confirm(yes, f"erase {', '.join(found)}")
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
@yes_option
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
            "Name one of these: the sessions; which, by --older-than and --status; or rules, by --policy, --age, "
            "--idle and --versions."
        )
    if by_rules:
        from perdure.cli.retaining import apply_policy, policy_of

        policy = policy_of(rules["policy"], rules["age"], rules["idle"], rules["versions"])
        if not dry_run:
            confirm(yes, "erase what is over by these rules")
        apply_policy(ctx, policy, dry_run=dry_run, as_json=as_json)
        return
    if dry_run or as_json:
        raise click.UsageError("--dry-run and --json go with rules: --policy, --age, --idle or --versions.")
    if sessions:
        _erase_each(ctx, sessions, yes)
        return
    confirm(yes, "erase these sessions")

    async def work(store: Sessions) -> tuple[int, dict[str, str], list[str]]:
        erased = await store.purge(older_than=older_than, status=status)
        return erased, *await _skipped(store, older_than, status)

    erased, held, unread = on_sessions(ctx, work)
    say(f"sessions erased: {erased}")
    if held:
        note(f"{counted(len(held), 'session')} left, under hold: {_some(f'{id} ({tag})' for id, tag in held.items())}")
    if unread:
        left = f"{counted(len(unread), 'session')} left that cannot be read: {_some(unread)}"
        note(f"{left}. To see why: {command('fsck')}")


def _some(names: Iterable[str]) -> str:
    first = [*islice(names, _SHOWN + 1)]
    return ", ".join([*first[:_SHOWN], *(["…"] if len(first) > _SHOWN else [])])


async def _skipped(
    sessions: Sessions, older_than: datetime | None, status: str | None
) -> tuple[dict[str, str], list[str]]:
    """Return what a purge has skipped: sessions under a legal hold, each with its tag, and those it could not read."""
    from perdure.model.session import SessionStatus
    from perdure.paging import pages, unread_ids
    from perdure.protocols import Filters

    found: list[str] = []
    unread: list[str] = []
    for each in (status,) if status is not None else SessionStatus:
        filters: Filters = {"status": each}
        if older_than is not None:
            filters |= {"updated_before": older_than, "order": "updated"}
        async for page in pages(sessions.headers, **filters):
            found += [info.id for info in page]
            unread += unread_ids(page)
    return {str(each): tag for each, tag in (await sessions.holds(found)).items()}, unread


@store_command(json=True)
@session_argument()
@click.option(
    "--before", type=click.IntRange(1), metavar="N", required=True, help="Erase the versions older than this one."
)
@yes_option
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
        confirm(yes, f"erase versions {info.first_version} to {last} of {session_id}")
    _, erased = on_session(ctx, session_id, verb)
    if as_json:
        print_json({"session": session_id, **msgspec.to_builtins(erased)})
        return
    say(f"versions erased: {erased.versions}, messages: {erased.messages}, bytes: {erased.bytes}")


@store_command()
def gc(ctx: click.Context) -> None:
    """Erase what erased sessions have left behind and nothing points to."""
    say(f"messages erased: {on_sessions(ctx, lambda store: store.gc())}")
