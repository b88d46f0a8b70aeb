"""Power cuts for a store that keeps files, as a test class. Apply it to yours in three lines:

    class TestMyStoreWithoutPower(PowerCutContract):
        def open_store(self, where):
            return MyStore(where / "sessions")

A process works with the store, and everything that it writes and syncs is recorded. Then the power is cut, on paper,
at many moments of that recording. Each time the store is opened on files that a disk may hold then. Everything
acknowledged must be there. Anything else is there whole or not at all. fsck finds nothing, and the sessions can be
used.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from perdure.actions.resume import recover
from perdure.actions.send import SendMessage
from perdure.archive import fsck
from perdure.errors import PerdureError
from perdure.runtime.runtime import SessionRuntime
from perdure.testing.disk import Disk, Ignored, Kind, Operation, preloaded, read_recording, write_files
from perdure.testing.outcomes import Outcome
from perdure.testing.outcomes import note as note_outcome
from perdure.testing.pictures import Picture, pictures
from perdure.testing.scene import Contract
from perdure.testing.shapes import Mark, loops_for

# The disk is simulated, and each cut writes a store and removes it: in memory that is quicker.
_MEMORY = Path("/dev/shm")


class PowerCutContract(Contract):
    """The contract that a store loses nothing that it has acknowledged, whenever the power fails."""

    name: ClassVar[str] = ""
    """The store's name in the table of outcomes. Leave it empty to write no outcome."""
    cuts: ClassVar[int] = 1_000 if os.environ.get("PERDURE_TORTURE") else 25

    def put_older(self, where: Path) -> bool:
        """Put the files of an older release where `open_store` will open them. Return False if you have none."""
        return False

    def test_plain_saves(self) -> None:
        """Saves, claims, appends, posts, notes and timers outlast a power cut."""
        self.hold("plain")

    def test_runs_with_tools(self) -> None:
        """A run that was cut off is continued, and no tool that must not be repeated is called twice."""
        self.hold("tools")

    def test_forks_and_compaction(self) -> None:
        """Forks, compactions, rewinds, and saves of several sessions together outlast a power cut."""
        self.hold("forks")

    def test_erasure(self) -> None:
        """Words that were deleted, redacted or forgotten do not come back in any file."""
        self.hold("erasure")

    def test_several_processes(self) -> None:
        """Three processes that write at once lose nothing that was acknowledged to one of them."""
        if self.shared:
            self.hold("several")

    def test_creation_of_a_store(self) -> None:
        """A store that was created in a new directory is still there after a power cut."""
        self.hold("creation")

    def test_search(self) -> None:
        """A store with a search index keeps its promises, and no file has an erased word."""
        self.hold("search")

    def test_migration(self) -> None:
        """A store that an older release has written keeps its promises while it is migrated."""
        with tempfile.TemporaryDirectory() as empty:
            has_older = self.put_older(Path(empty))
        if has_older:
            self.hold("migration")

    def hold(self, shape: str) -> None:
        """Cut the power at many moments, and require that every promise is kept.

        Then do the same on a disk where fsync does nothing, and require that a promise is broken. An attack that
        cannot fail proves nothing.
        """
        with self.recorded(shape) as recording:
            found = recording.attack(self, self.cuts, seed=1)
            # The control has to fail once only, so a tenth of the cuts is enough.
            lost = recording.attack(self, max(20, self.cuts // 10), seed=2, ignored=lambda path, is_directory: True)
        self._note(f"power cut: {shape}", self.cuts, found, "fsync does nothing", max(20, self.cuts // 10), lost)
        assert found == [], "\n".join(found[:5])
        assert lost, "fsync did nothing, and nothing was lost: the attack proves nothing"

    def lose(self, shape: str, control: str, ignored: Ignored) -> None:
        """Cut the power on a disk that ignores some syncs, and require that a promise is broken."""
        with self.recorded(shape) as recording:
            lost = recording.attack(self, self.cuts, seed=1, ignored=ignored)
        self._note(f"power cut: {shape}", 0, (), control, self.cuts, lost)
        assert lost, f"{control}, and nothing was lost: the attack proves nothing"

    def _note(
        self, attack: str, rounds: int, found: Sequence[str], control: str, controls: int, lost: Sequence[str]
    ) -> None:
        if self.name:
            note_outcome(
                Outcome(
                    attack=attack,
                    store=self.name,
                    rounds=rounds,
                    failures=len(found),
                    control=control,
                    control_rounds=controls,
                    control_failures=len(lost),
                )
            )

    @contextmanager
    def recorded(self, shape: str) -> Iterator[Recording]:
        """Let a process do the work of a shape, and yield the recording of what it has written."""
        # Resolved, since the recorder compares it with the real paths of open files.
        home = Path(tempfile.mkdtemp(prefix="perdure-cuts-", dir=_MEMORY if _MEMORY.is_dir() else None)).resolve()
        try:
            yield Recording(self, home, shape)
        finally:
            shutil.rmtree(home, ignore_errors=True)


class Recording:
    """A recording of what one process has written in one shape, and of what it has acknowledged at which moment."""

    def __init__(self, contract: PowerCutContract, home: Path, shape: str) -> None:
        self._home, self._shape = home, shape
        where, kind = home / "disk", type(contract)
        where.mkdir()
        if shape == "migration":
            (where / "store").mkdir()
            contract.put_older(where / "store")
        self._before = {str(path.relative_to(where)): path.read_bytes() for path in _files(where)}
        # The recording has no creation of these files, and names each by its inode.
        self._numbers = {str(path.relative_to(where)): path.stat().st_ino for path in _files(where)}
        task = (inspect.getfile(kind), kind.__module__, kind.__qualname__, str(where / "store"), shape)
        # The process imports the contract's class, from wherever this one has it.
        environment = {**preloaded(where, home / "log"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-m", "perdure.testing.shapes", *task], env=environment, check=True)
        self.operations = read_recording(home / "log")
        self.marks = [
            (place, msgspec.json.decode(each.data, type=Mark))
            for place, each in enumerate(self.operations)
            if each.kind is Kind.MARK
        ]

    def attack(
        self, contract: PowerCutContract, cuts: int, *, seed: int, ignored: Ignored | None = None
    ) -> Sequence[str]:
        """Cut the power at many moments. Return a text for each cut that broke a promise."""
        chance = random.Random(seed)
        disk = Disk(self._before, ignored=ignored)
        for path, number in self._numbers.items():
            disk.know(path, number)
        # Some of them right behind an acknowledgement, where most is promised.
        acknowledged = [place + 1 for place, mark in self.marks if mark.what != "begin"]
        moments = sorted(
            chance.choice(acknowledged) if chance.random() < 0.2 else chance.randrange(1, len(self.operations) + 1)
            for _ in range(cuts)
        )
        found, done = list[str](), 0
        for number, moment in enumerate(moments):
            for operation in self.operations[done:moment]:
                disk.apply(operation)
            done = moment
            wrong = self._wrong_after(contract, disk.after_cut(chance), moment, number)
            if wrong:
                found.append(f"{self._shape}, cut {number} at operation {moment}: {wrong}")
        return found

    def _wrong_after(self, contract: PowerCutContract, files: Mapping[str, bytes], moment: int, number: int) -> str:
        where = self._home / f"cut-{number}"
        write_files(files, where)
        try:
            promised = Promised.at(moment, self.marks)
            # In the files, before the store is opened: the first opening may clear away what was left.
            for word in promised.gone:
                if any(word.encode() in content for content in files.values()):
                    holding = [path for path, content in files.items() if word.encode() in content]
                    return f"{word!r} was erased, and is still in {holding}"
            is_used = number % 4 == 0 and self._shape != "migration"  # older files may hold runs of made-up agents
            return asyncio.run(_verdict(contract, where / "store", promised, is_used=is_used))
        except PerdureError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(where)


class Promised(msgspec.Struct):
    """The promises that must be kept after a cut at one moment."""

    states: list[tuple[Mapping[str, Picture | None], ...]]
    """For each writer, the pictures that may be shown: those acknowledged last, and those of what was under way."""
    is_repeated: bool
    said: dict[str, list[str]]
    gone: list[str]
    calls: list[str]

    @classmethod
    def at(cls, moment: int, marks: Sequence[tuple[int, Mark]]) -> Promised:
        past = [mark for place, mark in marks if place < moment]
        future = [mark for place, mark in marks if place >= moment]
        said: dict[str, list[str]] = {}
        for mark in past:
            if mark.what == "said":
                said.setdefault(mark.name, []).extend(mark.gone)
        writers = dict.fromkeys(mark.writer for _, mark in marks if mark.what == "end")
        return cls(
            [_states(writer, past, future) for writer in writers],
            # The next mark is the end of what was under way.
            any(mark.is_repeated for mark in future[:1]),
            said,
            [word for mark in past if mark.what == "end" for word in mark.gone],
            [mark.name for mark in past if mark.what == "call"],
        )


def _states(writer: str, past: Sequence[Mark], future: Sequence[Mark]) -> tuple[Mapping[str, Picture | None], ...]:
    own = [mark for mark in past if mark.writer == writer and mark.what in ("begin", "end")]
    ended = [mark.shows for mark in own if mark.what == "end"][-1:]
    if not ended:
        # Nothing was acknowledged yet: no session has to be there.
        ended = [{}]
    if own and own[-1].what == "begin":
        ended += [mark.shows for mark in future if mark.writer == writer and mark.what == "end"][:1]
    return tuple(ended)


async def _verdict(contract: PowerCutContract, where: Path, promised: Promised, *, is_used: bool) -> str:
    """Return what is wrong with a store that was cut off, or "" if nothing is."""
    async with contract.open_store(where) as store:
        for states in promised.states:
            known = dict.fromkeys(session_id for state in states for session_id in state)
            found = await pictures(store, known)
            wanted = [{name: state.get(name) for name in known} for state in states]
            if promised.is_repeated:
                found, *wanted = (_texts(each) for each in (found, *wanted))
            if found not in wanted:
                return f"it shows {_differences(found, wanted[0])}" + (
                    f", or {_differences(found, wanted[-1])} of what was under way" if len(wanted) > 1 else ""
                )
        for session_id, texts in promised.said.items():
            shown = await pictures(store, [session_id])
            lost = Counter(texts) - Counter((shown[session_id] or {"shown": []})["shown"])
            if lost:
                return f"{session_id} has lost {[*lost]}"
        problems = (await fsck(store)).problems
        if problems:
            return f"fsck: {[str(problem) for problem in problems]}"
        return await _use(store, promised) if is_used else ""


def _texts(shown: Mapping[str, Picture | None]) -> dict[str, Picture | None]:
    """Return those parts of the pictures that do not change if something is done twice."""
    return {name: each and {key: each[key] for key in ("shown", "said", "inbox")} for name, each in shown.items()}


def _differences(found: Mapping[str, Picture | None], wanted: Mapping[str, Picture | None]) -> str:
    for name, one in found.items():
        other = wanted[name]
        if one != other:
            if one is None or other is None:
                return f"{name}: {'nothing' if one is None else one}, not {'nothing' if other is None else other}"
            return f"{name}: {[(key, one[key], other[key]) for key in one if one[key] != other[key]]}"
    return "what it should"


async def _use(store: Any, promised: Promised) -> str:
    """Continue what was cut off, and send a message to a session or two."""
    calls = _Calls(promised.calls)
    runtime = SessionRuntime(store)
    report = await recover(runtime, loops_for("again", calls))
    await runtime.idle()
    if report.failed:
        return f"recovery failed: {report.failed}"
    twice = [name for name, count in Counter(calls.made).items() if count > 1]
    if twice:
        return f"{twice} were called twice"
    for info in (await store.list(limit=2)).all():
        if info.status == "active":
            await runtime.execute(info.id, SendMessage("And now?", loops_for(f"new-{info.id}", calls)))
    return ""


class _Calls:
    """The tool calls that were made before the cut and after it."""

    def __init__(self, made: Sequence[str]) -> None:
        self.made = [*made]

    def mark(self, _: str, name: str) -> None:
        self.made.append(name)


def _files(where: Path) -> Iterator[Path]:
    return (path for path in sorted(where.rglob("*")) if path.is_file())


__all__ = ["Operation", "PowerCutContract", "Promised", "Recording"]
