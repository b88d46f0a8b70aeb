"""How the contracts' tests are run: each in an event loop of its own, with a store opened in a new directory."""

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
    """What a contract asks of the class that applies it: how to open the store, and whether it can be shared."""

    shared: ClassVar[bool] = False
    """Whether several processes may open the store in the same directory."""
    patience: ClassVar[float] = PATIENCE
    """Seconds after which a test that has not ended has failed."""

    def open_store(self, where: Path) -> AbstractAsyncContextManager[Any]:
        """The store, not yet entered, that keeps its sessions in the directory `where`."""
        raise NotImplementedError("a contract needs to know how your store is opened: define open_store(self, where)")


C = TypeVar("C", bound=Contract)
S = TypeVar("S", bound=SessionStore)


def in_store(test: Callable[[C, S], Awaitable[None]]) -> Callable[[C, Path], None]:
    """A test of one open store."""

    async def scene(self: C, where: Path) -> None:
        async with self.open_store(where) as store:
            await test(self, store)

    return _as_method(test, scene)


def in_directory(test: Callable[[C, Path], Awaitable[None]]) -> Callable[[C, Path], None]:
    """A test that opens stores itself."""
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
    """The block has to raise one of these; it is then the `error` of what this yields."""
    caught = SimpleNamespace(error=None)
    names = " or ".join(error.__name__ for error in errors)
    try:
        yield caught
    except errors as error:
        caught.error = error
    except Exception as error:
        raise AssertionError(f"expected {names} of {of}, and {type(error).__name__} was raised: {error}") from error
    else:
        raise AssertionError(f"expected {names} of {of}, and nothing was raised")


async def for_a_while(delay: int) -> None:
    """Turns of the event loop at first, then fractions of a millisecond."""
    for _ in range(min(delay, 4)):
        await asyncio.sleep(0)
    if delay > 4:
        await asyncio.sleep(delay * 0.0001)
