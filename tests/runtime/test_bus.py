"""The event bus: who hears what, in which order, and what a failing subscriber does to the others."""

from __future__ import annotations

import logging

import pytest

from perdure import EventBus


async def test_subscribers_hear_their_type_in_order() -> None:
    """Plain and async subscribers take turns in the order of subscription; wiretaps hear everything."""
    bus, heard = EventBus(), []

    async def later(event: object) -> None:
        heard.append(("async", event))

    bus.subscribe(str, lambda event: heard.append(("str", event)))
    bus.subscribe(str, later)
    bus.wiretap(lambda event: heard.append(("tap", event)))
    await bus.emit("a")
    await bus.emit(1)
    assert heard == [("str", "a"), ("async", "a"), ("tap", "a"), ("tap", 1)]


async def test_a_failing_subscriber_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What one raises is logged; the others still hear the event."""
    bus, heard = EventBus(), []

    def fail(event: object) -> None:
        raise ValueError("no")

    bus.wiretap(fail)
    bus.wiretap(heard.append)
    with caplog.at_level(logging.ERROR, logger="perdure.events"):
        await bus.emit("a")
    assert heard == ["a"]
    assert "a subscriber failed on str" in caplog.text


async def test_a_cancelled_subscription_hears_nothing_more() -> None:
    """Also when it is cancelled by a subscriber while an event is being delivered."""
    bus, heard = EventBus(), []
    second = None

    def first(event: object) -> None:
        assert second is not None
        second.cancel()

    bus.wiretap(first)
    second = bus.wiretap(heard.append)
    await bus.emit("a")
    await bus.emit("b")
    second.cancel()
    assert "b" not in heard
