"""Set-up for every test: `async def` tests run without a plugin, and hypothesis has its profiles."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from tests import postgres_server

# A shell that starts the tests in the background makes them, and all the processes they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = Path("/dev/shm")
_ENOUGH = 4 << 30


def _is_roomy(directory: Path) -> bool:
    """Tell whether a directory has room for the tests' files, and may run programs."""
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return False
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize >= _ENOUGH and not room.f_flag & os.ST_NOEXEC


# Files are in memory, if there is room: otherwise most of a test's time would be spent waiting for the disk. The
# tests themselves simulate a disk's power failure; torture uses the real one.
if not os.environ.get("PERDURE_TORTURE") and "TMPDIR" not in os.environ and _is_roomy(MEMORY):
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="perdure-tests-", dir=MEMORY)
    # At the very end: multiprocessing has a directory of its own there, which it removes itself.
    Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-1_000)

# A busy machine must not make a property fail, so neither profile looks at the clock.
settings.register_profile("default", deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("torture", settings.get_profile("default"), max_examples=1_000)
settings.load_profile("torture" if os.environ.get("PERDURE_TORTURE") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave repeats to torture: otherwise, of the cases of a test or a class with `sample(n)`, every nth is run.

    The first one differs from test to test, so that each store has some of its tests. With `sample(n, cases=True)`
    on a module, tests that have one case are all run.
    """
    if os.environ.get("PERDURE_TORTURE") or any("[" in argument for argument in config.args):
        return
    counts: Counter[str] = Counter()
    left_out = []
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and ("[" in item.nodeid or not mark.kwargs.get("cases")):
            case = item.nodeid.partition("[")[0] if "[" in item.nodeid else item.nodeid.rpartition("::")[0]
            if (counts[case] + crc32(case.encode())) % mark.args[0]:
                left_out.append(item)
            counts[case] += 1
    config.hook.pytest_deselected(items=left_out)
    chosen = {*map(id, left_out)}
    items[:] = [item for item in items if id(item) not in chosen]


def pytest_collection_finish() -> None:
    """Make the garbage collector skip imported and collected objects, which it would scan again and again."""
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test, also under `@given`, in an event loop of its own."""
    property_test = getattr(pyfuncitem.obj, "hypothesis", None)
    if property_test is not None and inspect.iscoroutinefunction(property_test.inner_test):
        property_test.inner_test = _blocking(property_test.inner_test)
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def pytest_unconfigure() -> None:
    """Release the PostgreSQL that tests may have started; at exit would be too late for xdist's workers."""
    postgres_server.stop()


def _blocking(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
