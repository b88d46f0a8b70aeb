"""Failures of a provider, over the wire: which are transient, which are permanent, and what the error says."""

from __future__ import annotations

import asyncio
import gc
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from perdure.errors import ConfigurationError, ContextTooLong, DriverError, RequestRefused, TransientDriverError
from perdure.loop.drivers.retry import RetryingDriver
from perdure.model.definition import ModelConfig
from perdure.protocols import Delta, ModelRequest

from . import wire
from .asking import HI, KEY, KEY_ENV, Asking, asking
from .loopback import Reply, Stream

OPENAI, ANTHROPIC, GOOGLE = "openai:gpt-4o", "anthropic:claude-haiku-4-5", "google:gemini-3-pro"
RESPONSES = "openai-responses:gpt-5"


def openai_error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "param": None, "code": code}}


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def google_error(code: int, status: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "status": status, "message": message}}


MAY_PASS = [
    (OPENAI, Reply(408, openai_error("too slow")), 408),
    (OPENAI, Reply(409, openai_error("locked")), 409),
    (OPENAI, Reply(429, openai_error("slow down", "rate_limit_exceeded")), 429),
    (OPENAI, Reply(500, openai_error("oops")), 500),
    (OPENAI, Reply(502, "<html>Bad gateway</html>", {"content-type": "text/html"}), 502),
    (ANTHROPIC, Reply(429, anthropic_error("rate_limit_error", "slow down")), 429),
    (ANTHROPIC, Reply(529, anthropic_error("overloaded_error", "Overloaded")), 529),
    (GOOGLE, Reply(503, google_error(503, "UNAVAILABLE", "The model is overloaded.")), 503),
]


@pytest.mark.parametrize(("model", "reply", "status"), MAY_PASS)
async def test_what_may_pass(monkeypatch: pytest.MonkeyPatch, model: str, reply: Reply, status: int) -> None:
    """Time-outs, conflicts, rate limits and server faults are transient; the driver itself asks only once."""
    async with asking(monkeypatch, reply, reply, reply) as made:
        with pytest.raises(TransientDriverError) as caught:
            await made.ask(model)
        assert len(made.server.requests) == 1
    assert (caught.value.status, caught.value.model) == (status, model)


WILL_NOT_PASS = [
    (OPENAI, Reply(400, openai_error("no such parameter")), 400, "no such parameter"),
    (OPENAI, Reply(403, openai_error("not yours")), 403, "not yours"),
    (OPENAI, Reply(404, openai_error("no such model", "model_not_found")), 404, "no such model"),
    (OPENAI, Reply(429, openai_error("no credit left", "insufficient_quota")), 429, "no credit left"),
    (ANTHROPIC, Reply(400, anthropic_error("invalid_request_error", "no such field")), 400, "no such field"),
    (GOOGLE, Reply(400, google_error(400, "INVALID_ARGUMENT", "no such field")), 400, "no such field"),
]


@pytest.mark.parametrize(("model", "reply", "status", "reason"), WILL_NOT_PASS)
async def test_what_will_not_pass(
    monkeypatch: pytest.MonkeyPatch, model: str, reply: Reply, status: int, reason: str
) -> None:
    """Any other refusal is permanent: it is not retried, and repeats the provider's message."""
    async with asking(monkeypatch, reply) as made:
        with pytest.raises(RequestRefused, match=reason) as caught:
            await RetryingDriver(made.driver).respond(ModelRequest(config(made, model), HI), made.hear)
        assert len(made.server.requests) == 1
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert not isinstance(caught.value, ContextTooLong)


def config(made: Asking, model: str) -> ModelConfig:
    return ModelConfig(model, base_url=made.url(model), api_key_env=KEY_ENV)


