"""Attacks on worker processes, and the verdict on what they have left behind.

A `Stage` starts processes of `worker_process` and harms them. `verdict` reads the store and the ledger afterwards, and
lists everything that is wrong. So a control, in which something is broken on purpose, can compare the list.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from tests.crash import worker_process
from tests.crash.addresses import store_at
from tests.crash.worker_process import CHARGES, Task

from perdure import LoopStatus, SessionRuntime
from perdure.archive import fsck

# In a pid namespace of its own: nobody outside can see that its process has died.
_REMOTE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")


@functools.cache
def _can_unshare() -> bool:
    with suppress(OSError):
        return subprocess.run((*_REMOTE, "true"), capture_output=True, check=False).returncode == 0
    return False


BEYOND = 2.5
"""Seconds beyond its lease for which a worker is stopped."""


class Victim:
    """A process that may be harmed at any instant."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.is_stopped = False
        self.is_to_end = False
        self.listening = asyncio.Event()
        """Set once it works. Before that, SIGTERM ends it like any other process."""

    def signal(self, number: int) -> None:
        # Not `send_signal`: it may reap a process that has just ended, and asyncio then reports 255 for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def ready(self) -> None:
        """Wait until it works, or was killed before it did."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line == b"ready\n" or self.is_to_end, f"process {self.name} did not begin"
        self.listening.set()

    async def end(self, patience: float = 60.0) -> int:
        return await asyncio.wait_for(self.process.wait(), patience)


class Harm(msgspec.Struct, frozen=True):
    """A harm to a process, and its time."""

    name: str
    at: float


class Stage:
    """Worker processes, each replaced once it has ended, a process that leaves messages, and the harms done to them."""

    def __init__(self, task: Task, *, seed: int = 0, remote: bool = False) -> None:
        self.task = task
        self.chance = random.Random(seed)
        self.workers: list[Victim] = []
        self._others: list[Victim] = []
        self.harms: list[Harm] = []
        self._prefix = _REMOTE if remote and _can_unshare() else ()
        if remote and not self._prefix:
            self.task = msgspec.structs.replace(task, breaks=[*task.breaks, "elsewhere"])
        self._started = 0
        self._took: list[float] = []
        self._wanted = 0

    async def start(self, role: str, **changes: Any) -> Victim:
        """Start a process, and return once it works."""
        self._started += 1
        name = f"{role}{self._started}"
        began = time.monotonic()
        told = msgspec.json.encode(msgspec.structs.replace(self.task, name=name, **changes)).decode()
        prefix = self._prefix if role == "work" else ()
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, worker_process.__file__, role, told),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        victim = Victim(name, process)
        (self.workers if role == "work" else self._others).append(victim)
        await victim.ready()
        self._took.append(time.monotonic() - began)
        return victim

    @property
    def slowness(self) -> float:
        """Return how many times slower the machine is than a quiet one, where a process is ready within 1.5 seconds."""
        return max(1.0, sorted(self._took)[len(self._took) // 2] / 1.5)

    async def start_workers(self, count: int, **changes: Any) -> None:
        self._wanted += count
        await asyncio.gather(*(self.start("work", **changes) for _ in range(count)))

    async def worker_in_a_run(self) -> Victim:
        """Wait for a worker in the middle of a run, while more than half of them work, and return it."""
        while True:
            at_work = [each for each in self.workers if each.listening.is_set() and not each.is_stopped]
            if len(at_work) > self._wanted // 2:
                last = {line.session_id: line for line in ledger_of(self.task) if line.what in ("start", "over")}
                names = {line.by for line in last.values() if line.what == "start"}
                if found := [each for each in at_work if each.name in names]:
                    return self.chance.choice(found)
            await asyncio.sleep(0.02)

    def note(self, name: str) -> None:
        """Note that something is harmed now."""
        self.harms.append(Harm(name, time.time()))

    def harm(self, victim: Victim, number: int) -> None:
        """Send a signal, and note the time."""
        self.note(victim.name)
        victim.signal(number)

    async def kill(self, victim: Victim) -> None:
        self.workers.remove(victim)
        victim.is_to_end = True
        self.harm(victim, signal.SIGKILL)
        await victim.end()

    async def close(self) -> None:
        """End all processes that are left."""
        left = [*self.workers, *self._others]
        for victim in left:
            victim.signal(signal.SIGKILL)
        await asyncio.gather(*(victim.end() for victim in left))


@asynccontextmanager
async def stage(task: Task, **options: Any) -> AsyncIterator[Stage]:
    made = Stage(task, **options)
    try:
        yield made
    finally:
        await made.close()


Attack = Callable[[Stage, Victim], Awaitable[None]]


async def kills(on: Stage, victim: Victim) -> None:
    """Kill a worker, and start another in its place."""
    await on.kill(victim)
    await on.start("work")


async def stops(on: Stage, victim: Victim) -> None:
    """Stop a worker for longer than its lease, then let it run on."""
    victim.is_stopped = True
    on.harm(victim, signal.SIGSTOP)
    try:
        await asyncio.sleep(on.task.options["lease"] + BEYOND)
    finally:
        victim.signal(signal.SIGCONT)
        victim.is_stopped = False
    await asyncio.sleep(1.0)  # time for it to try to write


async def terminates(on: Stage, victim: Victim) -> None:
    """Ask a worker to end, and start another in its place once it has."""
    on.workers.remove(victim)
    victim.is_to_end = True
    on.harm(victim, signal.SIGTERM)
    assert await victim.end() == 0, f"{victim.name} did not end in good order"
    await on.start("work")


ATTACKS: dict[str, Attack] = {"kill": kills, "stop": stops, "term": terminates}


async def attacking(on: Stage, attack: Attack, every: tuple[float, float], times: int) -> None:
    """Attack again and again. One attack does not wait for the end of another."""
    under_way: set[asyncio.Task[Any]] = set()
    try:
        for _ in range(times):
            await asyncio.sleep(on.chance.uniform(*every))
            under_way.add(asyncio.ensure_future(attack(on, await on.worker_in_a_run())))
            for done in [each for each in under_way if each.done()]:
                under_way.remove(done)
                done.result()
    finally:
        await asyncio.gather(*under_way)


async def leave_messages(on: Stage, patience: float, *, killed_after: float | None = None) -> None:
    """Let a process leave messages; if it is killed on its way, start another that begins again."""
    poster = await on.start("post")
    if killed_after is not None:
        await asyncio.sleep(killed_after)
        poster.signal(signal.SIGKILL)
        await poster.end()
        poster = await on.start("post")
    assert await poster.end(patience) == 0


async def is_done(store: Any, task: Task) -> bool:
    """Return True if every message was answered and nothing is under way."""
    if await store.waiting(1, idle_only=False) or await store.running():
        return False
    return all([await store.exists(name) for name in task.sessions])


async def all_done(task: Task, patience: float) -> bool:
    """Wait until nothing is left to do, as seen by a process that is not attacked."""
    deadline = time.monotonic() + patience
    async with store_at(task.address) as store:
        while not await is_done(store, task):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
    return True


async def chaos(
    on: Stage, attack: Attack, *, workers: int, every: tuple[float, float], times: int, patience: float
) -> list[str]:
    """Attack workers until all messages are answered. Return what is wrong."""
    await on.start_workers(workers)
    attacks = asyncio.ensure_future(attacking(on, attack, every, times))
    try:
        await leave_messages(on, patience, killed_after=0.5)
        in_time = await all_done(on.task, patience)
    finally:
        attacks.cancel()
        with suppress(asyncio.CancelledError):
            await attacks
    wrong = [] if in_time else [f"something is left to do after {patience:g} seconds"]
    return wrong + await verdict(on.task)


class Line(msgspec.Struct, frozen=True):
    """A line of the ledger."""

    at: float
    by: str
    what: str
    session_id: str
    which: str


def ledger_of(task: Task) -> list[Line]:
    path = Path(task.ledger)
    if not path.exists():
        return []
    parts = [line.split() for line in path.read_text().splitlines()]
    return [Line(float(at), *rest) for at, *rest in parts]


async def verdict(task: Task) -> list[str]:
    """Return everything that is wrong with what workers have left behind; nothing, if all is well."""
    ledger = ledger_of(task)
    by_session: dict[str, list[Line]] = defaultdict(list)
    for line in ledger:
        by_session[line.session_id].append(line)
    async with store_at(task.address) as store:
        wrong = [f"a claim is left on {each.session_id}" for each in await store.running()]
        wrong += [f"something waits in {each.session_id}" for each in await store.waiting(1000, idle_only=False)]
        wrong += [str(problem) for problem in (await fsck(store)).problems]
        for name in task.sessions:
            wrong += await _wrong_in(store, name, task.messages, by_session[name])
    return wrong


async def _wrong_in(store: Any, name: str, messages: int, ledger: Sequence[Line]) -> list[str]:
    session = await store.load(name)
    if session is None:
        return [f"{name} is not there"]
    said = [message.text for message in session.state.messages if message.role == "user"]
    answers = [message.text for message in session.state.messages if message.role == "assistant" and message.text]
    wrong = _compared(name, "asked", said, [f"{name} {number}" for number in range(messages)])
    wrong += _compared(name, "answered", answers, [f"re {name} {number}" for number in range(messages)])
    wrong += await _wrong_versions(store, name, messages)
    wrong += await _wrong_record(store, name, messages)
    return wrong + _wrong_calls(session, name, messages, ledger)


def _compared(name: str, what: str, found: list[str], wanted: list[str]) -> list[str]:
    counted = Counter(found)
    wrong = [f"{name}: {each!r} was {what} {counted[each]} times" for each in wanted if counted[each] != 1]
    wrong += [f"{name}: {each!r} was {what}, and never sent" for each in counted if each not in wanted]
    return wrong or ([] if found == wanted else [f"{name}: {what} out of order: {found}"])


async def _wrong_versions(store: Any, name: str, messages: int) -> list[str]:
    """Check that each message makes one version after the first, which the opening made."""
    found = [head.info.version for head in await store.versions(name, limit=messages * 4 + 10)]
    wanted = list(range(messages + 1, 0, -1))
    return [] if found == wanted else [f"{name}: its versions are {found}, not {wanted}"]


async def _wrong_record(store: Any, name: str, messages: int) -> list[str]:
    """Check that each message has one run on record, which has ended, and that runs' events do not mix."""
    loops = (await SessionRuntime(store).record(name)).loops
    wrong = [f"{name}: run {loop.loop_id} is {loop.status}" for loop in loops if loop.status != LoopStatus.COMPLETED]
    wrong += [] if len(loops) == messages else [f"{name}: {len(loops)} runs for {messages} messages"]
    for loop in loops:
        numbers = [int(entry.body["seq"]) for entry in await store.read(name, run=loop.loop_id) if "seq" in entry.body]
        if any(later <= sooner for sooner, later in itertools.pairwise(numbers)):
            wrong.append(f"{name}: two have written the record of run {loop.loop_id}: {numbers}")
    return wrong


