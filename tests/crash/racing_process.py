"""A process that tries to run a session on request, and one that holds a claim and is stopped meanwhile.

Run as `python racing_process.py ADDRESS race|hold`; each line it reads names a session, each line it prints is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.crash.addresses import store_at
from tests.loop.scenes import loops_of

from perdure import (
    AgentSession,
    Message,
    ModelReply,
    ModelRequest,
    PerdureError,
    SendMessage,
    SessionRuntime,
)
from perdure.protocols import Claim, Entry, OnDelta
from perdure.testing import ScriptedDriver

LEASE = 0.2


class Slow(ScriptedDriver):
    """A model that says that it was asked, and answers when it is told to."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        print(json.dumps("asked"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        return await super().respond(request, on_delta)


async def race(store: Any, session_id: str) -> dict[str, Any]:
    """Run the session. Return the outcome, and how often the model was called."""
    driver = Slow(["Hello."])
    try:
        await SessionRuntime(store).execute(session_id, SendMessage("Hi", loops_of(driver)))
    except PerdureError as error:
        return {"error": type(error).__name__, "calls": len(driver.requests)}
    return {"error": None, "calls": len(driver.requests)}


class Holder:
    """A holder that claims a session at its first request, and tries to write under that claim at the next."""

    def __init__(self) -> None:
        self._held: tuple[AgentSession, Claim] | None = None

    async def __call__(self, store: Any, session_id: str) -> dict[str, Any]:
        if self._held is None:
            session = await store.load(session_id)
            assert session is not None
            claim, _ = await store.claim(session.id, version=session.version, owner="holder", lease=LEASE)
            self._held = session, claim
            return {"epoch": claim.epoch}
        return await self._write(store, *self._held)

    async def _write(self, store: Any, session: AgentSession, claim: Claim) -> dict[str, Any]:
        late = Message.user("too late")
        changed = session.with_state(session.state.with_messages(late))
        attempts = {
            "append": store.append(claim, messages=[late], entries=[Entry("late")]),
            "branch": store.append(claim, messages=[late], entries=[Entry("late")], log="branch"),
            "heartbeat": store.heartbeat(claim),
            "save": store.save(changed, claim=claim, entries=[Entry("late")]),
        }
        return {name: await _error_of(attempt) for name, attempt in attempts.items()}


async def _error_of(attempt: Any) -> str | None:
    try:
        await attempt
    except PerdureError as error:
        return type(error).__name__
    return None


async def main(database: str, how: str) -> None:
    do = race if how == "race" else Holder()
    async with store_at(database) as store:
        print(json.dumps("ready"), flush=True)
        while session_id := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(json.dumps(await do(store, session_id)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
