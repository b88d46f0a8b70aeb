"""One store for a process, whichever event loops and threads use it: it lives in a loop of its own.

Every verb hands its work to that loop and waits. A forked child opens a store of its own; at the interpreter's exit
what is open is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from perdure.model.checks import expect
from perdure.protocols import SessionStore
from perdure.sessions.default_store import as_url, default_store, path_of
from perdure.sessions.loop_thread import LoopThread
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.stores.store import Store as _Verbs
else:
    _Verbs = object

T = TypeVar("T")
_CLOSED = "This store was closed while it was used. Ask again: it is opened again then."


def shared(url: str | None = None) -> SharedStore:
    """Return the store at a URL that all of this process shares; without one, the store that the command line uses.

    It is opened when it is first used. Its verbs can be awaited in any event loop, and `wait` is for code without one.
    Two URLs of the same file or directory give the same store, with the options of the one that was asked for first.
    """
    given = default_store().value if url is None else expect(url, str, "$.url")
    made = store_of(given)  # which refuses what is no URL of a store
    absolute = as_url(given, Path.cwd())
    with _changing:
        found = _shared.get(_key_of(absolute))
        if found is None:
            found = _shared[_key_of(absolute)] = _kind_like(type(made))(absolute)
        return found


def _key_of(url: str) -> Hashable:
    path = path_of(url)
    scheme, _, rest = url.partition("://")
    return (scheme.replace("postgresql", "postgres"), rest if path is None else os.path.realpath(path))


class SharedStore(_Verbs):
    """A store with every verb of its kind, for any event loop or thread of this process. See `perdure.shared`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changing = threading.Lock()
        self._home: _Home | None = None

    @property
    def is_open(self) -> bool:
        """Tell that nobody has to open it: whoever uses it first does."""
        return True

    async def __aenter__(self) -> Self:
        home = self._here
        await home.run(home.opened())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it open for others; `close` closes it."""

    async def run(self, work: Awaitable[T]) -> T:
        """Return what a coroutine comes to that is carried out in the store's own event loop.

        What uses the store often is quicker there: a verb awaited from elsewhere goes to that loop and back. If the
        caller is cancelled, the work goes on.
        """
        return await self._here.run(work)

    def wait(self, work: Awaitable[T]) -> T:
        """Return what a coroutine comes to, for code without an event loop: `store.wait(store.load("chat-1"))`."""
        return self._here.loop.wait(work)

    def close(self) -> None:
        """Close the store, for all who share it. The next to use it opens it again."""
        self._close()

    def _close(self, *, at_exit: bool = False) -> None:
        with self._changing:
            home, self._home = self._home, None
        if home is not None:
            home.close(at_exit=at_exit)

    @property
    def _here(self) -> _Home:
        """The store's home in this process."""
        home = self._home
        if home is not None:
            return home
        with self._changing:
            if self._home is None:
                self._home = _Home(self._url)
            return self._home

    def _begin_again(self) -> None:
        """Forget the home of the process that this one was forked from: its thread is not here.

        Nothing of it may be closed or collected, since its files and its selector are the parent's too.
        """
        _of_parents.append(self._home)
        self._changing, self._home = threading.Lock(), None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without the URL, which may have a password


class _Home:
    """A store, and the event loop in which it lives."""

    def __init__(self, url: str) -> None:
        self.store: Any = store_of(url)
        self._exits = AsyncExitStack()
        self._is_open = False
        self._opening = asyncio.Lock()
        name = f"perdure shared {type(self.store).__name__}"
        self.loop = LoopThread(name, not_open=_CLOSED, closed=_CLOSED)

    async def opened(self) -> Any:
        """Return the store, which the first to come here opens. One that could not be is tried again by the next."""
        if not self._is_open:
            async with self._opening:
                if not self._is_open:
                    await self._exits.enter_async_context(self.store)
                    self._is_open = True
        return self.store

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(await self.opened(), verb)(*args, **kwargs)

    async def entered(self, verb: str, *args: Any) -> tuple[AsyncExitStack, Any]:
        stack = AsyncExitStack()
        return stack, await stack.enter_async_context(getattr(await self.opened(), verb)(*args))

    async def run(self, work: Awaitable[T]) -> T:
        return await self.loop.run(work)

    def close(self, *, at_exit: bool = False) -> None:
        self.loop.close(self._exits.aclose(), at_exit=at_exit)


@cache
def _kind_like(kind: type[SessionStore]) -> type[SharedStore]:
    """Return the class of shared stores of a kind, with the verbs that it has and no others: it can do as much."""
    verbs = {
        name: _listening if name == "listening" else _handed_over(name, verb)
        for name, verb in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    return type(f"Shared{kind.__name__}", (SharedStore,), verbs)


def _handed_over(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(verb):  # it is about what is at hand, and waits for nothing

        @wraps(verb)
        def at_once(self: SharedStore, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._here.store, name)(*args, **kwargs)

        return at_once

    @wraps(verb)
    async def awaited(self: SharedStore, *args: Any, **kwargs: Any) -> Any:
        home = self._here
        return await home.run(home.call(name, *args, **kwargs))

    return awaited


@asynccontextmanager
async def _listening(self: SharedStore, session_id: str) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
    home = self._here
    stack, heard = await home.run(home.entered("listening", session_id))
    try:
        yield lambda most: home.run(heard(most))
    finally:
        await home.run(stack.aclose())


_shared: dict[Hashable, SharedStore] = {}
_changing = threading.Lock()
_of_parents: list[_Home | None] = []


def _after_fork() -> None:
    global _changing
    _changing = threading.Lock()  # another thread of the parent may have held it
    for each in _shared.values():
        each._begin_again()


def _at_exit() -> None:
    with ExitStack() as all_of_them:
        for each in _shared.values():
            all_of_them.callback(each._close, at_exit=True)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
