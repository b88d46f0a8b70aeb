"""The events of a run. Each names its loop, session and agent, and is numbered."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
from msgspec.structs import force_setattr

from perdure.model.execution import CallAnswer, ExecutionStatus, ExternalToolSpec, ModelOptions
from perdure.model.ids import now
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.message import Message, Role, ToolCall
from perdure.model.secrets import without_secrets
from perdure.model.step import InferenceResponse, ToolExecution
from perdure.model.stop import StopSignal
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, JSON, ErrorRecord, Value, freeze


class LoopConfigSnapshot(Value, frozen=True):
    """The model that ran a loop, and how it was asked. It never has a secret."""

    model: str
    """The name of the model, without its provider."""
    provider: str
    """The name of the provider."""
    config_id: str | None = None
    """An id that equal configurations have in every process."""
    name: str | None = None
    """The name of the model with its provider, as in `ModelConfig.name`."""
    api: str | None = None
    """The provider's API that was asked."""
    base_url: str | None = None
    """The address of that API, without credentials."""
    reasoning: bool | None = None
    """True if the model can think before it answers."""
    context_window: int | None = None
    """The number of tokens that fit into a prompt."""
    max_tokens: int | None = None
    """The number of tokens that one answer may have."""
    thinking_level: str | None = None
    """The amount of thinking that the model was asked for."""
    temperature: float | None = None
    """The sampling temperature."""

    def __post_init__(self) -> None:
        if self.base_url:
            force_setattr(self, "base_url", without_secrets(self.base_url))


class ContinuationKind(Value, frozen=True):
    """A loop's relation to its parent: initial, default, rerun, branch or compaction. Rerun and branch have a tag."""

    kind: str = "initial"
    """initial, default, rerun, branch or compaction."""
    tag: str | None = None
    """More about a branch or a rerun, such as the number of the branch."""


class LoopEvent(Value, frozen=True, kw_only=True):
    """The fields that every event of a run has. `seq` counts within the loop, from 1."""

    loop_id: str = ""
    """The run."""
    session_id: str | None = None
    """The session of the run."""
    agent_id: str = ""
    """The agent that runs."""
    seq: int = 0
    at: datetime = msgspec.field(default_factory=now)
    """The time of the event."""
    cursor: int | None = None
    """The place of the event on its session's record, once it has been read from there. It can be given as `after=`."""


class AgentStart(LoopEvent, frozen=True, kw_only=True, tag="agent_start"):
    """A run begins, or continues after an interruption."""

    parent_loop_id: str | None = None
    """The run that this one follows, or branches off from."""
    continuation: ContinuationKind = ContinuationKind()
    """The relation to that run."""
    config: LoopConfigSnapshot | None = None
    """The model, and how it is asked."""
    metadata: Mapping[str, Any] = EMPTY
    """The values that the sender has put on the record of the run."""
    spawn_ref: SpawnRef | None = None
    """The call that has spawned the run, if it is a sub-agent's."""
    base_version: int | None = None
    """The version of the session that the run began from. Until a save, only the record goes beyond it."""
    resumed: bool = False
    """True if the run continues after an interruption."""
    idle: float = 0.0
    """Seconds that a resumed run had waited for a person, or was down after a crash, before it started again."""
    key: tuple[str, str] | None = None
    """The idempotency key of the request that the run answers, and the request's digest."""
    posted: str | None = None
    """The delivery id of the inbox item that the run answers, if it came from there."""
    context_data: Mapping[str, Any] | None = None
    """The caller's data for making a context for the run's tools later, also in another process."""
    group: tuple[str, ...] = ()
    """The loops that run side by side with this one, itself among them."""
    input_at: tuple[int, int] | None = None
    """The stretch of the session's own log that all branches of a group answer. It is written once for all of them."""
    approved: Mapping[str, str] = EMPTY
    """The calls that were approved: their ids, each with the digest of what was shown."""
    denied: Mapping[str, str] = EMPTY
    """The calls that were denied: their ids, each with the reason."""
    answered: tuple[str, ...] = ()
    """The calls made outside whose answers continued the run: their ids, or the digests of sub-agents' calls."""
    answers: tuple[CallAnswer, ...] = ()
    """Those answers that are in no result on record yet: of sub-agents' calls, and of a run left to a worker."""
    response_format: Mapping[str, Any] | None = None
    """The JSON schema of the answer that this run alone is asked for."""
    external_tools: tuple[ExternalToolSpec, ...] = ()
    """Tools that this run alone may call, and whose calls are answered from outside."""
    instructions: str | None = None
    """Instructions for this run alone, sent behind the system prompt."""
    model_options: ModelOptions | None = None
    """Options for the model in this run alone, where they differ from `config`."""
    takes_back: str | None = None
    """The loop in place of which this run is begun. What that one was asked and has said left the view before."""
    trace: str | None = None
    """The span of this run in its trace, as W3C's `traceparent`. A continued run continues its trace."""

    def __post_init__(self) -> None:
        for name in ("metadata", "approved", "denied"):
            freeze(self, name)
        if self.context_data is not None:
            freeze(self, "context_data")
        if self.response_format is not None:
            freeze(self, "response_format")


