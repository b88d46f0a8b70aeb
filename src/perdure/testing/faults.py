"""A store that fails on demand, so that a test can ask what happens when the disk, or the answer, is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

import msgspec

from perdure.errors import InvalidData, StoreError
from perdure.model.session import AgentSession, SessionInfoList

Verb = Callable[..., Coroutine[Any, Any, Any]]

_STORE = ("create", "save", "load", "exists", "delete", "list")
_JOURNAL = ("claim", "heartbeat", "release", "append", "read", "messages", "post")


class Fault(msgspec.Struct, frozen=True):
    """What goes wrong at the `call`-th call of `verb`; at every call if `call` is None."""

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
    """Passes every call on to another store, but for the faults it has been given.

        store = FailingStore(MemoryStore())
        store.fail("save", call=2)                  # the second save raises StoreError, and nothing is saved
        store.fail("append", after=True)            # the next append is carried out, and its answer is lost
        store.delay("load", 0.5, call=None)         # every load takes half a second longer

    `calls` counts what was asked for. It is a Journal exactly if the store it stands before is one.
    """

    create: Callable[..., Coroutine[Any, Any, AgentSession]]
    save: Callable[..., Coroutine[Any, Any, AgentSession]]
    load: Callable[..., Coroutine[Any, Any, AgentSession | None]]
    exists: Callable[..., Coroutine[Any, Any, bool]]
    delete: Callable[..., Coroutine[Any, Any, None]]
    list: Callable[..., Coroutine[Any, Any, SessionInfoList]]

    def __init__(self, store: Any) -> None:
        self._store = store
        self._faults: list[Fault] = []
        self.calls: Counter[str] = Counter()
        for verb in (*_STORE, *_JOURNAL):
            if hasattr(store, verb):
                setattr(self, verb, partial(self._call, verb))

    async def __aenter__(self) -> Self:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._store.__aexit__(*error)

    def fail(self, verb: str, *, call: int | None = 1, error: BaseException | None = None, after: bool = False) -> None:
        """Raise at the `call`-th call from now on (None: at each), before it is carried out, or `after`."""
        self._add(verb, call, error or StoreError(f"This {verb} was told to fail."), 0.0, after)

    def delay(self, verb: str, seconds: float, *, call: int | None = 1, after: bool = False) -> None:
        """Take `seconds` longer at the `call`-th call from now on (None: at each)."""
        self._add(verb, call, None, seconds, after)

    def heal(self) -> None:
        """Forget every fault."""
        self._faults.clear()

    def _add(self, verb: str, call: int | None, error: BaseException | None, delay: float, after: bool) -> None:
        if not hasattr(self._store, verb):
            raise InvalidData("$.verb", f"{type(self._store).__name__} has no {verb!r}")
        self._faults.append(Fault(verb, None if call is None else self.calls[verb] + call, error, delay, after))

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self.calls[verb] += 1
        call = self.calls[verb]
        await self._strike(verb, call, after=False)
        answer = await getattr(self._store, verb)(*args, **kwargs)
        await self._strike(verb, call, after=True)
        return answer

    async def _strike(self, verb: str, call: int, *, after: bool) -> None:
        for fault in [fault for fault in self._faults if fault.strikes(verb, call, after=after)]:
            await fault.strike()
