"""The metrics: the usage of models, the durations of calls and runs, and the work that waits in stores."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation, get_meter

from perdure.errors import PerdureError
from perdure.model.usage import Usage
from perdure.telemetry import attributes as names
from perdure.telemetry.attributes import Asked

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

Report = Callable[[Exception], None]
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864)
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""The bounds that the conventions ask for."""
_RUN_SECONDS = (*_SECONDS, 163.84, 327.68, 655.36, 1310.72)
_PATIENCE = 2.0
"""Seconds that a store has to tell what waits in it. Metrics are collected on time, with the store or without it."""
_AT_ONCE = 128
"""The most measurements that wait for a collection. Recorded together, each takes a third of its time alone."""
_NO_SPAN = Context()
"""The context of measurements. They are recorded late, when the current span is not the one they belong to."""


class Depths:
    """The numbers that a store gives when metrics are collected."""

    def __init__(self, kind: str, waiting: int, held: int, lapsed: int) -> None:
        self.kind = kind
        self.waiting = waiting
        """The number of messages that wait."""
        self.held = held
        """The number of valid claims."""
        self.lapsed = lapsed
        """The number of lapsed claims: their runs wait to be recovered."""


class Watched(Protocol):
    """A store that can be asked for its numbers, in its own event loop."""

    async def depths(self) -> Depths | None: ...


