"""The sessions that somebody has open: their subscribers, and whether they are running."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.protocols import Cache, SessionStore
from perdure.runtime.bus import EventBus, Subscriber, Subscription


class _LiveSession:
    def __init__(self) -> None:
        self.bus = EventBus()
        self.running = 0
        self.keeps_model = False
        """True if the session is known to keep the model that this connection names."""

    @property
    def is_pinned(self) -> bool:
        return self.running > 0 or self.bus.has_subscribers


class LiveSet:
    """Open sessions, the least recently used first. Beyond `most`, those without a run and subscribers are dropped.

    Only memory is freed: the store has the sessions. It is asked to keep those in its cache that are pinned here.
    """

    def __init__(self, store: SessionStore, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidData("$.live", f"expected a number of sessions of at least 1, got {most!r}")
        self._most = most
        self._open: OrderedDict[str, _LiveSession] = OrderedDict()
        self._cache = store if isinstance(store, Cache) else None

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._open

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def touch(self, session_id: SessionId) -> _LiveSession:
        """Return the session, which counts as the last used from now on. Others may be dropped."""
        live = self._open.setdefault(session_id, _LiveSession())
        self._open.move_to_end(session_id)
        if len(self._open) > self._most:
            for key in [key for key, each in self._open.items() if not each.is_pinned and key != session_id]:
                if len(self._open) <= self._most:
                    break
                self._drop(key)
        return live

    def _drop(self, session_id: str) -> None:
        del self._open[session_id]
        if self._cache is not None:
            self._cache.evict(session_id)

    @contextmanager
    def running(self, session_id: SessionId) -> Iterator[None]:
        """Pin the session while the block lasts."""
        live = self.touch(session_id)
        live.running += 1
        self._settle(session_id)
        try:
            yield
        finally:
            live.running -= 1
            self._settle(session_id)

    def is_running(self, session_id: str) -> bool:
        """Tell whether an action on the session is under way in this process."""
        live = self._open.get(session_id)
        return live is not None and live.running > 0

    def subscribe(self, session_id: SessionId, subscriber: Subscriber) -> LiveSubscription:
        if not callable(subscriber):
            raise InvalidData("$.subscriber", f"expected a function, got {type(subscriber).__name__}")
        live = self.touch(session_id)
        subscription = LiveSubscription(live.bus.wiretap(subscriber), lambda: self._settle(session_id))
        self._settle(session_id)
        return subscription

    def _settle(self, session_id: str) -> None:
        live = self._open.get(session_id)  # looked up again: the session may have been closed since
        if self._cache is not None:
            settle = self._cache.pin if live is not None and live.is_pinned else self._cache.unpin
            settle(session_id)

    async def emit(self, event: object) -> None:
        """Pass an event on to the subscribers of its session."""
        live = self._open.get(getattr(event, "session_id", None) or "")
        if live is not None:
            await live.bus.emit(event)

    def close(self, session_id: str) -> None:
        """Drop a session at once, and its subscribers with it."""
        live = self._open.get(session_id)
        if live is not None:
            live.bus.clear()
            self._drop(session_id)
            self._settle(session_id)


class LiveSubscription:
    """A subscriber's place at a session, until it is cancelled."""

    def __init__(self, subscription: Subscription, settle: Callable[[], None]) -> None:
        self._subscription = subscription
        self._settle = settle

    def cancel(self) -> None:
        """End the subscription. Cancelling twice does nothing."""
        self._subscription.cancel()
        self._settle()