TOO_LONG = [
    (OPENAI, Reply(400, openai_error("8193 tokens", "context_length_exceeded"))),
    (OPENAI, Reply(400, openai_error("the request exceeds the available context size, try increasing it"))),
    (RESPONSES, Reply(400, openai_error("8193 tokens", "context_length_exceeded"))),
    (ANTHROPIC, Reply(400, anthropic_error("invalid_request_error", "prompt is too long: 210000 tokens > 200000"))),
    (ANTHROPIC, Reply(413, anthropic_error("request_too_large", "Request exceeds the maximum size"))),
    (
        GOOGLE,
        Reply(400, google_error(400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum number (8).")),
    ),
]


@pytest.mark.parametrize(("model", "reply"), TOO_LONG)
async def test_a_context_that_is_too_long(monkeypatch: pytest.MonkeyPatch, model: str, reply: Reply) -> None:
    """Each provider words it in its own way; it becomes one error, with the advice to compact."""
    async with asking(monkeypatch, reply) as made:
        with pytest.raises(ContextTooLong, match="Compact or trim"):
            await made.ask(model)


CHAT = wire.chat({"content": "Hel"}, {"content": "lo."}, finish=None)[:-1]
CLAUDE = wire.claude({"type": "text", "text": "Hello."}, stop=None)
ITEM = {
    "type": "message",
    "id": "msg_7",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
}


@pytest.mark.parametrize("end", ["reset", "early"])
@pytest.mark.parametrize(
    ("model", "events"), [(OPENAI, CHAT), (ANTHROPIC, CLAUDE), (RESPONSES, wire.responses(ITEM)[:-2]), (OPENAI, [])]
)
async def test_a_stream_that_breaks_off(monkeypatch: pytest.MonkeyPatch, model: str, events: Any, end: Any) -> None:
    """A partial answer does not count, even if the connection is closed properly."""
    async with asking(monkeypatch, Stream(events, end)) as made:
        with pytest.raises(TransientDriverError):
            await made.ask(model)
    assert "".join(delta.text for delta in made.deltas) == ("Hello." if events else "")


async def test_an_error_in_mid_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the beginning of an answer counts as it would have before."""
    error = wire.sse(anthropic_error("overloaded_error", "Overloaded"), "error")
    async with asking(monkeypatch, Stream([*CLAUDE, error])) as made:
        with pytest.raises(TransientDriverError) as caught:
            await made.ask(ANTHROPIC)
    assert caught.value.status == 529


async def test_a_finish_word_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may end its answers with a word of its own."""
    async with asking(monkeypatch, Stream(wire.chat({"content": "Hello."}, finish="eos"))) as made:
        reply = await made.ask(OPENAI)
    assert (reply.message.text, reply.response.finish_reason) == ("Hello.", "eos")


async def test_a_server_that_never_says_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without a finish reason is whole if its usage came, since usage comes last."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    async with asking(monkeypatch, Stream(wire.chat({"content": "Hello."}, finish=None, usage=usage))) as made:
        reply = await made.ask(OPENAI)
    assert reply.message.text == "Hello."


async def test_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is silent for too long may answer another time."""
    async with asking(monkeypatch, Stream(CHAT, "never")) as made:
        with pytest.raises(TransientDriverError, match="timed out"):
            await made.ask(OPENAI, settings={"timeout": 0.2})


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is down may come up."""
    async with asking(monkeypatch) as made:
        pass
    with pytest.raises(TransientDriverError):
        await made.ask(OPENAI)
    await made.driver.aclose()


async def test_429_then_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry waits for as long as the provider asks, and then the answer comes."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    limited = Reply(429, openai_error("slow down", "rate_limit_exceeded"), {"retry-after": "3"})
    async with asking(monkeypatch, limited, Stream(wire.chat({"content": "Hello."}))) as made:
        driver = RetryingDriver(made.driver, sleep=sleep)
        reply = await driver.respond(ModelRequest(config(made, OPENAI), HI), made.hear)
        assert len(made.server.requests) == 2
    assert reply.message.text == "Hello."
    assert made.deltas == [Delta("text", "Hello.")]
    assert len(waits) == 1
    assert 3.0 <= waits[0] <= 3.5


async def test_a_dropped_stream_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners get a restart, and the message has the answer once."""
    async with asking(monkeypatch, Stream(CHAT, "reset"), Stream(wire.chat({"content": "Good day."}))) as made:
        driver = RetryingDriver(made.driver, base=0.0)
        reply = await driver.respond(ModelRequest(config(made, OPENAI), HI), made.hear)
    assert reply.message.text == "Good day."
    assert [(delta.kind, delta.text) for delta in made.deltas] == [
        ("text", "Hel"),
        ("text", "lo."),
        ("restart", ""),
        ("text", "Good day."),
    ]


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC])
async def test_cancelling_ends_the_request(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """A cancelled call ends at once, closes its stream, and leaves the driver ready for the next."""
    begun, whole = (CHAT, wire.chat({"content": "Hello."})) if model == OPENAI else (CLAUDE, wire.claude(TEXT))
    async with asking(monkeypatch, Stream(begun, "never"), Stream(whole)) as made:
        heard = asyncio.Event()

        async def hear(delta: Delta) -> None:
            heard.set()

        driver = RetryingDriver(made.driver)
        asked = asyncio.create_task(driver.respond(ModelRequest(config(made, model), HI), hear))
        async with asyncio.timeout(10):
            await heard.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await made.ask(model)).message.text == "Hello."


TEXT = {"type": "text", "text": "Hello."}


async def test_no_key_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that quotes the key cannot bring it into an error, its causes or a traceback."""
    async with asking(monkeypatch, Reply(401, openai_error(f"Incorrect API key provided: {KEY}"))) as made:
        with pytest.raises(DriverError, match="Incorrect API key provided: …") as caught:
            await made.ask(OPENAI)
    assert caught.value.__cause__ is None
    assert KEY not in "".join(traceback.format_exception(caught.value))


OWN_VARIABLES = {
    OPENAI: "OPENAI_API_KEY",
    RESPONSES: "OPENAI_API_KEY",
    ANTHROPIC: "ANTHROPIC_API_KEY",
    GOOGLE: "GOOGLE_API_KEY",
}


def refused_key(model: str, said: str) -> Reply:
    if model == GOOGLE:
        return Reply(401, google_error(401, "UNAUTHENTICATED", said))
    return Reply(401, anthropic_error("authentication_error", said) if model == ANTHROPIC else openai_error(said))


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("model", OWN_VARIABLES)
async def test_no_key_in_an_error_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, model: str, is_named: bool, end: str
) -> None:
    """The provider's own variable is treated like a named one. A newline at the end is not part of a key."""
    reply = refused_key(model, f"Bad key {KEY}, or {KEY[:9]}%0A; see {KEY}")
    async with asking(monkeypatch, reply) as made:
        monkeypatch.setenv(KEY_ENV, KEY + end if is_named else "unused")
        monkeypatch.setenv(OWN_VARIABLES[model], "unused" if is_named else KEY + end)
        given = ModelConfig(model, base_url=made.url(model), api_key_env=KEY_ENV if is_named else None)
        with pytest.raises(RequestRefused, match="Bad key …, or sk-loopba%0A; see …") as caught:
            await made.driver.respond(ModelRequest(given, HI), made.hear)
    assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "PROXY_PASSWORD", "gateway_token"])
