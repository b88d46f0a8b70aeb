"""Stop reasons, signals, and the continuation that weighs them."""

from __future__ import annotations

import itertools

import pytest

from perdure.model.stop import ExecutionContinuation, StopReason, StopSignal

IN_ORDER = [
    StopReason.ERROR_FORBADE,
    StopReason.STOP_REQUESTED,
    StopReason.STEPS_LIMIT_REACHED,
    StopReason.TOKEN_LIMIT_REACHED,
    StopReason.TIME_LIMIT_REACHED,
    StopReason.RETRY_LIMIT_REACHED,
    StopReason.LENGTH,
    StopReason.CONTENT_FILTER,
    StopReason.FINISH_REASON_RECEIVED,
    StopReason.USER_REQUESTED,
    StopReason.COMPLETED,
    StopReason.UNKNOWN,
]


def test_priorities_are_those_of_the_table():
    """Priority 0 is the highest; the model's own reasons to stop share one rank, as in the table."""
    assert sorted(StopReason, key=lambda reason: reason.priority) == IN_ORDER
    assert [reason.priority for reason in IN_ORDER] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9]


@pytest.mark.parametrize("reason", StopReason)
def test_only_the_two_natural_ends_are_not_forced(reason):
    """Completed and the model's own finish reason are natural; every other reason forces the run to stop."""
    natural = {StopReason.COMPLETED, StopReason.FINISH_REASON_RECEIVED}
    assert reason.was_force_stopped is (reason not in natural)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(StopReason, 2)))
def test_the_highest_priority_is_the_reason(first, second):
    """Of several signals the one with the highest priority gives the reason, whichever came first."""
    continuation = ExecutionContinuation().with_stop_signal(StopSignal(first)).with_stop_signal(StopSignal(second))
    assert continuation.stop_reason is min(first, second, key=IN_ORDER.index)
    assert [signal.reason for signal in continuation.stop_signals] == [first, second]


def test_without_signals_nothing_stops():
    """A continuation without signals has no reason and does not ask to stop."""
    assert ExecutionContinuation().stop_reason is None
    assert not ExecutionContinuation().should_stop


def test_a_requested_continuation_overrides_signals():
    """Signals stop a run unless a continuation is requested, and stop it again once the request is withdrawn."""
    stopping = ExecutionContinuation().with_stop_signal(StopSignal(StopReason.USER_REQUESTED))
    assert stopping.should_stop
    assert not stopping.with_continuation_requested().should_stop
    assert stopping.with_continuation_requested().with_continuation_requested(False).should_stop


def test_changes_make_new_values():
    """A change makes a new continuation and leaves the old one unchanged."""
    before = ExecutionContinuation()
    before.with_stop_signal(StopSignal(StopReason.COMPLETED))
    before.with_continuation_requested()
    assert before == ExecutionContinuation()
    with pytest.raises(AttributeError):
        before.is_continuation_requested = True


def test_changes_keep_the_fields_of_a_newer_release():
    """An unknown field that was read stays on the value through every change."""
    read = ExecutionContinuation.from_dict({"format": 1, "patience": 3})
    changed = read.with_stop_signal(StopSignal(StopReason.COMPLETED)).with_continuation_requested()
    assert changed.to_dict()["patience"] == 3


def test_explain_names_signals_and_the_request():
    """explain() names the signals, and says if a continuation was requested."""
    assert ExecutionContinuation().explain() == "No Stop Signals; Continuation Requested: No"
    signals = (StopSignal(StopReason.COMPLETED), StopSignal(StopReason.TOKEN_LIMIT_REACHED))
    assert ExecutionContinuation(signals, True).explain() == (
        "completed, token_limit_reached; Continuation Requested: Yes"
    )


def test_a_signal_says_who_why_and_which_limit():
    """A signal carries its message, its source, and the limit that was reached."""
    signal = StopSignal(StopReason.TOKEN_LIMIT_REACHED, "0.51 of 0.50 spent", source="guard", limit="max_cost")
    assert (signal.message, signal.source, signal.limit) == ("0.51 of 0.50 spent", "guard", "max_cost")
