"""Wait for an answer that another run gives: under the same key, or to a queued message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from perdure.actions.inbox import Inbox
from perdure.errors import InputRefused, RunInterrupted
from perdure.model.ids import SessionId
from perdure.protocols import Journal, JournalEntry, RunOnRecord
from perdure.runtime.record_reader import PAGE
from perdure.sessions.cursors import Place
from perdure.sessions.following import Follower, listening
from perdure.sessions.reply import Chunk

PATIENCE = 1.0
"""The number of seconds for which a run whose process has died is left to others to recover."""
Recover = Callable[[SessionId], Awaitable[None]]


class Joining:
    """A follower of the run that answers a message, from the moment that the message waits or the run begins.

    A run that was killed is recovered here, unless somebody else does so first.
    """

    def __init__(self, journal: Journal, session_id: SessionId, found: JournalEntry, recover: Recover) -> None:
        self._journal = journal
        self._session_id = session_id
        self._found = found
        self._recover = recover
        self.follower: Follower | None = None
        """The follower of the run, or None if no run was needed, since the key had its answer before."""

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the text of the run until it is over, or waits for a person.

        Raise InputRefused if the message can never be sent.
        """
        run_id = self._found.run if self._found.kind == "agent_start" else await self._answering(self._found)
        runs = () if run_id is None else await self._journal.runs(self._session_id, run=run_id)
        if not runs:
            return
        self._require_sent(runs[0])
        place: Place | None = None
        while True:
            self.follower = Follower(self._journal, self._session_id, runs[0], place)
            try:
                async for chunk in self.follower.chunks(PATIENCE):
                    yield chunk
                return
            except RunInterrupted:
                place = self.follower.place
                await self._recover(self._session_id)

    async def _answering(self, item: JournalEntry) -> str | None:
        """Wait until a run answers an item of the inbox. Return its id, or None if the item was taken without a run."""
        inbox, seq, killed_since = Inbox(self._journal, self._session_id), item.body.get("after", 0), 0.0
        unsent: set[str | None] = set()
        async with listening(self._journal, self._session_id) as wait:
            while True:
                is_waiting = await inbox.has(item)  # before the record is read, which then tells what has taken it
                while page := await self._journal.read(self._session_id, after=seq, limit=PAGE):
                    for entry in page:
                        if _answers(entry, item, unsent):
                            return entry.run
                    seq = page[-1].seq
                if not is_waiting:
                    return None
                killed_since = await self._recovered_in_time(killed_since)
                await wait()

    async def _recovered_in_time(self, killed_since: float) -> float:
        """Recover the run that the item waits behind, if it was killed a while ago. Return since when, or 0."""
        if not await self._journal.is_interrupted(self._session_id):
            return 0.0
        time = asyncio.get_running_loop().time()
        if not killed_since or time < killed_since + PATIENCE:
            return killed_since or time
        await self._recover(self._session_id)
        return 0.0

    def _require_sent(self, run: RunOnRecord) -> None:
        """Raise InputRefused if a message was taken from the inbox because it can never be sent."""
        if run.first.body.get("base_version") is None and run.last.kind == "agent_end":
            raise InputRefused(self._session_id, 0, str(run.last.body.get("rejection")))


def _answers(entry: JournalEntry, item: JournalEntry, unsent: set[str | None]) -> bool:
    """Tell whether an entry is of the run that answers an item, or of the loop that says why the item is refused.

    Such a loop names no delivery, and no version that it began from. The ids of these loops are collected in `unsent`.
    """
    if entry.kind == "agent_start":
        unsent |= {entry.run} if entry.body.get("base_version") is None else set()
        return bool(entry.body.get("posted") == item.body["id"])
    said = entry.body["message"]["id"] if entry.kind == "message_end" and entry.run in unsent else None
    return bool(said == item.body["messages"][0]["id"])
