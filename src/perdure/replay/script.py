"""A driver that gives the model's answers on record again."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from typing import NoReturn

from msgspec.structs import replace

from perdure.errors import ConfigurationError, ContextTooLong, DriverError, RetriesExhausted
from perdure.model.message import Message, Text
from perdure.model.value import EMPTY, ErrorRecord
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta
from perdure.replay.story import PlayedTurn, Step


class Playing:
    """A turn that is being replayed, with the number of requests for each step."""

    def __init__(self, turn: PlayedTurn) -> None:
        self.turn = turn
        self._asked: Counter[int] = Counter()

    def is_refused(self, step: int) -> bool:
        """Count a request, and tell whether the model on record refused it as too long."""
        self._asked[step] += 1
        found = [made for at, made in self.turn.compactions if at == step and made.trigger == "context_too_long"]
        return self._asked[step] <= len(found)


playing: ContextVar[Playing | None] = ContextVar("perdure_replayed_turn", default=None)
"""The turn that is replayed in this task."""


class RecordedDriver:
    """A driver that repeats the answers of the model on record step by step, and fails where that model failed.

    A replay with it has no differences. This shows that a replay changes nothing but the model. The driver works
    only inside a replay.
    """

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        now = playing.get()
        if now is None:
            raise ConfigurationError("A RecordedDriver answers in a replay only: Replay(…, driver=RecordedDriver()).")
        if now.is_refused(request.step):
            raise ContextTooLong(request.model.name, "the model on record refused this request as too long")
        steps = now.turn.steps
        if request.step < len(steps) and not steps[request.step].is_incomplete:
            return await _said(steps[request.step], on_delta)
        if request.step < len(steps):
            await on_delta(Delta("text", steps[request.step].text))
        if now.turn.errors:
            _fail(now.turn.errors[-1])
        raise DriverError(f"The record has no answer for step {request.step}, counted from 0.")


async def _said(step: Step, on_delta: OnDelta) -> ModelReply:
    for part in step.message.parts:
        if isinstance(part, Text):
            await on_delta(Delta("text", part.text))
    return ModelReply(said(step.message), step.response)


def said(message: Message) -> Message:
    """Return an answer as its model gave it, without the metadata that the run on record has added."""
    return replace(message, metadata=EMPTY)


_KINDS: dict[str, type[Exception]] = {"ContextTooLong": ContextTooLong, "RetriesExhausted": RetriesExhausted}
"""Errors that a run handles differently from any other DriverError."""


def _fail(error: ErrorRecord) -> NoReturn:
    """Raise an error with the name and the message of one on record."""
    base = _KINDS.get(error.type, DriverError)
    # A class of that name, since the end of a run shows the error's name. Exception's constructor takes the message as
    # it is: those of the errors take facts and write a sentence of their own.
    kind = type(error.type, (base,), {"__init__": Exception.__init__, "status": error.code})
    raise kind(error.message)
