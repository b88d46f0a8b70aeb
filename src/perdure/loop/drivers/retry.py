"""Retries of model calls: what may be retried, how long to wait, and which error the last failure becomes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from copy import copy

from perdure.errors import RetriesExhausted, TransientDriverError
from perdure.model.checks import expect_count, expect_method, expect_number
from perdure.protocols import Delta, Driver, ModelReply, ModelRequest, OnDelta

LONGEST_RETRY_AFTER = 60.0
"""Seconds. A provider that asks for more is out of quota rather than busy; waiting would only hide that."""


class RetryingDriver:
    """A driver that asks another again after a passing failure. Listeners are told when an answer begins again.

    `driver` is the other one. It is asked `attempts` times at most. Pauses begin with `base` seconds and double, up to
    `cap` seconds. `sleep` waits for them.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        attempts: int = 4,
        base: float = 0.5,
        cap: float = 20.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._driver = expect_method(driver, "respond", "$.driver")
        self._attempts = expect_count(attempts, "$.attempts", least=1)
        self._base = expect_number(base, "$.base")
        self._cap = expect_number(cap, "$.cap")
        self._sleep = sleep

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        """Ask the other driver, again if need be. Raise RetriesExhausted after the last attempt.

        `request` and `on_delta` are passed on.
        """
        attempt = 1
        while True:
            # One for each try: a listener is told of a restart only if this try has sent it something.
            relay = _Relay(on_delta)
            try:
                return await self._driver.respond(request, relay)
            except TransientDriverError as error:
                if attempt == self._attempts or (error.retry_after or 0.0) > LONGEST_RETRY_AFTER:
                    raise RetriesExhausted(attempt, error) from error
                wait = self._wait(attempt, error.retry_after)
            if relay.was_used:
                await on_delta(Delta("restart", ""))
            await self._sleep(wait)
            attempt += 1

    def trying(self, wrap: Callable[[Driver], Driver]) -> RetryingDriver:
        """Return a driver that retries what `wrap` makes of this one's driver: each try goes through it."""
        other = copy(self)
        other._driver = wrap(self._driver)
        return other

    async def aclose(self) -> None:
        """Close what the driver holds open, if it holds anything."""
        close = getattr(self._driver, "aclose", None)
        if close is not None:
            await close()

    def _wait(self, attempt: int, retry_after: float | None) -> float:
        """Return the seconds to wait, at least `retry_after`. Jitter keeps callers that failed together apart."""
        backoff = random.uniform(0.0, min(self._cap, self._base * 2 ** (attempt - 1)))
        return backoff if retry_after is None else retry_after + random.uniform(0.0, self._base)


class _Relay:
    """A relay of deltas that remembers whether there were any."""

    def __init__(self, on_delta: OnDelta) -> None:
        self._on_delta = on_delta
        self.was_used = False

    async def __call__(self, delta: Delta) -> None:
        self.was_used = True
        await self._on_delta(delta)