def _wrong_calls(session: Any, name: str, messages: int, ledger: Sequence[Line]) -> list[str]:
    """Check that each call was made at most once, exactly once if it has a result, and in order."""
    wanted = [f"{name}/{number}/{step}" for number in range(messages) for step in range(CHARGES)]
    calls = [call for message in session.state.messages for call in message.tool_calls]
    by_id = {result.call_id: result for message in session.state.messages for result in message.tool_results}
    results = {str(call.arguments["which"]): by_id[call.id] for call in calls if call.id in by_id}
    begun = [line.which for line in ledger if line.what == "begin"]
    ended = [line.which for line in ledger if line.what == "end"]
    wrong = [f"{name}: call {each} has no result" for each in wanted if each not in results]
    wrong += [f"{name}: call {each} was made {begun.count(each)} times" for each in wanted if begun.count(each) > 1]
    wrong += [
        f"{name}: call {each} has come to a result, and was not made"
        for each in wanted
        if each in results and not results[each].is_error and (begun.count(each), ended.count(each)) != (1, 1)
    ]
    # A worker stopped before a call may make it late: by then its outcome was reported as unknown.
    sure = [each for each in begun if each in results and not results[each].is_error]
    in_order = [each for each in wanted if each in sure]
    return wrong if wrong or sure == in_order else [f"{name}: calls were made out of order: {begun}"]


