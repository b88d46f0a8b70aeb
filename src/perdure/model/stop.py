"""The reasons of a run to stop, by priority; signals; and the continuation that weighs them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from perdure.model.value import Value


class StopReason(StrEnum):
    """The reason why a run stopped. Of several signals, the run has the reason that is named first here."""

    ERROR_FORBADE = "error_forbade"
    STOP_REQUESTED = "stop_requested"
    STEPS_LIMIT_REACHED = "steps_limit_reached"
    TOKEN_LIMIT_REACHED = "token_limit_reached"
    TIME_LIMIT_REACHED = "time_limit_reached"
    RETRY_LIMIT_REACHED = "retry_limit_reached"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    FINISH_REASON_RECEIVED = "finish_reason_received"
    USER_REQUESTED = "user_requested"
    COMPLETED = "completed"
    UNKNOWN = "unknown"

    @property
    def priority(self) -> int:
        """Return the rank among reasons; 0 is the highest. The model's own reasons share one."""
        return _RANKS[self]

    @property
    def was_force_stopped(self) -> bool:
        """False only for the two natural ends: completed, and the model's own finish reason."""
        return self not in (StopReason.COMPLETED, StopReason.FINISH_REASON_RECEIVED)


_CUT_OFF = (StopReason.LENGTH, StopReason.CONTENT_FILTER)
_BY_PRIORITY = tuple(reason for reason in StopReason if reason not in _CUT_OFF)
_RANKS = {reason: rank for rank, reason in enumerate(_BY_PRIORITY)}
_RANKS |= dict.fromkeys(_CUT_OFF, _RANKS[StopReason.FINISH_REASON_RECEIVED])
_CUT_OFF_BY: dict[str | None, StopReason] = {reason.value: reason for reason in _CUT_OFF}
_PLACES = {reason: place for place, reason in enumerate(StopReason)}


def cut_off_by(finish_reason: str | None) -> StopReason | None:
    """Return why a model's answer was cut off: it ran out of tokens, or its provider held it back."""
    return _CUT_OFF_BY.get(finish_reason)


class StopSignal(Value, frozen=True):
    """A request to stop the run, with its reason and source. `limit` names the budget's field, if one was reached."""

    reason: StopReason
    """The reason."""
    message: str = ""
    """A sentence about it."""
    source: str = ""
    """The name of what has raised it."""
    limit: str | None = None


class ExecutionContinuation(Value, frozen=True):
    """The stop signals of a run, and whether it was asked to continue all the same."""

    stop_signals: tuple[StopSignal, ...] = ()
    """The signals, in the order in which they came."""
    is_continuation_requested: bool = False
    """True if the run was asked to continue."""

    @property
    def should_stop(self) -> bool:
        return bool(self.stop_signals) and not self.is_continuation_requested

    @property
    def stop_reason(self) -> StopReason | None:
        """The reason of the signal with the highest priority."""
        # By place, not by rank: reasons that share a rank have an order too.
        return min((s.reason for s in self.stop_signals), key=_PLACES.__getitem__, default=None)

    def with_stop_signal(self, signal: StopSignal) -> ExecutionContinuation:
        return msgspec.structs.replace(self, stop_signals=(*self.stop_signals, signal))

    def with_continuation_requested(self, requested: bool = True) -> ExecutionContinuation:
        if requested is self.is_continuation_requested:
            return self
        return msgspec.structs.replace(self, is_continuation_requested=requested)

    def explain(self) -> str:
        signals = ", ".join(s.reason.value for s in self.stop_signals) or "No Stop Signals"
        return f"{signals}; Continuation Requested: {'Yes' if self.is_continuation_requested else 'No'}"
