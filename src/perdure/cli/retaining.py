"""The part of `perdure purge` that works by a policy: the rules of its options or a file, and the report of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli.setup import on_sessions
from perdure.cli.terminal import counted, print_json, print_table, say

if TYPE_CHECKING:
    from perdure.model.retention import RetentionPolicy
    from perdure.protocols import Left
    from perdure.sessions.rounds import RetentionReport

_SHOWN = 20
"""The most sessions that are named, of those that stay."""
_WORDS = {
    "running": "it is being run",
    "interrupted": "its run was killed, and waits to be continued",
    "approval": "it waits for a person, or for a result from outside",
    "queued": "messages wait in its inbox",
    "timer": "it has a timer",
    "hold": "it is under hold",
    "changed": "it has changed meanwhile",
    "damaged": "it cannot be read",
}


def policy_of(file: str | None, age: str | None, idle: str | None, versions: int | None) -> RetentionPolicy:
    """Return the policy of a file, or of options."""
    from perdure.errors import InvalidData
    from perdure.model.retention import RetentionPolicy
    from perdure.sessions.rounds import load_policy

    named = {"age": age, "idle": idle, "versions": versions}
    given = {name: value for name, value in named.items() if value is not None}
    if file is not None and given:
        raise click.UsageError("Name a file by --policy, or the rule by --age, --idle and --versions; not both.")
    if file is not None:
        return load_policy(file)
    try:
        return RetentionPolicy.from_dict(given)
    except InvalidData as error:
        raise click.UsageError(f"--{error.path.removeprefix('$.')}: {error.problem}.") from None


def apply_policy(ctx: click.Context, policy: RetentionPolicy, *, dry_run: bool, as_json: bool) -> None:
    """Erase sessions by a policy, or rehearse that, and print what was erased and what stays."""
    report = on_sessions(ctx, lambda sessions: sessions.apply_retention(policy, dry_run=dry_run))
    if as_json:
        print_json(_as_json(report))
        return
    counts = [(name, f"{getattr(report, name):,}") for name in ("sessions", "versions", "messages", "bytes")]
    head = "would be erased" if dry_run else "erased"
    print_table(("what", head), counts, right=(head,))
    if report.left:
        say()
        rows = [(each.session_id, _why(each)) for each in report.left[:_SHOWN]]
        print_table(("stays for now", "why"), rows, flexible=("why",))
        if len(report.left) > _SHOWN:
            say(f"and {counted(len(report.left) - _SHOWN, 'session')} more; --json names all of them")


def _why(left: Left) -> str:
    return f"{_WORDS[left.why]} ({left.detail})" if left.detail else _WORDS[left.why]


def _as_json(report: RetentionReport) -> dict[str, Any]:
    left = [{"session": each.session_id, "why": each.why.value, "detail": each.detail} for each in report.left]
    return {
        "at": report.at.isoformat(),
        "dry_run": report.dry_run,
        "sessions": report.sessions,
        "versions": report.versions,
        "messages": report.messages,
        "bytes": report.bytes,
        "erased": list(report.erased),
        "pruned": list(report.pruned),
        "left": left,
    }
