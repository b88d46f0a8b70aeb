"""Controllers: called at each stage of the runtime's pipelines, in order of priority."""

from __future__ import annotations

from inspect import isawaitable

from perdure.errors import ConfigurationError
from perdure.model.checks import expect_priority
from perdure.model.session import AgentSession
from perdure.protocols import SessionController, SessionStage


class PassThroughSessionController:
    """A controller that changes nothing at any stage."""

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        return session


class SessionHookStack:
    """Several controllers as one: highest priority first, ties in the order of adding. Adding makes a new stack."""

    def __init__(self, hooks: tuple[tuple[int, SessionController], ...] = ()) -> None:
        self._hooks = hooks

    @classmethod
    def empty(cls) -> SessionHookStack:
        return cls()

    def with_hook(self, controller: SessionController, priority: int = 0) -> SessionHookStack:
        if not callable(getattr(controller, "on_stage", None)):
            raise ConfigurationError(f"A controller needs an on_stage(stage, session) method; {controller!r} has none.")
        expect_priority(priority, "$.priority")
        # The sort is stable, so controllers of one priority stay in the order in which they were added.
        hooks = sorted((*self._hooks, (priority, controller)), key=lambda hook: -hook[0])
        return SessionHookStack(tuple(hooks))

    async def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        for _, controller in self._hooks:
            session = await pass_stage(controller, stage, session)
        return session


async def pass_stage(controller: SessionController, stage: SessionStage, session: AgentSession) -> AgentSession:
    """Return the session as a controller leaves it at a stage. The controller may be plain or async."""
    answer = controller.on_stage(stage, session)
    passed = await answer if isawaitable(answer) else answer
    if not isinstance(passed, AgentSession) or passed.id != session.id or passed.version != session.version:
        raise ConfigurationError(
            f"{type(controller).__name__}.on_stage({stage.value}) must return the session it was given, changed or "
            f"not; it returned {type(passed).__name__}."
        )
    return passed
