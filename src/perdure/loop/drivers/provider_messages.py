"""Turns our messages into pydantic-ai's, and back. This module imports pydantic-ai, so nothing imports it at the top.

Data that only its provider understands comes as pydantic-ai's own JSON. It is kept as that, in three forms of `Opaque`.
`{"next": …}` belongs to the next part, and `{"response": …}` to the whole message. `{"part": …}` is a part that we do
not model. A tool call carries its own data. All of it goes back to its provider, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError
from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    DocumentUrl,
    FilePart,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    SystemPromptPart,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
    VideoUrl,
)

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.message import Media, Message, Opaque, Part, Text, Thinking, ToolCall
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, JSON, clean_text
from perdure.protocols import Delta

INVALID_JSON = "INVALID_JSON"
"""The only argument of a call with unreadable arguments. It is pydantic-ai's word, so that it goes back as it came."""

_URLS: dict[str, type[ImageUrl | AudioUrl | VideoUrl]] = {"image": ImageUrl, "audio": AudioUrl, "video": VideoUrl}
_TEXTS = {f"application/{name}" for name in ("json", "xml", "yaml", "x-yaml", "toml", "javascript")}
_MODELLED = {
    "text": {"content"},
    "thinking": {"content", "id", "signature"},
    "tool-call": {"tool_name", "args", "tool_call_id"},
    "file": {"content"},
}
_NAMING = {"part_kind", "provider_name"}
_NOT_THE_PROVIDERS = {"parts", "usage", "timestamp", "kind", "state", "finish_reason", "provider_name"}
_ON_EVERY_RESPONSE = {"finish_reason", "timestamp"}


class Origin(NamedTuple):
    """The source or destination of a message: `provider` as our parts name it, `system` as pydantic-ai does."""

    provider: str
    system: str


class CallIds:
    """Ids for tool calls, unique in a conversation. They are the provider's own, unless a server uses one twice."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._taken = {call.id for message in messages for call in message.tool_calls}

    def claim(self, wanted: str) -> str:
        others = (f"{wanted or 'call'}-{number}" for number in count(2))
        claimed = wanted if wanted and wanted not in self._taken else next(x for x in others if x not in self._taken)
        self._taken.add(claimed)
        return claimed


class Deltas:
    """A converter of one streamed answer's events into deltas."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._calls: dict[int, tuple[str, str]] = {}

    def of(self, event: ModelResponseStreamEvent) -> Delta | None:
        if isinstance(event, PartStartEvent):
            return self._start(event.index, event.part)
        if not isinstance(event, PartDeltaEvent):
            return None
        delta = event.delta
        if isinstance(delta, TextPartDelta):
            return _said("text", delta.content_delta)
        if isinstance(delta, ThinkingPartDelta):
            return _said("thinking", delta.content_delta)
        if isinstance(delta, ToolCallPartDelta) and event.index in self._calls and delta.args_delta:
            return Delta("tool_call", _json_text(delta.args_delta), *self._calls[event.index])
        return None

    def _start(self, index: int, part: ModelResponsePart) -> Delta | None:
        if isinstance(part, TextPart):
            return _said("text", part.content)
        if isinstance(part, ThinkingPart):
            return _said("thinking", part.content)
        if isinstance(part, ToolCallPart):
            call = self._calls.setdefault(index, (self._ids.claim(part.tool_call_id), part.tool_name))
            return Delta("tool_call", _json_text(part.args), *call)
        return None


def to_pydantic(system_prompt: str, messages: Iterable[Message], destination: Origin) -> list[ModelMessage]:
    """Return the conversation for a provider. Everything that was said between two answers becomes one request."""
    names: dict[str, str] = {}
    turns: list[ModelMessage] = []
    said: list[ModelRequestPart] = [SystemPromptPart(system_prompt)] if system_prompt.strip() else []
    for message in messages:
        if message.role != "assistant":
            said.extend(_request_parts(message, names))
            continue
        names.update((call.id, call.name) for call in message.tool_calls)
        answer = _response(message, destination)
        # An answer that has nothing for this provider is left out, and the requests around it become one.
        if answer.parts:
            turns.extend([ModelRequest(said), answer] if said else [answer])
            said = []
    return [*turns, ModelRequest(said)] if said else turns


