"""Retries: which failures are retried, how long a retry waits, and which deltas a listener gets."""

from __future__ import annotations

import asyncio

import pytest

from perdure.errors import DriverError, InvalidData, RequestRefused, RetriesExhausted, TransientDriverError
from perdure.loop.drivers.retry import LONGEST_RETRY_AFTER, RetryingDriver
from perdure.model.definition import ModelConfig
from perdure.model.message import Message
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta
from perdure.testing import ScriptedDriver

ASKED = ModelRequest(ModelConfig("acme:m"), (Message.user("hi"),))
BUSY = TransientDriverError("acme:m", "too busy", status=503)


class Flaky:
    """A driver that says each of its texts and raises its error, and then answers."""

    def __init__(self, *failures: tuple[str, Exception]) -> None:
        self._failures = list(failures)
        self.calls = 0
        self.closed = False

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.calls += 1
        if self._failures:
            text, error = self._failures.pop(0)
            if text:
                await on_delta(Delta("text", text))
            raise error
        await on_delta(Delta("text", "Hello."))
        return ModelReply(Message.assistant("Hello."))

    async def aclose(self) -> None:
        self.closed = True


class Ear:
    """Collects deltas and waits without sleeping."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.waits: list[float] = []

    async def hear(self, delta: Delta) -> None:
        self.deltas.append(delta)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


async def test_an_answer_at_once_is_passed_on() -> None:
    """Without a failure, nothing is added."""
    ear = Ear()
    reply = await RetryingDriver(Flaky(), sleep=ear.sleep).respond(ASKED, ear.hear)
    assert (reply.message.text, ear.deltas, ear.waits) == ("Hello.", [Delta("text", "Hello.")], [])


async def test_a_failure_before_the_first_word_is_not_heard() -> None:
    """A retry that voids nothing sends no restart."""
    ear = Ear()
    await RetryingDriver(Flaky(("", BUSY)), sleep=ear.sleep).respond(ASKED, ear.hear)
    assert ear.deltas == [Delta("text", "Hello.")]


async def test_a_failure_after_the_first_word_is_heard() -> None:
    """A restart voids the earlier text, each time and before any new text."""
    ear = Ear()
    driver = RetryingDriver(Flaky(("Hel", BUSY), ("", BUSY), ("He", BUSY)), sleep=ear.sleep)
    await driver.respond(ASKED, ear.hear)
    assert [(delta.kind, delta.text) for delta in ear.deltas] == [
        ("text", "Hel"),
        ("restart", ""),
        ("text", "He"),
        ("restart", ""),
        ("text", "Hello."),
    ]


async def test_waits_grow_up_to_a_cap_and_vary() -> None:
    """Each wait is random between zero and a bound that doubles up to the cap."""
    seen: list[list[float]] = []
    for _ in range(200):
        ear = Ear()
        driver = RetryingDriver(Flaky(*[("", BUSY)] * 4), attempts=5, base=1.0, cap=3.0, sleep=ear.sleep)
        await driver.respond(ASKED, ear.hear)
        seen.append(ear.waits)
    bounds = [max(waits) for waits in zip(*seen, strict=True)]
    assert all(bound <= limit for bound, limit in zip(bounds, (1.0, 2.0, 3.0, 3.0), strict=True))
    assert bounds[1] > 1.0
    assert bounds[2] > 2.0
    assert len({waits[0] for waits in seen}) > 100


async def test_retry_after_is_honoured() -> None:
    """The retry waits as long as the provider says, and a random bit longer, so that not all retry at once."""
    ear = Ear()
    limited = TransientDriverError("acme:m", "slow down", status=429, retry_after=30.0)
    await RetryingDriver(Flaky(("", limited)), sleep=ear.sleep).respond(ASKED, ear.hear)
    assert 30.0 <= ear.waits[0] <= 30.5


async def test_a_retry_after_of_hours_is_not_waited_for() -> None:
    """A long wait means that the quota is used up: the caller is told at once."""
    ear = Ear()
    limited = TransientDriverError("acme:m", "slow down", status=429, retry_after=LONGEST_RETRY_AFTER + 1)
    driver = Flaky(("", limited))
    with pytest.raises(RetriesExhausted, match="asks to wait 61 s"):
        await RetryingDriver(driver, sleep=ear.sleep).respond(ASKED, ear.hear)
    assert (driver.calls, ear.waits) == (1, [])


async def test_retries_run_out() -> None:
    """The error has the number of attempts and the last failure; no restart follows the last."""
    ear = Ear()
    driver = Flaky(*[("Hel", BUSY)] * 9)
    with pytest.raises(RetriesExhausted, match="asked 3 times") as caught:
        await RetryingDriver(driver, attempts=3, sleep=ear.sleep).respond(ASKED, ear.hear)
    assert isinstance(caught.value, DriverError)
    assert (caught.value.attempts, caught.value.last, driver.calls) == (3, BUSY, 3)
    assert [delta.kind for delta in ear.deltas] == ["text", "restart", "text", "restart", "text"]


@pytest.mark.parametrize("error", [RequestRefused("acme:m", "no", status=400), DriverError("no"), ValueError("no")])
async def test_anything_else_is_not_retried(error: Exception) -> None:
    """Only an error that is marked as transient is tried again."""
    driver = Flaky(("", error))
    with pytest.raises(type(error)) as caught:
        await RetryingDriver(driver).respond(ASKED, Ear().hear)
    assert caught.value is error
    assert driver.calls == 1


async def test_cancelling_while_it_waits() -> None:
    """A cancelled call does not wait until the end."""
    driver = Flaky(*[("", BUSY)] * 9)
    asked = asyncio.create_task(RetryingDriver(driver, base=1e9, cap=1e9).respond(ASKED, Ear().hear))
    await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert driver.calls == 1


async def test_closing_closes_the_driver() -> None:
    """Closing passes through, to drivers that can be closed."""
    driver = Flaky()
    await RetryingDriver(driver).aclose()
    assert driver.closed
    await RetryingDriver(ScriptedDriver([])).aclose()  # a driver without aclose


def test_attempts_must_be_possible() -> None:
    """A driver that may not try even once is a mistake in the configuration."""
    with pytest.raises(InvalidData, match="attempts"):
        RetryingDriver(Flaky(), attempts=0)
