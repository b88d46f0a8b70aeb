"""One store for a process, whichever event loops and threads use it: it lives in a loop of its own.

Every verb hands its work to that loop and waits. A forked child opens the store again for itself. No file is open at
the moment of the fork, because a child would inherit SQLite's list of locks, but not the locks. An open store is closed
at the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  # see the end of this file
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from perdure.errors import ConfigurationError, PerdureError, StoreError
from perdure.model.checks import expect
from perdure.protocols import KeyRing, Opened, SessionStore, keys_of
from perdure.sessions.default_store import as_url, default_ring, default_store, path_of
from perdure.sessions.loop_thread import LoopThread, drop
from perdure.stores import file_lock  # noqa: F401  # see the end of this file
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.stores.store import Store as _Verbs
else:
    _Verbs = object

T = TypeVar("T")
_CLOSED = "This store was closed while it was used. Repeat the call, which opens it again."
_LOST = (
    "This process was forked while the store was in use and could not be paused. Its locks do not survive that. "
    'Fork before the store is used, or start processes by multiprocessing\'s "spawn" or "forkserver".'
)
_ALREADY_OPEN = (
    "This store is open in an event loop, and other loops or threads cannot use it. "
    "Give its URL, or a store that nobody has opened."
)
_PATIENCE = 10.0
"""The number of seconds that a fork waits for verbs that are under way."""


def shared(url: str | SessionStore | None = None, *, keys: KeyRing | None = None) -> SharedStore:
    """Return the store at a `url` that all of this process shares. By default it is the command line's store.

    It is opened when it is first used. Its verbs can be awaited in any event loop, and `wait` is for code without one.
    Two URLs of the same file or directory give the same store, with the options of the one that was asked for first. A
    store that nobody has opened can be given in place of a URL. A forked child cannot use that one. `keys` are the keys
    with which the store is sealed. Without a `url` they are by default those of the command line, which PERDURE_KEYS or
    a config file names.
    """
    if isinstance(url, SharedStore):
        return url
    if getattr(url, "redaction", None) is not None:
        # It passes every verb on, also those of a shared store.
        return url.over(shared(url.inner))  # type: ignore[no-any-return,union-attr]  # it has both, but not by its type
    if isinstance(url, SessionStore):
        return _sharing(url, url)
    given = default_store().value if url is None else expect(url, str, "$.url")
    if url is None and keys is None:
        keys = _default_keys()
    made = store_of(given, keys=keys)  # it raises for what is not the URL of a store, before the first use
    return _sharing(made, as_url(given, Path.cwd()), keys)


def _default_keys() -> KeyRing | None:
    path = default_ring()
    if path is None:
        return None
    from perdure.keys import ring_at  # few stores are sealed

    return ring_at(path)


def _sharing(store: SessionStore, source: str | SessionStore, keys: KeyRing | None = None) -> SharedStore:
    key: Any = _key_of(source) if isinstance(source, str) else source
    with _changing:
        found = _shared.get(key)
        if found is None:
            if isinstance(store, Opened) and store.is_open:
                raise ConfigurationError(_ALREADY_OPEN)
            found = _shared[key] = _kind_like(type(store))(source, keys)
        return found


def _key_of(url: str) -> Hashable:
    path = path_of(url)
    scheme, _, rest = url.partition("://")
    # By the real path, without options: two links to a file must not become two stores of it.
    return (scheme.replace("postgresql", "postgres"), rest if path is None else os.path.realpath(path))


class SharedStore(_Verbs):
    """A store with every verb of its kind, for any event loop or thread of this process. `shared` makes it."""

    def __init__(self, source: str | SessionStore, keys: KeyRing | None = None) -> None:
        self._source = source
        self._keys = keys
        self._changing = threading.Lock()
        self._home: _Home | None = None
        self._is_lost = False
        """True if this process was forked from one that had it open."""

    @property
    def is_open(self) -> bool:
        """Return True: the first use opens it, so nobody has to."""
        return True

    @property
    def keys(self) -> KeyRing | None:
        """Return the key ring with which it seals what it writes, or None."""
        return self._keys or (None if isinstance(self._source, str) else keys_of(self._source))

    async def __aenter__(self) -> Self:
        home = self._here
        await home.run(home.opened())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it open for others; `close` closes it."""

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, a coroutine that is carried out in the store's own event loop.

        Code that uses the store often is quicker there, since each verb that is awaited elsewhere goes to that loop and
        back. If the caller is cancelled, the work continues.
        """
        return await self._home_for(work).run(work)

    def wait(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, a coroutine, to code without a loop: `store.wait(store.load("chat-1"))`."""
        return self._home_for(work).loop.wait(work)

    @property
    def loop(self) -> LoopThread:
        """The event loop in which the store lives."""
        return self._here.loop

    def close(self) -> None:
        """Close the store, for all that share it. The next use opens it again."""
        self._close()

    def _close(self, *, at_exit: bool = False) -> None:
        with self._changing:
            home, self._home = self._home, None
        if home is not None:
            home.close(at_exit=at_exit)

    def _home_for(self, work: Awaitable[Any]) -> _Home:
        try:
            return self._here
        except StoreError:
            drop(work)
            raise

    @property
    def _here(self) -> _Home:
        """The store's home in this process."""
        home = self._home
        if home is not None:
            return home
        with self._changing:
            if self._is_lost:
                raise StoreError(_LOST)
            if self._home is None:
                self._home = _Home(self._source, self._keys)
            return self._home

    def _before_fork(self) -> None:
        """Keep other threads from beginning anything, wait a while for running verbs, and close open files."""
        # Held over the fork. The parent releases it afterwards, and the child makes a new one.
        self._changing.acquire()
        if self._home is not None:
            self._is_lost = not self._home.pause()

    def _after_fork(self, *, in_child: bool) -> None:
        home = self._home
        if in_child:
            # Nothing of it may be closed or collected here: its selector and its connections are the parent's too.
            _of_parents.append(home)
            self._changing, self._home = threading.Lock(), None
            self._is_lost |= not isinstance(self._source, str)  # what it has in memory is the parent's
            return
        self._is_lost = False
        self._changing.release()
        if home is not None:
            home.resume()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without the URL, which may have a password


