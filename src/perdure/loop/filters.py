"""Input filters. They see what a user says before the model does, and pass it, warn about it, or reject it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable

import msgspec

from perdure.errors import ConfigurationError
from perdure.model.checks import expect_text
from perdure.model.message import Message
from perdure.model.stop import StopReason, StopSignal
from perdure.model.value import brief

SOURCE = "input_filter"


class Warned(msgspec.Struct, frozen=True):
    """A verdict: the input may pass, and the model is given a warning about it."""

    text: str
    """The warning."""

    def __post_init__(self) -> None:
        expect_text(self.text, "$.text")


class Rejected(msgspec.Struct, frozen=True):
    """A verdict: the input may not pass. A run that was to answer it ends with this reason, and asks no model."""

    reason: str
    """The reason, which the sender gets with `InputRefused`."""

    def __post_init__(self) -> None:
        expect_text(self.reason, "$.reason")


Verdict = Warned | Rejected | None
InputFilter = Callable[[Sequence[Message]], Verdict | Awaitable[Verdict]]
"""A function, plain or async, of what a user says. It returns `Rejected`, `Warned`, or None."""


async def judge(filters: Sequence[InputFilter], messages: Sequence[Message]) -> tuple[list[Warned], Rejected | None]:
    """Ask filters about an input, in their order. Return their warnings, and the rejection if there is one.

    The first filter that rejects the input decides: those after it are not asked.
    """
    warnings: list[Warned] = []
    for each in filters:
        answer = each(messages)
        verdict = await answer if isawaitable(answer) else answer
        if isinstance(verdict, Rejected):
            return warnings, verdict
        if isinstance(verdict, Warned):
            warnings.append(verdict)
        elif verdict is not None:
            name = getattr(each, "__name__", type(each).__name__)
            raise ConfigurationError(
                f"The input filter {name} returned {brief(verdict)}. A filter returns None to pass the input, "
                "Warned(text) or Rejected(reason)."
            )
    return warnings, None


def refusal(reason: str) -> StopSignal:
    """Return the signal that stops a run after its input was rejected."""
    return StopSignal(StopReason.ERROR_FORBADE, reason, source=SOURCE)


def rejection_in(signals: Iterable[StopSignal]) -> str | None:
    """Return the reason why a run's input was rejected; None if it was not. Signals keep it across a crash."""
    return next((signal.message for signal in signals if signal.source == SOURCE), None)
