"""A wire between a process under test and its store: pauses, faults, and the death of the process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from typing import Any, Self

from perdure import SessionStage, StoreError
from perdure.model.session import AgentSession
from perdure.testing import FailingStore

FAILING = {
    "save": 5,
    "append": 7,
    "claim": 2,
    "release": 1,
    "load": 2,
    "read": 3,
    "post": 2,
    "find_key": 1,
    "list": 1,
    **dict.fromkeys(("ring", "set_timer", "drop_timer", "due", "has_waiting", "is_interrupted"), 1),
}
"""The calls that fail once, and how often each of them is chosen."""

Tamper = Callable[..., Awaitable[Any]]


class Died(BaseException):
    """The process of this wire is dead: nothing that it still tries has an effect."""


class HookRaised(Exception):
    """The error that a controller raises when it is told to."""


class Wire:
    """A wire that passes every call to a store, after a pause, until its process dies.

    It waits a few turns of the event loop around each call, so that two verbs at once meet at any point. `tampers`
    replace calls by name; each is given the real one first.
    """

    def __init__(self, store: Any, chance: Random | None = None, tampers: Mapping[str, Tamper] | None = None) -> None:
        self.store = store
        self.is_dead = False
        self._failing = FailingStore(store)
        self._error: StoreError | None = None
        self._chance = chance
        self._tampers = tampers or {}
        self._calls = 0
        self._last: tuple[int, bool] | None = None
        for verb in dir(store):
            if not verb.startswith("_") and inspect.iscoroutinefunction(getattr(type(store), verb, None)):
                setattr(self, verb, partial(self._call, verb))
        self.is_waited_for = store.is_waited_for

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.store.__aexit__(*error)

    def fail(self, chance: Random) -> None:
        """Fail one of the next calls, before or after it is carried out."""
        (verb,) = chance.choices([*FAILING], [*FAILING.values()])
        self._error = StoreError(f"This {verb} was told to fail.")
        call = chance.choice((1, 1, 2, 2, 3, 4))
        self._failing.fail(verb, call=call, error=self._error, after=chance.random() < 0.3)

    def die(self, chance: Random, most: int = 25) -> None:
        """Die at one of the next calls, before or after it is carried out."""
        self._last = (self._calls + chance.randint(1, most), chance.random() < 0.5)

    def heal(self) -> None:
        """Remove all faults that still wait to strike."""
        self._failing.heal()
        self._last = None
        self._error = self._error if self.has_failed else None

    @property
    def is_armed(self) -> bool:
        return self._last is not None or (self._error is not None and not self.has_failed)

    @property
    def has_failed(self) -> bool:
        return self._error is not None and self._error.__traceback__ is not None

    def require_alive(self) -> None:
        if self.is_dead:
            raise Died

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        await self._pause()
        self._calls += 1
        mine = self._calls
        if self._last == (mine, False):
            self.is_dead = True
            self.require_alive()
        answer = await self._carried_out(verb, *args, **kwargs)
        if self._last == (mine, True):
            self.is_dead = True
        await self._pause()
        return answer

    async def _carried_out(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        real = getattr(self._failing, verb, None) or getattr(self.store, verb)
        tamper = self._tampers.get(verb)
        return await (tamper(real, *args, **kwargs) if tamper else real(*args, **kwargs))

    async def _pause(self) -> None:
        self.require_alive()
        for _ in range(self._chance.choice((0, 0, 1, 1, 2, 5)) if self._chance else 0):
            await asyncio.sleep(0)
        self.require_alive()


class Hook:
    """A controller that changes nothing, and raises once if it is told to."""

    def __init__(self) -> None:
        self._stage: SessionStage | None = None
        self._left = 0
        self.has_raised = False

    def arm(self, chance: Random) -> None:
        stages = ("after_load", "after_action", "after_action", "before_save", "before_save", "after_save")
        self._stage = SessionStage(chance.choice(stages))
        self._left = chance.choice((1, 1, 2))

    def heal(self) -> None:
        self._stage = None

    @property
    def is_armed(self) -> bool:
        return self._stage is not None

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession:
        if stage is self._stage:
            self._left -= 1
            if self._left == 0:
                self._stage, self.has_raised = None, True
                raise HookRaised(stage.value)
        return session
