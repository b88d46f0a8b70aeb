"""The object that a connection is traced and measured with. OpenTelemetry is imported only when one is made."""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING
from weakref import ref

from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.model.checks import expect
from perdure.model.definition import ModelConfig
from perdure.model.session import AgentSession
from perdure.model.value import brief
from perdure.protocols import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from perdure.model.message import Message
    from perdure.redaction.texts import Redaction
    from perdure.telemetry.meters import Watched
    from perdure.telemetry.spans import GroupTrace, RunTrace

_log = logging.getLogger("perdure.telemetry")


class Telemetry:
    """Traces and metrics of runs, model calls and tool calls, by OpenTelemetry's conventions for GenAI.

    Without `tracer_provider` and `meter_provider` it uses those that are set for the process. Spans contain no
    messages, arguments or results unless `content` is set. If something fails here, `perdure.telemetry` logs it once,
    and the run continues.
    """

    def __init__(
        self,
        *,
        content: bool = False,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self.content = expect(content, bool, "$.content")
        for provider, path, method in (
            (tracer_provider, "$.tracer_provider", "get_tracer"),
            (meter_provider, "$.meter_provider", "get_meter"),
        ):
            if provider is not None and not callable(getattr(provider, method, None)):
                raise InvalidData(path, f"expected a provider of OpenTelemetry, got {brief(provider)}")
        try:
            from perdure.telemetry.meters import Meters
            from perdure.telemetry.spans import Tracing
        except ImportError as error:
            what = f"Telemetry needs a package that is not here, or a newer one ({error})."
            raise ConfigurationError(what, "pip install 'perdure[otel]' opentelemetry-sdk") from error
        self.meters = Meters(meter_provider, self.report)
        self._tracing = Tracing(tracer_provider, self.meters, self.report, content=self.content)
        # Handlers run in reverse order: this one comes before the SDK's own, since its providers were made earlier.
        atexit.register(_flush, ref(self))
        self._reported: set[tuple[type[Exception], str]] = set()

    def clean_with(self, redaction: Redaction) -> None:
        """Redact content by a `redaction` before it is traced, for as long as the redaction's connection is there."""
        self._tracing.cleaners[redaction] = None

    def run(
        self,
        session: AgentSession,
        model: ModelConfig,
        *,
        before: str | None = None,
        sender: str | None = None,
        is_posted: bool = False,
        inputs: Sequence[Message] = (),
    ) -> RunTrace | None:
        """Begin the span of a run of a `session` by a `model`. Return None if that fails.

        `before` is the trace of a run that is continued. `sender` is the trace in which the message was left that the
        run answers, if it `is_posted`. `inputs` are the messages that it answers.
        """
        try:
            return self._tracing.run(session, model, before, sender, is_posted=is_posted, inputs=inputs)
        except Exception as error:  # around a subscriber: an exporter or a sampler may raise anything
            self.report(error)
            return None

    def group(self, session: AgentSession, count: int, before: str | None) -> GroupTrace | None:
        """Begin the span above `count` runs of a `session` side by side. Return None if that fails.

        `before` is the trace of a group that is continued.
        """
        try:
            return self._tracing.group(session, count, before)
        except Exception as error:  # around a subscriber
            self.report(error)
            return None

    def driver(self, driver: Driver) -> Driver:
        """Return a `driver` whose calls are traced, each below the span that is current at the time."""
        from perdure.telemetry.spans import TracedDriver

        return TracedDriver(self._tracing, driver)

    def here(self) -> str | None:
        """Return the current span in its stored form, or None."""
        try:
            return self._tracing.here()
        except Exception as error:  # around a subscriber
            self.report(error)
            return None

    def refused(self, error: PerdureError) -> None:
        """Count an action that did not get its session, by its `error`: it was busy, or had changed."""
        self.meters.refused(error)

    def recovered(self) -> None:
        """Count a run that is continued because its claim had lapsed, or was handed over."""
        self.meters.recovered()

    def flush(self) -> None:
        """Hand all spans and measurements over to OpenTelemetry now."""
        self._tracing.flush()
        self.meters.flush()

    def watch(self, watched: Watched) -> None:
        """Ask a store, the `watched`, for the work that waits whenever metrics are collected, until `unwatch`."""
        self.meters.watch(watched)

    def unwatch(self, watched: Watched) -> None:
        """Stop asking a store, the `watched`, and hand over what was measured."""
        self.meters.unwatch(watched)
        self.flush()

    def report(self, error: Exception) -> None:
        """Log an `error` of telemetry once: it may come again at every call."""
        what = (type(error), str(error))
        # At most 100 different ones, in case each message is another.
        if what not in self._reported and len(self._reported) < 100:
            self._reported.add(what)
            _log.warning("telemetry has failed, and the run continues: %s", error, exc_info=error)


def _flush(telemetry: ref[Telemetry]) -> None:
    """Hand over the rest when the interpreter exits."""
    found = telemetry()
    if found is not None:
        found.flush()
