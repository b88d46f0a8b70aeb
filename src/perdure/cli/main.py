"""The command `perdure`. Its help is all here, so that showing it imports nothing but click."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import RawIOBase
from typing import Any, NamedTuple

import click

from perdure.cli.options import AGENT_OPTIONS, STORE_OPTIONS


class Place(NamedTuple):
    """The place of a command in the code, and its line in the help."""

    target: str
    help: str


SECTIONS: dict[str, dict[str, Place]] = {
    "Begin": {
        "tour": Place("tour:tour", "See in under a minute, without a key, what perdure does."),
        "init": Place("starting:init", "Write an agent file and a tools file to start from."),
        "doctor": Place("starting:doctor", "Show versions, the store, and which keys are set."),
        "completion": Place("starting:completion", "Print the script that completes commands in your shell."),
    },
    "Talk": {
        "chat": Place("chat:chat", "Talk to an agent: streamed, with tools, approvals and history."),
        "send": Place("talking:send", "Send one message and print the answer."),
        "approve": Place("talking:approve", "Approve pending tool calls, and continue the run."),
        "deny": Place("talking:deny", "Deny pending tool calls; the model is told why."),
        "answer": Place("talking:answer", "Give the result of a call that is made outside."),
        "cancel": Place("talking:cancel", "Ask a run that is under way, in whichever process, to stop."),
        "recover": Place("talking:recover", "Continue runs that were killed."),
        "inject": Place("talking:inject", "Append a message without running the agent."),
    },
    "Look": {
        "ls": Place("looking:ls", "List sessions, the last created first."),
        "show": Place("looking:show", "Show what a session says."),
        "versions": Place("looking:versions", "List a session's versions, the newest first."),
        "tree": Place("tree:tree", "Draw runs, branches, forks and sub-agents with status, cost and time."),
        "events": Place("runs:events", "Show what happened in a session's runs, and what happens now."),
        "diff": Place("looking:diff", "Show where two sessions part, and how each continues."),
        "search": Place("looking:search", "Find messages by their words, covered and trimmed ones too."),
        "replay": Place("replaying:replay", "Run stored sessions again, and show what is different."),
        "stats": Place("runs:stats", "Count tokens and cost by agent, model and day."),
        "inspect": Place("inspecting:inspect", "Write the inspector's pages into files that need no server."),
    },
    "Change": {
        "fork": Place("changing:fork", "Begin a new session where another stands; nothing is copied."),
        "trim": Place("changing:trim", "Show the model the last messages only."),
        "compact": Place("changing:compact", "Show the model a summary, or less, of what is older."),
        "uncompact": Place("changing:uncompact", "Show again what a compaction covers."),
        "reset": Place("changing:reset", "Show the model nothing of what was said so far."),
        "rewind": Place("changing:rewind", "Go back to a version, or to a message."),
        "undo": Place("changing:undo", "Take back the last change of what is shown."),
        "suspend": Place("changing:suspend", "Close a session to messages until it is resumed."),
        "resume": Place("changing:resume", "Open a session again that was suspended, completed or failed."),
        "rename": Place("changing:rename", "Give a session a name for people."),
        "tag": Place("changing:tag", "Add tags to a session, or take some away."),
        "delete": Place("changing:delete", "Hide a session from lists; restore takes that back."),
        "restore": Place("changing:restore", "Take back that a session was deleted, or put a store back."),
    },
    "Work": {
        "worker": Place("working:worker", "Run sessions that others have left messages with."),
        "queue": Place("queueing:queue", "Show what waits, runs, is delayed or parked; open or drop it."),
        "schedule": Place("queueing:schedule", "Have a message sent to a session again and again."),
    },
    "Serve": {
        "serve": Place("serving:serve", "Serve sessions over HTTP, with an inspector for the browser."),
        "acp": Place("acp:acp", "Serve an agent to an editor that speaks the Agent Client Protocol."),
        "mcp": Place("mcp:mcp", "Serve sessions to an assistant as tools, over MCP."),
        "token": Place("tokens:token", "Make, list and revoke the access tokens of a service."),
    },
    "Keep": {
        "export": Place("moving:export", "Write sessions into one file."),
        "import": Place("moving:import_", "Import the sessions of an exported file."),
        "copy": Place("moving:copy", "Copy every session into another store, and compare."),
        "backup": Place("backing_up:backup", "Back the store up, and list or verify its backups."),
        "fsck": Place("checking:fsck", "Verify every promise of a store, and say how to repair what is wrong."),
        "erase": Place("erasing:erase", "Erase sessions, or all of an owner, for good."),
        "purge": Place("erasing:purge", "Erase old sessions for good, by age, by status or by rules."),
        "forget": Place("erasing:forget", "Erase a session's older versions, and what only they show."),
        "redact": Place("redacting:redact", "Replace what messages say, for good and everywhere."),
        "keys": Place("keys:keys", "Make, list, rotate and forget the keys that a store is sealed with."),
        "gc": Place("erasing:gc", "Erase what erased sessions have left behind."),
    },
}
COMMANDS = {name: place for section in SECTIONS.values() for name, place in section.items()}
EXAMPLES: dict[str, tuple[str, ...]] = {
    "tour": ("perdure tour", "perdure tour my-tour"),
    "init": ("perdure init", "perdure init my-agent --force"),
    "doctor": ("perdure doctor", "perdure doctor --store sqlite:///sessions.db --json"),
    "completion": ("perdure completion bash", "perdure completion fish"),
    "chat": (
        "perdure chat",
        "perdure chat -c",
        "perdure chat --agent assistant.md --tools tools.py --model openai:gpt-5",
        "perdure chat --mcp 'uvx mcp-server-time' --model openai:gpt-5",
    ),
    "send": (
        "perdure send --new 'What is 19 * 21?' --model offline",
        "perdure send @ 'And half of it?'",
        "perdure send order-7 - --key request-12 --tools tools.py",
        "perdure send order-7 'Did it arrive?' --later 3d",
        "perdure send order-7 'Ship it.' --no-wait --priority 5",
    ),
    "approve": (
        "perdure approve @ --tools tools.py",
        "perdure approve order-7 --call call_1 --tools tools.py",
        "perdure approve order-7 --no-wait",
    ),
    "deny": ("perdure deny @ 'Not on a Sunday.' --tools tools.py",),
    "answer": (
        "perdure answer order-7 call_1 '{\"rain\": true}' --tools tools.py",
        "perdure answer order-7 call_1 --error 'The browser was closed.' --no-wait",
    ),
    "cancel": ("perdure cancel order-7",),
    "recover": ("perdure recover --tools tools.py", "perdure recover order-7 --tools tools.py"),
    "inject": ("perdure inject @ 'The parcel has arrived.'", "perdure inject order-7 'Be brief.' --role system"),
    "ls": ("perdure ls", "perdure ls --status suspended --since 2d", "perdure ls --all --json"),
    "show": ("perdure show @", "perdure show 0192f --all", "perdure show order-7 --version 3 --json"),
    "versions": ("perdure versions @", "perdure versions order-7 --before 40 --limit 20 --json"),
    "tree": ("perdure tree @", "perdure tree order-7 --svg tree.svg"),
    "events": ("perdure events @ --last 20", "perdure events order-7 --follow --json"),
    "diff": ("perdure diff order-7 order-7-again",),
    "search": ("perdure search 'refund order*'", "perdure search '\"two words\"' --limit 5"),
    "replay": (
        "perdure replay @ --model openai:gpt-5 --tools tools.py",
        "perdure replay @ --model recorded --tools live --tools tools.py",
        "perdure replay tests/sessions.jsonl --agent assistant.md --fail-on calls --fail-on cost=1.2",
        "perdure replay --tag regression --jobs 8 --max-cost 2 --json",
    ),
    "stats": ("perdure stats", "perdure stats --by model --since 30d"),
    "inspect": ("perdure inspect --static pages @", "perdure inspect --static pages order-7 order-8 --force"),
    "fork": ("perdure fork @", "perdure fork order-7 order-7-again --at 4"),
    "trim": ("perdure trim @ 6",),
    "compact": ("perdure compact @", "perdure compact order-7 --strategy truncate --keep-last 4"),
    "uncompact": ("perdure uncompact @",),
    "reset": ("perdure reset order-7",),
    "rewind": ("perdure rewind @ 3",),
    "undo": ("perdure undo @",),
    "suspend": ("perdure suspend order-7", "perdure suspend order-7 --resume 3d"),
    "resume": ("perdure resume order-7",),
    "rename": ("perdure rename @ 'Ada and her parcel'",),
    "tag": ("perdure tag @ urgent north", "perdure tag order-7 --remove urgent"),
    "delete": ("perdure delete order-7",),
    "restore": (
        "perdure restore order-7",
        "perdure restore --from /mnt/backups --store sqlite:///sessions.db --verify",
        "perdure restore --from /mnt/backups --at 2d --store sqlite:///before.db",
    ),
    "worker": (
        "perdure worker --tools tools.py",
        "perdure worker --concurrency 64 --drain 5min --queue high",
        "perdure worker --only order-7 --tools tools.py",
    ),
    "queue": ("perdure queue", "perdure queue retry order-7", "perdure queue drop order-7", "perdure queue --json"),
    "schedule": (
        "perdure schedule",
        "perdure schedule add digest 'Write the weekly digest.' --cron '0 7 * * MON' --timezone Europe/Oslo",
        "perdure schedule remove digest",
    ),
    "serve": (
        "perdure serve",
        "perdure serve --agent assistant.md --tools tools.py --workers 4",
        "perdure serve --host 0.0.0.0 --known-as agents.example.org --no-open",
    ),
    "acp": (
        "perdure acp --model openai:gpt-5",
        "perdure acp --agent assistant.md --tools tools.py --store sqlite:///sessions.db",
    ),
    "mcp": ("perdure mcp --owner ada", "perdure mcp --allow-send --agent assistant.md --tools tools.py"),
    "token": (
        "perdure token new ada --expires 30d",
        "perdure token new --everyone --read-only --name 'the dashboard'",
        "perdure token ls",
        "perdure token revoke 5f2b0c9d1e7a",
    ),
    "export": (
        "perdure export -o all.jsonl",
        "perdure export order-7 -o order-7.jsonl",
        "perdure export order-7 --format markdown",
    ),
    "import": (
        "perdure import all.jsonl",
        "perdure import - --store sqlite:///sessions.db",
        "perdure import --format openai chat.json",
        "perdure import --from langgraph checkpoints.sqlite",
    ),
    "copy": ("perdure copy sqlite:///sessions.db postgresql://localhost/agents",),
    "backup": (
        "perdure backup /mnt/backups --keep 30",
        "perdure backup --list /mnt/backups",
        "perdure backup --verify /mnt/backups --json",
    ),
    "fsck": (
        "perdure fsck",
        "perdure fsck order-7 --json",
        "perdure fsck --repair --dry-run",
        "perdure fsck --accept-lost-commits",
    ),
    "erase": ("perdure erase order-7", "perdure erase --of ada --yes"),
    "purge": (
        "perdure purge --status deleted --older-than 30d --yes",
        "perdure purge --policy retention.toml --dry-run",
        "perdure purge --idle 90d --versions 20 --yes",
    ),
    "forget": ("perdure forget order-7 --before 40",),
    "redact": ("perdure redact order-7 0192f0c1-22d4-7e61-8f00-5a1b2c3d4e5f",),
    "keys": (
        "perdure keys master",
        "perdure keys new ring.json",
        "perdure keys list --keys ring.json",
        "perdure keys rotate --keys ring.json",
        "perdure keys forget ada --keys ring.json",
    ),
    "gc": ("perdure gc",),
}


class LazyGroup(click.Group):
    """A group of commands, each imported when it is called. Errors are shown in a line or two, with an exit code."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("terminal_width", _help_width())
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:  # click would print its own form of it: `reported` is not entered yet
            from perdure.cli.errors import refuse

            refuse(error)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.target.partition(":")
        command: click.Command = getattr(import_module(f"perdure.cli.{module}"), name)
        # click keeps the lines of a paragraph that begins with \b as they are.
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[cmd_name])
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(error.format_message() + hint, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, place.help) for name, place in section.items()], col_max=12)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=COMMANDS[name].help) for name in COMMANDS if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        from perdure.cli.errors import reported

        with reported(ctx):
            return super().invoke(ctx)


