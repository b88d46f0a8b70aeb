"""Asks the models of every provider, over pydantic-ai, which is imported at the first question."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.errors import ConfigurationError
from perdure.model.definition import ModelConfig
from perdure.protocols import ModelReply, ModelRequest, OnDelta

if TYPE_CHECKING:
    from perdure.loop.drivers.provider_client import Clients


class ProviderDriver:
    """One model call, always streamed, to whichever provider the request's model names. It does not retry."""

    def __init__(self) -> None:
        self._clients: dict[asyncio.AbstractEventLoop, Clients] = {}
        self._known: set[str] = set()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        return await clients.ask(request, on_delta)

    async def require(self, model: ModelConfig) -> None:
        """Raise ConfigurationError, before any network, if a model cannot be asked from here."""
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        await clients.require(model)

    async def require_known(self, model: ModelConfig) -> None:
        """Raise ConfigurationError if a model can be asked nowhere: it names no provider, or one that nobody knows.

        A key or a package that is missing here is found out when the model is asked.
        """
        if model.name in self._known:
            return
        try:
            clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        except ConfigurationError:  # nothing is known of any provider without the packages, which `respond` says
            return
        await clients.require_known(model)
        self._known.add(model.name)

    async def name_key(self, model: ModelConfig) -> str:
        """Return a name for the key that a model is asked with: its provider and a fingerprint."""
        clients = self._clients.get(asyncio.get_running_loop()) or await self._open()
        return await clients.name_key(model)

    async def aclose(self) -> None:
        """Close the connections of this event loop. The driver can be used again; it then opens new ones."""
        clients = self._clients.pop(asyncio.get_running_loop(), None)
        if clients is not None:
            await clients.aclose()

    async def _open(self) -> Clients:
        """Clients for this event loop; those of loops that are closed went with them."""
        kind = await asyncio.to_thread(_import)  # it takes a second, in which other sessions go on
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            del self._clients[loop]
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
