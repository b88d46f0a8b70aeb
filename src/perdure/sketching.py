"""Storage of an answer's text while a model still writes it: ten times a second, and only if the answer takes a while.

It never delays a run, and never makes one fail. All runs of an event loop share one timer. So an answer that takes less
than a tenth of a second costs its run two calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from perdure.errors import ClaimLost
from perdure.model.value import clean_text
from perdure.protocols import Claim, Sketch, Sketchbook

EVERY = 0.1
"""Seconds between two writes of a run, and the least that an answer has to take for the first."""
# A store that has failed gets a pause: the text is not lost, since a later piece has it too.
_AFTER_FAILURE = 1.0
_log = logging.getLogger("perdure.runs")


class Unfinished(Protocol):
    """An answer that is being written."""

    @property
    def message_id(self) -> str: ...
    @property
    def pieces(self) -> Sequence[str]:
        """Its text so far."""
        ...

    @property
    def restarts(self) -> int:
        """The number of times that the model has begun it again."""
        ...


class Sketcher:
    """A keeper of answers under a claim, one after the other."""

    def __init__(self, journal: Sketchbook, claim: Claim) -> None:
        self._journal = journal
        self._claim = claim
        self._pulse = pulse_here()
        self._answer: Unfinished | None = None
        self._seen: Unfinished | None = None
        """The answer at the last look. If it is still there at the next one, it takes long enough to be kept."""
        self._write: asyncio.Task[None] | None = None

    def begin(self, run: str, answer: Unfinished, seq: int) -> None:
        """Keep an answer from now on. `seq` is the end of the record: the run's next entry comes after it."""
        self._run, self._answer, self._seq = run, answer, seq
        pulse = self._pulse
        pulse.asked.add(self)
        if not pulse.is_set:
            pulse.set()

    def end(self) -> None:
        self._answer = None
        self._pulse.asked.discard(self)

    @property
    def is_writing(self) -> bool:
        return self._write is not None

    async def idle(self) -> None:
        """Wait until no piece is being written."""
        if self._write is not None:
            await asyncio.wait({self._write})

    def look(self, time: float) -> None:
        """Write the new text, unless it is too soon or another piece is being written."""
        answer = self._answer
        if answer is None or self._write is not None:
            return
        # The first look only notes the answer: one that is whole before the next look costs no write.
        if answer is not self._seen:
            self._seen, self._attempt, self._pieces, self._length, self._not_before = answer, -1, 0, 0, time
            return
        if time < self._not_before:
            return
        if answer.restarts != self._attempt:
            self._attempt, self._pieces, self._length = answer.restarts, 0, 0
        pieces = len(answer.pieces)
        text = clean_text("".join(answer.pieces[self._pieces :]))
        if text:
            piece = Sketch(self._run, answer.message_id, text, self._length, self._attempt, self._seq)
            self._write = asyncio.get_running_loop().create_task(self._keep(answer, piece, pieces))
            self._write.add_done_callback(self._written)

    async def _keep(self, answer: Unfinished, piece: Sketch, pieces: int) -> None:
        try:
            is_kept = await self._journal.sketch(self._claim, piece)
        except ClaimLost:
            is_kept = False  # the run itself finds out by its next write
        except Exception as error:  # around a request: once it is whole, the answer is on record in any case
            _log.warning("what session %s is being told could not be kept: %s", self._claim.session_id, error)
            self._not_before = asyncio.get_running_loop().time() + _AFTER_FAILURE
            return
        if self._answer is not answer:  # it ended while the piece was written
            return
        if not is_kept:
            self.end()
        elif piece.attempt == self._attempt:
            self._pieces, self._length = pieces, piece.start + len(piece.text)

    def _written(self, _: asyncio.Task[None]) -> None:
        self._write = None


class Pulse:
    """A timer that looks at answers every tenth of a second. It runs only while an answer is being kept."""

    def __init__(self) -> None:
        self.asked: set[Sketcher] = set()
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        loop = asyncio.get_running_loop()
        loop.call_later(EVERY, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_set = False
        for each in tuple(self.asked):  # a copy: a look may take its sketcher out of the set
            each.look(loop.time())
        if self.asked:
            self.set()


# Weak, so that a pulse does not keep a closed event loop in memory.
_pulses: WeakKeyDictionary[asyncio.AbstractEventLoop, Pulse] = WeakKeyDictionary()


def pulse_here() -> Pulse:
    """Return the pulse of the running event loop."""
    loop = asyncio.get_running_loop()
    pulse = _pulses.get(loop)
    if pulse is None:
        pulse = _pulses[loop] = Pulse()
    return pulse
