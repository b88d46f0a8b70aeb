"""The names of attributes, and the values that are the same in all spans of a model."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

from perdure.model.definition import ModelConfig

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
CALL_ID = "gen_ai.tool.call.id"
ERROR = "error.type"

INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
ARGUMENTS = "gen_ai.tool.call.arguments"
RESULT = "gen_ai.tool.call.result"

OWNER = "perdure.owner"
RUN = "perdure.run.id"
STATUS = "perdure.run.status"
STOP_REASON = "perdure.run.stop_reason"
COST = "perdure.cost"
BRANCHES = "perdure.branches"
CANCELLED = "perdure.cancelled"
AWAITS = "perdure.tool.awaits_approval"
LINK = "perdure.link"

_PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "google-cloud": "gcp.vertex_ai",
    "google-vertex": "gcp.vertex_ai",
    "grok": "x_ai",
    "mistral": "mistral_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "xai": "x_ai",
}
"""The conventions' names of providers that have another name here."""
_MOST = 256
"""The most models that are remembered. If a process asks more, all are forgotten."""


class Asked(NamedTuple):
    """The values that every call of a model has in its span and metrics."""

    name: str
    """The name of the model, without its provider."""
    span_name: str
    provider: str
    chat: dict[str, Any]
    """The attributes of a `chat` span, except those of its session."""
    measured: dict[str, Any]
    """The attributes of its metrics."""


_asked: dict[int, tuple[ModelConfig, Asked]] = {}


def asked(model: ModelConfig) -> Asked:
    """Return the values that every call of a model has."""
    # By identity, which needs no comparison of whole configurations: a run asks with the same object each time.
    known = _asked.get(id(model))
    if known is not None and known[0] is model:
        return known[1]
    made = _made(model)
    if len(_asked) >= _MOST:
        _asked.clear()
    _asked[id(model)] = model, made  # with the model itself: as long as it lives, no other object gets its id
    return made


def _made(model: ModelConfig) -> Asked:
    prefix, _, rest = model.name.partition(":")
    name, provider = rest or model.name, _PROVIDERS.get(prefix, prefix)
    measured = {OPERATION: "chat", PROVIDER: provider, REQUEST_MODEL: name, **_server_of(model.base_url)}
    chat = dict(measured)
    if model.temperature is not None:
        chat["gen_ai.request.temperature"] = float(model.temperature)
    if model.max_tokens is not None:
        chat["gen_ai.request.max_tokens"] = model.max_tokens
    top_p = model.settings.get("top_p")
    if isinstance(top_p, int | float):
        chat["gen_ai.request.top_p"] = float(top_p)
    return Asked(name, f"chat {name}", provider, chat, measured)


def _server_of(url: str | None) -> dict[str, Any]:
    """Return the host and the port of an address, and nothing else: the rest may contain a secret."""
    try:
        parts = urlsplit(url or "")
        host, port = parts.hostname, parts.port
    except ValueError:
        return {}
    if not host:
        return {}
    return {"server.address": host} if port is None else {"server.address": host, "server.port": port}
