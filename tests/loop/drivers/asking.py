"""Helpers for the tests of the provider driver: a key, a tool, and a question to a loopback server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from perdure.loop.drivers.provider import ProviderDriver
from perdure.model.definition import ModelConfig
from perdure.model.message import Message
from perdure.protocols import Delta, ModelReply, ModelRequest, ToolSpec

from .loopback import Loopback, Reply, Stream

KEY = "sk-loopback-never-stored-0123456789"
KEY_ENV = "PERDURE_LOOPBACK_KEY"

ADD = ToolSpec(
    "add",
    "Add two numbers.",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)

HI = (Message.user("hi"),)


class Asking:
    """A driver, its server, and the deltas received."""

    def __init__(self, server: Loopback) -> None:
        self.server = server
        self.driver = ProviderDriver()
        self.deltas: list[Delta] = []

    async def ask(self, model: str, messages: Sequence[Message] = HI, **given: Any) -> ModelReply:
        """Ask; fields of ModelConfig go there, the others into the request."""
        own = {name: given.pop(name) for name in list(given) if name in ModelConfig.__struct_fields__}
        config = ModelConfig(model, base_url=self.url(model), api_key_env=KEY_ENV, **own)
        self.deltas = []
        return await self.driver.respond(ModelRequest(config, messages, **given), self.hear)

    async def hear(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def url(self, model: str) -> str:
        return f"{self.server.url}/v1" if model.startswith("openai") else self.server.url

    @property
    def sent(self) -> Any:
        """The body of the last request that arrived."""
        return self.server.requests[-1].body


@asynccontextmanager
async def asking(monkeypatch: pytest.MonkeyPatch, *replies: Reply | Stream) -> AsyncIterator[Asking]:
    monkeypatch.setenv(KEY_ENV, KEY)
    async with Loopback(*replies) as server:
        made = Asking(server)
        async with aclosing(made.driver):
            yield made
