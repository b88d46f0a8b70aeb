"""A framework's suite: its files, the tests that must pass, and those that cannot. It knows no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Suite:
    """Tests that a framework publishes, run with perdure's class in place of its own store."""

    name: str
    package: str
    """The package on PyPI whose source distribution has the tests, in the installed version."""
    files: tuple[str, ...]
    """Arguments of pytest, relative to the unpacked source distribution."""
    bar: int
    """The number of tests that must pass."""
    excused: Mapping[str, str] = field(default_factory=dict)
    """Tests that may fail, and why: a test's id, or a pattern with `*`."""
    arguments: tuple[str, ...] = ()
    """More arguments of pytest, for example `-k sqlite`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    minutes: float = 10.0
    """The time limit: a test that has not run by then has not passed."""

    def reason(self, test: str) -> str | None:
        """Return the reason why a test may fail, None if it may not."""
        if test in self.excused:
            return self.excused[test]
        return next((why for pattern, why in self.excused.items() if "*" in pattern and _matches(test, pattern)), None)


@dataclass(frozen=True)
class Result:
    """A test's outcome."""

    test: str
    outcome: str
    """passed, failed or skipped."""
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The results of a suite."""

    suite: Suite
    results: tuple[Result, ...]
    seconds: float
    problem: str = ""
    """The reason why it did not run to its end."""

    def count(self, outcome: str) -> int:
        """Return the number of tests with an outcome."""
        return sum(each.outcome == outcome for each in self.results)

    @property
    def excused(self) -> Iterable[tuple[Result, str]]:
        """The failures that are known, each with its reason."""
        return [(each, why) for each in self._failed if (why := self.suite.reason(each.test)) is not None]

    @property
    def unexpected(self) -> Iterable[Result]:
        """The failures without a known reason."""
        return [each for each in self._failed if self.suite.reason(each.test) is None]

    @property
    def is_met(self) -> bool:
        """True if enough tests pass, none fails for an unknown reason, and all of them were run."""
        return not self.problem and not self.unexpected and self.count("passed") >= self.suite.bar

    @property
    def _failed(self) -> Iterable[Result]:
        return [each for each in self.results if each.outcome == "failed"]


def _matches(test: str, pattern: str) -> bool:
    return fnmatchcase(test, pattern.replace("[", "[[]"))  # an id may have brackets, which are literal