def take_overs(on: Stage) -> list[float]:
    """Return the time until each run was continued that was under way in a process when it was harmed.

    That is when a run begins in that session next, in another process. A run that its own process ends, woken again,
    has waited for as long as that took. If one that has just taken it over is harmed too, time counts from then on.
    """
    by_session: dict[str, list[Line]] = defaultdict(list)
    for line in ledger_of(on.task):
        by_session[line.session_id].append(line)
    return sorted(late for harm in on.harms for lines in by_session.values() for late in _waited(harm, lines, on.harms))


def _waited(harm: Harm, lines: Sequence[Line], harms: Sequence[Harm]) -> list[float]:
    """Return how long one session has waited after a process was harmed; nothing if it was not run there."""
    runs = [line for line in lines if line.what in ("start", "over")]
    last = next((line for line in reversed(runs) if line.at <= harm.at), None)
    if last is None or (last.by, last.what) != (harm.name, "start"):
        return []
    after = next((line.at for line in runs if line.at > harm.at), None)
    if after is None:
        return []
    looks = [line for line in lines if line.what in ("look", "looked")]
    since = [each.at for each in harms if harm.at <= each.at < after and _is_looking(each, looks)]
    return [after - max(since, default=harm.at)]


def _is_looking(harm: Harm, looks: Sequence[Line]) -> bool:
    """Return True if a process was looking at a session when it was harmed."""
    found = next((line.what for line in reversed(looks) if line.by == harm.name and line.at <= harm.at), None)
    return found == "look"


def told(found: Sequence[float]) -> str:
    """Return the durations of take-overs, for people."""
    if not found:
        return "no take-over"
    median, late = found[len(found) // 2], found[min(len(found) - 1, int(len(found) * 0.95))]
    return f"{len(found)} take-overs: median {median:.1f} s, p95 {late:.1f} s, most {found[-1]:.1f} s"
