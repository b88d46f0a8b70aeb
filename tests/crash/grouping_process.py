"""A process that saves three sessions together, again and again, and counts the commits.

Run as `python grouping_process.py URL`; each line it prints is the number of commits that were acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import perdure
from perdure.protocols import Change
from perdure.testing.samples import new_session, note, say

NAMES = ("a", "b", "c")


async def main(url: str) -> None:
    store: Any = perdure.store_of(url)
    async with store:
        found = [await store.load(name) or new_session(id=name) for name in NAMES]
        rounds = found[0].version
        while True:
            rounds += 1
            turned = found[rounds % 3 :] + found[: rounds % 3]
            found = list(await store.save_all([Change(note(say(each, "x"), "round", rounds)) for each in turned]))
            found.sort(key=lambda each: each.id)
            print(rounds, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
