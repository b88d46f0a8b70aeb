"""The body of `POST /v1/responses`. Each parameter is followed, kept, or refused; none is ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.external import ExternalTool, external_tool, specs_of
from perdure.loop.response_format import Form
from perdure.model.definition import AgentDefinition, refuse_secrets
from perdure.model.execution import ModelOptions
from perdure.server.call import Call
from perdure.server.making import digest_of
from perdure.server.openai.errors import invalid, unsupported
from perdure.server.problems import Problem

# OpenAI's own limits.
_MOST_METADATA, _MOST_IN_KEY, _MOST_IN_VALUE = 16, 64, 512
_HOSTED = "tools are run by the agent, or by the client as functions; there are no hosted tools here"
_EFFORTS = {"none": "off", **{name: name for name in ("minimal", "low", "medium", "high", "xhigh", "max")}}
"""The levels of thinking, by OpenAI's names, with perdure's names."""
_BY_AGENT = "the agent's definition says how its model is asked; leave it out"


class CreateResponse(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request for a response. A parameter that is null is left out."""

    model: str | None = None
    """The name of an agent. Without it, the agent is that of the conversation, or the first."""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: dict[str, Any] | None = None


class Asked(msgspec.Struct, frozen=True):
    """A request that can be followed."""

    wanted: CreateResponse
    agent: AgentDefinition | None
    """The agent that the client names."""
    tools: tuple[ExternalTool, ...]
    output: Mapping[str, Any] | None
    """The JSON schema of the answer."""
    conversation: str | None
    model_options: ModelOptions | None

    @property
    def kept(self) -> dict[str, Any]:
        """Return the parts of the request that are kept with its run, to be shown later."""
        wanted = self.wanted
        strict = [each["name"] for each in wanted.tools or () if each.get("strict")]
        form = (wanted.text or {}).get("format") or {}
        about = {name: form[name] for name in ("type", "name", "description", "strict") if form.get(name) is not None}
        kept = {
            "previous": wanted.previous_response_id,
            "background": wanted.background,
            "conversation": self.conversation,
            "metadata": wanted.metadata,
            "format": about,
            "strict": strict,
            "user": wanted.user,
            "safety": wanted.safety_identifier,
            "cache": wanted.prompt_cache_key,
            "request": self.digest,
        }
        return {name: value for name, value in kept.items() if value}

    @property
    def digest(self) -> str:
        """Return a digest that tells it from other requests under the same key. `stream` does not count."""
        return digest_of(msgspec.structs.replace(self.wanted, stream=None, stream_options=None))

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that are sent with the message. They hold for its run alone."""
        given = {
            "instructions": self.wanted.instructions or None,
            "external_tools": self.tools or None,
            "output": self.output,
            "model_options": self.model_options,
        }
        return {name: value for name, value in given.items() if value is not None}


def read_asked(call: Call) -> Asked:
    """Return what a request asks for. Raise a Problem for what cannot be followed."""
    wanted: CreateResponse = call.body
    _require_plain(wanted)
    _require_together(wanted)
    if wanted.store is False and call.key is not None:
        raise invalid("Idempotency-Key", "nothing is kept by which the request could be known again; leave it out")
    check_metadata(wanted.metadata)
    agent = None if wanted.model is None else agent_of(call, wanted.model)
    tools = _tools(wanted.tools or ())
    schema, conversation = _schema(wanted.text or {}), _conversation(wanted.conversation)
    return Asked(wanted, agent, tools, schema, conversation, _model_options(wanted))


def agent_of(call: Call, name: str) -> AgentDefinition:
    """Return the agent that a model's name stands for. Raise a Problem if there is none."""
    agents = call.service.agents
    if name in agents:
        return agents[name]
    if "@" in name and name.partition("@")[0] in agents:
        raise unsupported("model", "the agent's definition says which model it asks; give the agent's name alone")
    raise invalid("model", f"no agent of that name is served; there are: {', '.join(agents)}")


def _require_plain(wanted: CreateResponse) -> None:
    """Refuse other values of parameters that have only one value here."""
    if wanted.tool_choice not in (None, "auto"):
        raise unsupported("tool_choice", "the agent decides which tools it calls; leave it out, or give 'auto'")
    if wanted.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "an agent may call several tools at once; leave it out")
    if wanted.truncation not in (None, "disabled"):
        raise unsupported("truncation", "a long conversation is compacted as the agent is set up; leave it out")
    if wanted.include:
        raise unsupported("include", "all there is to tell is told; leave it out")
    if wanted.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", "there is one tier; leave it out, or give 'auto'")
    if any((wanted.stream_options or {}).values()):
        raise unsupported("stream_options", "pieces are sent as they come; leave it out")
    if (wanted.text or {}).get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", _BY_AGENT)
    for name in (wanted.text or {}).keys() - {"format", "verbosity"}:
        raise unsupported(f"text.{name}", "this setting is not known")


