"""The frame of every contract test: an event loop of its own, and a store opened in a new directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from perdure.protocols import SessionStore

PATIENCE = 60.0


class Contract:
    """The part of a contract that you fill in: how to open the store, and whether processes can share it."""

    shared: ClassVar[bool] = False
    """True if several processes may open the store in the same directory."""
    patience: ClassVar[float] = PATIENCE
    """The number of seconds after which a test that has not ended fails."""

    def open_store(self, where: Path) -> AbstractAsyncContextManager[Any]:
        """Return the store that keeps its sessions in the directory `where`, not yet entered."""
        raise NotImplementedError("a contract needs to know how your store is opened: define open_store(self, where)")


C = TypeVar("C", bound=Contract)
S = TypeVar("S", bound=SessionStore)


def in_store(test: Callable[[C, S], Awaitable[None]]) -> Callable[[C, Path], None]:
    """Make a test of one open store."""

    async def scene(self: C, where: Path) -> None:
        async with self.open_store(where) as store:
            await test(self, store)

    return _as_method(test, scene)


def in_directory(test: Callable[[C, Path], Awaitable[None]]) -> Callable[[C, Path], None]:
    """Make a test that opens stores itself."""
    return _as_method(test, test)


def _as_method(test: Callable[..., Any], scene: Callable[[C, Path], Awaitable[None]]) -> Callable[[C, Path], None]:
    async def patiently(self: C, where: Path) -> None:
        async with asyncio.timeout(self.patience):
            await scene(self, where)

    def method(self: C, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        asyncio.run(patiently(self, tmp_path))
        started = [thread for thread in threading.enumerate() if thread not in before]
        for thread in started:
            thread.join(timeout=1.0)  # those that wait for a child process end a little after it
        left = [thread.name for thread in started if thread.is_alive()]
        assert left == [], "the store was closed, and these threads go on"

    # functools.wraps would also set __wrapped__, and pytest would look there for the fixtures.
    method.__name__, method.__qualname__, method.__doc__ = test.__name__, test.__qualname__, test.__doc__
    return method


@contextmanager
def refused(*errors: type[BaseException], of: str = "this") -> Iterator[Any]:
    """Require that the block raises one of these errors. What this yields has it as `error` afterwards."""
    caught = SimpleNamespace(error=None)
    names = " or ".join(error.__name__ for error in errors)
    try:
        yield caught
    except errors as error:
        caught.error = error
    except Exception as error:
        # Exceptions only: a cancel or a KeyboardInterrupt says nothing about the store, and passes through.
        raise AssertionError(f"expected {names} of {of}, and {type(error).__name__} was raised: {error}") from error
    else:
        raise AssertionError(f"expected {names} of {of}, and nothing was raised")


async def for_a_while(delay: int) -> None:
    """Wait for `delay` turns of the event loop. Above four turns, wait for tenths of a millisecond as well."""
    # A few turns let a cancel meet the first steps of a verb. Later steps take place in the store's own thread.
    for _ in range(min(delay, 4)):
        await asyncio.sleep(0)
    if delay > 4:
        await asyncio.sleep(delay * 0.0001)
