"""Actions that change facts about a session: metadata, task, tags, name, retention rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.checks import expect, text_of
from perdure.model.definition import refuse_secrets
from perdure.model.retention import Retention, is_hold
from perdure.model.session import AgentSession, check_name, check_tags
from perdure.model.value import JSON
from perdure.protocols import ActionContext


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """An action that sets one key of the session's metadata to any JSON value."""

    may_be_repeated: ClassVar[bool] = True

    key: str
    """The name of the value."""
    value: JSON
    """Any JSON value."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise InvalidData("$.key", f"a metadata key is a text of at least one character, not {self.key!r}")
        codec.check_json({self.key: self.value}, "$.metadata")
        refuse_secrets({self.key: self.value}, "$.metadata")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(session.state.with_metadata(self.key, self.value))


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """An action that sets the agent's current task. None removes it."""

    may_be_repeated: ClassVar[bool] = True

    text: object
    """The task, as a text or as anything that has a text form."""

    def __post_init__(self) -> None:
        if self.text is not None:
            text_of(self.text, "$.text")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_state(session.state.with_task(None if self.text is None else text_of(self.text, "$.text")))


class TagSession:
    """An action that adds the `tags`, and removes those in `remove`."""

    may_be_repeated = True

    __slots__ = ("add", "remove")

    def __init__(self, *tags: str, remove: tuple[str, ...] = ()) -> None:
        self.add = check_tags(tags)
        self.remove = check_tags(remove)

    @property
    def lifts_hold(self) -> bool:
        """Return whether it takes the tag of a legal hold away, which a session's owner may not do."""
        return any(map(is_hold, self.remove))

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        kept = (tag for tag in session.info.tags if tag not in self.remove)
        return session.with_tags((*kept, *self.add))


@dataclass(frozen=True, slots=True)
class RenameSession:
    """An action that gives the session a name for people. None removes it."""

    may_be_repeated: ClassVar[bool] = True

    name: str | None
    """A text of 1 to 500 characters, or None."""

    def __post_init__(self) -> None:
        check_name(self.name)

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_name(self.name)


@dataclass(frozen=True, slots=True)
class RetainSession:
    """An action that gives the session its own rule about how long it is kept. None removes it.

    `Retention()` keeps it for ever, whatever rules its tags, its owner or all sessions have.
    """

    may_be_repeated: ClassVar[bool] = True

    rule: Retention | None
    """The rule, or None."""

    def __post_init__(self) -> None:
        if self.rule is not None:
            expect(self.rule, Retention, "$.rule")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        return session.with_keep(self.rule)
