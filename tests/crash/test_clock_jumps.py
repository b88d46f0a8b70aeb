"""Two machines whose clocks jump by hours and disagree: one runs a session, and nothing is lost."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.crash.addresses import NAMES, address_of, store_at
from tests.store_breaks import without_epochs

from perdure.archive import fsck
from perdure.errors import ClaimLost, PerdureError, SessionBusy
from perdure.model.ids import SessionId, use
from perdure.protocols import Claim, Entry, Timer
from perdure.testing.outcomes import Outcome, note
from perdure.testing.samples import new_session, say, texts

ROUNDS, CONTROLS = (200, 50) if os.environ.get("PERDURE_TORTURE") else (8, 8)
STEPS = 14
STORES = ("sqlite", "files", "postgres")
JUMPS = (0.0, 1.0, 40.0, 3600.0, 9 * 3600.0, -40.0, -3600.0, -9 * 3600.0)


class Machine:
    """A store that is opened on a machine with a clock of its own."""

    def __init__(self, name: str, store: Any) -> None:
        self.name, self.store = name, store
        self._ahead = timedelta()
        self.claim: Claim | None = None

    def jump(self, seconds: float) -> None:
        self._ahead += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead


class Round:
    """The actions of two machines on one session, and the checks of their outcome."""

    def __init__(self, machines: list[Machine], name: str, chance: random.Random) -> None:
        self._machines, self._name, self._chance = machines, name, chance
        self._newest: Machine | None = None
        self._version = 1
        self._noted: list[str] = []
        self._said = ["Hello."]
        self._rings = 0
        self.wrong: list[str] = []

    async def play(self) -> list[str]:
        first = self._machines[0]
        for machine in self._machines:
            machine.claim = None
        with use(clock=first.now):
            await first.store.create(new_session("Hello.", id=self._name))
            await first.store.set_timer(Timer(SessionId(self._name), "wake", first.now().timestamp() + 60))
        for step in range(STEPS):
            machine = self._chance.choice(self._machines)
            machine.jump(self._chance.choice(JUMPS))
            with use(clock=machine.now):
                await self._chance.choice((self._take, self._write, self._write, self._save, self._ring))(machine, step)
        await self._compare(self._chance.choice(self._machines))
        return self.wrong

    async def _take(self, machine: Machine, step: int) -> None:
        """Claim the session, or take it over from a machine whose lease seems to be over."""
        before = None if self._newest is None else self._newest.claim
        try:
            claim, _ = await machine.store.claim(
                self._name, version=self._version, owner=machine.name, take_over=True, entries=[Entry(f"take {step}")]
            )
        except SessionBusy:
            if before is None:
                self.wrong.append("nobody had claimed it, and it was busy")
            return
        if before is not None and claim.epoch <= before.epoch:
            self.wrong.append(f"epoch {claim.epoch} came after {before.epoch}")
        machine.claim, self._newest = claim, machine
        self._noted.append(f"take {step}")

    async def _write(self, machine: Machine, step: int) -> None:
        """Write under the claim that this machine has, or had."""
        if machine.claim is None:
            return
        try:
            await machine.store.append(machine.claim, entries=[Entry(f"write {step}")])
        except ClaimLost:
            if self._newest is machine:
                self.wrong.append("the newest claim was refused")
        else:
            self._noted.append(f"write {step}")
            if self._newest is not machine:
                self.wrong.append("one that was taken over could write")

    async def _save(self, machine: Machine, step: int) -> None:
        """End the run with a save, as the holder of the claim may."""
        if machine.claim is None or self._chance.random() < 0.5:
            return
        session = await machine.store.load(self._name)
        try:
            await machine.store.save(say(session, f"save {step}"), claim=machine.claim)
        except ClaimLost:
            if self._newest is machine:
                self.wrong.append("a save under the newest claim was refused")
        else:
            if self._newest is not machine:
                self.wrong.append("one that was taken over could save")
            self._said.append(f"save {step}")
            self._version += 1
            machine.claim = self._newest = None

    async def _ring(self, machine: Machine, step: int) -> None:
        for timer in await machine.store.due(machine.now().timestamp()):
            if timer.session_id == self._name:
                self._rings += await machine.store.ring(timer)

    async def _compare(self, machine: Machine) -> None:
        store = machine.store
        noted = [entry.kind for entry in await store.read(self._name)]
        session = await store.load(self._name)
        if (noted, texts(session), session.version) != (self._noted, self._said, self._version):
            self.wrong.append(f"it shows {noted}, {texts(session)}, not {self._noted}, {self._said}")
        if self._rings > 1 or self._rings + len(await store.timers(self._name)) != 1:
            self.wrong.append(f"its timer rang {self._rings} times")
        self.wrong += [str(problem) for problem in (await fsck(store, session_id=self._name)).problems]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
async def test_clocks_that_jump(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last machine that claimed can write, a timer rings once, and ids are not given out twice."""
    address, ids = address_of(kind, tmp_path), list[str]()
    async with store_at(address) as one, store_at(address) as two:
        machines = [Machine("one", one), Machine("two", two)]
        wrong = [each for number in range(ROUNDS) for each in await played(machines, number, ids)]
        without_epochs(monkeypatch.setattr)
        lost = [await played(machines, number, []) for number in range(ROUNDS, ROUNDS + CONTROLS)]
    note(
        Outcome(
            attack="clocks jump",
            store=NAMES[kind],
            rounds=ROUNDS,
            failures=len(wrong),
            control="epochs of claims are not compared",
            control_rounds=CONTROLS,
            control_failures=sum(map(bool, lost)),
        )
    )
    assert wrong == []
    assert len({*ids}) == len(ids)
    assert any(lost)


async def played(machines: list[Machine], number: int, ids: list[str]) -> list[str]:
    """Play one round. Return what went wrong, and add the new ids to `ids`."""
    for machine in machines:
        with use(clock=machine.now):
            ids += [SessionId.generate() for _ in range(10)]
    try:
        found = await Round(machines, f"s{number}", random.Random(number)).play()
    except PerdureError as error:
        found = [f"{type(error).__name__}: {error}"]
    return [f"round {number}: {each}" for each in found]
