"""Setting up the provider driver: packages, keys, clients, connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing

import pytest

from perdure.errors import ConfigurationError
from perdure.loop.drivers.provider import ProviderDriver
from perdure.loop.drivers.retry import RetryingDriver
from perdure.model.definition import ModelConfig
from perdure.protocols import Delta, ModelRequest

from . import wire
from .asking import HI, KEY_ENV, asking
from .loopback import Stream

HELLO = wire.chat({"content": "Hello."})
KEYS = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY", "MISTRAL_API_KEY")


async def hear(delta: Delta) -> None: ...


async def ask(model: ModelConfig | str) -> None:
    async with aclosing(ProviderDriver()) as driver:
        await driver.respond(ModelRequest(ModelConfig.of(model), HI), hear)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_it_imports_no_client() -> None:
    """The driver can be imported, and made, without its packages."""
    code = (
        "import sys; from perdure.loop.drivers.provider import ProviderDriver; ProviderDriver();"
        "print(*sorted(sys.modules.keys() & {'pydantic_ai', 'pydantic', 'openai', 'anthropic', 'google.genai'}))"
    )
    assert run(code) == ""


def test_a_missing_extra_says_what_to_install() -> None:
    """Without its packages, the driver says how to install them when it is first asked."""
    code = """
import asyncio, sys
sys.modules["pydantic_ai"] = None
from perdure.errors import ConfigurationError
from perdure.loop.drivers.provider import ProviderDriver
from perdure.model.definition import ModelConfig
from perdure.protocols import ModelRequest
try:
    asyncio.run(ProviderDriver().respond(ModelRequest(ModelConfig("openai:gpt-5"), ()), print))
except ConfigurationError as error:
    print(error)
"""
    assert "pip install 'perdure[llm]'" in run(code)


@pytest.mark.parametrize(
    ("model", "variable"),
    [
        ("openai:gpt-5", "OPENAI_API_KEY"),
        ("openai-chat:gpt-5", "OPENAI_API_KEY"),
        ("anthropic:claude-haiku-4-5", "ANTHROPIC_API_KEY"),
        ("google-gla:gemini-3-pro", "GOOGLE_API_KEY"),
        (ModelConfig("openai:gpt-5", api_key_env="MY_KEY"), "MY_KEY"),
        (ModelConfig("anthropic:claude-haiku-4-5", base_url="http://127.0.0.1:9", api_key_env="MY_KEY"), "MY_KEY"),
    ],
)
async def test_a_missing_key_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig | str, variable: str
) -> None:
    """Before any network, the error says which environment variable to set."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=f"environment variable {variable} is not set"):
        await ask(model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt-5", "Unknown model: gpt-5"),
        ("acme:gpt-5", "Unknown provider: acme"),
        ("mistral:large", "mistral"),
        (ModelConfig("azure:gpt-5", base_url="https://acme.example"), "takes no base_url"),
    ],
)
async def test_a_model_that_cannot_be_had(model: ModelConfig | str, said: str) -> None:
    """Each error names the cause: no provider, an unknown one, a missing package, or a setting it does not take."""
    with pytest.raises(ConfigurationError, match=said):
        await ask(model)


async def test_a_server_of_ones_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local server is asked with `base_url` alone."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    async with asking(monkeypatch, Stream(HELLO)) as made:
        config = ModelConfig("openai:llama", base_url=f"{made.server.url}/v1")
        reply = await made.driver.respond(ModelRequest(config, HI), hear)
        assert made.server.requests[0].path == "/v1/chat/completions"
    assert reply.message.text == "Hello."


async def test_connections_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to one model use one connection, whatever their settings; two at once open a client once."""
    async with asking(monkeypatch, *[Stream(HELLO)] * 4) as made:
        await made.ask("openai:gpt-4o")
        await made.ask("openai:gpt-4o", temperature=0.5)
        assert made.server.connections == 1
        await asyncio.gather(made.ask("openai:gpt-4o"), made.ask("openai:gpt-4o"))
        assert made.server.connections <= 2


async def test_closing_and_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that was closed opens new connections; closing twice, or unused, does nothing."""
    async with asking(monkeypatch, Stream(HELLO), Stream(HELLO)) as made:
        await made.driver.aclose()
        await made.ask("openai:gpt-4o")
        await RetryingDriver(made.driver).aclose()
        await made.driver.aclose()
        await made.ask("openai:gpt-4o")
        assert made.server.connections == 2


def test_one_driver_in_several_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections belong to an event loop, so each has its own, and none outlives it."""
    driver = ProviderDriver()

    async def once() -> str:
        async with asking(monkeypatch, Stream(HELLO)) as made:
            config = ModelConfig("openai:gpt-4o", base_url=f"{made.server.url}/v1", api_key_env=KEY_ENV)
            reply = await driver.respond(ModelRequest(config, HI), hear)
            await driver.aclose()
            return reply.message.text

    assert [asyncio.run(once()) for _ in range(2)] == ["Hello.", "Hello."]


async def test_a_change_of_model_reaches_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call goes to the new model, with the whole history."""
    async with asking(monkeypatch, Stream(HELLO), Stream(wire.claude({"type": "text", "text": "Hello."}))) as made:
        reply = await made.ask("openai:gpt-4o")
        await made.ask("anthropic:claude-haiku-4-5", (*HI, reply.message, *HI))
    first, second = made.server.requests
    assert (first.path, first.body["model"]) == ("/v1/chat/completions", "gpt-4o")
    assert (second.path.partition("?")[0], second.body["model"]) == ("/v1/messages", "claude-haiku-4-5")
    assert [message["role"] for message in second.body["messages"]] == ["user", "assistant", "user"]
