"""Interceptors. They are called at ten points of a run, by priority, and may change what passes through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import isawaitable
from typing import Any

from perdure.errors import ConfigurationError
from perdure.model.checks import expect_priority, expect_text
from perdure.model.message import ToolCall
from perdure.model.state import AgentState
from perdure.model.step import ToolExecution
from perdure.protocols import ModelReply, ModelRequest


class Blocked:
    """The value that `before_tool_use` returns to prevent a call. The model is told the `reason`."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = expect_text(reason, "$.reason")


class Interceptor:
    """An interceptor that passes everything on. Override what you need, with plain or async methods."""

    def before_execution(self, state: AgentState) -> Any:
        """Return the `state` with which a run begins, changed or not."""
        return state

    def after_execution(self, state: AgentState) -> Any:
        """Return the `state` with which a run ends, changed or not."""
        return state

    def before_step(self, state: AgentState) -> Any:
        """Return the `state` before a step, changed or not."""
        return state

    def after_step(self, state: AgentState) -> Any:
        """Return the `state` after a step, changed or not."""
        return state

    def before_inference(self, request: ModelRequest, state: AgentState) -> Any:
        """Return the `request` to a model, changed or not. `state` is the state of the run."""
        return request

    def after_inference(self, reply: ModelReply, state: AgentState) -> Any:
        """Return the `reply` of a model, changed or not. `state` is the state of the run."""
        return reply

    def before_tool_use(self, call: ToolCall, state: AgentState) -> Any:
        """Return the `call`, changed or not, or `Blocked(reason)`. `state` is the state of the run."""
        return call

    def after_tool_use(self, execution: ToolExecution, state: AgentState) -> Any:
        """Return the `execution` of a tool call, changed or not. `state` is the state of the run."""
        return execution

    def on_stop(self, state: AgentState) -> Any:
        """Return the `state` of a run that is about to stop: `with_continuation_requested()` for another step."""
        return state

    def on_error(self, error: BaseException, state: AgentState) -> Any:
        """Return the `state` of a run that has met an `error` which will end it."""
        return state


class Interceptors:
    """Interceptors in order: highest priority first, ties in the order they were given."""

    def __init__(self, given: Iterable[Interceptor | tuple[Interceptor, int]] = ()) -> None:
        ranked = [each if isinstance(each, tuple) else (each, 0) for each in given]
        for each, priority in ranked:
            expect_priority(priority, "$.interceptors.priority")
            if not isinstance(each, Interceptor):
                raise ConfigurationError(f"An interceptor is a subclass of perdure.Interceptor, which {each!r} is not.")
        self._ordered: Sequence[Interceptor] = [each for each, _ in sorted(ranked, key=lambda pair: -pair[1])]

    async def pass_through(self, point: str, value: Any, *rest: Any) -> Any:
        """Pass a value through all interceptors at a point, one after the other, and return the result."""
        for interceptor in self._ordered:
            answer = getattr(interceptor, point)(value, *rest)
            answer = await answer if isawaitable(answer) else answer
            # The first that blocks decides: the call is not made, so the others need not see it.
            if isinstance(answer, Blocked) and point == "before_tool_use":
                return answer
            value = _checked(interceptor, point, value, answer)
        return value

    async def on_error(self, error: BaseException, state: AgentState) -> AgentState:
        for interceptor in self._ordered:
            answer = interceptor.on_error(error, state)
            state = _checked(interceptor, "on_error", state, await answer if isawaitable(answer) else answer)
        return state


def _checked(interceptor: Interceptor, point: str, given: Any, answer: Any) -> Any:
    if not isinstance(answer, type(given)):
        raise ConfigurationError(
            f"{type(interceptor).__name__}.{point} must return the {type(given).__name__} it was given, changed or "
            f"not; it returned {type(answer).__name__}."
        )
    return answer
