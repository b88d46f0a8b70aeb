"""Models of pydantic-ai, made from a ModelConfig and asked with a ModelRequest.

This module imports pydantic-ai, so nothing imports it at the top.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import dropwhile
from typing import Any, cast

import msgspec
from pydantic_ai.direct import model_request_stream
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import InstructionPart, ModelResponse
from pydantic_ai.models import Model, ModelRequestParameters, infer_model
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from perdure.errors import ConfigurationError, RequestRefused, TransientDriverError
from perdure.loop.drivers.pacing import fingerprint
from perdure.loop.drivers.provider_errors import FAILURES, driver_error, keys_of, not_set_up, unfit, unknown, unset
from perdure.loop.drivers.provider_messages import CallIds, Deltas, Origin, from_pydantic, to_pydantic, usage_of
from perdure.model.definition import ModelConfig
from perdure.model.message import Media
from perdure.model.step import InferenceResponse
from perdure.protocols import ModelReply, ModelRequest, OnDelta, ToolSpec

_RENAMED = {"google-gla": "google", "google-vertex": "google-cloud"}  # as pydantic-ai 1 called them
_THINKING: dict[str, Any] = {"on": True, "off": False} | {
    effort: effort for effort in ("minimal", "low", "medium", "high", "xhigh", "max")
}
_FORM = "Answer with nothing but JSON that fits this JSON schema:\n\n{schema}"


class Clients:
    """The clients of one event loop, to which their connections are bound: one for each model and server."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str | None, str | None], Model[Any]] = {}
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()

    async def ask(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        model = await self._model(request.model)
        try:
            response = await _stream(model, request, on_delta)
        except FAILURES as error:
            # `from None`, because what caused it may quote the key.
            raise driver_error(error, request.model, model) from None
        except (RuntimeError, AssertionError) as error:  # how pydantic-ai tells of a file that a model does not take
            if not any(isinstance(part, Media) for message in request.messages for part in message.parts):
                raise
            raise RequestRefused(request.model.name, f"it does not take a file of this type ({error})") from None
        if not _is_whole(response):
            raise TransientDriverError(request.model.name, "the stream broke off before the answer was complete")
        return _reply(response, request, origin_of(request.model, model))

    async def require(self, config: ModelConfig) -> None:
        """Raise ConfigurationError if a model's client cannot be made."""
        await self._model(config)

    async def require_known(self, config: ModelConfig) -> None:
        """Raise ConfigurationError if no provider is named, or an unknown one."""
        await asyncio.to_thread(check_known, config)  # it imports

    async def name_key(self, config: ModelConfig) -> str:
        """Return a name for the key that a model is asked with. Without a key, it is the provider's name."""
        model = await self._model(config)
        provider = origin_of(config, model).provider
        keys = sorted({key.strip() for key in keys_of(model) if key.strip()})
        return f"{provider}:{fingerprint(' '.join(keys))}" if keys else provider

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def _model(self, config: ModelConfig) -> Model[Any]:
        key = (config.name, config.base_url, config.api_key_env)
        # One at a time: two tasks must not open two clients for one key.
        async with self._opening:
            if key not in self._models:
                model = await asyncio.to_thread(open_model, config)  # it imports, and reads certificates
                self._models[key] = await self._stack.enter_async_context(model)
        return self._models[key]


def open_model(config: ModelConfig) -> Model[Any]:
    """Return a model with its client. Raise ConfigurationError, before any network, if something is missing."""
    name = config.name.partition(":")[2]
    try:
        model = infer_model(f"{_kind(config)}:{name}" if name else config.name, partial(_provider, config))
    except UserError as error:
        raise not_set_up(config, error) from None
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{config.name} cannot be asked: {error}.") from None
    _settle_key(config, model)
    _switch_off_retries(model)
    return model


def check_known(config: ModelConfig) -> None:
    """Raise ConfigurationError if a model can be asked nowhere. What is missing only here shows at the first call."""
    try:
        if ":" in config.name:
            infer_provider_class(_kind(config))
        else:
            infer_model(config.name)
    except ImportError:
        return
    except (UserError, ValueError) as error:
        raise unknown(config, error) from None


def origin_of(config: ModelConfig, model: Model[Any]) -> Origin:
    """Return the origin of what this model sends. A server with its own URL is not the provider that it imitates."""
    kind = _kind(config).removesuffix("-responses")
    host = config.base_url.partition("//")[2].partition("/")[0] if config.base_url else ""
    return Origin(f"{kind}@{host}" if host else kind, model.system)


def settings_of(config: ModelConfig) -> ModelSettings:
    settings = dict(config.settings)
    if config.temperature is not None:
        settings["temperature"] = config.temperature
    if config.max_tokens is not None:
        settings["max_tokens"] = config.max_tokens
    if config.thinking is not None:
        if config.thinking not in _THINKING:
            raise ConfigurationError(f"thinking is one of {', '.join(_THINKING)}, not {config.thinking!r}.")
        settings["thinking"] = _THINKING[config.thinking]
    return cast(ModelSettings, settings)


def parameters_of(request: ModelRequest, model: Model[Any]) -> ModelRequestParameters:
    """Return the tools and the form of the answer. The form is enforced if the model can do that, or else asked for."""
    words: list[str] = []
    form: dict[str, Any] = {}
    if request.response_format is not None:
        schema = _plain(request.response_format)
        if _is_of_object(schema):
            mode = "native" if _answers_natively(request, model) else "prompted"
            form = {"output_mode": mode, "output_object": OutputObjectDefinition(schema)}
        else:  # providers enforce objects only
            words.append(_FORM.format(schema=msgspec.json.encode(schema).decode()))
    return ModelRequestParameters(
        function_tools=[_tool(spec) for spec in request.tools],
        instruction_parts=[InstructionPart(text) for text in words],
        **form,
    )


def _tool(spec: ToolSpec) -> ToolDefinition:
    return ToolDefinition(
        name=spec.name, parameters_json_schema=_plain(spec.parameters), description=spec.description or None
    )


async def _stream(model: Model[Any], request: ModelRequest, on_delta: OnDelta) -> ModelResponse:
    parameters = parameters_of(request, model)
    said = await request.messages_with_files()
    turns = to_pydantic(request.system_prompt, said, origin_of(request.model, model))
    if _needs_preparing(request, model):
        turns = model.prepare_messages(turns, parameters)
    deltas = Deltas(CallIds(request.messages))
    async with model_request_stream(
        model, turns, model_settings=settings_of(request.model), model_request_parameters=parameters
    ) as stream:
        async for event in stream:
            delta = deltas.of(event)
            if delta is not None:
                await on_delta(delta)
    return stream.get()


def _needs_preparing(request: ModelRequest, model: Model[Any]) -> bool:
    """Tell whether this history, sent as it is, would be refused or lose its order.

    Others are not prepared: for many models, that adds a sentence to the system prompt and rewrites what users said.
    """
    later = dropwhile(lambda message: message.role == "system", request.messages)
    profile = cast(Mapping[str, Any], model.profile)
    return profile.get("tool_call_id_length") is not None or any(message.role == "system" for message in later)


def _reply(response: ModelResponse, request: ModelRequest, origin: Origin) -> ModelReply:
    details = response.provider_details or {}
    return ModelReply(
        from_pydantic(response, origin, CallIds(request.messages)),
        InferenceResponse(
            finish_reason=response.finish_reason or details.get("finish_reason"),
            usage=usage_of(response),
            model=response.model_name,
            provider=response.provider_name,
            response_id=response.provider_response_id,
        ),
    )


def _is_whole(response: ModelResponse) -> bool:
    """Tell whether the stream ran to its end. For pydantic-ai, one that closes early without an error is finished."""
    if response.state == "incomplete":
        return False
    if (response.provider_details or {}).get("finish_reason"):
        return True
    return response.finish_reason is not None and response.usage.has_values()


def _kind(config: ModelConfig) -> str:
    """Return pydantic-ai's name of the provider. With a base URL, `openai` is any server with its chat completions."""
    if config.provider == "openai" and config.base_url:
        return "openai-chat"
    return _RENAMED.get(config.provider, config.provider)


def _provider(config: ModelConfig, name: str) -> Provider[Any]:
    given: dict[str, str] = {}
    if config.base_url:
        given["base_url"] = config.base_url
    if config.api_key_env:
        given["api_key"] = _key(config, config.api_key_env)
    if not given:
        return infer_provider(name)
    provider = infer_provider_class(name)
    foreign = given.keys() - inspect.signature(provider).parameters.keys()
    if foreign:
        raise ConfigurationError(
            f"{config.name} takes no {' and no '.join(sorted(foreign))}. Leave it out; {name} has variables of its own."
        )
    return provider(**given)


def _key(config: ModelConfig, variable: str) -> str:
    key = os.environ.get(variable, "").strip()  # a secret that is mounted as a file ends with a newline
    if not key:
        raise unset(config, variable)
    return key


def _settle_key(config: ModelConfig, model: Model[Any]) -> None:
    """Make a client's key fit for a header, like one from `api_key_env`. Raise ConfigurationError if it cannot be."""
    client: Any = getattr(model.provider, "client", None)
    if isinstance(getattr(client, "api_key", None), str):
        client.api_key = client.api_key.strip()
    for key in keys_of(model):
        if not (key.strip().isascii() and key.strip().isprintable()):
            raise unfit(config)


def _switch_off_retries(model: Model[Any]) -> None:
    """Switch off the retries of a provider's client, which nothing reports. Only `RetryingDriver` retries."""
    client: Any = getattr(model.provider, "client", None)
    if hasattr(client, "max_retries"):
        client.max_retries = 0


def _answers_natively(request: ModelRequest, model: Model[Any]) -> bool:
    """Tell whether the model can be held to a schema. Earlier Gemini models cannot while they have tools."""
    profile = cast(Mapping[str, Any], model.profile)
    if request.tools and not profile.get("google_supports_tool_combination", True):
        return False
    return bool(profile.get("supports_json_schema_output"))


def _is_of_object(schema: Mapping[str, Any]) -> bool:
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        schema = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    return schema.get("type") == "object"


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that may be changed: pydantic-ai fits schemas to each provider."""
    plain: dict[str, Any] = msgspec.to_builtins(dict(mapping))
    return plain
