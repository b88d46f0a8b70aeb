"""Disks that fail, as a test class: full, broken, read-only, or without file handles. Apply it to yours in three lines:

    class TestMyStoreOnABadDisk(DiskFaultContract):
        def open_store(self, where):
            return MyStore(where / "sessions")

In each round a system call fails while the store does one operation. The operation is done, or one of perdure's
errors is raised and it is not half done. When the disk works again, so does the store, or it says that it must be
opened again.

`python -m perdure.testing.disk_faults FILE MODULE CLASS WHERE FAULT ROUNDS` plays the rounds in a watched process.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from perdure.archive import fsck
from perdure.errors import PerdureError, SessionNotFound, StoreError
from perdure.testing.deeds import Deed, deeds_for, prepared, reduced
from perdure.testing.disk import SHORT, Switch, preloaded
from perdure.testing.outcomes import Outcome
from perdure.testing.outcomes import note as note_outcome
from perdure.testing.pictures import Picture
from perdure.testing.race import load_class
from perdure.testing.samples import say
from perdure.testing.scene import Contract

_PATIENCE = 600.0


class DiskFaultContract(Contract):
    """The contract that a store on a failing disk keeps what it has acknowledged, and says what it could not do."""

    name: ClassVar[str] = ""
    """The store's name in the table of outcomes. Leave it empty to write no outcome."""
    synced: ClassVar[str] = "*"
    """A pattern for the files whose failed syncs must be noticed, as paths below the directory of all rounds."""
    lies: ClassVar[bool] = False
    """True for a control: the disk reports what failed as done. No store can withstand that."""
    rounds: ClassVar[int] = 200 if os.environ.get("PERDURE_TORTURE") else 6

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """Space runs out in the middle of a write, and comes back."""
        self.hold("disk full", tmp_path)

    def test_no_space_at_a_call(self, tmp_path: Path) -> None:
        """A write, a sync, a rename or an allocation has no space. Some writes are short."""
        self.hold("no space at write, sync or rename", tmp_path)

    def test_writes_that_fail(self, tmp_path: Path) -> None:
        """A write or a truncation ends with EIO."""
        self.hold("EIO at write", tmp_path)

    def test_reads_that_fail(self, tmp_path: Path) -> None:
        """A read ends with EIO. A file that could not be read once is not called damaged for ever."""
        self.hold("EIO at read", tmp_path)

    def test_a_sync_that_fails(self, tmp_path: Path) -> None:
        """A store refuses further writes after a failed sync. A sync that succeeds later is not trusted."""
        self.hold("fsync fails", tmp_path)

    def test_no_file_handles(self, tmp_path: Path) -> None:
        """The process cannot open any more files."""
        self.hold("no file handles", tmp_path)

    def test_a_read_only_disk(self, tmp_path: Path) -> None:
        """Nothing can be created or changed, and everything that is there can be read."""
        self.hold("read-only", tmp_path)

    def controls(self) -> Mapping[str, tuple[str, type[DiskFaultContract]]]:
        """Return the control of some faults: what it takes away, in words, and the class that opens such a store."""
        return {}

    def hold(self, fault: str, where: Path) -> None:
        """Play all rounds with a fault in a watched process, and require that none goes wrong."""
        found = self.play(fault, where / "rounds")
        control, careless = self.controls().get(fault, ("", None))
        lost = [] if careless is None else careless().play(fault, where / "control").wrong
        if self.name:
            note_outcome(
                Outcome(
                    attack=fault,
                    store=self.name,
                    rounds=self.rounds,
                    failures=len(found.wrong),
                    control=control,
                    control_rounds=0 if careless is None else careless.rounds,
                    control_failures=len(lost),
                )
            )
        assert found.wrong == [], "\n".join(found.wrong[:5])
        # A round whose fault met no call proves nothing. At least a quarter has to meet one.
        assert found.struck * 4 >= self.rounds, f"only {found.struck} of {self.rounds} rounds met a fault"
        assert lost or not control, f"{control}, and nothing went wrong: the attack proves nothing"

    def play(self, fault: str, where: Path) -> Played:
        """Play all rounds in a process of their own."""
        kind = type(self)
        where.mkdir()
        task = (inspect.getfile(kind), kind.__module__, kind.__qualname__, str(where), fault, str(self.rounds))
        environment = {**preloaded(where), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "perdure.testing.disk_faults", *task]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE)
        return msgspec.json.decode(done.stdout, type=Played)


