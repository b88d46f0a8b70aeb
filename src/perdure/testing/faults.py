"""A store that fails on demand, for tests of what happens when the disk, or an answer, is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

import msgspec

from perdure.errors import InvalidData, StoreError
from perdure.model.session import AgentSession, SessionInfoList
from perdure.protocols import KnowsWaiting

Verb = Callable[..., Coroutine[Any, Any, Any]]

_STORE = (
    *("create", "save", "save_all", "load", "exists", "delete", "forget", "list"),
    *("previews", "heads", "versions", "find_message"),
)
_JOURNAL = (
    *("claim", "heartbeat", "release", "append", "post", "note", "sketch", "progress"),
    *("read", "runs", "log_of", "lapsed", "messages", "find_key", "is_claimed", "is_interrupted", "attachments"),
    *(
        "waiting",
        "held",
        "in_turn",
        "has_waiting",
        "running",
        "set_timer",
        "timers",
        "due",
        "ring",
        "drop_timer",
        "reserve",
    ),
)


class Fault(msgspec.Struct, frozen=True):
    """A fault at the `call`-th call of `verb`, or at every call if `call` is None."""

    verb: str
    call: int | None
    error: BaseException | None
    delay: float
    after: bool

    def strikes(self, verb: str, call: int, *, after: bool) -> bool:
        return self.verb == verb and self.call in (None, call) and self.after is after

    async def strike(self) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error


class FailingStore:
    """A store that passes every call on to another store, except for the faults that it was given.

        store = FailingStore(MemoryStore())
        store.fail("save", call=2)                  # the second save raises StoreError, and nothing is saved
        store.fail("append", after=True)            # the next append is carried out, and its answer is lost
        store.delay("load", 0.5, call=None)         # every load takes half a second longer
        store.crash(call=3)                         # the third call of any verb, and all that follow, are lost

    `create`, `save`, `load`, `exists`, `delete`, `list` and all other verbs are those of the other store. `calls`
    counts the calls of each verb. The failing store is a Journal exactly if the other store is one.
    """

    # Declared for type checkers. `__init__` sets these verbs on each object, as it does all others.
    create: Callable[..., Coroutine[Any, Any, AgentSession]]
    save: Callable[..., Coroutine[Any, Any, AgentSession]]
    load: Callable[..., Coroutine[Any, Any, AgentSession | None]]
    exists: Callable[..., Coroutine[Any, Any, bool]]
    delete: Callable[..., Coroutine[Any, Any, None]]
    list: Callable[..., Coroutine[Any, Any, SessionInfoList]]

    def __init__(self, store: Any) -> None:
        self._store = store
        self._faults: list[Fault] = []
        self._crash: tuple[int, bool] | None = None
        self.calls: Counter[str] = Counter()
        for verb in (*_STORE, *_JOURNAL):
            # A verb that the other store lacks must be missing here too: `isinstance` tells a Journal by its
            # attributes.
            if hasattr(store, verb):
                setattr(self, verb, partial(self._call, verb))
        if isinstance(store, KnowsWaiting):
            self.is_waited_for = store.is_waited_for  # no call: it tells what a save has seen

    async def __aenter__(self) -> Self:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._store.__aexit__(*error)

    def fail(self, verb: str, *, call: int | None = 1, error: BaseException | None = None, after: bool = False) -> None:
        """Raise an error at the `call`-th call from now on (None: at each), before or `after` the call takes effect."""
        self._add(verb, call, error or StoreError(f"This {verb} was told to fail."), 0.0, after)

    def delay(self, verb: str, seconds: float, *, call: int | None = 1, after: bool = False) -> None:
        """Delay the `call`-th call from now on (None: each call) by `seconds`."""
        self._add(verb, call, None, seconds, after)

    def crash(self, *, call: int, after: bool = False) -> None:
        """Fail from the `call`-th call on, of whatever verb, as after a crash.

        The call itself has no effect. With `after` it takes effect, and its answer is lost.
        """
        self._crash = (self.calls.total() + call, after)

    @property
    def has_crashed(self) -> bool:
        return self._crash is not None and self.calls.total() >= self._crash[0]

    def heal(self) -> None:
        """Remove every fault."""
        self._faults.clear()
        self._crash = None

    def _add(self, verb: str, call: int | None, error: BaseException | None, delay: float, after: bool) -> None:
        # A fault for a misspelt verb would never strike, and the test would prove nothing.
        if not hasattr(self._store, verb):
            raise InvalidData("$.verb", f"{type(self._store).__name__} has no {verb!r}")
        self._faults.append(Fault(verb, None if call is None else self.calls[verb] + call, error, delay, after))

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self.calls[verb] += 1
        call, total = self.calls[verb], self.calls.total()
        # With `after`, the call of the crash itself is still carried out: only its answer is lost, below.
        if self.has_crashed and (total, True) != self._crash:
            raise StoreError(f"This {verb} came after the crash.")
        await self._strike(verb, call, after=False)
        answer = await getattr(self._store, verb)(*args, **kwargs)
        await self._strike(verb, call, after=True)
        if (total, True) == self._crash:
            raise StoreError(f"The answer to this {verb} was lost in the crash.")
        return answer

    async def _strike(self, verb: str, call: int, *, after: bool) -> None:
        # A list of its own: `heal` may empty the other one while a fault waits out its delay.
        for fault in [fault for fault in self._faults if fault.strikes(verb, call, after=after)]:
            await fault.strike()
