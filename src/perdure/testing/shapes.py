"""Work for a store while it is attacked, in several shapes, each in a process of its own.

`python -m perdure.testing.shapes FILE MODULE CLASS WHERE SHAPE [WRITER]` opens the store of a contract's class and
does the work. It puts two marks into the recording for each verb that writes. The first says that the verb begins, the
second what the store shows once the verb is acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from perdure.actions.compact import CompactTranscript
from perdure.actions.metadata import WriteMetadata
from perdure.actions.send import SendMessage
from perdure.actions.transcript import Rewind
from perdure.errors import SessionConflict
from perdure.loop.factory import LoopFactory
from perdure.loop.tools import tool
from perdure.model.definition import AgentDefinition
from perdure.model.message import ToolCall
from perdure.protocols import Change, Entry, Timer
from perdure.runtime.runtime import SessionRuntime
from perdure.testing.disk import Switch
from perdure.testing.faults import FailingStore
from perdure.testing.pictures import KEYS, Picture, pictures
from perdure.testing.race import load_class
from perdure.testing.samples import fork, new_session, note, say, show
from perdure.testing.scripted import Reply, ScriptedDriver

WORKER = AgentDefinition("worker", tools=("charge", "jot"))
# These verbs need no marks. `sketch` and `heartbeat` write, but nothing that a picture shows.
_READING = frozenset(
    (
        *("load", "exists", "list", "previews", "heads", "versions", "find_message", "read", "runs", "log_of"),
        *("lapsed", "messages", "find_key", "is_claimed", "is_interrupted", "attachments", "waiting", "held"),
        *("in_turn", "has_waiting", "running", "timers", "due", "progress", "sketch", "heartbeat"),
    )
)


class Mark(msgspec.Struct, omit_defaults=True):
    """A note that a process puts between its writes."""

    writer: str
    what: str
    """`begin` or `end` of a verb, `call` of a tool, or `said` for texts that must stay in a session from then on."""
    name: str = ""
    shows: dict[str, Picture | None] = {}
    """With `end`: the pictures of the writer's sessions."""
    gone: list[str] = []
    """With `end`: words that must not be on the disk any longer. With `said`: the texts."""
    is_repeated: bool = False
    """True if the next opening of the store may do the interrupted work again, and so make one version more."""


class Stage:
    """A store at work, and its promises at each moment."""

    def __init__(self, open_store: Callable[[], Any], writer: str = "main") -> None:
        self.open_store = open_store
        self.writer = writer
        self.known: list[str] = []
        """The sessions of this writer."""
        self._switch = Switch()
        self._gone: list[str] = []

    def mark(self, what: str, name: str = "", **more: Any) -> None:
        self._switch.mark(msgspec.json.encode(Mark(self.writer, what, name, **more)))

    async def doing(
        self,
        store: Any,
        name: str,
        work: Callable[[], Awaitable[Any]],
        gone: Sequence[str] = (),
        *,
        is_repeated: bool = False,
    ) -> Any:
        """Do something that is kept whole or not at all, and mark its result. `gone` has the words that it erases."""
        self.mark("begin", name)
        result = await work()
        # Only now: the words may be on the disk until the erasure is acknowledged.
        self._gone += gone
        shows = await pictures(store, self.known)
        self.mark("end", name, shows=shows, gone=self._gone, is_repeated=is_repeated)
        return result


class NotedStore(FailingStore):
    """A store that marks each verb that writes."""

    def __init__(self, store: Any, stage: Stage) -> None:
        super().__init__(store)
        self._stage = stage

    async def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if verb in _READING:
            return await getattr(self._store, verb)(*args, **kwargs)

        async def work() -> Any:
            return await getattr(self._store, verb)(*args, **kwargs)

        made = args[:1] if verb == "create" else [each.session for each in args[0]] if verb == "save_all" else ()
        # Known before it is created, so that the pictures of the same verb's end have it.
        self._stage.known += [session.id for session in made if session.version == 0]
        return await self._stage.doing(self._store, verb, work)


