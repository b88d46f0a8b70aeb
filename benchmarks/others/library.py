"""The interface of a measured library: its class is a `Store`, or a `Subject` that runs agents too."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import perdure
from benchmarks.others.turns import Turn

ON_PERDURE = "perdure on SQLite, WAL, synchronous=FULL: fsync at every commit"
Kind = Literal["question", "call", "result", "answer"]
Write = Callable[[Turn], Awaitable[None]]


class CannotFork(Exception):
    """The library has no call that makes a second session from a first."""


class Store(ABC):
    """A store of sessions in a folder. Blocking libraries block here too: nothing else runs while one is measured."""

    name: ClassVar[str]
    folder: Path

    @abstractmethod
    async def open(self, folder: Path) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        """Make a session that holds these turns. It is not measured, so any quick way will do."""

    @abstractmethod
    async def append_turn(self, session_id: str, turn: Turn) -> None:
        """Add four messages to an open session, saved when this returns."""

    async def turn(self, session_id: str, turn: Turn) -> None:
        """Make the calls of a run by the library's own agent: read the model's messages, and write the new ones."""
        await self.append_turn(session_id, turn)


class Subject(Store):
    """A store that is measured beside all others, and an agent that uses it."""

    packages: ClassVar[tuple[str, ...]]
    durability: ClassVar[str]
    """The library's default guarantee before a write counts as done."""
    run_settings: ClassVar[tuple[str, ...]] = ("default",)
    """The settings under which a run is killed: the default, and the library's options for resuming.

    None for a second way to write with the same library, whose runs are the same.
    """

    @abstractmethod
    async def load(self, session_id: str) -> Sequence[Any]:
        """Return every message of a session, as the library's own objects."""

    @abstractmethod
    def kind(self, message: Any) -> Kind:
        """Return the kind of one of those messages."""

    async def fork(self, session_id: str) -> None:
        raise CannotFork

    @abstractmethod
    async def writer(self, session_id: str) -> Write:
        """Return a write that builds on the session as it is now, whatever happens to it before the write is called."""

    async def past(self, session_id: str) -> Sequence[Any]:
        """Return the messages of the session's past that the library still has, beside those from `load`."""
        return ()

    async def on_record(self, session_id: str) -> Sequence[Any]:
        """Return the messages of an unfinished run, if the library keeps them beside the session."""
        return ()

    @abstractmethod
    async def run(self, session_id: str, setting: str, model: ScriptedModel) -> None:
        """Run the library's own agent on a new session, with a model that follows the script."""

    @abstractmethod
    async def go_on(self, session_id: str, setting: str, model: ScriptedModel) -> str:
        """After such a run was killed, finish it if the library can, or else answer a next message. Return which."""


class OnPerdure:
    """A library whose sessions are kept by perdure's adapter for it."""

    folder: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'perdure.db'}"

    async def close(self) -> None:
        """Close the store that the process shares, so that the next one opened reads the file."""
        perdure.shared(self.url).close()


class ScriptedModel:
    """Calls the tool, then answers. With a `mark` it never answers: it makes that file and hangs.

    If the library cannot finish a run, a next message is answered at once.
    """

    def __init__(self, turn: Turn, mark: Path | None = None) -> None:
        self.turn = turn
        self.mark = mark
        self.tool_runs = 0

    async def next(self, last: Kind) -> Literal["call", "answer"]:
        if last == "question" and not self.turn.number:
            return "answer"
        if last == "question":
            return "call"
        if self.mark is not None:
            self.mark.touch()
            await asyncio.Event().wait()
        return "answer"

    def tool(self) -> Callable[[str], str]:
        def look_up(query: str) -> str:
            """Look something up."""
            self.tool_runs += 1
            return self.turn.result

        return look_up


NEXT_MESSAGE = Turn(0)
"""The turn of a message that is sent after a run was killed and cannot be finished: the model answers it at once."""