class TurnStart(LoopEvent, frozen=True, kw_only=True, tag="turn_start"):
    """A step begins."""

    step_id: str
    """The step."""
    index: int
    """Its place in the run, from 0."""


class MessageStart(LoopEvent, frozen=True, kw_only=True, tag="message_start"):
    """A message is on its way."""

    message_id: str
    """The id that the message will have."""
    role: Role
    """The role of its sender."""


class MessageUpdate(LoopEvent, frozen=True, kw_only=True, tag="message_update"):
    """A piece of a message as it is streamed."""

    message_id: str
    """The message that the piece belongs to."""
    kind: str
    """text, thinking, tool_call or restart."""
    text: str
    """The piece."""
    call_id: str | None = None
    """The tool call that the piece belongs to."""
    name: str | None = None
    """The name of the tool, if the piece belongs to a call."""


class MessageEnd(LoopEvent, frozen=True, kw_only=True, tag="message_end"):
    """A message is whole."""

    message: Message
    """The message."""
    response: InferenceResponse | None = None
    """The facts about the model's answer, if it is one."""
    posted: str | None = None
    """The delivery id of the inbox item that the message came from, if it was posted to steer the run."""


class ToolExecutionStart(LoopEvent, frozen=True, kw_only=True, tag="tool_execution_start"):
    """A tool is about to be called."""

    call: ToolCall
    """The call."""
    step_id: str
    """The step that the call belongs to."""


class ToolExecutionUpdate(LoopEvent, frozen=True, kw_only=True, tag="tool_execution_update"):
    """A tool tells how far it is."""

    call_id: str
    """The call."""
    progress: JSON = None
    """Any JSON value that the tool has reported."""


class ToolExecutionEnd(LoopEvent, frozen=True, kw_only=True, tag="tool_execution_end"):
    """A tool call has come to its result or its error."""

    execution: ToolExecution
    """The call with its result or error."""
    step_id: str
    """The step that the call belongs to."""
    child: ChildLoopRef | None = None
    """The link to the sub-agent's loop that the call has spawned."""


class TurnEnd(LoopEvent, frozen=True, kw_only=True, tag="turn_end"):
    """A step is complete."""

    step_id: str
    """The step."""
    index: int
    """Its place in the run, from 0."""
    usage: Usage = Usage()
    """Tokens and money of the step."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the step and its tools."""


class AgentEnd(LoopEvent, frozen=True, kw_only=True, tag="agent_end"):
    """A run has ended. `messages` are all it has produced, in order."""

    status: ExecutionStatus
    """The status that the run has ended with."""
    messages: tuple[Message, ...] = ()
    stop_signals: tuple[StopSignal, ...] = ()
    """The signals that have stopped it."""
    usage: Usage = Usage()
    """Tokens and money of the whole run."""
    compaction_usage: Usage = Usage()
    """The part of it that compactions took, including those without a result."""
    discarded_usage: Usage = Usage()
    """The part of it for answers that an interceptor threw away, or that a crash cut off and the model began again."""
    compactions: int = 0
    """The number of its compactions. A header of the record reads the last of them."""
    idle: float = 0.0
    """Seconds that the run waited for a person, or was down after a crash. They are not part of its duration."""
    errors: tuple[ErrorRecord, ...] = ()
    """The errors of the run."""
    rejection: str | None = None
    """The reason why an input filter has refused its input."""
    children: tuple[ChildLoopRef, ...] = ()
    """The loops of sub-agents that its tool calls have spawned. A header of the record is made without the calls."""
    redactions: Mapping[str, int] = EMPTY
    """The number of replacements in its messages, for each redactor of `connect(redact=…)`."""

    def __post_init__(self) -> None:
        freeze(self, "redactions")


class InputRejected(LoopEvent, frozen=True, kw_only=True, tag="input_rejected"):
    """An input filter has refused what the user said: the model is not called, or not told of it."""

    reason: str
    """The reason that the filter gave."""
    message_ids: tuple[str, ...] = ()
    """The messages that were to steer a run, which continues without them. Empty if all of its input was refused."""


