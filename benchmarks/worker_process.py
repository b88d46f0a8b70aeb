"""A real worker in a process of its own, for the benchmarks: `python -m benchmarks.worker_process URL …`.

It obeys lines on its standard input: `go` begins to work, `cpu` asks for the processor time so far. At the end of the
input it stops, and prints the time of each question to the model, on a clock shared by all processes of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import perdure
from perdure import InferenceResponse, Message, ModelReply, Sessions
from perdure.protocols import Advance, Dispatcher, ModelRequest, OnDelta, Outcome, WorkerOptions
from perdure.workers import Worker
from perdure.workers.choosing import dispatcher_of


class Thinking:
    """A model that thinks for a while and answers "yes". It notes the time of each question."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.heard: dict[str, float] = {}

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.heard[request.messages[-1].text] = time.monotonic()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return ModelReply(Message.assistant("yes"), InferenceResponse("stop"))


class Timed:
    """A dispatcher that notes the time spent on looks at sessions, and when their timers rang."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.seconds = 0.0
        self.rung: dict[str, float] = {}

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        self.rung.setdefault(session_id, time.monotonic())
        await self._dispatcher.wake(session_id, priority=priority, owner=owner)

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        async def timed(session_id: str) -> Outcome:
            start = time.monotonic()
            try:
                return await advance(session_id)
            finally:
                self.seconds += time.monotonic() - start

        await self._dispatcher.work(timed, options, stopped)


@asynccontextmanager
async def working(sessions: Sessions, **options: Any) -> AsyncIterator[Worker]:
    """Run a worker in this process."""
    async with Worker(sessions, **options) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await running


class WorkerProcess:
    """A worker in another process, as its parent sees it. It works from `go` on, until the block is left."""

    def __init__(self, url: str, *, think: float = 0.0, concurrency: int = 16, lease: float = 20.0) -> None:
        self._command = (url, f"--think={think}", f"--concurrency={concurrency}", f"--lease={lease}")
        self._process: asyncio.subprocess.Process | None = None
        self.heard: dict[str, float] = {}
        """The time of each question to its model. It is known once the process has been left."""
        self.advanced = 0.0
        """The seconds that its looks at sessions took, all together. They are known then too."""
        self.rung: dict[str, float] = {}
        """The time when it first woke each session: when a timer had rung there. It is known then too."""

    async def __aenter__(self) -> Self:
        command = (sys.executable, "-m", "benchmarks.worker_process", *self._command)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**26)
        await self._answer()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        told = await self._answer()
        self.heard, self.advanced, self.rung = told["heard"], told["advanced"], told["rung"]
        await self._process.wait()

    async def go(self) -> None:
        await self._told("go")

    async def cpu(self) -> float:
        """Return the seconds of the processor that the process has used."""
        return float(await self._told("cpu"))

    async def _told(self, command: str) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        return await self._answer()

    async def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the worker's process has ended; what it said is above")
        return json.loads(line)


async def obey(worker: Worker) -> None:
    """Obey the lines of the standard input, until it ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running = None
    say("ready")
    while line := (await lines.readline()).strip():
        if line == b"go":
            running = asyncio.create_task(worker.run())
        say(time.process_time())
    worker.stop()
    if running is not None:
        await running


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_process", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--think", type=float)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--lease", type=float)
    options = parser.parse_args(given)
    model = Thinking(options.think)
    async with perdure.connect(options.url, driver=model, compaction=None) as sessions:
        dispatcher = Timed(dispatcher_of(sessions.store))  # type: ignore[arg-type]  # those of perdure are queues
        settings = {"concurrency": options.concurrency, "lease": options.lease}
        async with Worker(sessions, dispatcher=dispatcher, **settings) as worker:
            await obey(worker)
    say({"heard": model.heard, "advanced": dispatcher.seconds, "rung": dispatcher.rung})


if __name__ == "__main__":
    asyncio.run(main())