def from_pydantic(response: ModelResponse, origin: Origin, ids: CallIds) -> Message:
    """Return an answer as our message."""
    parts = [ours for part in response.parts for ours in _our_parts(part, origin, ids)]
    # A refusal may come beside the parts, and would be lost otherwise.
    refusal = (response.provider_details or {}).get("refusal")
    if isinstance(refusal, str) and not any(isinstance(part, Text) for part in parts):
        parts.append(Text(clean_text(refusal)))
    if _is_bound(parts) or (response.provider_details or {}).keys() - _ON_EVERY_RESPONSE:
        fields = {key: value for key, value in _plain(response).items() if key not in _NOT_THE_PROVIDERS}
        parts.append(Opaque(origin.provider, {"response": fields}))
    return Message.assistant(*parts)


def usage_of(response: ModelResponse) -> Usage:
    """Return the tokens as the provider has counted them, and their cost."""
    used, cost = response.usage, _cost(response)
    return Usage(
        used.input_tokens,
        used.output_tokens,
        used.cache_read_tokens,
        used.cache_write_tokens,
        used.output_reasoning_tokens,
        0.0 if cost is None else cost,
        used.input_tokens + used.output_tokens if cost is None else 0,
    )


def _cost(response: ModelResponse) -> float | None:
    """Return dollars, from the price list of genai-prices; None if it does not know the model."""
    if response.usage.cost is not None:
        return float(response.usage.cost)
    try:
        return float(response.cost().total_price) if response.model_name else None
    except (LookupError, ValueError):
        return None


def _said(kind: Any, text: str | None) -> Delta | None:
    return Delta(kind, clean_text(text)) if text else None


def _json_text(arguments: str | Mapping[str, Any] | None) -> str:
    if isinstance(arguments, str):
        return clean_text(arguments)
    return msgspec.json.encode(arguments).decode() if arguments else ""


def _request_parts(message: Message, names: Mapping[str, str]) -> Iterator[ModelRequestPart]:
    if message.role == "system":
        yield SystemPromptPart(message.text)
    elif message.role == "user":
        yield UserPromptPart(_prompt(message))
    # pydantic-ai wants the tool's name with each result. A result that lacks it has the name of its call.
    for result in message.tool_results:
        name = result.name or names.get(result.call_id) or "unknown"
        yield ToolReturnPart(name, result.text, result.call_id, outcome="failed" if result.is_error else "success")


def _prompt(message: Message) -> str | Sequence[UserContent]:
    if not any(isinstance(part, Media) for part in message.parts):
        return message.text
    said: list[UserContent] = []
    for part in message.parts:
        if isinstance(part, Text):
            said.append(part.text)
        elif isinstance(part, Media):
            said += _attachment(part)
    return said


def _attachment(media: Media) -> Iterator[UserContent]:
    """Yield a file, and its name before it: most providers have no other place for a name."""
    if media.name:
        kind = media.media_type.partition("/")[0]
        yield f"[{kind if kind in _URLS else 'file'}: {media.name}]"
    if media.data is not None:
        yield BinaryContent(media.data, media_type=_sent_type(media), identifier=media.name)
        return
    address = _URLS.get(media.media_type.partition("/")[0], DocumentUrl)
    yield address(media.url or "", media_type=media.media_type, identifier=media.name)


def _sent_type(media: Media) -> str:
    """Return a type that every provider accepts: of texts, some accept only plain ones."""
    is_text = media.media_type.startswith("text/") or media.media_type in _TEXTS
    return "text/plain" if is_text else media.media_type


def _response(message: Message, destination: Origin) -> ModelResponse:
    parts: list[ModelResponsePart] = []
    envelope: Mapping[str, Any] = EMPTY
    beside: Mapping[str, Any] = EMPTY
    for part in message.parts:
        if not isinstance(part, Opaque):
            theirs = _response_part(part, beside, destination)
            parts.extend([theirs] if theirs else [])
            beside = EMPTY
        elif part.provider == destination.provider:
            match part.body:
                case {"next": Mapping() as beside}:
                    pass
                case {"response": Mapping() as envelope}:
                    pass
                case {"part": Mapping() as whole}:
                    revived = _revived({**whole, "provider_name": destination.system})
                    parts.extend([revived] if revived else [])
    if not envelope:
        return ModelResponse(parts)
    plain = {**envelope, "kind": "response", "parts": [], "provider_name": destination.system}
    response = _validated(plain) or ModelResponse(parts)
    response.parts = parts  # not through the check above: they are pydantic-ai's own objects already
    return response


