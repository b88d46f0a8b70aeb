"""The same attacks on every library: the power fails while it writes, and one bit of its files flips."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from benchmarks.others.library import Subject
from benchmarks.others.turns import Turn
from perdure.testing.disk import Disk, Kind, Operation, Switch, preloaded, read_recording, write_files

SESSION = "attacked"
TURNS = 24
TEXTS = [text for number in range(1, TURNS + 1) for text in (Turn(number).question, Turn(number).result)]
Shown = list[tuple[str, tuple[str, ...]]]
"""A library's view of each message: its kind, and the known texts that it contains."""


@dataclass
class Attacks:
    """The number of each attack's rounds."""

    cuts: int = 200
    flips: int = 200


def is_attacked(kind: type[Subject]) -> bool:
    """Tell whether a library is attacked: a second way to write into the same files is not."""
    return bool(kind.run_settings)


async def power_cuts(kind: type[Subject], folder: Path, rounds: int) -> int:
    """Cut the power while turns are added one after the other. Return how often an acknowledged turn is missing.

    The session has a turn and its files are safe on the disk when the recording begins: the library's making of its
    files is left out.
    """
    where = _made(folder / "disk")
    await _fill(kind, where, [Turn(1)])
    before = {str(path.relative_to(where)): path.read_bytes() for path in _files(where)}
    numbers = {str(path.relative_to(where)): path.stat().st_ino for path in _files(where)}
    operations = _recorded(kind, where, folder / "log")
    disk = Disk(before)
    for path, number in numbers.items():
        disk.know(path, number)
    lost = 0
    for number, (files, acknowledged) in enumerate(_cuts(disk, operations, rounds)):
        left = folder / f"cut-{number}"
        write_files(files, left)
        lost += await _turns_shown(kind, left) < 1 + acknowledged
        shutil.rmtree(left)
    return lost


async def acknowledge(subject: Subject, where: Path) -> None:
    """Add turns in the recorded process, and mark each that the library reports as saved."""
    await subject.open(where)
    disk = Switch()
    for number in range(2, TURNS + 1):
        await subject.append_turn(SESSION, Turn(number))
        disk.mark(str(number).encode())
    await subject.close()


async def flipped_bits(kind: type[Subject], folder: Path, rounds: int) -> Mapping[str, int]:
    """Flip one bit of the files, and load the session. Return how often it is right, refused, or silently wrong."""
    whole = _made(folder / "whole")
    await _fill(kind, whole, [Turn(number) for number in range(1, TURNS + 1)])
    right = await _shown(kind, _copied(whole, folder / "right"))
    chance, found = random.Random(1), Counter[str]()
    for number in range(rounds):
        damaged = _copied(whole, folder / f"flip-{number}")
        _flip(damaged, chance)
        try:
            found["right" if await _shown(kind, damaged) == right else "wrong"] += 1
        except Exception:  # with any exception, the library has noticed
            found["refused"] += 1
        shutil.rmtree(damaged)
    return dict(found)


async def _fill(kind: type[Subject], where: Path, turns: Sequence[Turn]) -> None:
    subject = kind()
    await subject.open(where)
    await subject.fill(SESSION, turns)
    await subject.close()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _recorded(kind: type[Subject], where: Path, log: Path) -> Sequence[Operation]:
    """Return the disk operations of a process of its own that adds turns."""
    name = f"{kind.__module__}:{kind.__name__}"
    command = [sys.executable, "-m", "benchmarks.others", "--acknowledge", name, str(where)]
    subprocess.run(command, env=preloaded(where, log), check=True, stdout=subprocess.DEVNULL)
    return read_recording(log)


def _cuts(disk: Disk, operations: Sequence[Operation], rounds: int) -> Iterator[tuple[Mapping[str, bytes], int]]:
    """Yield the files after each cut, and how many turns were acknowledged before it."""
    chance, done, acknowledged = random.Random(1), 0, 0
    for moment in sorted(chance.randrange(1, len(operations) + 1) for _ in range(rounds)):
        for operation in operations[done:moment]:
            disk.apply(operation)
            acknowledged += operation.kind is Kind.MARK
        done = moment
        yield disk.after_cut(chance), acknowledged


async def _turns_shown(kind: type[Subject], where: Path) -> int:
    """Return how many turns are there, from the first on. A session that cannot be loaded has none."""
    try:
        texts = [text for _, texts in await _shown(kind, where) for text in texts]
    except Exception:  # with any exception, no turn can be read
        return 0
    return len([*takewhile(lambda number: Turn(number).question in texts and Turn(number).result in texts, count(1))])


async def _shown(kind: type[Subject], where: Path) -> Shown:
    subject = kind()
    await subject.open(where)
    try:
        messages = await subject.load(SESSION)
        return [(subject.kind(each), tuple(text for text in TEXTS if text in repr(each))) for each in messages]
    finally:
        await subject.close()


def _copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def _flip(where: Path, chance: random.Random) -> None:
    files = [*_files(where)]
    (path,) = chance.choices(files, [path.stat().st_size for path in files])
    place = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _files(where: Path) -> Iterator[Path]:
    """Yield the files with content, but not SQLite's `-shm`, which it makes again whenever a file is opened."""
    for path in sorted(where.rglob("*")):
        if path.is_file() and path.stat().st_size and not path.name.endswith("-shm"):
            yield path


__all__ = ["Attacks", "acknowledge", "flipped_bits", "is_attacked", "power_cuts"]