def _model_options(wanted: CreateResponse) -> ModelOptions | None:
    """Return the options for the model. Raise a Problem for options that no model here can follow."""
    if wanted.max_tool_calls is not None:
        raise unsupported("max_tool_calls", "the agent's budget limits its steps; leave it out")
    if wanted.top_logprobs:
        raise unsupported("top_logprobs", "models are not asked for probabilities; leave it out")
    for name, value in (wanted.reasoning or {}).items():
        if name != "effort" and value is not None:
            raise unsupported(f"reasoning.{name}", "what a model thinks is told as it comes; leave it out")
    effort = (wanted.reasoning or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise invalid("reasoning.effort", f"expected one of {', '.join(_EFFORTS)}")
    # OpenAI's own ranges.
    for name, most in (("temperature", 2.0), ("top_p", 1.0), ("max_output_tokens", float("inf"))):
        value = getattr(wanted, name)
        if value is not None and not (1 if name == "max_output_tokens" else 0) <= value <= most:
            raise invalid(name, "it is out of range")
    thinking = None if effort is None else _EFFORTS[effort]
    options = ModelOptions(wanted.temperature, wanted.top_p, wanted.max_output_tokens, thinking)
    return None if options == ModelOptions() else options


def _require_together(wanted: CreateResponse) -> None:
    """Refuse parameters that contradict each other."""
    if wanted.previous_response_id is not None and wanted.conversation is not None:
        raise invalid("previous_response_id", "give `previous_response_id` or `conversation`, not both")
    if wanted.store is False:
        for name in ("background", "conversation", "previous_response_id"):
            if getattr(wanted, name):
                raise invalid("store", f"`{name}` needs a response that is kept; leave `store` out")
    if wanted.input is None or wanted.input == "" or wanted.input == []:
        raise invalid("input", "there is nothing to answer; give a text or a list of items")


def check_metadata(given: Mapping[str, str] | None) -> None:
    """Refuse metadata that is too large, or names a secret."""
    if len(given or {}) > _MOST_METADATA:
        raise invalid("metadata", f"expected at most {_MOST_METADATA} pairs, got {len(given or {})}")
    for name, value in (given or {}).items():
        if len(name) > _MOST_IN_KEY or len(value) > _MOST_IN_VALUE:
            raise invalid("metadata", f"a key has at most {_MOST_IN_KEY} characters, a value {_MOST_IN_VALUE}")
    try:
        refuse_secrets(given or {}, "$.metadata")
    except ConfigurationError as error:
        raise invalid("metadata", error.what) from None


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[ExternalTool, ...]:
    tools = tuple(_tool(each, place) for place, each in enumerate(given))
    try:
        specs_of(tools)
    except InvalidData as error:
        raise invalid("tools", error.problem) from None
    return tools


def _tool(given: Mapping[str, Any], place: int) -> ExternalTool:
    path = f"tools[{place}]"
    if given.get("type") != "function":
        raise unsupported(f"{path}.type", _HOSTED)
    known = {"type", "name", "description", "parameters", "strict"}
    # Clients write null for what they leave out.
    for name in (name for name, value in given.items() if name not in known and value is not None):
        raise unsupported(f"{path}.{name}", "a function has name, description, parameters and strict")
    try:
        return external_tool(given.get("name") or "", given.get("description") or "", given.get("parameters"))
    except ConfigurationError as error:
        raise invalid(f"{path}.name", error.what) from None


def _schema(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON schema that an answer has to fit, or None if it is plain text."""
    form = text.get("format") or {"type": "text"}
    if not isinstance(form, Mapping):
        raise invalid("text.format", "expected an object")
    if form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return {"type": "object"}
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), Mapping):
        raise invalid("text.format", "expected text, json_object, or json_schema with a schema")
    schema: Mapping[str, Any] = form["schema"]
    try:
        # Checked before the message is durable: otherwise its run would fail.
        Form.of(schema)
    except InvalidData as error:
        raise invalid("text.format", error.problem) from None
    return schema


def _conversation(given: str | Mapping[str, Any] | None) -> str | None:
    if given is None or isinstance(given, str):
        return given
    found = given.get("id")
    if not isinstance(found, str) or given.keys() != {"id"}:
        raise invalid("conversation", "expected an id, or an object that has an id")
    return found


def in_progress(given: str) -> Problem:
    """Return the Problem for a client that continues a response before it has ended."""
    detail = f"Response '{given}' has not ended yet. Wait for it, or cancel it: POST /v1/responses/{given}/cancel."
    return Problem(409, "ResponseInProgress", detail, headers={"Retry-After": "2"})
