"""The state of an agent: its context, which lasts, and its execution, which is per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionState, ExecutionStatus
from perdure.model.ids import Time, new_id, now
from perdure.model.lineage import Adoption
from perdure.model.message import Message
from perdure.model.schema import schema_of
from perdure.model.step import AgentStep, AgentStepType
from perdure.model.stop import StopReason, StopSignal
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, ErrorRecord, FrozenDict, Value, freeze, plain_text


class AgentContext(Value, frozen=True):
    """The context of an agent: transcript, system prompt, metadata, and the form of answer asked for."""

    transcript: Transcript = msgspec.field(default_factory=Transcript)
    """The view: the messages that the model is shown."""
    metadata: Mapping[str, Any] = EMPTY
    """The session's metadata: JSON values by key."""
    system_prompt: str = ""
    """The instructions that the model is told first."""
    response_format: Mapping[str, Any] | None = None
    """The JSON schema of the answers, if one was set."""

    def __post_init__(self) -> None:
        freeze(self, "metadata")
        if self.response_format is not None:
            msgspec.structs.force_setattr(self, "response_format", schema_of(self.response_format))
            freeze(self, "response_format")


class AgentState(Value, frozen=True):
    """The state of an agent. Every `with_…` returns a new value with a new `updated_at`."""

    agent_id: str = msgspec.field(default_factory=new_id)
    """The id of the agent in this session."""
    parent_agent_id: str | None = None
    """The agent that has called it, if it is a sub-agent."""
    created_at: Time = msgspec.field(default_factory=now)
    """The time at which the state was made."""
    updated_at: Time = msgspec.field(default_factory=now)
    """The time of its last change."""
    execution_count: int = 0
    """The number of runs that have begun."""
    model: ModelConfig | None = None
    """The model that `ChangeModel` has set, or None."""
    task: str | None = None
    """The task that `UpdateTask` has set, or None."""
    context: AgentContext = AgentContext()
    """The part that lasts from run to run."""
    execution: ExecutionState | None = None
    """The run under way, or the last one."""
    rewound_to: int = 0
    """The version with the view that this one shows again, until a message is added."""
    shown_since: int = 0
    """The version that first showed this view, as all later ones do. 0 if none does, or an older release saved it."""
    adopted: Adoption | None = None
    """The last adoption of a branch's view by the session."""
    default_model: ModelConfig | None = None
    """The model that was given when the session was created. `model`, an override, and the definition's come first."""
    spent: Usage | None = None
    """The usage of the session before the run that is in `execution`; see `total_usage`."""

    @classmethod
    def of(cls, definition: AgentDefinition) -> AgentState:
        """Return the state with which an agent of this definition starts."""
        return cls(context=AgentContext(metadata=definition.metadata, system_prompt=definition.system_prompt))

    @property
    def transcript(self) -> Transcript:
        return self.context.transcript

    store = transcript

    @property
    def messages(self) -> Sequence[Message]:
        """The messages that the transcript shows, in order."""
        return self.context.transcript

    @property
    def metadata(self) -> FrozenDict:
        assert isinstance(self.context.metadata, FrozenDict)
        return self.context.metadata

    @property
    def system_prompt(self) -> str:
        """The first text for the model: the agent's prompt, followed by instructions for the last run alone."""
        own = self.execution.instructions if self.execution else None
        return "\n\n".join(filter(None, (self.context.system_prompt, own)))

    @property
    def response_format(self) -> Mapping[str, Any] | None:
        """The form of answer asked for: the run's own, or else the one that lasts. None leaves it to the definition."""
        own = self.execution.response_format if self.execution else None
        return self.context.response_format if own is None else own

    @property
    def status(self) -> ExecutionStatus | None:
        return self.execution.status if self.execution else None

    @property
    def execution_duration(self) -> float | None:
        return self.execution.duration if self.execution else None

    @property
    def steps(self) -> tuple[AgentStep, ...]:
        return self.execution.steps if self.execution else ()

    @property
    def step_count(self) -> int:
        return len(self.execution.step_executions) if self.execution else 0

    @property
    def last_step(self) -> AgentStep | None:
        return self.execution.last_step if self.execution else None

    @property
    def last_step_type(self) -> AgentStepType | None:
        return self.execution.last_step_type if self.execution else None

    @property
    def stop_reason(self) -> StopReason | None:
        return self.execution.stop_reason if self.execution else None

    @property
    def should_stop(self) -> bool:
        return self.execution is not None and self.execution.should_stop

    @property
    def usage(self) -> Usage:
        return self.execution.usage if self.execution else Usage()

    @property
    def total_usage(self) -> Usage | None:
        """Return what all runs of the session have used so far, whatever is shown of them.

        None if that is not known: the session has run under a release that did not count it.
        """
        if self.spent is None:
            return None if self.execution_count else self.usage
        total = self.spent + self.usage
        return msgspec.structs.replace(total, unknown=self.spent.unknown) if self.spent.unknown else total

    @property
    def errors(self) -> tuple[ErrorRecord, ...]:
        return self.execution.all_errors if self.execution else ()

    @property
    def has_errors(self) -> bool | None:
        return bool(self.execution.all_errors) if self.execution else None

    @property
    def has_final_response(self) -> bool:
        return self.final_response is not None

    @property
    def final_response(self) -> Message | None:
        """Return the answer that ended the run; None while there is none, and for one that was cut off.

        An incomplete answer is in `current_response` and in the transcript.
        """
        if self.last_step_type is not AgentStepType.FINAL_RESPONSE or self.last_step is None:
            return None
        answer = self.last_step.output_messages[-1] if self.last_step.output_messages else None
        return None if answer is None or answer.is_incomplete else answer

    @property
    def current_response(self) -> Sequence[Message]:
        """The messages of the final response, or else the output of the latest step."""
        if self.execution is None:
            return ()
        step = self.execution.current_step or self.execution.last_step
        return step.output_messages if step else ()

    def debug(self) -> dict[str, Any]:
        """Return a summary for logs and assertions."""
        run = self.execution
        return {
            "status": self.status,
            "execution_count": self.execution_count,
            "has_execution": run is not None,
            "execution_id": run.execution_id if run else None,
            "steps": self.step_count,
            "continuation": run.continuation.explain() if run else None,
            "has_errors": bool(self.has_errors),
            "errors": self.errors,
            "usage": {name: spent for name, spent in msgspec.structs.asdict(self.usage).items() if name != "unknown"},
        }

    def _with(self, **changes: Any) -> AgentState:
        return msgspec.structs.replace(self, updated_at=now(), **changes)

    def with_context(self, context: AgentContext) -> AgentState:
        rewound_to = self.rewound_to if context.transcript is self.transcript else 0
        return self._with(context=context, rewound_to=rewound_to, shown_since=self._since(context.transcript))

    def _with_context(self, **changes: Any) -> AgentState:
        return self._with(context=msgspec.structs.replace(self.context, **changes))

    def with_transcript(self, transcript: Transcript, *, rewound_to: int = 0, shown_since: int = 0) -> AgentState:
        """Return the state with another view. `rewound_to` is the version it was taken from, if it is an older one.

        `shown_since` is that of an earlier state with the same view, as if no other view had come between.
        """
        context = msgspec.structs.replace(self.context, transcript=transcript)
        return self._with(context=context, rewound_to=rewound_to, shown_since=shown_since or self._since(transcript))

    def _since(self, transcript: Transcript) -> int:
        """Return `shown_since` for a view: as it was for the same view, and 0 for another."""
        view = self.transcript
        is_same = transcript is view or (len(transcript) == len(view) and transcript == view)
        return self.shown_since if is_same else 0

    def kept_as(self, version: int) -> AgentState:
        """Return the state as a version of a session. A view that no earlier version shows is shown since this one."""
        is_known = 0 < self.shown_since <= version
        return self if is_known else msgspec.structs.replace(self, shown_since=version)

    def with_adopted(self, transcript: Transcript, adoption: Adoption) -> AgentState:
        """Return the state with the view of a branch, and with where to find that once another has taken its place."""
        return msgspec.structs.replace(self.with_transcript(transcript), adopted=adoption)

    def for_another_session(self) -> AgentState:
        """Return the state without what belongs to this session: its versions and its usage."""
        spent = Usage() if self.execution_count else None
        return self._with(execution=None, adopted=None, rewound_to=0, shown_since=0, spent=spent)

    def with_messages(self, *messages: Message) -> AgentState:
        """Return the state with messages at the end of the transcript."""
        return self.with_transcript(self.transcript.append(*messages))

    def with_system_prompt(self, text: str) -> AgentState:
        return self._with_context(system_prompt=plain_text(text))

    def with_metadata(self, key: str, value: Any) -> AgentState:
        return self._with_context(metadata={**self.metadata, key: value})

    def with_response_format(self, wanted: Any) -> AgentState:
        """Return the state with a form of answer to ask for: a type, a JSON schema, or None for any."""
        return self._with_context(response_format=wanted)

    def with_model(self, model: ModelConfig | None) -> AgentState:
        return self._with(model=model)

    def with_default_model(self, model: ModelConfig | None) -> AgentState:
        return self._with(default_model=model)

    def model_for(self, definition: AgentDefinition) -> ModelConfig | None:
        """Return the model that is stored for an agent: the override, the definition's, or the one given at creation.

        Return None if none was ever named.
        """
        return self.model or definition.model_config or self.default_model

    def with_task(self, text: str | None) -> AgentState:
        return self._with(task=plain_text(text))

    def with_parent_agent(self, agent_id: str | None) -> AgentState:
        return self._with(parent_agent_id=agent_id)

    def with_execution(self, execution: ExecutionState | None) -> AgentState:
        """Return the state with another run, or the same one further on. The usage of a replaced run stays counted."""
        return self._with(execution=execution, spent=self._spent_before(execution))

    def _spent_before(self, execution: ExecutionState | None) -> Usage | None:
        now_there, then = self.execution, execution
        is_same = (now_there and now_there.execution_id) == (then and then.execution_id)
        return self.spent if is_same else self.total_usage

    def with_spent(self, more: Usage) -> AgentState:
        """Add usage beside the run in `execution`: of branches that were not selected, or of a compaction."""
        spent = self.spent if self.spent is not None or self.execution_count else Usage()
        return self if more == Usage() or spent is None else self._with(spent=spent + more)

    def with_execution_started(self, execution_id: str | None = None) -> AgentState:
        """Return the state with a fresh execution, which is counted."""
        fresh = ExecutionState.fresh()
        if execution_id is not None:
            fresh = msgspec.structs.replace(fresh, execution_id=execution_id)
        spent = self._spent_before(fresh)
        return self._with(execution=fresh, spent=spent, execution_count=self.execution_count + 1)

    def for_next_execution(self) -> AgentState:
        """Return the same state between runs."""
        return self.with_execution(None)

    def with_stop_signal(self, signal: StopSignal) -> AgentState:
        return self._with(execution=self._ensure_execution().with_stop_signal(signal))

    def with_continuation_requested(self, requested: bool = True) -> AgentState:
        return self._with(execution=self._ensure_execution().with_continuation_requested(requested))

    def with_current_step(self, step: AgentStep) -> AgentState:
        """Return the state with a step under way. Its output joins the transcript, tagged with where it comes from."""
        current = self.execution.current_step if self.execution else None
        known = current.output_messages if current is not None and current.id == step.id else Transcript()
        new = step.output_messages[len(known) :]
        return self.with_step_output(msgspec.structs.replace(step, output_messages=known), *new)

    def with_step_output(self, step: AgentStep, *messages: Message) -> AgentState:
        """Return the state with a step under way, and with more messages at the end of its output."""
        run = self._ensure_execution()
        calls = [call for message in messages for call in message.tool_calls]
        tags: dict[str, Any] = {"step_id": step.id, "execution_id": run.execution_id, "agent_id": self.agent_id}
        if step.tool_calls or calls or step.all_errors:
            tags["is_trace"] = True
        # Tags are plain values, so nothing in them has to be frozen.
        tagged = [msgspec.structs.replace(each, metadata=FrozenDict({**each.metadata, **tags})) for each in messages]
        transcript = self.transcript.append(*tagged)
        output = step.output_messages.then_last_of(transcript, len(tagged))
        run = run.with_current_step(step.with_changes(calls, output_messages=output))
        context = msgspec.structs.replace(self.context, transcript=transcript)
        return self._with(context=context, execution=run, rewound_to=0, shown_since=0)

    def with_current_step_completed(self) -> AgentState:
        return self._with(execution=self._ensure_execution().with_current_step_completed())

    def _ensure_execution(self) -> ExecutionState:
        return self.execution or ExecutionState.fresh()
