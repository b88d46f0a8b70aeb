"""Commands for the keys that a store is sealed with. No secret is ever an argument of a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from perdure.cli.errors import NOT_FOUND, Failure
from perdure.cli.hints import command
from perdure.cli.options import settings_of, store_command
from perdure.cli.setup import keys_in, on_sessions, ring_path, store_url
from perdure.cli.terminal import is_terminal, note, print_json, print_table, say
from perdure.errors import SessionHeld
from perdure.model.session import SessionStatus
from perdure.paging import pages, unread_ids
from perdure.protocols import Filters, Retains, SealedStore
from perdure.sessions.default_store import path_of

if TYPE_CHECKING:
    from perdure.keys import FileKeyRing
    from perdure.sessions.sessions import Sessions

_VERBS = ("master", "new", "list", "renew", "rotate", "forget")
_COLUMNS = ("ID", "OWNER", "MADE", "MASTER")
_SHARED = "(sessions without an owner)"


@store_command(json=True, owner=False)
@click.argument("verb", type=click.Choice(_VERBS), default="list", metavar=f"[{'|'.join(_VERBS)}]")
@click.argument("name", required=False, metavar="[FILE|OWNER]")
@click.option("--no-owner", is_flag=True, help="Mean the key that sessions without an owner share.")
@click.option("--no-store", is_flag=True, help="The store is gone: look for no legal holds before `forget`.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a key is destroyed.")
def keys(
    ctx: click.Context, /, verb: str, name: str | None, no_owner: bool, no_store: bool, yes: bool, as_json: bool
) -> None:
    """Make, list, rotate and forget the keys that a store is sealed with. Without a verb, list them.

    `master` prints a new master key, for the environment variable PERDURE_MASTER_KEY or the file that
    PERDURE_MASTER_KEY_FILE names. `new FILE` makes a key ring. `renew OWNER` gives an owner who has a data key a new
    one for what is written from now on. `rotate` wraps all data keys with the newest master key: put it first, and the
    older ones behind it with commas between. `forget OWNER` destroys the owner's keys, which erases all that they have
    sealed, in backups too; it is refused while a legal hold is on a session of theirs in the store.
    """
    if verb in ("renew", "forget") and (name is None) != no_owner:
        raise click.UsageError(f"Name the owner: perdure keys {verb} OWNER, or add --no-owner.")
    if verb == "new" and no_owner:
        raise click.UsageError("perdure keys new makes a ring for all owners; leave --no-owner out.")
    if no_store and verb != "forget":
        raise click.UsageError(f"perdure keys {verb} looks into no store; leave --no-store out.")
    if verb in ("master", "list", "rotate") and (name is not None or no_owner):
        raise click.UsageError(f"perdure keys {verb} takes no name.")
    if verb == "master":
        from perdure.keys import new_master

        say(new_master())
        if is_terminal():
            note("Keep it in a safe place, away from the store: without it nothing that is sealed can be opened.")
    elif verb == "new":
        _make(ctx, name)
    elif verb == "list":
        _show(_ring(ctx), as_json)
    elif verb == "renew":
        ring = _ring(ctx)
        if name not in ring.owners():
            raise _no_key(name)
        say(ring.renew(name).id.hex())
    elif verb == "rotate":
        say(f"keys wrapped with the newest master key: {_ring(ctx).rotate()}")
    else:
        ring = _ring(ctx)
        if not no_store:
            _require_no_hold(ctx, name)
        _forget(ring, name, yes)


def _ring(ctx: click.Context) -> FileKeyRing:
    found = keys_in(ctx)
    if found is None:
        raise click.UsageError("Name the key ring: --keys FILE, or PERDURE_KEYS.", ctx)
    return found


def _make(ctx: click.Context, name: str | None) -> None:
    from pathlib import Path

    from perdure.keys import ring_at

    path = name or ring_path(ctx)
    if path is None:
        raise click.UsageError("Name the file to make: perdure keys new FILE.", ctx)
    if Path(path).exists():
        raise click.UsageError(f"{path} is there already. Name another file: perdure keys new FILE.")
    ring_at(path, create=True)
    settings_of(ctx).keys = path
    say(path)
    note("Back this file up apart from the store. Anyone who has both, and the master key, can open what is sealed.")


def _show(ring: FileKeyRing, as_json: bool) -> None:
    found, forgotten = ring.keys(), ring.forgotten()
    if as_json:
        for key in found:
            print_json({"id": key.id, "owner": key.owner, "made": key.made, "master": key.master})
        for key_id, at in forgotten:
            print_json({"id": key_id, "forgotten": at})
        return
    rows = [(key.id, _SHARED if key.owner is None else key.owner, key.made, key.master) for key in found]
    rows += [(key_id, "", f"forgotten {at}", "") for key_id, at in forgotten]
    if rows:
        print_table(_COLUMNS, rows, spare=("MASTER",), flexible=("OWNER",))
    elif is_terminal():
        note("There are no keys yet. The first is made when the first session is written.")


def _require_no_hold(ctx: click.Context, owner: str | None) -> None:
    """Refuse to destroy the keys of sessions under a legal hold in the store that the options name."""
    path = path_of(store_url(ctx).value)
    if path is not None and not path.exists():
        raise click.UsageError(
            f"No store is at {path}, so legal holds cannot be looked up. Name it: --store URL, or add --no-store "
            "if it is gone."
        )
    on_sessions(ctx, lambda sessions: _refuse_held(sessions, owner))


async def _refuse_held(sessions: Sessions, owner: str | None) -> None:
    store = sessions.store
    if not isinstance(store, Retains):
        return
    # Two lists, since deleted sessions are listed only when asked for.
    for filters in (Filters(owner=owner), Filters(owner=owner, status=SessionStatus.DELETED)):
        async for page in pages(store.list, **filters):
            # A hold is looked up without keys, so sessions that cannot be read count as well.
            ids = [*(info.id for info in page), *unread_ids(page)]
            for session_id, tag in (await store.holds(ids)).items():
                raise SessionHeld(session_id, tag)
    if owner is not None and isinstance(store, SealedStore):
        for session_id, tag in (await store.held_beside(owner)).items():
            raise SessionHeld(session_id, tag)


def _forget(ring: FileKeyRing, owner: str | None, yes: bool) -> None:
    whose = _whose(owner)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"This would destroy the keys of {whose} for good. Add --yes if you mean it.")
        click.confirm(f"Destroy the keys of {whose} for good? What they have sealed is erased by that.", abort=True)
    count = ring.forget(owner)
    if not count:
        raise _no_key(owner)
    say(f"keys forgotten: {count}")
    note("A backup of the key ring still has them: destroy those too.")


def _no_key(owner: str | None) -> Failure:
    return Failure(f"{_whose(owner)} has no key in this ring. To see who has one: {command('keys')}", NOT_FOUND)


def _whose(owner: str | None) -> str:
    return _SHARED if owner is None else repr(owner)
