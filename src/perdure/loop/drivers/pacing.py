"""Rates: how often a provider's key may be used, by all processes that share a store."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b

import msgspec

from perdure.errors import ConfigurationError, InvalidData, RateLimited, StoreError
from perdure.model.checks import expect, expect_count, expect_number, expect_text
from perdure.model.definition import OWN_DRIVER, ModelConfig
from perdure.model.ids import now
from perdure.model.value import brief
from perdure.protocols import Driver, ModelReply, ModelRequest, OnDelta, Queue, is_queue

_log = logging.getLogger("perdure.rates")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)/([smhd])")
_TOLD_FROM = 1.0
"""Seconds. A wait of at least this length is logged."""
_TRIES = 4
_AGAIN = 0.1
"""Seconds until a store that could not give a place is asked again."""
NameKey = Callable[[ModelConfig], Awaitable[str]]
"""A function that returns a name for a model's key, which tells it from others and does not reveal it."""


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The rate at which a model may be asked: `requests` in `seconds`, evenly. After a pause, `burst` may come at once.

    All connections that use the same name in the same store share it. Without one, the name is made of the provider
    and a fingerprint of its key.
    """

    requests: float
    seconds: float = 60.0
    burst: int = 1
    name: str | None = None
    """The name under which the rate is counted. Users of one name share it."""

    def __post_init__(self) -> None:
        for field in ("requests", "seconds"):
            if expect_number(getattr(self, field), f"$.rate.{field}") <= 0:
                raise InvalidData(f"$.rate.{field}", "expected a number over 0")
        expect_count(self.burst, "$.rate.burst", least=1)
        if self.name is not None:
            expect_text(self.name, "$.rate.name", blank=False)

    @classmethod
    def of(cls, rate: RateLimit | str) -> RateLimit:
        """Return a `rate`, given as one or as a text: `"60/m"`, `"10/s"`, `"1000/h"`."""
        if isinstance(rate, RateLimit):
            return rate
        found = _TEXT.fullmatch(rate) if isinstance(rate, str) else None
        if found is None:
            problem = f"write a rate like '60/m', '10/s' or '1000/h', or a RateLimit; {brief(rate)} is neither"
            raise InvalidData("$.rate", problem)
        return cls(requests=float(found[1]), seconds=_UNITS[found[2]])

    @property
    def cost(self) -> float:
        """The seconds of the rate that each request takes."""
        return self.seconds / self.requests


Rate = RateLimit | str | Mapping[str, RateLimit | str]
"""One rate for each key, or rates by provider: `{"openai": "60/m"}` leaves others without one."""


def rate_of(text: str) -> Rate:
    """Return the rate of a command line: `60/m`, or rates by provider, `openai=60/m,anthropic=10/m`."""
    if "=" not in text:
        return text
    return {name.strip(): rate.strip() for name, _, rate in (each.partition("=") for each in text.split(","))}


def fingerprint(secret: str) -> str:
    """Return a short text that tells a secret from others and does not reveal it."""
    return blake2b(secret.encode(), digest_size=6, key=b"perdure.rates").hexdigest()


class Pace:
    """The rates of one connection, whose places are kept in its store."""

    def __init__(self, rate: Rate, store: object) -> None:
        self._all = None if isinstance(rate, Mapping) else RateLimit.of(rate)
        by_provider = rate if isinstance(rate, Mapping) else {}
        self._by_provider = {expect(name, str, "$.rate"): RateLimit.of(each) for name, each in by_provider.items()}
        if not is_queue(store):
            raise ConfigurationError(
                "This store cannot share a rate between processes: it has no journal. Use one of perdure's own, or "
                "leave rate=… out."
            )
        self._queue: Queue = store

    def limit_of(self, model: ModelConfig) -> RateLimit | None:
        """Return the rate of a model; None if it has none."""
        return self._all or self._by_provider.get(model.provider)

    async def wait(self, limit: RateLimit, name: str, model: ModelConfig, most: float | None) -> None:
        """Take the next place, and wait for it.

        If that takes more than `most` seconds, take no place and raise RateLimited at once.
        """
        seconds = await self._reserved(limit, name, most)
        if most is not None and seconds > most:
            raise RateLimited(model.name, name, seconds, most)
        if seconds >= _TOLD_FROM:
            facts = {"rate": name, "model": model.name, "seconds": seconds}
            _log.info(
                "%s is asked in %.1f s: the rate %s is used up", model.name, seconds, name, extra={"facts": facts}
            )
        if seconds > 0:
            await asyncio.sleep(seconds)

    async def _reserved(self, limit: RateLimit, name: str, most: float | None) -> float:
        """Return how long to wait. A store that fails is asked again: a place that is taken twice only delays."""
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._queue.reserve(name, cost=limit.cost, burst=limit.burst * limit.cost, most=most)
            except StoreError:
                if attempt == _TRIES:
                    raise
            await asyncio.sleep(_AGAIN * attempt)
        raise AssertionError


class PacedDriver:
    """A driver that waits for its place in a rate before it asks another: each time, even after a failure."""

    def __init__(self, driver: Driver, pace: Pace, name_key: NameKey | None = None) -> None:
        self._driver = driver
        self._pace = pace
        self._name_key = name_key

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        limit = self._pace.limit_of(request.model)
        if limit is not None:
            name = limit.name or await self._name(request.model)
            left = None if request.deadline is None else max(0.0, (request.deadline - now()).total_seconds())
            await self._pace.wait(limit, name, request.model, left)
        return await self._driver.respond(request, on_delta)

    async def _name(self, model: ModelConfig) -> str:
        if self._name_key is not None:
            return await self._name_key(model)
        # The key of a caller's own driver is not known.
        return model.name if model.provider == OWN_DRIVER else model.provider

    async def aclose(self) -> None:
        """Close what the driver holds open, if it holds anything."""
        close = getattr(self._driver, "aclose", None)
        if close is not None:
            await close()
