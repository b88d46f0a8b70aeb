"""A simulation of workers, their store and the sessions they run: `python -m benchmarks.simulate --help`.

Time is simulated, so a minute of a thousand workers takes seconds. The cost of a run is given: measure it first
(`python -m benchmarks workers`). `tests/benchmarks/test_simulate.py` compares its small end with real processes.

Each worker is one process: its runs compute one after another, on one core. The store computes in the same way, on
its number of cores. A worker that has room takes the session that has waited longest. It finds it when it looks, when
one of its runs ends, or when it is woken.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import count


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The simulated system. Times are in seconds."""

    workers: int = 2
    concurrency: int = 16
    sessions: int = 20
    messages: int = 1
    """The number of messages left with each session at the beginning."""
    arrivals: float = 0.0
    """The number of further messages left a second, each with a session at random."""
    seconds: float = 60.0
    """The time during which they are left."""
    think: float = 1.0
    """The model's time for a run."""
    processor: float = 0.005
    """A run's cost for its worker, of one core."""
    store: float = 0.0
    """A run's cost for the store, of one core."""
    cores: int = 8
    """The number of the store's cores."""
    latency: float = 0.0
    """A run's other waits, such as commits and the network."""
    look_every: float = 0.2
    """The time between two looks of a worker for sessions that wait."""
    wake: float | None = None
    """The time until a worker that has room is notified of a message; None without notifications."""
    lease: float = 20.0
    sweep: float = 0.0
    """The cost of a sweep for its worker and for the store, each."""
    kills: float = 0.0
    """The number of workers killed a second. Another process takes the place of each."""
    restart: float = 1.0
    """The time until that process runs."""
    is_seen_dead: bool = False
    """True if a sweep sees that a process has ended. The end of another machine's process shows only in its lease."""


@dataclass
class Result:
    """The result of a play."""

    began: float = 0.0
    ends: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """The times from leaving a message to asking the model, of each run that was not killed before."""
    take_overs: list[float] = field(default_factory=list)
    """The times from the death of a worker to asking the model again, of each run that it had."""
    sweeps: int = 0
    computed: float = 0.0
    """The computing time of all workers together, in seconds."""
    stored: float = 0.0
    """The computing time of the store, in seconds."""

    def a_second(self, until: float | None = None) -> float:
        """Return the runs that ended a second, until a time or until the last."""
        span = (self.ends[-1] if until is None else until) - self.began
        return sum(until is None or end <= until for end in self.ends) / span


def part(times: Sequence[float], share: float) -> float:
    """Return the time that this share of them does not exceed; 0 if there are none."""
    ordered = sorted(times)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


