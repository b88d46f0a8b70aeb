"""A process that copies one store into another, to be killed at any instant.

Run as `python copying_process.py SOURCE TARGET`, each `sqlite:PATH` or `file:PATH`; it prints a line before it begins,
one for each session, and one when it is done.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from perdure import FileStore, SqliteStore
from perdure.archive import copy


def store_at(place: str) -> Any:
    kind, _, path = place.partition(":")
    return SqliteStore(path) if kind == "sqlite" else FileStore(path)


async def main(source: str, target: str) -> None:
    async with store_at(source) as one, store_at(target) as other:
        print("ready", flush=True)
        await copy(one, other, progress=lambda done, of: print(done, flush=True))
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
