"""An event bus: subscribers by type, and wiretaps that hear everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar

from perdure.model.checks import expect, expect_function

E = TypeVar("E")
Subscriber = Callable[[Any], Awaitable[None] | None]
"""A function, plain or async, that is called with events."""

_log = logging.getLogger("perdure.events")


class Subscription:
    """A subscriber's place on a bus, until it is cancelled."""

    __slots__ = ("_bus", "_kind", "_subscriber", "place", "session_id")

    def __init__(
        self, bus: EventBus, kind: type, subscriber: Subscriber, session_id: str | None = None, place: int = 0
    ) -> None:
        self._bus = bus
        self._kind = kind
        self._subscriber = subscriber
        self.session_id = session_id
        """The session whose events it hears, or None for those of all."""
        self.place = place
        """The number of subscribers that came to the bus before it."""

    def hears(self, event: object) -> bool:
        """Tell whether an `event` is of the type that was subscribed to."""
        return isinstance(event, self._kind)

    async def deliver(self, event: object) -> None:
        """Call the subscriber with an `event`. What it raises is logged and stops nobody else."""
        try:
            outcome = self._subscriber(event)
            if isawaitable(outcome):
                await outcome
        except Exception:
            _log.exception("a subscriber failed on %s", type(event).__name__)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Only a cancellation of the emitting task goes up: a subscriber's own must not keep others from hearing.
            if task is not None and task.cancelling():
                raise
            _log.exception("a subscriber was cancelled on %s, which is its own affair", type(event).__name__)

    def cancel(self) -> None:
        """End the subscription. Cancelling twice does nothing."""
        self._bus.remove(self)


class EventBus:
    """A bus that delivers each event to its subscribers, one after the other, in the order in which they came.

    Subscribers of one session are found by its id, so an event of another session costs them nothing.
    """

    def __init__(self) -> None:
        self._of_all: tuple[Subscription, ...] = ()
        self._by_session: dict[str, tuple[Subscription, ...]] = {}
        self._places = count()

    def subscribe(
        self, kind: type[E], subscriber: Callable[[E], Awaitable[None] | None], *, session_id: str | None = None
    ) -> Subscription:
        """Call `subscriber`, a plain or async function, with every event of a type, or only those of one session.

        `kind` is the type, and `session_id` names the session.
        """
        expect(kind, type, "$.kind")
        expect_function(subscriber, "$.subscriber")
        subscription = Subscription(self, kind, subscriber, session_id, next(self._places))
        # A new tuple each time: `emit` may be going through the old one, while a subscriber subscribes another.
        if session_id is None:
            self._of_all = (*self._of_all, subscription)
        else:
            self._by_session[session_id] = (*self._by_session.get(session_id, ()), subscription)
        return subscription

    def wiretap(self, subscriber: Subscriber) -> Subscription:
        """Call `subscriber` with every event."""
        return self.subscribe(object, subscriber)

    @property
    def has_subscribers(self) -> bool:
        """True if anybody hears the events of this bus."""
        return bool(self._of_all or self._by_session)

    def clear(self) -> None:
        """Remove every subscriber."""
        self._of_all = ()
        self._by_session = {}

    def remove(self, subscription: Subscription) -> None:
        """End a `subscription`."""
        session_id = subscription.session_id
        if session_id is None:
            self._of_all = _without(self._of_all, subscription)
            return
        left = _without(self._by_session.get(session_id, ()), subscription)
        if left:
            self._by_session[session_id] = left
        else:
            self._by_session.pop(session_id, None)

    async def emit(self, event: object) -> None:
        """Deliver an `event` to its subscribers, one after the other."""
        for subscription in self._hearers(event):
            if subscription.hears(event):
                await subscription.deliver(event)

    def _hearers(self, event: object) -> Sequence[Subscription]:
        session_id = getattr(event, "session_id", None) if self._by_session else None
        of_session = self._by_session.get(session_id) if isinstance(session_id, str) else None
        return self._of_all if of_session is None else sorted((*self._of_all, *of_session), key=attrgetter("place"))


def _without(subscriptions: Sequence[Subscription], gone: Subscription) -> tuple[Subscription, ...]:
    return tuple(each for each in subscriptions if each is not gone)