async def plain(stage: Stage) -> None:
    """Save, claim, append, post, note and set timers, with texts of several sizes."""
    async with stage.open_store() as opened:
        store: Any = NotedStore(opened, stage)
        one, two = [await store.create(new_session("Hello.", id=name)) for name in ("one", "two")]
        # From a part of a sector to more than two pages: a cut tears each size in another way.
        for size in (10, 700, 4096, 9000):
            one = await store.save(note(say(one, "x" * size, f"{size}"), "size", size))
        claim, _ = await store.claim(two.id, version=1, owner="ann", entries=[Entry("start", run="r")])
        for number in range(3):
            two = say(two, f"step {number}")
            await store.append(claim, messages=two.state.messages[-1:], entries=[Entry("step", run="r")])
        await store.post(one.id, Entry("mail", {"text": "Look here."}))
        await store.note(one.id, [Entry("noted", run="task")])
        await store.set_timer(Timer(one.id, "wake", 4e9, Entry("ring")))
        await store.release(claim)
        for number in range(6):
            one = await store.save(say(one, f"more {number}"))
        await store.save_all([Change(say(one, "both")), Change(new_session("Third.", id="three"))])


async def tools(stage: Stage) -> None:
    """Run an agent whose tools must not be called twice, under idempotency keys."""
    async with stage.open_store() as opened:
        store: Any = NotedStore(opened, stage)
        runtime = SessionRuntime(store)
        for name in ("run-1", "run-2"):
            await runtime.create(WORKER, session_id=name)
        for number, name in enumerate(("run-1", "run-2", "run-1")):
            action = SendMessage(f"Do {number}.", loops_for(f"{name}/{number}", stage), key=KEYS[number])
            await runtime.execute(name, action)
        await runtime.idle()


async def forks(stage: Stage) -> None:
    """Fork, continue both sessions, compact, rewind and save several sessions together."""
    async with stage.open_store() as opened:
        store: Any = NotedStore(opened, stage)
        runtime = SessionRuntime(store)
        parent = await store.create(new_session(*(f"{number} of the parent" for number in range(8)), id="parent"))
        child = await store.create(say(fork(parent, id="child"), "of the child"))
        parent = await store.save(say(parent, "y" * 3000))
        await runtime.execute("parent", CompactTranscript(keep_last=2, compact_strategy="truncate"))
        await store.create(show(fork(child, id="grandchild"), child.state.transcript.cut(0, 3)))
        await runtime.execute("child", Rewind(child.state.messages[3].id))
        for name in ("parent", "child", "grandchild"):
            await runtime.execute(name, WriteMetadata("note", "z" * 600))
        changed = [say(await opened.load(name), "together") for name in ("parent", "child")]
        await store.save_all([Change(each) for each in changed])


async def erasure(stage: Stage) -> None:
    """Delete, redact and forget. Words that were erased are no longer on the disk."""
    async with stage.open_store() as store:
        stage.known += ["keep", "old", "fork", "first", "second", "third"]
        keep = await store.create(new_session("stays", "zebrasecret", "stays too", id="keep"))
        await store.create(say(fork(keep, id="fork"), "of the fork"))
        for name in ("first", "second", "third"):
            await store.create(new_session(f"{name}canary " * 40, id=name))
        old = await store.create(new_session("begin", id="old"))
        for number in range(4):
            old = await store.save(note(say(old, f"forgotten{number}word"), "draft", f"draftword{number} " * 60))
        message = keep.state.messages[1]
        await stage.doing(store, "prepared", _nothing)
        await stage.doing(store, "delete", lambda: store.delete("first"), ["firstcanary"])
        redact = partial(store.redact, "keep", [message.id])
        await stage.doing(store, "redact", redact, ["zebrasecret"], is_repeated=True)
        await stage.doing(store, "forget", lambda: store.forget("old", before=5), ["draftword0", "draftword1"])
        both = ["secondcanary", "thirdcanary"]
        await stage.doing(store, "delete_many", lambda: store.delete_many(["second", "third"]), both)
        old = await store.load("old")
        await stage.doing(store, "save", lambda: store.save(say(old, "after all")))
        await stage.doing(store, "delete", lambda: store.delete("keep"))


