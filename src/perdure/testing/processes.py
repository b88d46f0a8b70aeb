"""Real processes for the contracts to race with; see `race.py` for what each of them runs."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


class Process:
    """A process with the store open in it, which does what it is told."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self.name = name

    async def ask(self, command: str) -> dict[str, Any]:
        """What came of a command: `{"did": …}` or `{"error": …}`."""
        await self.tell(command)
        return await self.answer()

    async def tell(self, command: str) -> None:
        """Give a command, and do not wait for what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, f"process {self.name} has ended; its error output says why"
        found: dict[str, Any] = json.loads(line)
        return found

    async def kill(self) -> None:
        """End it at once, as a power cut would."""
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            assert await self._process.wait() == 0, f"process {self.name} failed"


@asynccontextmanager
async def processes(contract: object, where: Path, session_id: str, *names: str) -> AsyncIterator[list[Process]]:
    """Processes, one a name, that have opened the contract's store in the same directory."""
    kind = type(contract)
    task = (inspect.getfile(kind), kind.__module__, kind.__qualname__, str(where))
    started = [Process(await _start(*task, name, session_id), name) for name in names]
    try:
        for process in started:
            assert await process.answer() == {"did": "open"}
        yield started
    except BaseException:
        for process in started:
            await process.kill()
        raise
    for process in started:
        await process.end()


async def ask_all(told: list[Process], command: str) -> list[dict[str, Any]]:
    """What came of a command that several were told at once."""
    return [*await asyncio.gather(*(process.ask(command) for process in told))]


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "perdure.testing.race", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
