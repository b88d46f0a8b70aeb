"""A process that plays a case and continues with random verbs, to be killed at any instant.

Run as `python victim.py SEED KIND FOLDER FACTS`. It prints a line when the session is there, and writes every fact
into a file, so that the test that kills it knows what was acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.pairs.case import Case, play
from tests.pairs.model import Model
from tests.pairs.world import World, opened


async def main(seed: str, kind: str, folder: str, facts: str) -> None:
    case = Case(int(seed))
    async with opened(World(case.seed, kind, Path(folder), model=Model(Path(facts)))) as world:
        print("ready", flush=True)
        while True:
            await play(world, case)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