def _response_part(part: Part, beside: Mapping[str, Any], destination: Origin) -> ModelResponsePart | None:
    """Return the part for a provider, or None. Thinking goes only to its own provider, and a file needs its bytes."""
    system = destination.system
    if isinstance(part, Text):
        return _with(beside, TextPart(part.text), system) if part.text.strip() or beside else None
    if isinstance(part, Thinking) and part.provider == destination.provider:
        plain = ThinkingPart(part.text, id=part.id, signature=part.signature, provider_name=system)
        return _with(beside, plain, system)
    if isinstance(part, ToolCall):
        is_own = part.provider == destination.provider and isinstance(part.opaque, Mapping)
        return _with(part.opaque if is_own else EMPTY, ToolCallPart(part.name, dict(part.arguments), part.id), system)
    if isinstance(part, Media) and part.data is not None:
        return _with(beside, FilePart(BinaryContent(part.data, media_type=part.media_type)), system)
    return None


def _with(beside: Mapping[str, Any], part: ModelResponsePart, system: str) -> ModelResponsePart:
    """Return the part with the data that its provider sent beside it."""
    if not beside:
        return part
    # The data may be from another release of pydantic-ai: then the part goes without it.
    return _revived({**beside, **_plain_part(part), "provider_name": system}) or part


def _our_parts(part: ModelResponsePart, origin: Origin, ids: CallIds) -> Iterator[Part]:
    plain = _plain_part(part)
    modelled = _MODELLED.get(part.part_kind)
    if modelled is None:
        yield Opaque(origin.provider, {"part": plain})
        return
    beside = {key: value for key, value in plain.items() if key not in modelled | _NAMING}
    if isinstance(part, ToolCallPart):
        call_id, arguments = ids.claim(part.tool_call_id), _arguments(part)
        yield ToolCall(part.tool_name, arguments, call_id, origin.provider if beside else None, beside or None)
        return
    if beside:
        yield Opaque(origin.provider, {"next": beside})
    if isinstance(part, ThinkingPart):
        yield Thinking(clean_text(part.content), part.signature or None, origin.provider, part.id)
    elif isinstance(part, FilePart):
        yield Media(part.content.media_type, data=part.content.data)
    elif isinstance(part, TextPart) and (part.content or beside):
        yield Text(clean_text(part.content))


def _arguments(part: ToolCallPart) -> Mapping[str, Any]:
    """Return a call's arguments. If they are not a JSON object that can be stored, return them under `INVALID_JSON`."""
    arguments = part.args_as_dict()
    try:
        codec.check_json(arguments)
    except InvalidData:
        return {INVALID_JSON: clean_text(part.args if isinstance(part.args, str) else repr(part.args))}
    return arguments


def _is_bound(parts: Iterable[Part]) -> bool:
    """Tell whether a part has a meaning only together with the rest of its response."""
    return any(
        isinstance(part, Opaque)
        or (isinstance(part, Thinking) and part.signature is not None)
        or (isinstance(part, ToolCall) and part.opaque is not None)
        for part in parts
    )


def _plain(response: ModelResponse) -> dict[str, Any]:
    """Return a response as JSON that can be stored."""
    [dumped] = ModelMessagesTypeAdapter.dump_python([response], mode="json", exclude_none=True, warnings=False)
    plain: dict[str, Any] = _settled(dumped)
    return plain


def _settled(value: JSON) -> JSON:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no NaN and no infinity
    if isinstance(value, dict):
        return {clean_text(key): _settled(item) for key, item in value.items()}
    return [_settled(item) for item in value] if isinstance(value, list) else value


def _plain_part(part: ModelResponsePart) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(ModelResponse([part]))["parts"][0]
    return plain


def _revived(plain_part: Mapping[str, Any]) -> ModelResponsePart | None:
    response = _validated({"kind": "response", "parts": [plain_part]})
    return response.parts[0] if response else None


def _validated(plain: Mapping[str, Any]) -> ModelResponse | None:
    """Return a response from its JSON. None if this pydantic-ai cannot read what another release of it has written."""
    try:
        [response] = ModelMessagesTypeAdapter.validate_json(msgspec.json.encode([plain]))
    except ValidationError:
        return None
    assert isinstance(response, ModelResponse)
    return response
