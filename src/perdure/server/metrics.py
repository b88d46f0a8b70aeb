"""Counts of the service itself, in OpenMetrics' text form."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of the buckets of durations, in seconds."""


class Metrics:
    """Requests by route and status, and how long they took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the path in the table, so that ids do not become labels."""
        self._requests[method, route, status] += 1
        buckets = self._buckets.setdefault(route, [0] * (len(BOUNDS) + 1))
        buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]  # a Counter of floats

    def lines(self, gauges: dict[str, tuple[str, float]]) -> Iterator[str]:
        """Yield all that is counted. `gauges` are current values by name, each with its help text."""
        yield "# HELP perdure_http_requests Requests that were answered."
        yield "# TYPE perdure_http_requests counter"
        for (method, route, status), count in sorted(self._requests.items()):
            yield f'perdure_http_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
        yield from self._durations()
        for name, (told, value) in gauges.items():
            yield f"# HELP perdure_{name} {told}"
            yield f"# TYPE perdure_{name} gauge"
            yield f"perdure_{name} {value:g}"
        yield "# EOF"

    def _durations(self) -> Iterator[str]:
        name = "perdure_http_request_duration_seconds"
        yield f"# HELP {name} Seconds from a request to its response, or to the beginning of a stream."
        yield f"# TYPE {name} histogram"
        yield f"# UNIT {name} seconds"
        for route, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), buckets, strict=True):
                # OpenMetrics' buckets are cumulative.
                total += count
                yield f'{name}_bucket{{route="{route}",le="{bound}"}} {total}'
            yield f'{name}_count{{route="{route}"}} {total}'
            yield f'{name}_sum{{route="{route}"}} {self._seconds[route]:.6f}'
