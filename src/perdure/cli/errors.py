"""Errors in the form for people: one or two lines on stderr, and an exit code by their kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from perdure.cli.hints import AGENT_FILE, TOOLS_FILE, command
from perdure.cli.interrupted import needs_tools_there, subagents_there, to_go_on
from perdure.cli.options import settings_of
from perdure.cli.terminal import safe
from perdure.errors import (
    ConfigurationError,
    IllegalStatusChange,
    InvalidData,
    InvalidSessionId,
    KeyForgotten,
    KeyMissing,
    KeyUnavailable,
    PerdureError,
    RunFailed,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionHeld,
    SessionNotActive,
    SessionNotFound,
    StoreError,
    WrongKey,
)

if TYPE_CHECKING:
    from perdure.model.execution import PendingCall

FAILED = 1
USAGE = 2  # click's own code for a wrong usage
NOT_FOUND = 3
CONFLICT = 4
NOT_ALLOWED = 5
DAMAGED = 6
STORE_FAILED = 7
RUN_FAILED = 8
NOT_SET_UP = 9
WAITS = 10
# 128 and the number of the signal, as shells report it: SIGINT is 2, SIGPIPE 13.
INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES: dict[str, int] = {
    "InvalidData": USAGE,
    "InvalidSessionId": USAGE,
    "SessionNotFound": NOT_FOUND,
    "SessionConflict": CONFLICT,
    "SessionBusy": CONFLICT,
    "QueueFull": CONFLICT,
    "SessionLocked": CONFLICT,
    "SessionHeld": NOT_ALLOWED,
    "SessionNotActive": NOT_ALLOWED,
    "IllegalStatusChange": NOT_ALLOWED,
    "CorruptRecord": DAMAGED,
    "KeyUnavailable": NOT_SET_UP,
    "KeyForgotten": NOT_FOUND,
    "InvalidSessionFile": DAMAGED,
    "BackupNotFound": NOT_FOUND,
    "StoreNotEmpty": CONFLICT,
    "StoreError": STORE_FAILED,
    "DriverError": RUN_FAILED,
    "RedactionFailed": RUN_FAILED,
    "ToolError": RUN_FAILED,
    "AgentStop": RUN_FAILED,
    "ConfigurationError": NOT_SET_UP,
}
"""The exit codes of the errors of `perdure.errors`. An error that is not named here has the code of its base class."""
NAME_A_MODEL = (
    "Name one: --model openai:gpt-5, or PERDURE_MODEL, or a line in perdure.toml. To try it without a key: "
    "--model offline"
)
_AN_ID = "An id is 1 to 200 of the characters A-Z a-z 0-9 . _ - and begins with a letter or digit."
_NOT_SET_UP = "ConfigurationError"
_PARAMETERS = ("block_id", "call_ids", "message_ids", "reason", "session_id")
"""The paths in errors that name a parameter of a Python function. Commands have no such option: they are left out."""
_OPTIONS = (
    "at",
    "cron",
    "drain",
    "key",
    "lease",
    "name",
    "priority",
    "rate",
    "retain_every",
    "timezone",
    "tries",
    "until",
)
"""The paths in errors that name an option of the command. The words of the error say so already."""
_INSTALL = "pip install "


class Failure(Exception):
    """An error that ends a command, with the lines to show and the exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self) -> None:
        click.echo(f"perdure: {safe(str(self))}", err=True)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error. A run that failed because no model could be asked was set up wrong."""
    if isinstance(error, RunFailed) and error.kind == _NOT_SET_UP:
        return NOT_SET_UP
    for kind in type(error).__mro__:
        if kind.__name__ in EXIT_CODES:
            return EXIT_CODES[kind.__name__]
    return FAILED


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn errors into lines and exit codes. With --debug, also show the traceback."""
    try:
        yield
        sys.stdout.flush()  # here, so that a pipe which is broken at the last write is reported too
    except click.UsageError as error:
        refuse(error)
    except (click.ClickException, click.exceptions.Exit):
        raise
    except BrokenPipeError:
        _stop_writing()
        ctx.exit(BROKEN_PIPE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("perdure: interrupted", err=True)
        ctx.exit(INTERRUPTED)
    except Exception as error:
        if settings_of(ctx).debug:
            _show_traceback()
        failure = error if isinstance(error, Failure) else _failure(error)
        failure.show()
        ctx.exit(failure.exit_code)


def refuse(error: click.UsageError) -> NoReturn:
    """End a command with an error of usage. If nothing was typed, click shows the help instead."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    where = f"\nSee: {error.ctx.command_path} --help" if error.ctx is not None else ""
    Failure(f"{error.format_message()}{where}", USAGE).show()
    raise click.exceptions.Exit(USAGE) from None


def _failure(error: Exception) -> Failure:
    if isinstance(error, PerdureError):
        return Failure(advised(error), exit_code_of(error))
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return Failure(f"{named}{error.strerror or error}", STORE_FAILED)
    kind = type(error).__name__
    return Failure(f"{kind}: {error}\nThis is a bug in perdure. Run it again with --debug to see where.", FAILED)


def advised(error: Exception) -> str:
    """Return an error's message, with a command to type where the library's own advice names Python code."""
    match error:
        case SessionNotActive(pending=pending) if pending:
            waits = f"Session {error.session_id!r} waits for a person to approve or deny: {', '.join(pending)}."
            return f"{waits}\n{to_decide(error.session_id)}"
        case RunInterrupted():
            key = error.session_id
            killed = f"The last run of session {key!r} was killed. Nothing was changed."
            tools = needs_tools_there(click.get_current_context(silent=True), key)
            return f"{killed}\n{to_go_on(key, tools=tools)}"
        case IllegalStatusChange(pending=pending) if pending:
            return f"Session {error.session_id!r} waits for approval.\n{to_decide(error.session_id)}"
        case InvalidSessionId():
            return f"{error.what} {_AN_ID}"
        case SessionNotFound(version=int()):
            return f"{error.what} Type: {command('versions', error.session_id)}"
        case SessionNotFound():
            notes = "".join(f" {each}" for each in getattr(error, "__notes__", ()))
            return f"{error.what}{notes} Type: {command('ls')}{_or_begin()}{_in_default_store()}"
        case InvalidData() if error.path.startswith("$"):
            where = error.path.removeprefix("$").removeprefix(".")
            where = "" if where in (*_PARAMETERS, *_OPTIONS) else where
            return f"{error.problem} ({where})" if where else error.problem
        case SessionNotActive(status="deleted"):
            return f"{error.what} Type: {command('restore', error.session_id)}"
        case SessionNotActive(is_parked=True):
            why = "its run took its process down each time. To see more: " + command("queue")
            return f"Session {error.session_id!r} is parked: {why}. Type: {command('queue', 'retry', error.session_id)}"
        case SessionNotActive():
            return f"Session {error.session_id!r} is {error.status}. Type: {command('resume', error.session_id)}"
        case SessionHeld():
            return f"{error.what} Once it may be lifted, type: {command('tag', error.holder, '--remove', error.tag)}"
        case SessionConflict(agent=str()):
            begin = command("chat", begins=True)
            return f"{error.what} Leave --agent out, or begin another session: {begin}"
        case RunFailed():
            return _of_run(error)
        case KeyUnavailable():
            return f"{error.what} {advice_on_key(error, error.session_id)}"
        case StoreError() if error.advice:  # it names the file already: which store is used need not be added
            return str(error)
        case StoreError():
            return f"{' '.join(str(error).split())}\n{_of_store(error)}"
        case SessionBusy(owner=owner) if type(error) is SessionBusy and owner:
            return f"{error.what} Wait for it, or type: {command('cancel', error.session_id)}"
        case ConfigurationError():
            return _of_setup(error)
    return str(error)


def advice_on_key(error: KeyUnavailable, session_id: str | None = None) -> str:
    """Return what to do about a session whose key is not at hand, or about any such, as commands to type."""
    match error:
        case WrongKey():
            rotate = f"PERDURE_MASTER_KEY=NEW,OLD {command('keys', 'rotate')}"
            return f"Give that one in PERDURE_MASTER_KEY. After a change of master keys, give both once: {rotate}"
        case KeyForgotten():
            return f"To erase what is left of a session: {command('erase', session_id or 'ID')}"
        case KeyMissing(has_ring=False):
            return "Give its master key in PERDURE_MASTER_KEY, and repeat the command with --keys FILE."
    return error.advice


def _or_begin() -> str:
    """Return the words to add for a command that could begin the session that it did not find."""
    ctx = click.get_current_context(silent=True)
    is_send = ctx is not None and "send" in (ctx.info_name, ctx.invoked_subcommand)
    return ". To begin a session of that name, add --new." if is_send else ""


def _in_default_store() -> str:
    """Return a line that names the store, if nothing has named one: the session may well be in another."""
    from perdure.cli.setup import shown_url, store_url

    ctx = click.get_current_context(silent=True)
    chosen = None if ctx is None else store_url(ctx)
    if chosen is None or chosen.by != "default":
        return ""
    return f"\nNo store was named, so this is {shown_url(chosen.value)}. To name another: --store URL"


def _of_setup(error: ConfigurationError) -> str:
    from perdure.sessions.reach import NO_OWNER

    if error.missing == "model":
        return f"{error.what}\n{NAME_A_MODEL}"
    if error.missing == "context":
        return f"{error.what}\n{to_make_context(error)}"
    if error.advice == NO_OWNER:
        return f"{error.what}\nRepeat the command without --owner and PERDURE_OWNER."
    if error.advice.startswith(_INSTALL):
        return f"{error.what}\nType: {error.advice}"
    there = subagents_there(click.get_current_context(silent=True)) if missed_tool(error) else set()
    return "\n".join(filter(None, (error.what, to_name_tool(error, there))))


def _of_store(error: StoreError) -> str:
    from perdure.cli.setup import may_write

    ctx = click.get_current_context(silent=True)
    if isinstance(error.__context__, PermissionError) or (ctx is not None and not may_write(ctx)):
        return (
            "A store is written to even when it is read. Copy it to where you may write, or name another: --store URL"
        )
    return f"To see which store is used, and why: {command('doctor')}"


def missed_tool(error: BaseException | None) -> str | None:
    """Return the name of the tool that is missing by an error or by its cause."""
    while error is not None:
        if isinstance(error, ConfigurationError) and error.missing == "tool":
            return error.name
        error = error.__cause__
    return None


def to_name_tool(error: BaseException, subagents: set[str], *words: object) -> str | None:
    """Return the option to type after a command to name a missing tool: its file of tools, or the file of an agent.

    Return None if no tool is missing."""
    name = missed_tool(error)
    if name is None:
        return None
    again = f"{command(*words)} " if words else ""
    if name in subagents:
        named = f"It is an agent. Name the file that defines it: {again}--agent {AGENT_FILE}"
        return f"{named}\nIf Python code defines it, list it in the file of --tools: subagents = [AGENT]"
    return f"Name the Python file that has it: {again}--tools {TOOLS_FILE}"


def to_make_context(error: BaseException) -> str | None:
    """Return what to write in a file of tools whose tools miss a context. Return None if none is missing."""
    if not isinstance(error, ConfigurationError) or error.missing != "context":
        return None
    if error.name is None:  # no tool was refused, so the user's own function was called and failed
        return "Correct the function context(session, data) in the file that --tools names."
    return (
        "Write the function that makes one into a file that --tools names: def context(session, data). What it returns "
        "is the ToolContext.context of tools; data is what the sender left as context_data, or None."
    )


def to_decide(session_id: str, calls: Iterable[PendingCall] = ()) -> str:
    """Return the commands to type if calls wait for a person, or for an answer from outside."""
    leaves = [leaf for call in calls for leaf in call.leaves]
    outside = [leaf for leaf in leaves if leaf.external]
    lines = [command("answer", session_id, leaf.id, "JSON", tools=True) for leaf in outside]
    if not outside or len(outside) < len(leaves):
        lines += [command("approve", session_id, tools=True)]
    lines += [command("deny", session_id, tools=True)]
    return "Type: " + "\nor: ".join(lines)


def _of_run(error: RunFailed) -> str:
    """Return why a run failed, and what to type. If the model could not be asked at all, the set-up is at fault."""
    undo = command("undo", error.session_id)
    if error.kind == _NOT_SET_UP:
        reason = error.problem.rstrip(". ")
        advice = f"Set that up and send again, or choose another model: --model offline. To take it back: {undo}"
        return f"Session {error.session_id!r} has the message, and no answer: {reason}.\n{advice}"
    failed = f"The run in session {error.session_id!r} failed: {error.reason.rstrip('. ')}."
    return f"{failed}\nWhat was said is kept. Send again to continue, or type: {undo}"


def _show_traceback() -> None:
    import traceback

    click.echo(safe(traceback.format_exc()), err=True, nl=False)


def _stop_writing() -> None:
    """Drop buffered output that nobody reads any more."""
    try:
        # Python flushes stdout at exit, and would print a second BrokenPipeError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in tests
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
