"""A service on a real port of this machine, for OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from tests.server.serving import on_a_port, refund, with_service

import perdure
from perdure.protocols import ModelRequest
from perdure.server.service import Service
from perdure.server.settings import Settings
from perdure.server.tokens import new_token
from perdure.testing import Chunks, Delay, ScriptedDriver
from perdure.workers.worker import Worker

CLERK = perdure.AgentDefinition("clerk", system_prompt="Be brief.")
HELPER = perdure.AgentDefinition("helper", description="Helps.", system_prompt="Help.")
"""An agent that the others call: it makes the calls that it is asked for."""
COOK = perdure.AgentDefinition("cook", system_prompt="Cook.")
_EXTRA = {"presence_penalty", "frequency_penalty", "store"}
"""Fields that Open Responses requires, and OpenAI's types lack."""
_events: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@perdure.tool
def stock(item: str) -> str:
    """Count what is there."""
    return f"7 of {item}"


def said(request: ModelRequest) -> str:
    """Return the last text that the model is asked about."""
    return next(message.text for message in reversed(request.messages) if message.role == "user")


def answer(request: ModelRequest) -> Any:
    """Answer by the last words: with calls, slowly, or with an echo of all that was said."""
    words = said(request)
    if request.messages[-1].role == "tool":
        return "It is: " + "; ".join(message.text for message in request.messages if message.role == "tool")
    if "<conversation>" in words:
        return "A summary."
    if words.startswith("call "):
        _, names = words.split(" ", 1)
        calls: dict[str, dict[str, Any]] = {
            "stock": {"item": "tea"},
            "refund": {"order": 7},
            "weather": {"city": "Oslo"},
            "helper": {"prompt": "call refund"},
        }
        return [perdure.ToolCall(name, calls[name]) for name in names.split()]
    if words.startswith("slow"):
        return Chunks([piece for number in range(6) for piece in (f"piece {number}, ", Delay(0.12, ""))])
    if words.startswith("hang"):
        return Chunks(["It takes ", Delay(20, "")])
    if words.startswith("fail"):
        raise perdure.DriverError("the provider is down")
    if words.startswith("json"):
        return '{"city": "Oslo"}'
    return "You said: " + " / ".join(message.text for message in request.messages if message.role == "user")


@dataclass
class Reached:
    """A service that is reached over HTTP, and clients of it."""

    sessions: perdure.Sessions
    service: Service
    driver: ScriptedDriver
    url: str
    ada: openai.AsyncOpenAI
    bob: openai.AsyncOpenAI
    reader: openai.AsyncOpenAI
    """Ada's client, with a token that may only read."""


@asynccontextmanager
async def reached(
    store: str, *, tools: Sequence[Any] = (stock, refund), settings: Settings | None = None, works: bool = True
) -> AsyncIterator[Reached]:
    """Serve and work. If the block raises, runs are left as they are, as if the process had died."""
    driver = ScriptedDriver(answer)
    async with (
        perdure.connect(store, driver=driver, tools=list(tools), subagents=[HELPER]) as sessions,
        Worker(sessions) as worker,
    ):
        work = asyncio.ensure_future(worker.run() if works else asyncio.sleep(0))
        service = Service(sessions, settings, agents=[CLERK, COOK], runs_here=True)
        try:
            async with on_a_port(service) as url, AsyncExitStack() as clients:
                secrets = [(await new_token(service.gate._book, *who))[0] for who in (("ada",), ("bob",))]
                reading, _ = await new_token(service.gate._book, "ada", may_write=False)
                made = [_client(url, each) for each in (*secrets, reading)]
                for each in made:
                    await clients.enter_async_context(each)
                yield Reached(sessions, service, driver, url, *made)
            worker.stop()
            await work
        finally:
            await service.feeds.close()
            work.cancel()


def _client(url: str, secret: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=20)


over_http = with_service(reached)


def checked(response: Response) -> Response:
    """Return a response after checking that OpenAI's types know each field, with its type."""
    plain = response.model_dump(mode="json", by_alias=True, exclude_unset=True)
    strict = Response.model_validate({name: value for name, value in plain.items() if name not in _EXTRA})
    again = strict.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert again | {name: plain[name] for name in _EXTRA} == plain
    _require_no_extra(strict)
    return response


async def heard(stream: Any) -> list[Any]:
    """Return all events of a stream, each checked against OpenAI's types. Their numbers grow."""
    events = [each async for each in stream]
    for event in events:
        plain = event.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if "response" in plain:
            checked(event.response)
            plain["response"] = {name: value for name, value in plain["response"].items() if name not in _EXTRA}
        _require_no_extra(_events.validate_python(plain))
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    return events


def _require_no_extra(model: object) -> None:
    """Fail for a field that the types lack, at any depth."""
    if isinstance(model, pydantic.BaseModel):
        assert not model.model_extra, f"{type(model).__name__}: {model.model_extra}"
        for name in type(model).model_fields:
            _require_no_extra(getattr(model, name))
    elif isinstance(model, list):
        for each in model:
            _require_no_extra(each)


def text_in(events: list[Any]) -> str:
    """Return the text that the pieces of a stream add up to."""
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")