class Cores:
    """Some cores that do one thing after another, in the order of the requests."""

    def __init__(self, number: int) -> None:
        self._free = [0.0] * number
        self.used = 0.0

    def done(self, now: float, seconds: float) -> float:
        """Return the time when a request of now is done."""
        if not seconds:
            return now
        end = max(now, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        self.used += seconds
        return end


@dataclass(eq=False)
class Session:
    """Messages that wait, by the time they were left, and the holder of the session."""

    waiting: deque[float] = field(default_factory=deque)
    holder: Worker | None = None
    expires: float = 0.0
    died: float | None = None
    """The time when the worker that was running it died."""


class Worker:
    """A process, until it is killed."""

    def __init__(self) -> None:
        self.core = Cores(1)
        self.running: dict[Session, None] = {}
        """In the order of their starts: that of a set would differ from play to play."""
        self.is_alive = True


class Simulation:
    """Plays a setting, event by event. The same seed gives the same play."""

    def __init__(self, setting: Setting, seed: int = 1) -> None:
        self.setting = setting
        self.result = Result()
        self._random = random.Random(seed)
        self._store = Cores(setting.cores)
        self._sessions = [Session() for _ in range(setting.sessions)]
        self._ready: list[tuple[float, int, Session]] = []
        """Sessions with waiting messages and without a holder, the longest waiting first."""
        self._lost: dict[Session, None] = {}
        """Sessions whose holder was killed, until a sweep finds them."""
        self._left = 0
        self._is_over = False
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._workers: list[Worker] = []

    def play(self) -> Result:
        setting = self.setting
        for session in self._sessions:
            for _ in range(setting.messages):
                self._leave(session, 0.0)
        for _ in range(setting.workers):
            self._hire(0.0)
        if setting.arrivals:
            self._at(self._random.expovariate(setting.arrivals), self._arrive)
        if setting.kills:
            self._at(self._random.expovariate(setting.kills), self._kill)
        while self._events and not self._is_done():
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        self.result.stored = self._store.used
        return self.result

    def _is_done(self) -> bool:
        """Tell whether every message that will ever be left is answered."""
        return not self._left and (self._is_over or not self.setting.arrivals)

    def _at(self, time: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happens))

    def _leave(self, session: Session, now: float) -> None:
        session.waiting.append(now)
        self._left += 1
        if len(session.waiting) == 1 and session.holder is None:
            self._make_ready(session)

    def _make_ready(self, session: Session) -> None:
        heapq.heappush(self._ready, (session.waiting[0], next(self._numbers), session))

    def _arrive(self, now: float) -> None:
        if now > self.setting.seconds:
            self._is_over = True
            return
        self._leave(self._random.choice(self._sessions), now)
        self._at(now + self._random.expovariate(self.setting.arrivals), self._arrive)
        if self.setting.wake is not None and (free := [each for each in self._workers if self._has_room(each)]):
            told = self._random.choice(free)
            self._at(now + self.setting.wake, lambda at: self._fetch(told, at))

    def _hire(self, now: float) -> None:
        worker = Worker()
        self._workers.append(worker)
        self._at(now, lambda at: self._fetch(worker, at))
        self._at(now + self._random.uniform(0, self.setting.look_every), lambda at: self._look(worker, at))
        self._at(now + self._sweep_pause(), lambda at: self._sweep(worker, at))

    def _sweep_pause(self) -> float:
        """Return the seconds between two sweeps, which are not in step with those of others."""
        return min(self.setting.lease / 6, 1.0) * self._random.uniform(0.8, 1.2)

    def _has_room(self, worker: Worker) -> bool:
        return worker.is_alive and len(worker.running) < self.setting.concurrency

    def _look(self, worker: Worker, now: float) -> None:
        if worker.is_alive:
            self._fetch(worker, now)
            self._at(now + self.setting.look_every, lambda at: self._look(worker, at))

    def _fetch(self, worker: Worker, now: float) -> None:
        while self._ready and self._has_room(worker):
            _, _, session = heapq.heappop(self._ready)
            session.holder = worker
            worker.running[session] = None
            self._begin(worker, session, now)

    def _begin(self, worker: Worker, session: Session, now: float) -> None:
        """Do the part before the model is asked: half of a run's cost."""
        self._at(self._computed(worker, now), lambda at: self._ask(worker, session, at))

    def _computed(self, worker: Worker, now: float) -> float:
        """Return when half of a run's cost is paid, to the worker first, then to the store."""
        own = worker.core.done(now, self.setting.processor / 2)
        return self._store.done(own, self.setting.store / 2) + self.setting.latency / 2

    def _ask(self, worker: Worker, session: Session, now: float) -> None:
        if not worker.is_alive:
            return
        if not self.result.began and not self.result.waits:
            self.result.began = now
        if session.died is None:
            self.result.waits.append(now - session.waiting[0])
        else:
            self.result.take_overs.append(now - session.died)
            session.died = None
        self._at(now + self.setting.think, lambda at: self._answered(worker, session, at))

    def _answered(self, worker: Worker, session: Session, now: float) -> None:
        if worker.is_alive:
            self._at(self._computed(worker, now), lambda at: self._end(worker, session, at))

    def _end(self, worker: Worker, session: Session, now: float) -> None:
        if not worker.is_alive:
            return
        session.waiting.popleft()
        self._left -= 1
        self.result.ends.append(now)
        self.result.computed += self.setting.processor
        if session.waiting:  # the session's next message, before any other session's
            self._begin(worker, session, now)
            return
        session.holder = None
        del worker.running[session]
        self._fetch(worker, now)

    def _kill(self, now: float) -> None:
        alive = [each for each in self._workers if each.is_alive]
        if alive:
            victim = self._random.choice(alive)
            victim.is_alive = False
            self._workers.remove(victim)
            for session in victim.running:
                # It has extended its lease at each third of it.
                session.expires = now + self.setting.lease * self._random.uniform(2 / 3, 1)
                session.died = now if session.died is None else session.died
                self._lost[session] = None
            self._at(now + self.setting.restart, self._hire)
        if now < self.setting.seconds:
            self._at(now + self._random.expovariate(self.setting.kills), self._kill)

    def _sweep(self, worker: Worker, now: float) -> None:
        """Find sessions whose claims have lapsed. The worker that finds them runs them, if it has room."""
        if not worker.is_alive:
            return
        self.result.sweeps += 1
        self.result.computed += self.setting.sweep
        end = self._store.done(worker.core.done(now, self.setting.sweep), self.setting.sweep)
        found = [each for each in self._lost if self.setting.is_seen_dead or each.expires <= end]
        for session in found:
            del self._lost[session]
            session.holder = None
            self._make_ready(session)
        self._at(end, lambda at: self._fetch(worker, at))
        self._at(end + self._sweep_pause(), lambda at: self._sweep(worker, at))


def simulate(setting: Setting, seed: int = 1) -> Result:
    return Simulation(setting, seed).play()


def told(setting: Setting, result: Result) -> str:
    """Lay a result out for a terminal."""
    span = result.ends[-1]
    lines = [
        f"{len(result.ends):,} runs, {result.a_second(setting.seconds if setting.arrivals else None):,.1f} a second",
        _times("wait for the model to be asked", result.waits),
        _times("take-over after a kill", result.take_overs),
        f"{result.sweeps:,} sweeps, {result.sweeps / span:,.1f} a second: "
        f"{100 * result.sweeps * setting.sweep / span:.1f} % of a core of the store",
        f"workers computed {100 * result.computed / span / setting.workers:.0f} % of the time, "
        f"the store {100 * result.stored / span / setting.cores:.0f} % of its cores",
    ]
    return "\n".join(line for line in lines if line)


def _times(what: str, times: Sequence[float]) -> str:
    if not times:
        return ""
    median, most = part(times, 0.5), part(times, 0.99)
    return f"{what}, s: median {median:.3f}, p99 {most:.3f}, longest {max(times):.3f} ({len(times):,})"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    for each in fields(Setting):
        name = "--" + each.name.replace("_", "-")
        if isinstance(each.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            kind = float if each.default is None else type(each.default)
            parser.add_argument(name, type=kind, default=each.default, help=f"{each.default} unless given")
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args(given))
    seed = options.pop("seed")
    setting = Setting(**options)
    print(told(setting, simulate(setting, seed)))


if __name__ == "__main__":
    main()
