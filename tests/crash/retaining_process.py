"""Apply retention in small commits, and say so after each: `python -m tests.crash.retaining_process ADDRESS`."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from tests.crash.addresses import store_at

from perdure import Retention, RetentionPolicy, connect
from perdure.model.ids import now
from perdure.sessions import rounds

POLICY = RetentionPolicy(default=Retention(idle=timedelta(days=1)), tags={"grown": Retention(versions=1)})


async def main(address: str) -> None:
    rounds.AT_ONCE = 3  # type: ignore[misc]  # many commits, to be killed between and in any of them
    async with connect(store_at(address)) as app:
        await rounds.Round(app, POLICY, now()).carry_out(between=_told)


async def _told() -> None:
    print("committed", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