class Played(msgspec.Struct):
    """The result of several rounds: what went wrong, and in how many rounds a call failed."""

    wrong: list[str]
    struck: int


class Player:
    """A player of rounds in this process, which is watched."""

    def __init__(self, contract: DiskFaultContract, where: Path, fault: str) -> None:
        self._contract, self._where, self._fault = contract, where, fault
        self._switch = Switch()
        if contract.lies:
            self._switch.lie()
        # Seeded by the fault's name: the same rounds are played each time.
        self._chance = random.Random(fault)
        self.struck = 0

    async def play(self, rounds: int) -> list[str]:
        wrong = []
        await self._import_all()
        for number in range(rounds):
            where = self._where / f"round-{number}"
            where.mkdir()
            try:
                said = await self._round(where)
            except (AssertionError, PerdureError) as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                self._switch.heal()
            if said:
                wrong.append(f"{self._fault}, round {number}: {said}")
            shutil.rmtree(where)
        return wrong

    async def _import_all(self) -> None:
        """Do each deed once. Stores import some modules late, and an import that fails says nothing about a store."""
        done, known = 0, 1
        while done < known:
            where = self._where / f"imports-{done}"
            where.mkdir()
            async with self._contract.open_store(where) as store:
                before = await prepared(store)
                deeds = deeds_for(store, {name: await store.load(name) for name in ("a", "b")}, before)
                await deeds[done].work()
            shutil.rmtree(where)
            done, known = done + 1, len(deeds)

    async def _round(self, where: Path) -> str:
        async with self._contract.open_store(where) as first:
            before = await prepared(first)
        store: Any = self._contract.open_store(where)
        await store.__aenter__()
        try:
            sessions = {name: await store.load(name) for name in ("a", "b")}
            deeds = deeds_for(store, sessions, before)
            if self._fault == "no file handles":  # a store that is open needs few, so half of the rounds open another
                deeds += [Deed("open", partial(self._look, where), before)] * len(deeds)
            deed = self._chance.choice(deeds)
            with self._failing() as how:
                outcome = await _error_of(deed)
            # The kernel refuses the handles, so the library has counted no failed call.
            struck = self._switch.heal() or (self._fault == "no file handles" and outcome is not None)
            self.struck += bool(struck)
            told = f"{deed.name} with {how}"
            if isinstance(outcome, BaseException) and not isinstance(outcome, PerdureError):
                return f"{told}: {type(outcome).__name__}: {outcome}"
            if outcome is None and struck and self._fault == "fsync fails":
                return f"{told} was acknowledged, though a sync had failed"
            if outcome is None:
                wrong = await self._compare(where, [deed.after], f"{told} was acknowledged")
            else:
                wrong = await self._compare(where, [before, deed.after], f"{told} raised {outcome}")
            return wrong or await self._go_on(store, where, outcome, told)
        finally:
            # A store may fail to close after a fault. The round has its verdict by then.
            with suppress(PerdureError):
                await store.__aexit__(None, None, None)

    async def _look(self, where: Path) -> None:
        async with self._contract.open_store(where) as other:
            await other.load("a")

    async def _compare(self, where: Path, wanted: Sequence[Mapping[str, Picture | None]], told: str) -> str:
        """Compare what another opening of the store shows, as another process would see it."""
        async with self._contract.open_store(where) as other:
            found = await reduced(other)
            if found not in wanted:
                return f"{told}, and the store shows {found}, not one of {wanted}"
            problems = (await fsck(other)).problems
            return f"{told}; fsck: {[*map(str, problems)]}" if problems else ""

    async def _go_on(self, store: Any, where: Path, outcome: BaseException | None, told: str) -> str:
        """Write once more with the store that met the fault, then with a second opening of it.

        The first write may be refused if the store says that it must be opened again.
        """
        is_over = isinstance(outcome, StoreError) and _asks_to_be_opened(outcome, where)
        try:
            await store.save(say(await store.load("b"), "again"))
        except PerdureError as error:
            if not is_over and not _asks_to_be_opened(error, where):
                return f"{told} raised {outcome}; then the disk was well again, and a save raised {error}"
        else:
            if is_over and "refuses more" in str(outcome):
                return f"{told} raised {outcome}; then a save was acknowledged"
        if self._fault == "fsync fails" and isinstance(outcome, StoreError) and not is_over:
            return f"{told} raised {outcome}, and the store was not closed by that"
        async with self._contract.open_store(where) as other:
            saved = await other.save(say(await other.load("b"), "and again"))
            return "" if await other.load("b") == saved else f"{told}; then another save is not what is loaded"

    @contextmanager
    def _failing(self) -> Iterator[str]:
        chance, switch = self._chance, self._switch
        if self._fault == "disk full":
            room = chance.choice((0, chance.randrange(600), chance.randrange(6000), chance.randrange(40_000)))
            switch.leave_room(room)
            yield f"{room} bytes of room"
        elif self._fault == "no file handles":
            # Mostly none: a store that is open needs few.
            with _without_handles(chance.choice((0, 0, 0, 1, 2))):
                yield "no handles"
        else:
            calls, error, most = {
                "no space at write, sync or rename": (
                    chance.choice(("write", "write", "sync", "rename", "allocate truncate", "open-write")),
                    chance.choice((errno.ENOSPC, errno.ENOSPC, SHORT)),
                    6,
                ),
                "EIO at write": (chance.choice(("write", "truncate")), errno.EIO, 8),
                "EIO at read": ("read", errno.EIO, 12),
                "fsync fails": ("sync", errno.EIO, 4),
                "read-only": ("open-write rename unlink mkdir write truncate", errno.EROFS, 1),
            }[self._fault]
            count = -1 if self._fault == "read-only" else chance.choice((1, 1, 2, -1))
            after = chance.choice((0, 1, chance.randrange(most)))
            # Only a write can be short.
            if error == SHORT:
                calls = "write"
            # SQLite syncs the directory too, and does not look at the result: the class names the syncs that count.
            pattern = self._contract.synced if calls == "sync" else "*"
            switch.fail(calls, error, pattern=pattern, after=after, count=count)
            yield f"{calls} {error} after {after}, {count} times"


