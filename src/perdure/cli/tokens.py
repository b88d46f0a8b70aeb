"""Commands for the access tokens of a service: make one, list them, revoke one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.errors import NOT_FOUND, Failure
from perdure.cli.hints import command
from perdure.cli.options import later_option, store_command
from perdure.cli.setup import on_sessions, owner_of
from perdure.cli.terminal import age, is_terminal, line, note, print_json, print_table, say, to_come
from perdure.sessions.json_forms import of_token

if TYPE_CHECKING:
    from perdure.protocols import Token
    from perdure.sessions.sessions import Sessions

_COLUMNS = ("ID", "MAY", "OWNER", "CREATED", "EXPIRES", "NAME")
_USAGE = (
    "Type: perdure token new OWNER, or perdure token new --everyone, or perdure token ls, or perdure token revoke ID."
)


@store_command(json=True)
@click.argument("verb", type=click.Choice(["new", "ls", "revoke"]), default="ls", metavar="[new|ls|revoke]")
@click.argument("owner_or_id", required=False, metavar="[OWNER|ID]")
@click.option("--everyone", is_flag=True, help="Make an operator's token, which reaches all sessions of all owners.")
@click.option("--read-only", is_flag=True, help="Make a token that changes nothing.")
@later_option("--expires", "expires_at", help="Until when it is valid: 12h, 30d, or a date. [until it is revoked]")
@click.option("--name", metavar="NOTE", help="What it is for. `ls` shows it.")
def token(ctx: click.Context, /, verb: str, owner_or_id: str | None, as_json: bool, **wanted: Any) -> None:
    """Make, list and revoke the tokens that a service asks of its clients. Without a verb, list them.

    `new OWNER` makes a token for the sessions of one owner, and prints its secret. The store keeps only a digest of
    the secret, so it is not shown again. `revoke ID` ends the token at once.
    """
    is_wanted = any(value for value in wanted.values()) or wanted["name"] is not None
    is_clear = {
        "new": (owner_or_id is None) == wanted["everyone"],
        "ls": owner_or_id is None and not is_wanted,
        "revoke": owner_or_id is not None and not is_wanted,
    }
    if not is_clear[verb]:
        raise click.UsageError(_USAGE)
    if verb == "new":
        _make(ctx, owner_or_id, as_json, **wanted)
    elif owner_or_id is None:
        _show(ctx, as_json)
    else:
        _revoke(ctx, owner_or_id, as_json)


def _make(
    ctx: click.Context,
    owner: str | None,
    as_json: bool,
    *,
    everyone: bool,
    read_only: bool,
    expires_at: datetime | None,
    name: str | None,
) -> None:
    from perdure.model.ids import now
    from perdure.protocols import Token
    from perdure.server.tokens import new_token, token_book

    wanted: dict[str, Any] = {"may_write": not read_only, "expires_at": expires_at, "name": name}
    # Wrong values are refused here, before a new store is made for them.
    Token(digest="0" * 64, owner=owner, created_at=now(), **wanted)
    if owner_of(ctx) not in (None, owner):
        raise click.UsageError(f"With the owner {owner_of(ctx)!r}, tokens are made for this owner only.")

    async def work(sessions: Sessions) -> tuple[str, Token]:
        return await new_token(token_book(sessions.store), owner, **wanted)

    # A service may begin with an empty store, and its clients need tokens first.
    secret, made = on_sessions(ctx, work, must_exist=False)
    if as_json:
        print_json({**of_token(made), "secret": secret})
    else:
        say(secret)
    note(f"This secret is not shown again: keep it now. To end it: {command('token', 'revoke', made.id)}")


def _show(ctx: click.Context, as_json: bool) -> None:
    from perdure.model.ids import now
    from perdure.server.tokens import token_book

    async def work(sessions: Sessions) -> Sequence[Token]:
        return await token_book(sessions.store).tokens(owner_of(ctx))

    found = on_sessions(ctx, work)
    if as_json:
        for each in found:
            print_json(of_token(each))
    elif found:
        at = now()
        rows = [
            (each.id, _described(each), each.owner or "", age(each.created_at), _end_of(each, at), each.name or "")
            for each in found
        ]
        print_table(_COLUMNS, rows, spare=("CREATED", "NAME", "EXPIRES"), flexible=("NAME", "OWNER"))
    elif is_terminal():
        note(f"There are no tokens. To make one: {command('token', 'new', 'OWNER')}")


def _described(token: Token) -> str:
    """Return the rights of a token. An operator's token is marked here, since an owner may have any name."""
    return ("write" if token.may_write else "read") + (" all" if token.owner is None else "")


def _end_of(token: Token, at: datetime) -> str:
    if token.expires_at is None:
        return ""
    return "expired" if token.is_expired(at) and is_terminal() else to_come(token.expires_at)


def _revoke(ctx: click.Context, token_id: str, as_json: bool) -> None:
    from perdure.server.tokens import token_book

    async def work(sessions: Sessions) -> bool:
        book, owner = token_book(sessions.store), owner_of(ctx)
        # Another owner's token counts as missing.
        if owner is not None and token_id not in {each.id for each in await book.tokens(owner)}:
            return False
        return await book.drop_token(token_id)

    if not on_sessions(ctx, work):
        raise Failure(f"No token has the id {token_id!r}. Type: {command('token', 'ls')}", NOT_FOUND)
    if as_json:
        print_json({"id": token_id, "revoked": True})
    else:
        say(f"revoked\t{line(token_id)}")
