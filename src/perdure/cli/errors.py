"""Errors as a person reads them: one or two lines on stderr, and an exit code by their kind."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from perdure.cli.options import settings_of

if TYPE_CHECKING:
    from perdure.errors import RunFailed

FAILED = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
NOT_ALLOWED = 5
DAMAGED = 6
STORE_FAILED = 7
RUN_FAILED = 8
NOT_SET_UP = 9
WAITS = 10
INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES: dict[str, int] = {
    "InvalidData": USAGE,
    "InvalidSessionId": USAGE,
    "SessionNotFound": NOT_FOUND,
    "SessionConflict": CONFLICT,
    "SessionBusy": CONFLICT,
    "SessionLocked": CONFLICT,
    "SessionNotActive": NOT_ALLOWED,
    "IllegalStatusChange": NOT_ALLOWED,
    "CorruptRecord": DAMAGED,
    "InvalidSessionFile": DAMAGED,
    "StoreError": STORE_FAILED,
    "DriverError": RUN_FAILED,
    "ToolError": RUN_FAILED,
    "AgentStop": RUN_FAILED,
    "ConfigurationError": NOT_SET_UP,
}
"""The exit code of each error of `perdure.errors`; one that is not named here has that of the kind it belongs to."""


class Failure(Exception):
    """What ends a command: the lines to show, and the exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self) -> None:
        from perdure.cli.terminal import safe

        click.echo(f"perdure: {safe(str(self))}", err=True)


def exit_code_of(error: BaseException) -> int:
    if _is_not_set_up(error):
        return NOT_SET_UP
    for kind in type(error).__mro__:
        if kind.__name__ in EXIT_CODES:
            return EXIT_CODES[kind.__name__]
    return FAILED


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn errors into lines and exit codes. With --debug those that are not the user's keep their traceback."""
    try:
        yield
        sys.stdout.flush()
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
    """End a command that was typed wrong. Where nothing was typed, click shows the help instead."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    where = f"\nSee: {error.ctx.command_path} --help" if error.ctx is not None else ""
    Failure(f"{error.format_message()}{where}", USAGE).show()
    raise click.exceptions.Exit(USAGE) from None


def _failure(error: Exception) -> Failure:
    from perdure.errors import PerdureError

    if isinstance(error, PerdureError):
        return Failure(advised(error), exit_code_of(error))
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return Failure(f"{named}{error.strerror or error}", STORE_FAILED)
    kind = type(error).__name__
    return Failure(f"{kind}: {error}\nThis is a fault of perdure's. Run it again with --debug to see where.", FAILED)


def advised(error: Exception) -> str:
    """What an error says, with what to type where the library's own advice speaks of Python."""
    from perdure.cli.hints import TOOLS_FILE, command
    from perdure.cli.killed import needs_tools_there, to_go_on
    from perdure.errors import (
        ConfigurationError,
        IllegalStatusChange,
        InvalidData,
        InvalidSessionId,
        RunFailed,
        RunInterrupted,
        SessionBusy,
        SessionConflict,
        SessionNotActive,
        SessionNotFound,
        StoreError,
    )

    match error:
        case SessionNotActive(pending=pending) if pending:
            waits = f"Session {error.session_id!r} waits for a person to approve or deny: {', '.join(pending)}."
            return f"{waits}\n{to_decide(error.session_id)}"
        case RunInterrupted():
            key = error.session_id
            killed = f"The last run of session {key!r} was killed. Nothing was changed."
            tools = needs_tools_there(click.get_current_context(silent=True), key)
            return f"{killed}\n{to_go_on(key, tools=tools)}"
        case IllegalStatusChange() if "ApproveToolCalls" in str(error):
            return f"Session {error.session_id!r} waits for approval.\n{to_decide(error.session_id)}"
        case InvalidSessionId():
            return f"{str(error).partition('. ')[0]}. Type: {command('ls')}"
        case InvalidData() if error.path.startswith("$"):
            where = error.path.removeprefix("$").removeprefix(".")
            where = "" if where in _PARAMETERS else where
            return f"{error.problem} ({where})" if where else error.problem
        case SessionNotActive():
            return f"Session {error.session_id!r} is {error.status}. Type: {command('resume', error.session_id)}"
        case SessionNotFound():
            return f"{str(error).partition('. ')[0]}. Type: {command('ls')}"
        case SessionConflict() if "belongs to the agent" in str(error):
            advice = f"Leave --agent out, or begin another session: {command('chat', begins=True)}"
            return f"{str(error).partition('. ')[0]}. {advice}"
        case SessionConflict() if "to be brought in" in str(error):
            said = str(error).partition(" Nothing was changed.")[0]
            erase = command("purge", error.session_id, "--yes")
            return f"{said} Bring it into another store, or erase the one that is there first: {erase}"
        case RunFailed():
            return _of_run(error)
        case StoreError():
            return f"{' '.join(str(error).split())}\n{_of_store(str(error))}"
        case SessionBusy(owner=owner) if type(error) is SessionBusy and owner:
            cancel = command("cancel", error.session_id)
            return f"{str(error).partition('. ')[0]}. Wait for it, or type: {cancel}"
    if isinstance(error, ConfigurationError) and NO_TOOL.search(str(error)):
        return f"{without_tools_advice(str(error))}\nName the Python file that has it: --tools {TOOLS_FILE}"
    return str(error)


def _of_store(said: str) -> str:
    from perdure.cli.hints import command

    if "readonly" in said or "Permission denied" in said:
        return (
            "A store is written to even when it is read. Copy it to where you may write, or name another: --store URL"
        )
    return f"Which store is used, and why, says: {command('doctor')}"


NO_TOOL = re.compile("no tool (named|of that name)")
_NOT_SET_UP = "ConfigurationError: "
_PARAMETERS = ("call_ids", "reason")
"""Where the library means a parameter of Python's, which is none of a command's."""


def without_tools_advice(said: str) -> str:
    """What an error says of a tool that is missing, less what is to be done about it in Python."""
    found, parted, advice = said.rpartition("is here. ")
    return f"{found}is here." if parted and "tools" in advice else said


def to_decide(session_id: str) -> str:
    """What to type where a call waits for a person."""
    from perdure.cli.hints import command

    approve, deny = (command(verb, session_id, tools=True) for verb in ("approve", "deny"))
    return f"Type: {approve}\nor: {deny}"


def _of_run(error: RunFailed) -> str:
    """What a run failed of. Where the model cannot be asked at all, that is no fault of the run."""
    from perdure.cli.hints import command

    undo = command("undo", error.session_id)
    if _is_not_set_up(error):
        reason = error.reason.removeprefix(_NOT_SET_UP).partition(". ")[0].rstrip(". ")
        advice = f"Set that up and send again, or choose another model: --model offline. To take it back: {undo}"
        return f"Session {error.session_id!r} has the message, and no answer: {reason}.\n{advice}"
    failed = f"The run in session {error.session_id!r} failed: {error.reason.rstrip('. ')}."
    return f"{failed}\nWhat was said is kept. Send again to go on, or type: {undo}"


def _is_not_set_up(error: BaseException) -> bool:
    from perdure.errors import RunFailed

    return isinstance(error, RunFailed) and getattr(error, "reason", "").startswith(_NOT_SET_UP)


def _show_traceback() -> None:
    import traceback

    from perdure.cli.terminal import safe

    click.echo(safe(traceback.format_exc()), err=True, nl=False)


def _stop_writing() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, and does not raise at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in tests
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
