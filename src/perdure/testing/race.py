"""One runner of a race between processes: `python -m perdure.testing.race`. Its parent tells it when to move.

Each line on standard input is a command, and each line on standard output the answer to one, as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from perdure.errors import PerdureError
from perdure.model.ids import now
from perdure.model.session import AgentSession
from perdure.protocols import Token
from perdure.testing.samples import new_session, note


def load_class(file: str, module: str, qualname: str) -> Any:
    """Return the class that applies the contract, from the file that it was written in."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    # Before it runs, as an import does: what resolves annotations looks for the module there.
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return reduce(getattr, qualname.split("."), loaded)


class Runner:
    """A client that does one thing at a time to one session, and tells the outcome."""

    def __init__(self, store: Any, name: str, session_id: str) -> None:
        self._store = store
        self._name = name
        self._session_id = session_id
        self._session: AgentSession | None = None
        self._claim: Any = None

    async def load(self) -> int | None:
        """Load the session, and return the version that the runner will race with."""
        self._session = await self._store.load(self._session_id)
        return None if self._session is None else self._session.version

    async def save(self) -> int:
        assert self._session is not None
        saved = await self._store.save(note(self._session, "winner", self._name))
        return int(saved.version)

    async def create(self) -> int:
        created = await self._store.create(note(new_session(id=self._session_id), "winner", self._name))
        return int(created.version)

    async def claim(self) -> int:
        assert self._session is not None
        self._claim, _ = await self._store.claim(self._session_id, version=self._session.version, owner=self._name)
        return int(self._claim.epoch)

    async def release(self) -> None:
        if self._claim is not None:
            await self._store.release(self._claim)
            self._claim = None

    async def reserve(self) -> float:
        """Take a place in a rate of fifty a second, with a burst of two."""
        return float(await self._store.reserve("race", cost=0.02, burst=0.04))

    async def add_token(self) -> str:
        """Add one more access token of its own."""
        digest = hashlib.sha256(os.urandom(16)).hexdigest()
        await self._store.add_token(Token(digest=digest, owner=self._name, may_write=True, created_at=now()))
        return self._name

    async def count_tokens(self) -> int:
        return len(await self._store.tokens())

    async def ring(self) -> int:
        """Ring all timers of the session. Return how many of them this runner rang."""
        return sum([await self._store.ring(timer) for timer in await self._store.timers(self._session_id)])

    async def ring_on(self) -> None:
        """Ring a timer again and again, and set it one second further each time, until the process is killed."""
        while timers := await self._store.timers(self._session_id):
            await self._store.ring(timers[0], again=timers[0].due + 1)

    async def answer(self, command: str) -> dict[str, Any]:
        verb, _, argument = command.partition(" ")
        if argument:
            self._session_id = argument
        try:
            return {"did": await getattr(self, verb)()}
        except PerdureError as error:
            return {"error": type(error).__name__, "message": str(error)}


async def main(file: str, module: str, qualname: str, where: str, name: str, session_id: str) -> None:
    contract = load_class(file, module, qualname)()
    async with contract.open_store(Path(where)) as store:
        runner = Runner(store, name, session_id)
        # The parent waits for this line before it starts the race.
        print(json.dumps({"did": "open"}), flush=True)
        # In a thread: the store's own tasks run while the parent says nothing.
        while command := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await runner.answer(command.strip())), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