def _help_width() -> int:
    """Return the width of the help. By itself, click would import shutil to find out."""
    given = os.environ.get("COLUMNS", "")
    try:
        columns = int(given) if given.isdecimal() else os.get_terminal_size(1).columns
    except OSError:  # no terminal
        columns = 80
    return max(50, min(columns or 80, 100) - 2)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:  # a shell that completes a word parses the options too
        import perdure

        click.echo(f"perdure {perdure.__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Sessions for LLM agents that last: stored, forked, rewound, compacted, recovered, inspected.

    A session is named by its id, by a beginning or an end of it that only one has, or by @ for the last used.
    `perdure tour` shows what there is; `perdure COMMAND --help` explains a command.
    """


cli.params += [*AGENT_OPTIONS, *STORE_OPTIONS]


def main() -> None:
    """Run the installed command."""
    sys.stdout, sys.stderr = _fit(sys.stdout), _fit(sys.stderr)
    try:
        cli(prog_name="perdure")
    except KeyboardInterrupt:  # during the completion of an id, which click does before it handles errors
        sys.exit(130)


def _fit(stream: Any) -> Any:
    """Return a stream that writes all or raises, and escapes characters that its encoding does not have."""
    if isinstance(getattr(stream, "buffer", None), RawIOBase):
        # With PYTHONUNBUFFERED, if a pipe took only a part of a write, the rest and the error would be lost.
        return open(stream.fileno(), "w", 1, stream.encoding, "backslashreplace", closefd=False)
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream
