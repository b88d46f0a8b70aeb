"""The inbox of a session: what others post to it, and what becomes of each item.

An item waits until a run answers it (queue), takes it in between two steps (steer) or ends for it (cancel). It is
delivered in the commit that puts its message on record, under its delivery id. Only the record tells what was
delivered: not the view, which may have been reset since, and not the message's id, which may be sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.errors import ClaimLost, SessionLocked, StoreError
from perdure.loop.agent_loop import Run
from perdure.model.ids import new_id
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Entry, Journal, JournalEntry
from perdure.recording import JournalRecord, see_through

CANCEL, STEER, QUEUE = "cancel", "steer", "queue"
LOOK_EVERY = 0.2
_log = logging.getLogger("perdure.actions")
PAGE = 200
"""How many entries of a record are looked at at a time for a delivery."""


async def post(
    journal: Journal,
    session_id: str,
    kind: str,
    messages: Sequence[Message],
    key: str | None,
    metadata: Mapping[str, Any],
) -> None:
    """Leave messages with a session: for its run to take in, or to be sent once it is free."""
    newest = await journal.read(session_id, last=1)
    body = {
        "id": new_id(),
        "after": newest[-1].seq if newest else 0,
        "messages": [message.to_dict() for message in messages],
        "key": key,
        **({"metadata": metadata} if metadata else {}),
    }
    await journal.post(session_id, Entry(kind, body))


async def last_posted(journal: Journal, session_id: str) -> int:
    """Return the number of the newest item in an inbox; 0 if there is none."""
    items = await journal.read(session_id, inbox=True)
    return items[-1].seq if items else 0


async def first_waiting(journal: Journal, session_id: str) -> JournalEntry | None:
    """Return the first item that is still to be sent, or None.

    Queued ones are taken in their order, by the save of the run that answers them. Steering may have passed them.
    """
    for entry in await journal.read(session_id, inbox=True):
        if entry.kind == QUEUE or (entry.kind == STEER and not await was_delivered(journal, session_id, entry)):
            return entry
    return None


async def was_delivered(journal: Journal, session_id: str, entry: JournalEntry) -> bool:
    """Tell whether a run has come to an item: the record behind the moment it was posted says so."""
    after = entry.body.get("after", 0)
    while page := await journal.read(session_id, after=after, limit=PAGE):
        if any(_delivers(each, entry.body) for each in page):
            return True
        after = page[-1].seq
    return False


def _delivers(entry: JournalEntry, item: Any) -> bool:
    if "id" not in item:  # posted by a release that knew deliveries by the message
        return entry.kind == "message_end" and entry.body["message"]["id"] == item["messages"][0]["id"]
    return entry.kind in ("agent_start", "message_end") and entry.body.get("posted") == item["id"]


def messages_in(entry: JournalEntry) -> list[Message]:
    return [Message.from_dict(plain) for plain in entry.body["messages"]]


class RunInbox:
    """A session's inbox as its run sees it. Without a run to steer, as while answers are compared, steering waits.

    The run's save takes the inbox up to the first item that still waits. One behind that which was delivered is known
    by its delivery id; so is the item that the run `answers`, after a crash too.
    """

    def __init__(self, run: Run | None, record: JournalRecord, journal: Journal, *, answers: str | None = None) -> None:
        self._run = run
        self._answers = answers
        self._record = record
        self._journal = journal
        self._seen = record.taken
        self._is_unwanted = False
        self._steering: list[JournalEntry] = []
        self._queued: list[JournalEntry] = []

    async def open(self) -> None:
        """See what is there before the run begins. A wish to cancel from before its claim was meant for another run."""
        wishes, before = await self._look(), self._record.posted_before
        self._is_unwanted = before is not None and any(wish.seq > before for wish in wishes)

    async def watch(self, work: asyncio.Future[None]) -> None:
        """Look every now and then, and keep the claim alive while the run is silent. A claim that is lost ends the run.

        It ends by itself with the run: a store may let a cancellation get lost, as `asyncio.wait_for` can.
        """
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + self._record.lease / 3
        if self._is_unwanted:
            work.cancel()
        while not work.done():
            await asyncio.sleep(LOOK_EVERY)
            try:
                if await self._look():
                    work.cancel()
                if loop.time() >= next_beat:
                    await self._record.beat()
                    next_beat = loop.time() + self._record.lease / 3
            except ClaimLost:
                work.cancel()
                raise
            except (StoreError, SessionLocked) as error:  # which may pass: the next write says if it does not
                _log.warning("the inbox of session %s could not be read: %s", self._record.session_id, error)

    async def _look(self) -> Sequence[JournalEntry]:
        """Take note of what is new. Return the wishes to cancel among it."""
        found = await self._journal.read(self._record.session_id, after=self._seen, inbox=True)
        self._steering += [entry for entry in found if entry.kind == STEER and not self._is_answered(entry)]
        self._queued += [entry for entry in found if entry.kind == QUEUE and not self._is_answered(entry)]
        self._seen = found[-1].seq if found else self._seen
        self._take()
        return [entry for entry in found if entry.kind == CANCEL]

    def _is_answered(self, entry: JournalEntry) -> bool:
        return self._answers is not None and entry.body.get("id") == self._answers

    async def deliver(self) -> None:
        """Put what was posted to steer by into the run's transcript, between two steps."""
        while self._run is not None and self._steering:
            entry = self._steering[0]
            if not await was_delivered(self._journal, self._record.session_id, entry):
                await self._run.steer(messages_in(entry), entry.body.get("id"))
            self._steering.pop(0)
        self._take()

    def _take(self) -> None:
        first_waiting = min((entry.seq for entry in (*self._steering, *self._queued)), default=self._seen + 1)
        self._record.taken = max(self._record.taken, first_waiting - 1)


async def take(
    journal: Journal,
    session: AgentSession,
    owner: str,
    seq: int,
    messages: Sequence[Message] = (),
    entries: Sequence[Entry] = (),
) -> None:
    """Mark a session's inbox as dealt with up to an item, without a run; and put on record what is to be told of it."""

    async def noted() -> None:
        claim, _ = await journal.claim(session.id, version=session.version, owner=owner)
        try:
            await journal.append(claim, messages=messages, entries=entries, taken=seq)
        finally:
            await journal.release(claim)

    await see_through(noted())  # or the claim of one who was cancelled would keep others out until it lapses
