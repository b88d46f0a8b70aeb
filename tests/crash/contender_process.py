"""One of many processes that want the same session at once, or that is stopped while it writes.

Run as `python contender_process.py ADDRESS NAME LEDGER`; each line it reads is a verb and a session, each line it
prints is JSON. `do_without NAME` removes something that protects the store: see `store_breaks`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests import store_breaks
from tests.crash.addresses import store_at
from tests.crash.agent_process import write_ledger

from perdure import LoopFactory, PerdureError, SendMessage, SessionRuntime, ToolCall, tool
from perdure.protocols import Entry
from perdure.testing import ScriptedDriver
from perdure.testing.samples import fork, say

LEASE = 0.25
KEY = "the same request"


class Contender:
    """A process that does one thing at a time, and prints the outcome."""

    def __init__(self, store: Any, name: str, ledger: str) -> None:
        self._store, self._name, self._ledger = store, name, ledger

    async def save(self, session_id: str) -> Any:
        session = await self._store.load(session_id)
        return (await self._store.save(say(session, self._name))).version

    async def claim(self, session_id: str) -> Any:
        """Claim it, write something down, and release it."""
        session = await self._store.load(session_id)
        claim, _ = await self._store.claim(session_id, version=session.version, owner=self._name)
        await self._store.append(claim, entries=[Entry("by", {"name": self._name, "epoch": claim.epoch})])
        await self._store.release(claim)
        return claim.epoch

    async def fork(self, session_id: str) -> Any:
        made = fork(await self._store.load(session_id), id=f"{session_id}-{self._name}")
        return (await self._store.create(say(made, self._name))).version

    async def send(self, session_id: str) -> Any:
        """Send the message that all of them send, under one key."""

        @tool
        async def charge(which: str) -> str:
            """Take money."""
            write_ledger(self._ledger, f"{which}")
            return "charged"

        replies = [ToolCall("charge", {"which": session_id}, id="c1"), "Done."]
        loops = LoopFactory(tools=[charge], driver=ScriptedDriver(replies))
        return (await SessionRuntime(self._store).execute(session_id, SendMessage("Pay.", loops, key=KEY))).version

    async def do_without(self, name: str) -> None:
        getattr(store_breaks, f"without_{name}")()

    async def hold(self, session_id: str) -> Any:
        """Write down one thing after the other, until somebody else has taken the session over."""
        claim, _ = await self._store.claim(session_id, version=1, owner=self._name, lease=LEASE)
        print(json.dumps({"epoch": claim.epoch}), flush=True)
        done = 0
        try:
            while True:
                await self._store.append(claim, entries=[Entry("held", {"number": done})])
                done += 1
        except PerdureError as error:
            return {"done": done, "error": type(error).__name__}

    async def answer(self, verb: str, session_id: str) -> dict[str, Any]:
        try:
            return {"did": await getattr(self, verb)(session_id)}
        except PerdureError as error:
            return {"error": type(error).__name__, "message": str(error)[:300]}


async def main(address: str, name: str, ledger: str) -> None:
    async with store_at(address) as store:
        contender = Contender(store, name, ledger)
        print(json.dumps("ready"), flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            print(json.dumps(await contender.answer(*line)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
