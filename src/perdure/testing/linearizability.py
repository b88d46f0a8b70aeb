"""A checker for histories of concurrent operations: could they have been done one at a time?

A history is linearizable if each operation can be given one moment between its start and its end. Done in the order of
these moments, all operations must give the answers that were given. The search is that of Wing and Gong with the
memory of Lowe: a state that was reached before, with the same operations done, is not tried again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

S = TypeVar("S", bound=Hashable)


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation of a client: when it began, what it was given, and its answer."""

    client: str
    verb: str
    given: tuple[Any, ...]
    began: int
    ended: int | None = None
    """None if the client was killed or cancelled before it had an answer: the operation may still take effect later."""
    answer: tuple[Any, ...] = ()

    @property
    def is_open(self) -> bool:
        """Tell whether the outcome is unknown."""
        return self.ended is None


class Model(Protocol[S]):
    """The effect of operations that are done one at a time."""

    def first(self) -> S:
        """Return the state before any operation."""
        ...

    def after(self, state: S, operation: Operation) -> Iterable[S]:
        """Return the states that an operation may lead to with the answer that it gave, or none if it cannot give it.

        For an open operation, return the states for every answer that it could have had.
        """
        ...


class Verdict(msgspec.Struct, Generic[S], frozen=True):
    """The longest way through a history: all of it, if it is linearizable."""

    order: Sequence[Operation]
    """Operations in an order that gives the answers that were given."""
    state: S
    """The state after these."""
    stuck: Sequence[Operation]
    """The operations one of which had to come next, although none could. Empty if the history is linearizable."""

    @property
    def is_linearizable(self) -> bool:
        return not self.stuck

    def __str__(self) -> str:
        if self.is_linearizable:
            return f"{len(self.order)} operations can be put in order"
        lines = [f"After {len(self.order)} operations the state is {self.state!r}, and none of these can come next:"]
        return "\n".join([*lines, *map(_line, self.stuck), "The last that could be put in order:", *_tail(self.order)])


def check(history: Iterable[Operation], model: Model[S]) -> Verdict[S]:
    """Put a history in an order that explains its answers, or say where that fails."""
    operations = sorted(history, key=lambda each: each.began)
    return _Search(operations, model).run()


class _Search(Generic[S]):
    """A depth-first search through the orders that time allows."""

    def __init__(self, operations: Sequence[Operation], model: Model[S]) -> None:
        self._operations = operations
        self._model = model
        # A set of operations is one number with a bit for each: it is hashed with the state, for every step of the
        # search.
        self._required = sum(1 << place for place, each in enumerate(operations) if not each.is_open)
        self._seen: set[tuple[int, S]] = set()

    def run(self) -> Verdict[S]:
        first = self._model.first()
        path: list[int] = []
        stack = [self._ways(0, first)]
        best, stuck_at, deepest = 0, first, list[int]()
        done, states = 0, [first]
        # Nobody was given an answer, so there is nothing to explain.
        if not self._required:
            return Verdict([], first, [])
        while stack:
            step = next(stack[-1], None)
            if step is None:
                stack.pop()
                if path:
                    done &= ~(1 << path.pop())
                    states.pop()
                continue
            place, state = step
            done |= 1 << place
            path.append(place)
            states.append(state)
            if done & self._required == self._required:
                return Verdict([self._operations[each] for each in path], state, [])
            if len(path) > len(deepest):
                best, stuck_at, deepest = done, state, [*path]
            stack.append(self._ways(done, state))
        stuck = [self._operations[place] for place in self._next_in_time(best) if not self._operations[place].is_open]
        return Verdict([self._operations[each] for each in deepest], stuck_at, stuck)

    def _ways(self, done: int, state: S) -> Any:
        """Yield the operations that may come next, each with a state that it leads to."""
        for place in self._next_in_time(done):
            after = done | 1 << place
            for reached in self._model.after(state, self._operations[place]):
                if (after, reached) not in self._seen:
                    self._seen.add((after, reached))
                    yield place, reached

    def _next_in_time(self, done: int) -> list[int]:
        """Return the operations that began before any other that is left had ended, those with an answer first."""
        found: list[int] = []
        earliest: int | None = None
        for place, operation in enumerate(self._operations):
            if done >> place & 1:
                continue
            # They are sorted by their beginnings: no later one can come next.
            if earliest is not None and operation.began > earliest:
                break
            found.append(place)
            if operation.ended is not None and (earliest is None or operation.ended < earliest):
                earliest = operation.ended
        # An open operation may have done nothing at all: tried first, it would widen the search for nothing.
        return sorted(found, key=lambda place: self._operations[place].is_open)


def _tail(order: Sequence[Operation]) -> list[str]:
    return [*map(_line, order[-5:])]


def _line(operation: Operation) -> str:
    answer = "no answer" if operation.is_open else repr(operation.answer)
    return f"  {operation.client} {operation.verb}{operation.given!r} -> {answer}"