class _Home:
    """A store, and the event loop in which it lives."""

    def __init__(self, source: str | SessionStore, keys: KeyRing | None) -> None:
        # This loop has no other work, so a commit may wait for the disk in it.
        self.store: Any = store_of(source, commit_in_loop=True, keys=keys)
        self._exits = AsyncExitStack()
        self._is_open = self._was_open = False
        self._is_on_disk = isinstance(source, str) and path_of(source) is not None
        self._opening = asyncio.Lock()
        self._calls = 0
        """The number of verbs that are under way."""
        self._is_idle = asyncio.Event()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        name = f"perdure shared {type(self.store).__name__}"
        self.loop = LoopThread(name, not_open=_CLOSED, closed=_CLOSED)

    async def opened(self) -> Any:
        """Return the store, which the first call opens. If that fails, the next call tries again."""
        # A loop: a fork may have paused the store again while this waited for it to be opened.
        while not self._is_open or not self._may_begin.is_set():
            await self._may_begin.wait()
            async with self._opening:
                if not self._is_open:
                    await self._open()
        return self.store

    async def _open(self) -> None:
        if self._was_open:
            await self.store._engine.__aenter__()
        else:
            await self._exits.enter_async_context(self.store)
        self._is_open = self._was_open = True

    async def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        store = await self.opened()
        self._calls += 1
        self._is_idle.clear()
        try:
            return await getattr(store, verb)(*args, **kwargs)
        finally:
            self._calls -= 1
            if not self._calls:
                self._is_idle.set()

    def pause(self) -> bool:
        """Close all files until `resume`. Return False if that could not be done."""
        if not self._is_on_disk:
            return True
        if self.loop.is_here:  # this thread would wait for itself
            return False
        try:
            self.loop.wait(self._pause(), _PATIENCE)
        except (TimeoutError, PerdureError, OSError):
            return False
        return True

    async def _pause(self) -> None:
        """Close the engine below the store. The store keeps its claims and its cache."""
        self._may_begin.clear()
        if self._calls:
            await self._is_idle.wait()
        async with self._opening:
            if self._is_open:
                self._is_open = False
                await self.store._engine.__aexit__(None, None, None)

    def resume(self) -> None:
        """Let verbs that wait continue. The first of them opens the store again."""
        self.loop.call_soon(self._may_begin.set)

    async def entered(self, verb: str, *args: Any) -> tuple[AsyncExitStack, Any]:
        stack = AsyncExitStack()
        return stack, await stack.enter_async_context(getattr(await self.opened(), verb)(*args))

    async def run(self, work: Awaitable[T]) -> T:
        return await self.loop.run(work)

    def close(self, *, at_exit: bool = False) -> None:
        self.loop.close(self._exits.aclose(), at_exit=at_exit)


@cache
def _kind_like(kind: type[SessionStore]) -> type[SharedStore]:
    """Return the class of shared stores of a kind. It has the verbs of the kind and no others, so it can do as much."""
    verbs = {
        name: _listening if name == "listening" else _handed_over(name, verb)
        for name, verb in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    return type(f"Shared{kind.__name__}", (SharedStore,), verbs)


def _handed_over(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(verb):  # such a verb asks what is in memory, and waits for nothing

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


def _before_fork() -> None:
    # This lock first: no store may be added while the known ones are paused.
    _changing.acquire()
    for each in _shared.values():
        each._before_fork()


def _after_fork_in_parent() -> None:
    for each in _shared.values():
        each._after_fork(in_child=False)
    _changing.release()


def _after_fork_in_child() -> None:
    global _changing
    _changing = threading.Lock()
    for each in _shared.values():
        each._after_fork(in_child=True)


def _at_exit() -> None:
    # A stack closes all of them, also after one has failed.
    with ExitStack() as all_of_them:
        for each in _shared.values():
            all_of_them.callback(each._close, at_exit=True)


# What is registered last is called first before a fork. The executor's threads and the locks on files also register
# functions, which take locks that a store needs to be paused. So both are imported above, to be registered before this.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