async def several(stage: Stage) -> None:
    """Write from three processes at once: each to a session of its own, and all to one."""
    if stage.writer == "main":
        async with stage.open_store() as shared:
            await shared.create(new_session("Shared.", id="shared"))
        stage.mark("said", "shared", gone=["Shared."])
        # The children inherit the environment of the recorder, so their writes are in the same recording.
        command = [sys.executable, "-m", "perdure.testing.shapes", *sys.argv[1:]]
        started = [await asyncio.create_subprocess_exec(*command, name) for name in ("a", "b", "c")]
        assert [await process.wait() for process in started] == [0, 0, 0]
        return
    async with stage.open_store() as opened:
        store: Any = NotedStore(opened, stage)
        session = await store.create(new_session("Own.", id=f"own-{stage.writer}"))
        for number in range(6):
            session = await store.save(say(session, f"{number} {'w' * 400}"))
            await _say_in_shared(opened, stage, f"{stage.writer}{number}.")


async def _say_in_shared(store: Any, stage: Stage, text: str) -> None:
    while True:
        with suppress(SessionConflict):
            await store.save(say(await store.load("shared"), text))
            stage.mark("said", "shared", gone=[text])
            return


async def creation(stage: Stage) -> None:
    """Create a store where there is not even a directory, close it, and open it again."""
    for name in ("first", "second"):
        async with stage.open_store() as opened:
            await NotedStore(opened, stage).create(new_session("Hello.", id=name))


async def search(stage: Stage) -> None:
    """Search while messages are added, and after one was erased."""
    async with stage.open_store() as opened:
        store: Any = NotedStore(opened, stage)
        session = await store.create(new_session("apples and pears", id="fruit"))
        for number in range(4):
            session = await store.save(say(session, f"plum{number} " * 50))
            assert len(await opened.search(f"plum{number}")) == 1
        gone = await store.create(new_session("quinceword", id="gone"))
        assert [hit.session_id for hit in await opened.search("quinceword")] == [gone.id]
        await stage.doing(opened, "delete", lambda: opened.delete(gone.id), ["quinceword"])
        assert await opened.search("quinceword") == []
        await store.save(say(session, "the last"))


async def migration(stage: Stage) -> None:
    """Open a store that an older release has written, and write to it."""
    async with stage.open_store() as opened:
        stage.known += [info.id for info in (await opened.list(limit=50)).all()]
        await stage.doing(opened, "open", _nothing)
        # One of many: pictures of all are taken each time.
        store: Any = NotedStore(opened, stage)
        name = stage.known[0]
        session = await opened.load(name)
        await store.save(note(session, "moved", "on"))


async def _nothing() -> None:
    pass


SHAPES: dict[str, Callable[[Stage], Coroutine[Any, Any, None]]] = {
    shape.__name__: shape for shape in (plain, tools, forks, erasure, several, creation, search, migration)
}


def loops_for(run: str, told: Any) -> LoopFactory:
    """Return a loop whose tools report each call to an object with a method `mark`."""

    @tool
    async def charge(which: str) -> str:
        """Take money: never twice."""
        told.mark("call", which)
        return f"charged {which}"

    @tool(idempotent=True)
    async def jot(text: str) -> str:
        """Write something down."""
        return f"jotted {text}"

    replies: list[Reply] = [
        ToolCall("charge", {"which": f"{run}/a"}, id=f"{run}/a"),
        [ToolCall("jot", {"text": "b"}, id=f"{run}/b"), ToolCall("charge", {"which": f"{run}/c"}, id=f"{run}/c")],
        "Done.",
    ]
    return LoopFactory(tools=[charge, jot], driver=ScriptedDriver(replies))


def main(file: str, module: str, qualname: str, where: str, shape: str, writer: str = "main") -> None:
    contract = load_class(file, module, qualname)()
    asyncio.run(SHAPES[shape](Stage(lambda: contract.open_store(Path(where)), writer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