def _asks_to_be_opened(error: PerdureError, where: Path) -> bool:
    """Tell whether an error says that the store must be opened again. A path does not count: it may contain "popen"."""
    return "open" in str(error).replace(str(where), "")


async def _error_of(deed: Deed) -> BaseException | None:
    try:
        await deed.work()
    except SessionNotFound as error:
        raise AssertionError(f"{deed.name}: {error}") from None
    except Exception as error:  # around a request: the round tells what it was
        return error
    return None


@contextmanager
def _without_handles(left: int) -> Iterator[None]:
    """Let this process open `left` more files at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(left)]
    taken = [*map(int, os.listdir("/proc/self/fd"))]
    low = next(number for number in range(len(taken) + 1) if number not in taken)
    fill = []
    # A low limit is soon filled. Handles that are open above it stay open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(low, 64), hard))
    with suppress(OSError):
        while True:
            fill.append(os.open("/dev/null", os.O_RDONLY))
    # Closed after the limit was filled, so that exactly these are free.
    for handle in spare:
        os.close(handle)
    try:
        yield
    finally:
        for handle in fill:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main(file: str, module: str, qualname: str, where: str, fault: str, rounds: str) -> None:
    player = Player(load_class(file, module, qualname)(), Path(where), fault)
    wrong = asyncio.run(player.play(int(rounds)))
    print(msgspec.json.encode(Played(wrong, player.struck)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
