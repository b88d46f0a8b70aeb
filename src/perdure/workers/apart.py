"""Processes for single runs that have taken a process down with them. There they do no harm to other runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from perdure.aio import finish_despite_cancel
from perdure.model.ids import SessionId
from perdure.protocols import Outcome

EXIT_CODES = {
    Outcome.DONE: 0,
    Outcome.FAILED: 1,
    Outcome.OWNER_BUSY: 4,
    Outcome.BUSY: 4,
    Outcome.PARKED: 5,
    Outcome.WAITS: 10,
}
"""The exit codes of `perdure worker --only ID` by outcome. They mean the same as those of other commands."""
AT_ONCE = 8
# Without FAILED: its code is also that of a process that could not begin, so it tells nothing about the run.
_TOLD = {code: outcome for outcome, code in EXIT_CODES.items() if outcome is not Outcome.FAILED}
_PATIENCE = 5.0
"""Seconds that a process has to hand its run over when it is told to. Then it is killed."""
_log = logging.getLogger("perdure.workers")


class ProcessApart:
    """A function that looks at each session in a process of its own. The process is started by a command and the id.

    `environment` is added to that of this process. Values that others must not see on a command line belong there. At
    most `at_once` processes run at a time: any further session is tried again later, or by another worker.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, at_once: int = AT_ONCE
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._places = asyncio.Semaphore(at_once)

    async def __call__(self, session_id: SessionId) -> Outcome | None:
        """Return the outcome for a session. Return None if its process has died, or could not begin."""
        if self._places.locked():  # not waited for: the caller would hold the session's place in the worker meanwhile
            return Outcome.BUSY
        async with self._places:
            child = await self._started(session_id)
            told = {"facts": {"session": session_id, "pid": child.pid}}
            _log.info("session %s is tried again in a process of its own (%d)", session_id, child.pid, extra=told)
            try:
                return _TOLD.get(await child.wait())
            finally:
                await finish_despite_cancel(_ended(child))

    async def _started(self, session_id: SessionId) -> Process:
        # A session of its own: Ctrl-C in a terminal reaches only this process, which then tells its children. If this
        # process is killed, the pipe to them is closed, and they end by that.
        return await asyncio.create_subprocess_exec(
            *self._command,
            session_id,
            stdin=PIPE,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )


def python_with(*arguments: str) -> list[str]:
    """Return a command that runs perdure with this Python, and finds modules in the same places."""
    # -m would put the working directory in front. -P keeps it out, if it is not on this process's own path.
    finds_here = any(path in ("", os.getcwd()) for path in sys.path)
    return [sys.executable, *([] if finds_here else ["-P"]), "-m", "perdure", *arguments]


def hold_leash(let_go: Callable[[], None], *, patience: float = _PATIENCE) -> None:
    """Have a function called in this event loop when the process at the other end of stdin is gone.

    If this process still lives after `patience` seconds, it ends at once: nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 1):
            pass
        with suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(let_go)
        threading.Event().wait(patience)
        os._exit(EXIT_CODES[Outcome.FAILED])  # sys.exit would end only this thread

    # In a thread, since a tool may keep the loop busy.
    threading.Thread(target=watch, name="perdure leash", daemon=True).start()


async def _ended(child: Process) -> None:
    """End a process that still runs. It hands its run over, if it can do so in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _PATIENCE)
