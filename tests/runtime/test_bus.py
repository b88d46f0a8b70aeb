"""The event bus: its subscribers, their order, and the effect of a failing one on the others."""

from __future__ import annotations

import logging

import pytest

from perdure import EventBus, SessionId, SessionSaved, SessionStatus


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
    """Its error is logged; the others still hear the event."""
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
    """This holds even if a subscriber cancels it while an event is being delivered."""
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


async def test_a_session_s_subscriber_hears_that_session_alone_and_in_turn() -> None:
    """It is called with that session's events only, between the subscribers before and after it."""
    bus, heard = EventBus(), []
    bus.wiretap(lambda event: heard.append(("first", event.session_id)))
    bus.subscribe(SessionSaved, lambda event: heard.append(("of a", event.session_id)), session_id="a")
    bus.wiretap(lambda event: heard.append(("last", event.session_id)))
    await bus.emit(_saved("a"))
    await bus.emit(_saved("b"))
    assert heard == [("first", "a"), ("of a", "a"), ("last", "a"), ("first", "b"), ("last", "b")]


async def test_a_session_s_subscriber_can_be_cancelled_and_leaves_nothing() -> None:
    """Cancelled one by one, or all at once, they hear nothing more, and the bus has no subscribers."""
    bus, heard = EventBus(), []
    one, two = (bus.subscribe(SessionSaved, heard.append, session_id="a") for _ in range(2))
    one.cancel()
    one.cancel()
    await bus.emit(_saved("a"))
    assert len(heard) == 1
    two.cancel()
    await bus.emit(_saved("a"))
    assert (len(heard), bus.has_subscribers) == (1, False)
    bus.subscribe(SessionSaved, heard.append, session_id="a")
    bus.clear()
    assert not bus.has_subscribers


async def test_an_event_whose_session_id_is_no_text_reaches_those_who_hear_all() -> None:
    """Callers may emit events of their own, with any content."""

    class Own:
        session_id = ["a"]

    bus, heard = EventBus(), []
    bus.subscribe(Own, heard.append)
    bus.subscribe(Own, heard.append, session_id="a")
    await bus.emit(Own())
    assert len(heard) == 1


def _saved(session_id: str) -> SessionSaved:
    return SessionSaved(SessionId(session_id), 1, SessionStatus.ACTIVE)