class Meters:
    """The instruments of one `Telemetry`."""

    def __init__(self, provider: MeterProvider | None, report: Report) -> None:
        meter = get_meter("perdure", meter_provider=provider)
        self._report = report
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        ).record
        self._operation = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        ).record
        self._runs = meter.create_histogram(
            "perdure.run.duration",
            "s",
            "Duration of runs, or of the parts of a run that was continued.",
            explicit_bucket_boundaries_advisory=_RUN_SECONDS,
        ).record
        self._cost = meter.create_counter("perdure.cost", "{USD}", "Cost of model calls whose price is known.").add
        self._refusals = meter.create_counter(
            "perdure.session.refusals", "{refusal}", "Actions that did not get their session: it was busy, or changed."
        ).add
        self._recoveries = meter.create_counter(
            "perdure.run.recoveries", "{run}", "Runs that were continued after their claim had lapsed."
        ).add
        self._measured: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """The measurements that are not recorded yet."""
        self._stores = _Stores(report, self.flush)
        meter.create_observable_gauge(
            "perdure.queue.depth", [self._stores.waiting], "{message}", "Messages that wait for a worker."
        )
        meter.create_observable_gauge(
            "perdure.claims",
            [self._stores.claims],
            "{claim}",
            "Sessions that are claimed, and claims that have lapsed.",
        )

    def chat(
        self,
        model: Asked,
        seconds: float,
        answered_by: str | None = None,
        usage: Usage | None = None,
        *,
        failed: str | None = None,
    ) -> None:
        """Note a model call, to be recorded later."""
        self._measured.append((self._record_chat, (model, seconds, answered_by, usage, failed)))

    def run(self, agent: str, status: str, failed: str | None, seconds: float, model: Asked, cost: float) -> None:
        """Note a run that has ended, or was left, to be recorded later."""
        self._measured.append((self._record_run, (agent, status, failed, seconds, model, cost)))
        if len(self._measured) >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Record all measurements noted since the last time. This happens whenever metrics are collected."""
        while self._measured:
            try:
                record, facts = self._measured.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                record(*facts)
            except Exception as error:  # around a subscriber
                self._report(error)

    def _record_chat(
        self, model: Asked, seconds: float, answered_by: str | None, usage: Usage | None, failed: str | None
    ) -> None:
        told = _told(model.measured, failed)
        if answered_by is not None:
            told[names.RESPONSE_MODEL] = answered_by
        self._operation(seconds, told, _NO_SPAN)
        if usage is not None and usage.total_tokens:
            self._tokens(usage.input_tokens, {**told, names.TOKEN_TYPE: "input"}, _NO_SPAN)
            self._tokens(usage.output_tokens, {**told, names.TOKEN_TYPE: "output"}, _NO_SPAN)

    def _record_run(
        self, agent: str, status: str, failed: str | None, seconds: float, model: Asked, cost: float
    ) -> None:
        self._runs(seconds, _told({names.AGENT: agent, names.STATUS: status}, failed), _NO_SPAN)
        if cost:
            told = {names.AGENT: agent, names.PROVIDER: model.provider, names.REQUEST_MODEL: model.name}
            self._cost(cost, told, _NO_SPAN)

    def refused(self, error: PerdureError) -> None:
        self._count(self._refusals, {names.ERROR: type(error).__name__})

    def recovered(self) -> None:
        self._count(self._recoveries, {})

    def watch(self, watched: Watched) -> None:
        self._stores.add(watched)

    def unwatch(self, watched: Watched) -> None:
        self._stores.remove(watched)

    def _count(self, add: Callable[..., None], told: dict[str, Any]) -> None:
        try:
            add(1, told)
        except Exception as error:  # around a subscriber
            self._report(error)


def _told(told: dict[str, Any], failed: str | None) -> dict[str, Any]:
    return dict(told) if failed is None else {**told, names.ERROR: failed}


class _Stores:
    """The stores of open connections. They are asked only when metrics are collected.

    Each is asked in its connection's event loop, from the thread that collects. The loop's own thread cannot wait for
    the answer. There, the answer to the last question is used, and the next question is asked.
    """

    def __init__(self, report: Report, first: Callable[[], None]) -> None:
        self._report = report
        self._first = first
        """A function that is called before anything is collected."""
        # The thread that collects metrics and the event loops of connections both use what follows.
        self._changing = threading.Lock()
        self._loops: dict[Watched, asyncio.AbstractEventLoop] = {}
        self._last: dict[Watched, Depths] = {}
        self._asking: set[asyncio.Future[None]] = set()

    def add(self, watched: Watched) -> None:
        with self._changing:
            self._loops[watched] = asyncio.get_running_loop()

    def remove(self, watched: Watched) -> None:
        with self._changing:
            self._loops.pop(watched, None)
            self._last.pop(watched, None)

    def waiting(self, options: CallbackOptions) -> Iterator[Observation]:
        self._first()
        counts: Counter[str] = Counter()
        for found in self._found():
            counts[found.kind] += found.waiting
        return (Observation(count, {"perdure.store": kind}) for kind, count in counts.items())

    def claims(self, options: CallbackOptions) -> Iterator[Observation]:
        """Return the claims that `waiting` has found. The SDK calls that one right before, so a store is asked once."""
        counts: Counter[tuple[str, str]] = Counter()
        with self._changing:
            last = [*self._last.values()]
        for found in last:
            counts[found.kind, "held"] += found.held
            counts[found.kind, "lapsed"] += found.lapsed
        told = (
            ({"perdure.store": kind, "perdure.claim.state": state}, count) for (kind, state), count in counts.items()
        )
        return (Observation(count, each) for each, count in told)

    def _found(self) -> Sequence[Depths]:
        with self._changing:
            loops = dict(self._loops)  # a copy: to hold the lock while stores are asked would block their loops
        found = (self._asked(watched, loop) for watched, loop in loops.items())
        return [each for each in found if each is not None]

    def _asked(self, watched: Watched, loop: asyncio.AbstractEventLoop) -> Depths | None:
        if loop.is_closed():
            self.remove(watched)
            return None
        if _is_running_here(loop):
            task = loop.create_task(self._ask(watched))
            self._asking.add(task)  # the loop itself has only a weak reference to a task
            task.add_done_callback(self._asking.discard)
            return self._last.get(watched)
        try:
            asyncio.run_coroutine_threadsafe(self._ask(watched), loop).result(_PATIENCE)
        except (TimeoutError, RuntimeError, CancelledError):  # it is busy, or is being closed
            with self._changing:
                self._last.pop(watched, None)  # an old answer must not be reported as the present one
            return None
        return self._last.get(watched)

    async def _ask(self, watched: Watched) -> None:
        try:
            found = await watched.depths()
        except Exception as error:  # around a subscriber: a store that cannot be asked tells nothing
            self._report(error)
            return
        with self._changing:
            if found is not None and watched in self._loops:
                self._last[watched] = found


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
