"""Asks the models of every provider through pydantic-ai, which is imported at the first request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.errors import ConfigurationError
from perdure.model.definition import ModelConfig
from perdure.protocols import ModelReply, ModelRequest, OnDelta

if TYPE_CHECKING:
    from perdure.loop.drivers.provider_client import Clients


class ProviderDriver:
    """A driver that sends a streamed call to the provider that the request's model names. It does not retry."""

    def __init__(self) -> None:
        self._clients: dict[asyncio.AbstractEventLoop, Clients] = {}
        self._known: set[str] = set()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        """Ask the provider of the `request`'s model. Pieces of the answer are passed to `on_delta` as they come."""
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        return await clients.ask(request, on_delta)

    async def require(self, model: ModelConfig) -> None:
        """Raise ConfigurationError, before any network, if a `model` cannot be asked from here."""
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        await clients.require(model)

    async def require_known(self, model: ModelConfig) -> None:
        """Raise ConfigurationError if a `model` can be asked nowhere: it names no provider, or an unknown one.

        A key or a package that is missing here is reported when the model is asked.
        """
        if model.name in self._known:
            return
        try:
            clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        except ConfigurationError:  # without the packages no provider is known; `respond` says which to install
            return
        await clients.require_known(model)
        self._known.add(model.name)

    async def name_key(self, model: ModelConfig) -> str:
        """Return a name for the key that a `model` is asked with: its provider and a fingerprint."""
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        return await clients.name_key(model)

    async def aclose(self) -> None:
        """Close the connections of this event loop. The driver can be used again; it then opens new ones."""
        clients = self._clients.pop(asyncio.get_running_loop(), None)
        if clients is not None:
            await clients.aclose()

    async def _open(self) -> Clients:
        """Return clients for this event loop, and drop those of closed loops: their connections are gone."""
        kind = await asyncio.to_thread(_import)  # it takes a second, while other sessions continue
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            del self._clients[loop]
        # Another task may have put some there while this one was importing.
        return self._clients.setdefault(asyncio.get_running_loop(), kind())


def _import() -> type[Clients]:
    try:
        from perdure.loop.drivers.provider_client import Clients
    except ImportError as error:
        raise ConfigurationError(
            f"Asking a provider's model needs packages that are not installed ({error}). "
            "Install them: pip install 'perdure[llm]'. The model 'offline' needs none."
        ) from None
    return Clients
