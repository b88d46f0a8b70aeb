"""A service with a worker in a process of its own, to be killed: `python agui_process.py STORE PORT MARK`.

It prints a token. Its tool waits at its first call, and returns at once when it is called again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvicorn

import perdure
from perdure.server.app import make_app
from perdure.server.service import Service
from perdure.server.tokens import new_token
from perdure.workers.worker import Worker


async def main(url: str, port: str, mark: str) -> None:
    @perdure.tool(on_unknown="rerun")
    def nap() -> str:
        """Rest."""
        if not Path(mark).exists():
            Path(mark).touch()
            time.sleep(60)
        return "rested"

    async with perdure.connect(url, model="offline", tools=[nap]) as sessions, Worker(sessions) as worker:
        service = Service(sessions)
        secret, _ = await new_token(service.gate._book, "ada")
        server = uvicorn.Server(uvicorn.Config(make_app(service), port=int(port), log_level="error"))
        work = asyncio.ensure_future(worker.run())
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn does not tell otherwise
            await asyncio.sleep(0.01)
        print(secret, flush=True)
        await asyncio.wait({work, serving})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