class ParallelLoopStart(LoopEvent, frozen=True, kw_only=True, tag="parallel_loop_start"):
    """Branches are about to run side by side. Enough is said here to continue them after a crash."""

    loop_ids: tuple[str, ...]
    """The branches, in the order of their configs."""
    parent_loop_id: str | None = None
    """The run that they branch off from."""
    configs: tuple[JSON, ...] = ()
    """The options in which each branch differs, as plain data."""
    strategy: JSON = None
    """The strategy by which one is selected, as plain data."""
    message_ids: tuple[str, ...] = ()
    """The messages that all branches answer."""
    base_version: int | None = None
    """The version of the session that they begin from."""
    metadata: Mapping[str, Any] = EMPTY
    """The values that the sender has put on the record of the branches."""
    trace: str | None = None
    """The parent of the branches' spans, as W3C's `traceparent`."""

    def __post_init__(self) -> None:
        freeze(self, "metadata")


class ParallelLoopEnd(LoopEvent, frozen=True, kw_only=True, tag="parallel_loop_end"):
    """One of the branches has been selected, or none if the evaluation was given up."""

    loop_ids: tuple[str, ...]
    """The branches, in the order of their configs."""
    selected_loop_id: str | None = None
    """The branch that was selected, or None."""
    selected_config_index: int | None = None
    """The place of its config."""
    evaluation_usage: Usage = Usage()
    """Tokens and money of the judge."""


class CompactionPart(Value, frozen=True):
    """A part of what a compaction shows: a message made for it, or messages `start` to `stop` of the view before."""

    message: Message | None = None
    """The message that was made for it."""
    start: int = 0
    """The first message of the stretch."""
    stop: int = 0
    """The place behind its last message."""


class CompactionBlock(Value, frozen=True):
    """A compaction overlay on record: how many messages it covers, what is shown instead, and what made it.

    `start` is the place of the covered messages in the view. `summary` is the beginning of what is shown instead.
    """

    id: str
    """The id of the compaction, for `uncompact`."""
    by: str
    """The strategy that made it."""
    at: datetime | None = None
    """The time at which it was made."""
    covered: int = 0
    """The number of messages that it covers."""
    summary: str = ""
    tokens_before: int | None = None
    """The estimate for the view before it."""
    tokens_after: int | None = None
    """The estimate for the view after it."""
    start: int = 0
    model: str | None = None
    """The model that wrote the summary, if one did."""


class Compaction(LoopEvent, frozen=True, kw_only=True, tag="compaction"):
    """The view of the model was compacted. The original messages stay."""

    block: CompactionBlock
    """The compaction."""
    trigger: str = "request"
    """The cause: a request, a prompt that came near the window, or one that the model refused as too long."""
    shown: tuple[CompactionPart, ...] = ()
    """The replacement of the covered messages: new ones, and stretches of the view that it was made from."""
    usage: Usage = Usage()
    """The usage of a model for writing the summary."""


class Redacted(LoopEvent, frozen=True, kw_only=True, tag="redacted"):
    """The content of messages was replaced for good, wherever it was. The event belongs to no loop."""

    message_ids: tuple[str, ...] = ()
    """The messages whose content was replaced."""


class HoldChanged(LoopEvent, frozen=True, kw_only=True, tag="hold_changed"):
    """A legal hold was placed on the session, or lifted. The event belongs to no loop, and stays on record for ever."""

    placed: tuple[str, ...] = ()
    """The tags of the holds that are new."""
    lifted: tuple[str, ...] = ()
    """The tags of the holds that are gone."""


class UnknownEvent(LoopEvent, frozen=True, kw_only=True, tag="unknown_event"):
    """An entry of a kind that this release does not know. A newer release or an adapter has written it.

    `body` is what the entry says beyond the fields that every event has.
    """

    kind: str
    """The kind that the entry has on record."""
    body: JSON = None


AnyLoopEvent = (
    InputRejected
    | Redacted
    | HoldChanged
    | ParallelLoopStart
    | ParallelLoopEnd
    | Compaction
    | AgentStart
    | TurnStart
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | TurnEnd
    | AgentEnd
    | UnknownEvent
)
"""An event of a run."""

KINDS = frozenset(str(event.__struct_config__.tag) for event in get_args(AnyLoopEvent))
"""The kinds of entries that this release knows."""

UNTOLD = datetime(1970, 1, 1, tzinfo=UTC)
"""The time of an event of an unknown kind that does not tell its time."""

_SHARED = tuple(name for name in LoopEvent.__struct_fields__ if name != "unknown")


def shared_fields(body: JSON) -> dict[str, JSON]:
    """Return those parts of a body that can be read as the fields of every event."""
    if not isinstance(body, Mapping):
        return {}
    return {name: body[name] for name in _SHARED if name in body and _is_readable(name, body[name])}


def _is_readable(name: str, value: JSON) -> bool:
    try:
        read = msgspec.convert({name: value}, LoopEvent)
    except (msgspec.ValidationError, ValueError, OverflowError):
        return False
    # A time without a zone could not be compared with those of other events.
    return name != "at" or read.at.tzinfo is not None