async def test_no_other_secret_of_the_environment_is_in_an_error(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A gateway may quote a secret in any form. Short values are words, and stay."""
    secret = 'p4ss "wörd" 4711'
    said = f"401 for {secret}, {quote(secret)}, {secret.encode()!r} and false"
    async with asking(monkeypatch, Reply(401, openai_error(said))) as made:
        monkeypatch.setenv(variable, f" {secret}\n")
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
        with pytest.raises(RequestRefused, match="401 for …, …, b'…' and false"):
            await made.ask(OPENAI)


@pytest.mark.parametrize("key", ["sk-löve-0123456789", "sk-0123\n456789"])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("model", OWN_VARIABLES)
async def test_a_key_that_cannot_be_sent_is_refused_before_it_is(
    monkeypatch: pytest.MonkeyPatch, model: str, is_named: bool, key: str
) -> None:
    """No header can carry it, and the client's own error would quote it."""
    async with asking(monkeypatch) as made:
        monkeypatch.setenv(KEY_ENV if is_named else OWN_VARIABLES[model], key)
        given = ModelConfig(model, base_url=made.url(model), api_key_env=KEY_ENV if is_named else None)
        with pytest.raises(ConfigurationError, match="cannot be sent") as caught:
            await made.driver.respond(ModelRequest(given, HI), made.hear)
        assert made.server.requests == []
    assert "456789" not in "".join(traceback.format_exception(caught.value))


async def test_a_request_that_the_model_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that pydantic-ai refuses to send raises ConfigurationError."""
    async with asking(monkeypatch) as made:
        with pytest.raises(ConfigurationError, match="thinking is one of on, off"):
            await made.ask(OPENAI, thinking="a lot")
        assert made.server.requests == []


async def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of every kind leave no open resource for the garbage collector."""
    async with asking(
        monkeypatch, Reply(500, openai_error("oops")), Stream(CHAT, "reset"), Stream(CHAT, "early")
    ) as made:
        for _ in range(3):
            with pytest.raises(TransientDriverError):
                await made.ask(OPENAI)
    gc.collect()


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC, GOOGLE])
async def test_a_refused_connection_names_its_address(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The error has the host that was asked, and no other part of its URL."""
    async with asking(monkeypatch) as made:
        made.server._server.close()
        with pytest.raises(TransientDriverError, match=r"\(at http://127\.0\.0\.1:\d+\)"):
            await made.ask(model)
