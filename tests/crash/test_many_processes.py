"""Sixteen processes that want one session at once, and processes that are stopped while they write."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.crash import contender_process
from tests.crash.addresses import NAMES, address_of, store_at

from perdure import AgentDefinition, SessionRuntime
from perdure.archive import fsck
from perdure.errors import PerdureError, SessionLocked
from perdure.protocols import Entry
from perdure.testing.outcomes import Outcome, note
from perdure.testing.samples import new_session, texts

IS_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
ROUNDS, CONTROLS = (200, 40) if IS_TORTURE else (4, 12)
MANY = 16 if IS_TORTURE else 4
STOPPED, STOPPED_CONTROLS = (200, 20) if IS_TORTURE else (4, 1)
AT_ONCE = 4
STORES = ("sqlite", "files", "postgres")
WITHOUT = {
    "file_locks": "locks of files are not taken",
    "versions": "versions are not compared",
    "epochs": "epochs of claims are not compared",
}
"""Protections that `store_breaks` removes, in words."""
REFUSALS = {"SessionConflict", "ClaimConflict", "SessionBusy", "RunInterrupted"}


class Contender:
    """A process of `contender_process`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process, self.name = process, name

    async def tell(self, verb: str, session_id: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {session_id}\n".encode())
        return await self.answer()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, f"{self.name} has ended"
        return json.loads(line)


@asynccontextmanager
async def contenders(address: str, where: Path, count: int) -> AsyncIterator[list[Contender]]:
    started = [
        Contender(
            await asyncio.create_subprocess_exec(
                *(sys.executable, contender_process.__file__, address, f"p{number}", str(where / "ledger")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            ),
            f"p{number}",
        )
        for number in range(count)
    ]
    try:
        for contender in started:
            assert await contender.answer() == "ready"
        yield started
    finally:
        for contender in started:
            contender.process.kill()
            await contender.process.wait()


async def raced(store: Any, many: Sequence[Contender], where: Path, rounds: Iterable[int]) -> list[str]:
    """Let all of them do the same thing to one session, again and again. Return what went wrong."""
    wrong: list[str] = []
    for number in rounds:
        verb = ("save", "claim", "fork", "send")[number % 4]
        name = f"r{number}"
        if verb == "send":
            await SessionRuntime(store).create(AgentDefinition("payer", tools=("charge",)), session_id=name)
        else:
            await store.create(new_session("Hello.", id=name))
        said = await asyncio.gather(*(each.tell(verb, name) for each in many))
        try:
            found = await WRONG[verb](store, name, said, where)
            found += [str(each) for each in (await fsck(store, session_id=name)).problems]
        except PerdureError as error:
            found = [str(error)]
        odd = [each for each in said if each.get("error") and each["error"] not in REFUSALS]
        if found or odd:
            wrong.append(f"round {number}, {verb}: {found} {odd}")
    return wrong


async def do_without(protection: str, many: Sequence[Contender]) -> None:
    """Remove something from processes that protects the store: see `store_breaks`."""
    assert [await each.tell("do_without", protection) for each in many] == [{"did": None}] * len(many)


async def _wrong_saves(store: Any, name: str, said: Sequence[Any], _: Path) -> list[str]:
    versions = sorted(each["did"] for each in said if "did" in each)
    session = await store.load(name)
    kept = Counter(texts(session)[1:])
    wrong = [] if versions == [*range(2, session.version + 1)] else [f"acknowledged {versions}, at {session.version}"]
    return wrong + ([] if sorted(kept.values()) == [1] * len(versions) else [f"kept {kept}"])


async def _wrong_claims(store: Any, name: str, said: Sequence[Any], _: Path) -> list[str]:
    epochs = sorted(each["did"] for each in said if "did" in each)
    noted = [entry.body["epoch"] for entry in await store.read(name)]
    return [] if noted == epochs and len({*epochs}) == len(epochs) else [f"claimed {epochs}, and noted {noted}"]


async def _wrong_forks(store: Any, name: str, said: Sequence[Any], _: Path) -> list[str]:
    made = [texts(await store.load(f"{name}-p{number}")) for number in range(MANY)]
    good = [each.get("did") == 1 for each in said]
    return [] if all(good) and made == [["Hello.", f"p{n}"] for n in range(MANY)] else [f"made {made}: {said}"]


async def _wrong_sends(store: Any, name: str, said: Sequence[Any], where: Path) -> list[str]:
    paid = (where / "ledger").read_text().split().count(name)
    asked = texts(await store.load(name)).count("Pay.")
    done = [each["did"] for each in said if "did" in each]
    return [] if (paid, asked, {*done}) == (1, 1, {2}) else [f"paid {paid} times, asked {asked} times: {said}"]


WRONG = {"save": _wrong_saves, "claim": _wrong_claims, "fork": _wrong_forks, "send": _wrong_sends}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
async def test_sixteen_processes_race(tmp_path: Path, kind: str) -> None:
    """Every acknowledged save, claim and fork is there, and one request that all of them send is done once."""
    address = address_of(kind, tmp_path)
    protection = "file_locks" if kind == "files" else "versions"
    async with store_at(address) as store, contenders(address, tmp_path, MANY) as many:
        wrong = await raced(store, many, tmp_path, range(ROUNDS))
        await do_without(protection, many)
        lost = await raced(store, many, tmp_path, range(ROUNDS, ROUNDS + CONTROLS))
    note(
        Outcome(
            attack=f"{MANY} processes race",
            store=NAMES[kind],
            rounds=ROUNDS,
            failures=len(wrong),
            control=WITHOUT[protection],
            control_rounds=CONTROLS,
            control_failures=len(lost),
        )
    )
    assert wrong == []
    assert lost


async def stopped(
    store: Any, holder: Contender, name: str, chance: random.Random, *, patience: float = 60.0
) -> tuple[list[str], bool]:
    """Stop a process that writes until its lease is over, take its session over, and wake it.

    Return what went wrong, and whether it was stopped while it held a lock. One that writes on gets `patience` seconds;
    then the session is released, so that no claim is left to write under.
    """
    await store.create(new_session("Hello.", id=name))
    assert "epoch" in await holder.tell("hold", name)
    await asyncio.sleep(chance.uniform(0.0, 0.03))
    holder.process.send_signal(signal.SIGSTOP)
    was_held = False
    try:
        async with asyncio.timeout(30):
            while await store.is_claimed(name):  # noqa: ASYNC110 (it lapses by itself, and nobody tells)
                await asyncio.sleep(contender_process.LEASE / 5)
        claim, _ = await store.claim(name, version=1, owner="successor", take_over=True, entries=[Entry("over")])
    except SessionLocked as error:
        was_held = True
        named = error.holder == holder.process.pid and error.is_stopped
        holder.process.send_signal(signal.SIGCONT)
        if not named:
            return [f"{name}: {error}"], was_held
        await asyncio.sleep(0.05)
        holder.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            claim = await _taken_over(store, name, holder)
    holder.process.send_signal(signal.SIGCONT)
    await store.append(claim, entries=[Entry("over")])
    answer = asyncio.ensure_future(holder.answer())
    if not (await asyncio.wait({answer}, timeout=patience))[0]:
        await store.release(claim)
    told = await answer
    kinds = [entry.kind for entry in await store.read(name)]
    wrong = [] if told.get("did", {}).get("error") == "ClaimLost" else [f"{name}: the one that was woken said {told}"]
    done = told.get("did", {}).get("done", 0)
    if kinds != ["held"] * kinds.count("held") + ["over"] * 2 or kinds.count("held") not in (done, done + 1):
        wrong.append(f"{name}: {done} writes were acknowledged, and on record are {kinds}")
    return wrong, was_held


async def stopped_in_turns(
    store: Any, many: Sequence[Contender], numbers: Sequence[int], *, at_once: bool, **more: float
) -> list[tuple[list[str], bool]]:
    """Stop one process after the other, or all at once if no lock is shared by all of them."""
    results = []
    for first in range(0, len(numbers), len(many)):
        plays = [
            stopped(store, holder, f"s{number}", random.Random(number), **more)
            for number, holder in zip(numbers[first : first + len(many)], many, strict=False)
        ]
        results += await asyncio.gather(*plays) if at_once else [await play for play in plays]
    return results


async def _taken_over(store: Any, name: str, holder: Contender) -> Any:
    """Take a session over. If the stopped process has a lock again, let it run for a moment."""
    while True:
        try:
            if not await store.is_claimed(name):
                claim, _ = await store.claim(
                    name, version=1, owner="successor", take_over=True, entries=[Entry("over")]
                )
                return claim
        except SessionLocked:
            holder.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
            holder.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(contender_process.LEASE / 5)


def patient_for(address: str, seconds: float) -> Any:
    """Return a store that waits for a lock for a shorter time."""
    store = store_at(address)
    if hasattr(store._engine, "_timeout"):
        store._engine._timeout = seconds
    return store


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", STORES)
async def test_processes_that_are_stopped_beyond_their_lease(tmp_path: Path, kind: str) -> None:
    """Woken after others have taken over, they write nothing. If one holds a lock, its process is named."""
    address = address_of(kind, tmp_path)
    async with patient_for(address, 1.0) as store, contenders(address, tmp_path, AT_ONCE) as many:
        plays = await stopped_in_turns(store, many, range(STOPPED), at_once=kind == "postgres")
        await do_without("epochs", many)
        controls = range(STOPPED, STOPPED + STOPPED_CONTROLS)
        lost = await stopped_in_turns(store, many, controls, at_once=kind == "postgres", patience=0.2)
    wrong, held = [each for found, _ in plays for each in found], sum(was_held for _, was_held in plays)
    print(f"{held} of {STOPPED} were stopped with a lock in their hands")
    note(
        Outcome(
            attack="stopped beyond the lease",
            store=NAMES[kind],
            rounds=STOPPED,
            failures=len(wrong),
            control=WITHOUT["epochs"],
            control_rounds=len(lost),
            control_failures=sum(bool(found) for found, _ in lost),
        )
    )
    assert wrong == []
    assert any(found for found, _ in lost)
