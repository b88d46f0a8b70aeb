"""Processes of their own, for runs that have taken a process down with them: they do no harm to others there."""

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
"""How `perdure worker --only ID` says what has come of the session. They mean the same as those of other commands."""
AT_ONCE = 8
_TOLD = {code: outcome for outcome, code in EXIT_CODES.items() if outcome is not Outcome.FAILED}
_PATIENCE = 5.0
"""How many seconds a process has to hand its run over when it is told to. Then it is killed."""
_log = logging.getLogger("perdure.workers")


class ProcessApart:
    """Looks at each session in a process of its own, which is started by a command with the session's id behind it.

    `environment` is added to that of this process: what others must not see on a command line belongs there. No more
    than `at_once` processes run at a time: a session beyond that is tried again later, or by another worker.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, at_once: int = AT_ONCE
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._places = asyncio.Semaphore(at_once)

    async def __call__(self, session_id: SessionId) -> Outcome | None:
        """Return what has come of the session; None if its process has died, or could not begin."""
        if self._places.locked():
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
        # Ctrl-C in a terminal is for this process, which tells its children. They end if the pipe to them is closed.
        return await asyncio.create_subprocess_exec(
            *self._command,
            session_id,
            stdin=PIPE,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )


def python_with(*arguments: str) -> list[str]:
    """Return a command that runs perdure with this Python, and finds modules where this process does."""
    finds_here = any(path in ("", os.getcwd()) for path in sys.path)
    return [sys.executable, *([] if finds_here else ["-P"]), "-m", "perdure", *arguments]


def hold_leash(let_go: Callable[[], None], *, patience: float = _PATIENCE) -> None:
    """Have a function called in this event loop when the process at the other end of stdin is gone.

    This process ends hard if it lives on for much longer: nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 1):
            pass
        with suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(let_go)
        threading.Event().wait(patience)
        os._exit(EXIT_CODES[Outcome.FAILED])

    # A thread: the loop may be kept busy by what it runs.
    threading.Thread(target=watch, name="perdure leash", daemon=True).start()


async def _ended(child: Process) -> None:
    """End a process that still runs: it hands its run over, if it can in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _PATIENCE)
