"""Rates: a model call waits for its place, and all users of the store share the places."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

from perdure import (
    AgentDefinition,
    ConfigurationError,
    ExecutionBudget,
    InvalidData,
    MemoryStore,
    RateLimit,
    RateLimited,
    RetryingDriver,
    RunFailed,
    SendParallel,
    Sessions,
    StoreError,
    TransientDriverError,
    connect,
)
from perdure.loop.drivers.pacing import Pace, PacedDriver, fingerprint
from perdure.loop.drivers.provider import ProviderDriver
from perdure.loop.strategies import LongestAnswer
from perdure.model.definition import ModelConfig
from perdure.model.ids import now
from perdure.protocols import ModelReply, ModelRequest, OnDelta
from perdure.testing import FailingStore
from perdure.testing.scripted import ScriptedDriver

PROCESS = Path(__file__).parent / "rate_process.py"


class Timed:
    """A model that notes when it is asked; its first `failures` calls fail."""

    def __init__(self, failures: int = 0) -> None:
        self.made = time.monotonic()
        self.at: list[float] = []
        self._failures = failures
        self._voice = ScriptedDriver(lambda request: "re")

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.at.append(time.monotonic())
        if len(self.at) <= self._failures:
            raise TransientDriverError(request.model.name, "not yet")
        return await self._voice.respond(request, on_delta)

    def keeps(self, seconds: float) -> bool:
        """Tell whether no call came before its place. A busy machine may note any of them late."""
        return all(at - self.made >= place * seconds - 0.01 for place, at in enumerate(self.at))


def sessions_at(rate: Any, model: Timed, store: Any = None, **options: Any) -> Sessions:
    return connect(store or MemoryStore(), driver=model, rate=rate, **options)


class TestRates:
    @pytest.mark.parametrize(
        ("text", "cost"), [("60/m", 1.0), ("10/s", 0.1), ("1000/h", 3.6), ("0.5/s", 2.0), ("86400/d", 1.0)]
    )
    def test_a_text_says_how_often(self, text: str, cost: float) -> None:
        """By second, minute, hour or day."""
        assert RateLimit.of(text).cost == pytest.approx(cost)

    @pytest.mark.parametrize("wrong", ["60", "60/x", "/m", "-1/m", "0/m", "60/m/m", 60, 1.5, b"60/m", [], "1e3/s"])
    def test_anything_else_is_refused_before_anything_is_opened(self, wrong: Any) -> None:
        """The error shows how to write one."""
        with pytest.raises(InvalidData, match="rate"):
            connect("memory://", model="offline", rate=wrong)
        with pytest.raises(InvalidData, match="rate"):
            connect("memory://", model="offline", rate={"openai": wrong})

    @pytest.mark.parametrize("wrong", [{"requests": 0}, {"seconds": -1}, {"burst": 0}, {"name": " "}, {"name": 5}])
    def test_a_limit_of_nothing_is_refused(self, wrong: Any) -> None:
        """No request would ever be allowed."""
        with pytest.raises(InvalidData):
            RateLimit(**{"requests": 5, **wrong})

    def test_a_store_without_a_journal_cannot_share_one(self) -> None:
        """A limit that would not hold is refused."""

        class Plain:
            async def load(self, *_: object) -> None: ...

        with pytest.raises(ConfigurationError, match="rate"):
            Pace("60/m", Plain())

    def test_a_fingerprint_is_short_and_not_the_key(self) -> None:
        """It is the same for the same key in every process, and differs for another key."""
        assert fingerprint("sk-secret") == fingerprint("sk-secret") != fingerprint("sk-other")
        assert "secret" not in fingerprint("sk-secret")
        assert len(fingerprint("sk-secret")) == 12


class TestWaiting:
    async def test_calls_wait_for_their_places(self) -> None:
        """In one session and in several, the burst starts at once, and the other calls one behind the other."""
        model = Timed()
        async with sessions_at(RateLimit(requests=5, seconds=1, burst=2), model) as sessions:
            chats = [await sessions.open() for _ in range(4)]
            await asyncio.gather(*(chat.send("Hello") for chat in chats))
        assert len(model.at) == 4
        assert model.at[1] - model.at[0] < 0.18
        assert model.at[-1] - model.made >= 0.39

    async def test_each_try_takes_a_place(self) -> None:
        """A model that fails is asked again at the rate's pace, also by a user's own driver."""
        model = Timed(failures=3)
        patient = RetryingDriver(model, base=0.0)
        async with connect(MemoryStore(), driver=patient, rate="10/s") as sessions:
            reply = await (await sessions.open()).send("Hello")
        assert reply.text == "re"
        assert len(model.at) == 4
        assert model.keeps(0.1)

    async def test_branches_share_it(self) -> None:
        """Branches run side by side, but take their turns at the model."""
        model = Timed()
        async with sessions_at(RateLimit(requests=10, seconds=1, name="all"), model) as sessions:
            chat = await sessions.open()
            action = SendParallel("Hello", sessions.loops, configs=["a", "b", "c"], strategy=LongestAnswer())
            await sessions.runtime.execute(chat.id, action)
        assert len(model.at) >= 3
        assert model.keeps(0.1)

    async def test_a_stream_waits_too(self) -> None:
        """No chunk comes before its place."""
        model = Timed()
        async with sessions_at("5/s", model) as sessions:
            chat = await sessions.open()
            await chat.send("Hello")
            heard = [chunk async for chunk in chat.stream("Again")]
        assert heard
        assert model.keeps(0.2)

    async def test_a_wait_can_be_cancelled(self) -> None:
        """The run ends like any cancelled run, and the model is not asked."""
        model = Timed()
        async with sessions_at("1/h", model) as sessions:
            chat = await sessions.open()
            await chat.send("Hello")
            waiting = asyncio.create_task(chat.send("Again"))
            await asyncio.sleep(0.2)
            await chat.cancel()
            async with asyncio.timeout(10):
                await asyncio.gather(waiting, return_exceptions=True)
            assert len(model.at) == 1
            assert (await chat.session()).status == "active"

    async def test_a_place_that_comes_too_late_is_an_error_at_once(self) -> None:
        """The error says how long the wait is, and that it may be tried again; no place is taken."""
        model, store = Timed(), MemoryStore()
        agent = AgentDefinition("a", budget=ExecutionBudget(max_seconds=5.0))
        async with sessions_at("1/m", model, store) as sessions:
            chat = await sessions.open(agent=agent)
            await chat.send("Hello")
            began = time.monotonic()
            with pytest.raises(RunFailed) as failed:
                await chat.send("Again")
            assert time.monotonic() - began < 2.0
            assert failed.value.cause is not None
            assert failed.value.cause.type == "RateLimited"
            assert failed.value.retryable
            assert "is used up for" in str(failed.value)
            assert 50 < await store.reserve("driver:Timed", cost=60.0, burst=60.0, most=0.0) <= 60

    async def test_what_it_says_of_a_deadline(self) -> None:
        """The facts are attributes of the error."""
        store, heard = MemoryStore(), Timed()
        async with store:
            driver = PacedDriver(heard, Pace("1/m", store))
            request = ModelRequest(ModelConfig("openai:gpt-5"), messages=(), deadline=now() + timedelta(seconds=3))
            await driver.respond(request, _ignore)
            with pytest.raises(RateLimited) as late:
                await driver.respond(request, _ignore)
            assert (late.value.model, late.value.rate) == ("openai:gpt-5", "openai")
            assert late.value.left <= 3.0 < late.value.wait <= 60.0

    async def test_a_long_wait_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """The log has the rate, the model and the length of the wait."""
        model = Timed()
        with caplog.at_level(logging.INFO, "perdure.rates"):
            async with sessions_at(RateLimit(requests=0.9, seconds=1, name="mine"), model) as sessions:
                chat = await sessions.open()
                for _ in range(2):
                    await chat.send("Hello")
        assert "the rate mine is used up" in caplog.text
        assert len(caplog.records) == 1

    async def test_only_providers_that_are_named_have_a_rate(self) -> None:
        """The others are asked at once."""
        model = Timed()
        async with sessions_at({"openai": "1/h"}, model) as sessions:
            chat = await sessions.open()
            for _ in range(3):
                await chat.send("Hello")
        assert len(model.at) == 3

    @pytest.mark.parametrize("after", [False, True])
    async def test_a_store_that_fails_once_is_asked_again(self, after: bool) -> None:
        """This holds if the place was taken or not; a taken place is lost."""
        model, store = Timed(), FailingStore(MemoryStore())
        store.fail("reserve", call=1, error=StoreError("no"), after=after)
        async with sessions_at("20/s", model, store) as sessions:
            assert (await (await sessions.open()).send("Hello")).text == "re"
        assert len(model.at) == 1

    async def test_a_store_that_keeps_failing_ends_the_run(self) -> None:
        """A rate that cannot be kept is not ignored."""
        model, store = Timed(), FailingStore(MemoryStore())
        store.fail("reserve", call=None, error=StoreError("no rates today"))
        async with sessions_at("20/s", model, store) as sessions:
            with pytest.raises(RunFailed, match="no rates today"):
                await (await sessions.open()).send("Hello")
        assert model.at == []


class TestProviders:
    async def test_a_name_tells_keys_apart_and_does_not_have_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two keys of one provider have a rate each; so have two servers."""
        monkeypatch.setenv("ONE_KEY", "sk-one-secret-0001")
        monkeypatch.setenv("OTHER_KEY", "sk-other-secret-0002")
        driver = ProviderDriver()
        names = [
            await driver.name_key(ModelConfig("openai:gpt-5", api_key_env="ONE_KEY")),
            await driver.name_key(ModelConfig("openai:gpt-5-mini", api_key_env="ONE_KEY")),
            await driver.name_key(ModelConfig("openai:gpt-5", api_key_env="OTHER_KEY")),
            await driver.name_key(ModelConfig("openai:m", base_url="http://localhost:1/v1", api_key_env="ONE_KEY")),
        ]
        await driver.aclose()
        assert names[0] == names[1]
        assert len({*names}) == 3
        assert names[0].startswith("openai:")
        assert names[3].startswith("openai-chat@localhost:1:")
        assert not any("secret" in name for name in names)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_two_processes_keep_to_one_rate(kind: str, tmp_path: Path) -> None:
    """Together they ask at the limit's rate, within a twentieth, and never more at once than the burst."""
    url = f"sqlite:///{tmp_path}/s.db" if kind == "sqlite" else postgres_server.url_of(tmp_path)
    rate, burst, seconds = 20.0, 5, 4.0
    async with connect(url, model="offline"):
        pass  # the schema is made once
    both = [await _started(url, rate, burst, seconds) for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await process.stdin.drain()
    answers = [(await process.communicate())[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    times = sorted(float(line) for answer in answers for line in answer.split())
    assert min(len(answer.split()) for answer in answers) > 5
    # After the burst, evenly: rate times seconds from the first to the last.
    steady = len(times) - burst
    assert steady / (times[-1] - times[0]) == pytest.approx(rate, rel=0.05)
    for first, last in zip(times, times[burst + 1 :], strict=False):
        assert last - first > 0.5 / rate


async def _started(url: str, *arguments: float) -> Process:
    given = map(str, arguments)
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROCESS), url, *given, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def _ignore(_: object) -> None: ...
