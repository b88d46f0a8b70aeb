"""An attack: damage, every question, and a save on top, again and again, with a report of the results."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from perdure.errors import SessionNotFound
from perdure.testing.rot.questions import TYPED, Answers, Failed, Kind, Question, answers_of, is_loaded, is_right
from perdure.testing.samples import say

SECTOR = 512
_CHECKED = 25
"""In one of this many rounds a check is run although no answer is wrong. Damage must not make it fail."""
Form = Literal["bit", "byte", "sector"]
OpenStore = Callable[[Path], AbstractAsyncContextManager[Any]]


class Damage(Protocol):
    """Something that can be damaged, and restored."""

    async def hurt(self, rng: random.Random) -> Hurt | None:
        """Damage one thing, and return which. Return None if nothing could be damaged."""
        ...

    async def heal(self) -> None:
        """Restore everything."""
        ...


class Wrong(NamedTuple):
    """An answer that is neither right nor an error that says what is damaged."""

    damage: str
    question: str
    found: str


class Hurt(NamedTuple):
    """Damage that was done: a description, and the names by which `Traces` know what was touched."""

    said: str
    touched: frozenset[Hashable] = frozenset()


class Report:
    """The result of an attack."""

    def __init__(self) -> None:
        self.rounds = self.noticed = self.saves = self.asked = self.unopened = 0
        self.wrong: list[Wrong] = []
        self.left_to_check: Counter[str] = Counter()
        """Counts, by kind, of answers that lacked something, which only a check has found."""


class RottenFiles:
    """The files of a closed store in a directory, as a `Damage`: bits flip, bytes change, sectors are zeroed."""

    def __init__(
        self,
        where: Path,
        *,
        hit: Callable[[str], bool] = lambda name: True,
        key: Callable[[str, int], Hashable] = lambda name, place: name,
    ) -> None:
        self.where = where
        self._key = key
        self._sound = {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}
        self._times = {name: (where / name).stat().st_mtime_ns for name in self._sound}
        self._written: dict[str, tuple[int, int, int]] = {}
        # A byte that is zero is mostly one that nobody reads.
        self._names = [name for name, raw in self._sound.items() if hit(name) and raw.strip(b"\0")]
        # The weights of the names: a large file is hit as often as its share of the bytes.
        self._sizes = [len(raw) for name, raw in self._sound.items() if name in self._names]
        for name in self._sound:
            self._note(name)

    async def hurt(self, rng: random.Random) -> Hurt | None:
        (name,) = rng.choices(self._names, self._sizes)
        raw = bytearray(self._sound[name])
        # Mostly single bits: what is read with one of them flipped is often still valid JSON.
        form: Form = rng.choices(("bit", "byte", "sector"), (8, 1, 1))[0]
        place = _used_place(raw, rng)
        if form == "bit":
            raw[place] ^= 1 << rng.randrange(8)
        elif form == "byte":
            raw[place] ^= rng.randrange(1, 256)
        else:
            start = place // SECTOR * SECTOR
            raw[start : start + SECTOR] = bytes(len(raw[start : start + SECTOR]))
        self._write(name, bytes(raw))
        return Hurt(f"{form} at byte {place} of {name}", frozenset({self._key(name, place)}))

    async def heal(self) -> None:
        """Write back every file that has changed since, and remove those that are new."""
        there = {str(path.relative_to(self.where)): path for path in self.where.rglob("*") if path.is_file()}
        for name, path in there.items():
            if name not in self._sound:
                path.unlink()
        for name, raw in self._sound.items():
            if name not in there or self._written.get(name) != _state(there[name]):
                self._write(name, raw)
                self._note(name)

    def _write(self, name: str, raw: bytes) -> None:
        path = self.where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        # With its old times: the mark of a SQLite store notes those of the file, to tell whether somebody has written
        # since.
        os.utime(path, ns=(self._times[name], self._times[name]))
        self._written.pop(name, None)

    def _note(self, name: str) -> None:
        self._written[name] = _state(self.where / name)


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _used_place(raw: bytearray, rng: random.Random) -> int:
    """Return a place whose byte is not zero, if one is found within 50 tries."""
    for _ in range(50):
        place = rng.randrange(len(raw))
        if raw[place]:
            break
    return place


class Traces:
    """The parts of a sound store that each question reads. Damage anywhere else cannot change its answer.

    `watch` is called before a question is asked of a newly opened store. It returns a function that tells afterwards
    what was read since.
    """

    def __init__(self, read: Mapping[str, frozenset[Hashable]]) -> None:
        self._read = read

    @classmethod
    async def taken(
        cls, open_store: OpenStore, where: Path, questions: Sequence[Question], watch: Callable[[], Callable[[], Any]]
    ) -> Traces:
        read: dict[str, frozenset[Hashable]] = {}
        for question in questions:
            seen = watch()
            async with open_store(where) as store:
                # A store of its own for each question: what an earlier one has left at hand would not be read again.
                await answers_of(store, [question])
                forget_claims(store)
            read[question.name] = frozenset(seen())
        return cls(read)

    def asked(self, questions: Sequence[Question], touched: Collection[Hashable]) -> Sequence[Question]:
        """Return the questions whose answers may depend on the damage."""
        return [each for each in questions if not self._read[each.name].isdisjoint(touched)]


class Attack:
    """Damage to a store, with every answer compared with the one before.

    Answers of the kinds in `left_to_check` may lack something if a check finds that something is wrong. A save on top
    of a session that is read as before must be right, too. Without `saves` none is tried: for damage that is undone
    where it was done.
    """

    def __init__(
        self,
        open_store: OpenStore,
        where: Path,
        damage: Damage,
        questions: Sequence[Question],
        right: Answers,
        *,
        traces: Traces | None = None,
        left_to_check: Collection[Kind] = (),
        saves: bool = True,
    ) -> None:
        self._saves = saves
        self._open_store = open_store
        self._where = where
        self._damage = damage
        self._questions = {question.name: question for question in questions if question.kind != "check"}
        self._right = right
        self._traces = traces
        self._left_to_check = left_to_check
        self._loads = [name for name in self._questions if name.startswith("load ")]

    async def run(self, rounds: int, seed: int = 0) -> Report:
        """Damage one thing in each of `rounds` rounds, and return the report."""
        rng, report = random.Random(seed), Report()
        while report.rounds < rounds:
            hurt = await self._damage.hurt(rng)
            if hurt is None:
                continue
            unopened = report.unopened
            try:
                await self._round(hurt, rng, report)
            finally:
                await self._damage.heal()
            if report.unopened > unopened or report.rounds == rounds:
                await self._look_again(hurt, report)
        return report

    async def _look_again(self, hurt: Hurt, report: Report) -> None:
        """Require that the restored store can be opened. After a handle that was left open, no later round counts."""
        try:
            found = await self._answers([])
        finally:
            await self._damage.heal()  # to open a store and to close it may change its files
        if "open" in found:
            report.wrong.append(Wrong(hurt.said, "open, when it was restored", repr(found["open"].error)))

    async def _round(self, hurt: Hurt, rng: random.Random, report: Report) -> None:
        asked = [*self._questions.values()]
        if self._traces is not None and hurt.touched:
            asked = [*self._traces.asked(asked, hurt.touched)]
        found = await self._answers(asked)
        reported = any(isinstance(found[name], Failed) for name in found if is_loaded(name))
        bad = [each for each in found if each != "open" and not self._is_right(each, found[each], reported)]
        # A check reads everything, so it is not run in every round.
        problems = await self._checked() if bad or report.rounds % _CHECKED == 0 else None
        if isinstance(problems, Failed) and not problems.is_typed:
            report.wrong.append(Wrong(hurt.said, "check()", repr(problems.error)))
        for name in bad:
            kind = self._questions[name].kind
            if kind in self._left_to_check and problems and _is_answer(found[name]):
                report.left_to_check[kind] += 1
            else:
                report.wrong.append(Wrong(hurt.said, name, _brief(self._right[name], found[name])))
        report.rounds += 1
        report.asked += len(asked)
        report.noticed += _is_noticed(found) or bool(bad)
        report.unopened += "open" in found or isinstance(problems, Failed)
        if "open" not in found and self._saves:
            await self._save_on_top(hurt, found, rng, report)

    def _is_right(self, name: str, found: Any, reported: bool) -> bool:
        return is_right(self._questions[name], self._right[name], found, reported)

    async def _answers(self, asked: Sequence[Question]) -> Answers:
        try:
            async with self._open_store(self._where) as store:
                found = await answers_of(store, asked)
                forget_claims(store)
                return found
        except TYPED as error:
            return {"open": Failed(error)}

    async def _checked(self) -> Any:
        """Return the problems that a check finds, or the error if the store cannot be opened."""
        try:
            async with self._open_store(self._where) as store:
                found = [*await store.check()]
                forget_claims(store)
                return found
        except Exception as error:  # around a request: whatever damage brings about is an outcome
            return Failed(error)

    async def _save_on_top(self, hurt: Hurt, found: Answers, rng: random.Random, report: Report) -> None:
        """Save a session that was read as before, if possible one whose load has read what is damaged."""
        read = [name for name in self._loads if name in found and found[name] is not None]
        sound = [name for name in read if found[name] == self._right[name]]
        names = sound or [name for name in self._loads if name not in found and self._right[name] is not None]
        if names:
            report.saves += 1
            wrong = await saved_on_top(self._open_store, self._where, self._right[rng.choice(names)])
            if wrong is not None:
                report.wrong.append(Wrong(hurt.said, "a save on top", wrong))


def forget_claims(store: Any) -> None:
    """Make a store leave its claims as they are when it is closed, as a killed process does."""
    getattr(store, "_claims", {}).clear()


def _is_answer(found: Any) -> bool:
    """Tell whether an answer may lack something. That a session does not exist is one, too."""
    return not isinstance(found, Failed) or isinstance(found.error, SessionNotFound)


def _is_noticed(found: Answers) -> bool:
    return any(isinstance(each, Failed) or bool(getattr(each, "damaged", ())) for each in found.values())


async def saved_on_top(open_store: OpenStore, where: Path, session: Any) -> str | None:
    """Save a session that was read as before, and load it from a store that is opened again.

    Return what is wrong, or None.
    """
    try:
        async with open_store(where) as store:
            newest = await store.load(session.id)
            if newest is None:
                return f"{session.id} is not there any more"
            saved = await store.save(say(newest, "on top"))
            forget_claims(store)
    except TYPED:
        return None
    except Exception as error:  # around a request: whatever damage brings about is an outcome
        # A session that is running, or waits to be recovered, refuses the save. That is not damage.
        return None if _is_refusal(error) else f"{session.id}: {error!r}"
    try:
        async with open_store(where) as store:
            again = await store.load(session.id)
            forget_claims(store)
    except TYPED:
        return None
    return None if again == saved else f"{session.id} was saved as version {saved.version}, and is {again!r}"[:300]


def _is_refusal(error: Exception) -> bool:
    return type(error).__name__ in ("SessionBusy", "RunInterrupted", "SessionConflict")


def _brief(right: Any, found: Any) -> str:
    if isinstance(found, Failed):
        return repr(found.error)[:300]
    if isinstance(right, list | tuple) and isinstance(found, list | tuple):
        return f"{len(found)} of {len(right)}; lacks {[each for each in right if each not in found]!r}"[:300]
    return f"{found!r}"[:200]


__all__ = ["Attack", "Damage", "Hurt", "Report", "RottenFiles", "Traces", "Wrong", "forget_claims"]
