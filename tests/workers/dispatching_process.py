"""A worker in a process of its own, to be killed or stopped once it is handed a session.

Run as `python dispatching_process.py DSN SCHEMA LEASE`. It prints a session's id when it is handed one, and holds it
without claiming it.
"""

from __future__ import annotations

import asyncio
import sys

from perdure import PostgresStore
from perdure.protocols import Outcome, WorkerOptions
from perdure.workers.procrastinate import ProcrastinateDispatcher


async def main(dsn: str, schema: str, lease: str) -> None:
    async def hold(session_id: str) -> Outcome:
        print(session_id, flush=True)
        await asyncio.sleep(3600)
        return Outcome.DONE

    async with PostgresStore(dsn, schema=schema) as store:
        dispatcher = ProcrastinateDispatcher(store)
        await dispatcher.work(hold, WorkerOptions(lease=float(lease)), asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
