"""Do one thing to copies of a directory, and get killed at the first, second, third … step of it.

`python -m tests.stores.killed VERB WHERE` works on copies of WHERE/before and prints how many steps there are: the copy
of that number is the first in which nobody was killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.protocols import Change, Entry
from perdure.stores.file import FileStore
from perdure.testing.samples import fork, say

STEPS = ("write", "fsync", "rename", "unlink", "ftruncate")


async def act(verb: str, where: Path, prepare: Callable[[], None] = lambda: None) -> None:
    """Do one write to a family of two sessions, `parent` and `child`."""
    async with FileStore(where) as store:
        parent, child = await store.load("parent"), await store.load("child")
        assert parent is not None
        assert child is not None
        prepare()
        if verb == "create":
            await store.create(say(fork(parent, id="new"), "more"))
        elif verb == "save":
            await store.save(say(child, "more"))
        elif verb == "save-all":
            new = say(fork(parent, id="new"), "more")
            await store.save_all([Change(say(child, "more")), Change(new), Change(say(parent, "more"))])
        elif verb == "append":
            await store.claim("child", version=1, owner="ann", lease=0.0, entries=[Entry("start")])
        elif verb == "note":
            await store.note("child", [Entry("noted", [place], "task") for place in range(3)])
        elif verb == "delete":
            await store.delete("parent")
        elif verb == "delete-child":
            await store.delete("child")
        elif verb == "forget":
            await store.forget("parent", before=2)
        elif verb == "delete-many":
            assert len(await store.delete_many(["parent", "child"])) == 2
        elif verb == "redact":
            await store.redact("parent", [parent.state.messages[0].id])


def kill_at(fatal: int) -> None:
    """Let this process die before the step with that number, or in the middle of it if it is a write."""
    taken = 0

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == fatal:
                if name == "write":
                    handle, body = arguments
                    real(handle, body[: len(body) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, deadly(name, getattr(os, name)))


def is_killed(verb: str, where: Path, step: int) -> bool:
    """Do it in a new process, which is single-threaded when it begins. Return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        asyncio.run(act(verb, where, lambda: kill_at(step)))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def main(verb: str, where: Path) -> None:
    step = 0
    while True:
        step += 1
        shutil.copytree(where / "before", where / str(step))
        if not is_killed(verb, where / str(step), step):
            print(step)
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
