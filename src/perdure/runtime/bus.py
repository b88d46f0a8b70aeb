"""An event bus: subscribers by type, and wiretaps that hear everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

from perdure.model.checks import expect, expect_function

E = TypeVar("E")
Subscriber = Callable[[Any], Awaitable[None] | None]

_log = logging.getLogger("perdure.events")


class Subscription:
    """A subscriber's place on a bus, until it is cancelled."""

    __slots__ = ("_bus", "_kind", "_subscriber")

    def __init__(self, bus: EventBus, kind: type, subscriber: Subscriber) -> None:
        self._bus = bus
        self._kind = kind
        self._subscriber = subscriber

    def hears(self, event: object) -> bool:
        return isinstance(event, self._kind)

    async def deliver(self, event: object) -> None:
        """Call the subscriber. What it raises is logged and stops nobody else."""
        try:
            outcome = self._subscriber(event)
            if isawaitable(outcome):
                await outcome
        except Exception:
            _log.exception("a subscriber failed on %s", type(event).__name__)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            _log.exception("a subscriber was cancelled on %s, which is its own affair", type(event).__name__)

    def cancel(self) -> None:
        """Hear nothing more. Cancelling twice does nothing."""
        self._bus.remove(self)


class EventBus:
    """Delivers each event to its subscribers in the order they came, one after the other."""

    def __init__(self) -> None:
        self._subscriptions: tuple[Subscription, ...] = ()

    def subscribe(self, kind: type[E], subscriber: Callable[[E], Awaitable[None] | None]) -> Subscription:
        """Call `subscriber`, a plain or async function, with every event of a type."""
        subscription = Subscription(self, expect(kind, type, "$.kind"), expect_function(subscriber, "$.subscriber"))
        self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def wiretap(self, subscriber: Subscriber) -> Subscription:
        """Call `subscriber` with every event there is."""
        return self.subscribe(object, subscriber)

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscriptions)

    def clear(self) -> None:
        """Let go of every subscriber."""
        self._subscriptions = ()

    def remove(self, subscription: Subscription) -> None:
        self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)

    async def emit(self, event: object) -> None:
        for subscription in self._subscriptions:
            if subscription.hears(event):
                await subscription.deliver(event)
