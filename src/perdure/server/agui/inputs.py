"""The input of an AG-UI client: the conversation as it knows it, its own tools, and answers to what a run waits for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class _Form(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """An object of the protocol. A field that is not known here is refused: it would be ignored otherwise."""


class DataSource(_Form, tag_field="type", tag="data", kw_only=True):
    value: str
    mime_type: str


class UrlSource(_Form, tag_field="type", tag="url", kw_only=True):
    value: str
    mime_type: str | None = None


class FileSource(_Form, tag_field="type", tag="file", kw_only=True):
    value: str
    provider: str | None = None
    mime_type: str | None = None


class TextPart(_Form, tag_field="type", tag="text", kw_only=True):
    text: str
    id: str | None = None
    metadata: Any = None


class _MediaPart(_Form, tag_field="type", kw_only=True):
    source: DataSource | UrlSource | FileSource
    id: str | None = None
    metadata: Any = None


class ImagePart(_MediaPart, tag="image", kw_only=True):
    pass


class AudioPart(_MediaPart, tag="audio", kw_only=True):
    pass


class VideoPart(_MediaPart, tag="video", kw_only=True):
    pass


class DocumentPart(_MediaPart, tag="document", kw_only=True):
    pass


ContentPart = TextPart | ImagePart | AudioPart | VideoPart | DocumentPart


class _Message(_Form, tag_field="role", kw_only=True):
    id: Id
    metadata: dict[str, Any] | None = None
    subagent_run_id: str | None = None


class _SealedMessage(_Message, kw_only=True):
    encrypted_value: str | None = None
    """Content that only its own agent understands. It is left out here: the model may be another's."""


class _NamedMessage(_SealedMessage, kw_only=True):
    name: str | None = None


class DeveloperMessage(_NamedMessage, tag="developer", kw_only=True):
    content: str


class SystemMessage(_NamedMessage, tag="system", kw_only=True):
    content: str


class UserMessage(_NamedMessage, tag="user", kw_only=True):
    content: str | list[ContentPart]


class FunctionCall(_Form, kw_only=True):
    name: str
    arguments: str


class CallMade(_Form, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    encrypted_value: str | None = None
    metadata: dict[str, Any] | None = None


class AssistantMessage(_NamedMessage, tag="assistant", kw_only=True):
    content: str | None = None
    tool_calls: list[CallMade] | None = None


class ToolMessage(_SealedMessage, tag="tool", kw_only=True):
    content: str | list[ContentPart]
    tool_call_id: str
    error: str | None = None


class ActivityMessage(_Message, tag="activity", kw_only=True):
    activity_type: str
    content: dict[str, Any]


class ReasoningMessage(_SealedMessage, tag="reasoning", kw_only=True):
    content: str


Said = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage
AnyMessage = Said | ActivityMessage | ReasoningMessage


class FrontEndTool(_Form, kw_only=True):
    """A tool that the front end calls itself."""

    name: str
    description: str
    parameters: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class Context(_Form, kw_only=True):
    description: str
    value: str


class ResumeEntry(_Form, kw_only=True):
    """The answer to one interrupt."""

    interrupt_id: str
    status: Literal["resolved", "cancelled"]
    payload: Any = None
    metadata: dict[str, Any] | None = None


class RunAgentInput(_Form, kw_only=True):
    """A request to run an agent."""

    thread_id: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    run_id: Id
    messages: list[AnyMessage]
    protocol_version: str | None = None
    parent_run_id: str | None = None
    state: Any = None
    tools: list[FrontEndTool] | None = None
    context: list[Context] | None = None
    forwarded_props: Any = None
    resume: list[ResumeEntry] | None = None
