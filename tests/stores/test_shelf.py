"""The tapes in memory while sessions are loaded; event loops in several threads may share them."""

from __future__ import annotations

import threading
from typing import Any

from perdure.model.message import Message
from perdure.model.transcript import LogRef, Span, Tape, Transcript
from perdure.stores.tapes import TapeCache, consolidate
from perdure.testing.samples import new_session, show


class Slow(list[Message]):
    """Messages that another thread puts onto the same tape just before this one does."""

    def __init__(self, messages: list[Message], other: threading.Thread) -> None:
        super().__init__(messages)
        self._other = other

    def __getitem__(self, key: Any) -> Any:
        self._other.start()
        self._other.join(0.2)
        return super().__getitem__(key)


def test_messages_that_two_threads_have_read_are_put_once() -> None:
    """Two loads that miss the same messages leave the tape that they share with each of them once."""
    ref = LogRef("here", 1)
    said = [Message.user(f"{number}") for number in range(4)]
    tape = Tape(said[:2], ref)
    known = show(new_session(), Transcript((Span(tape, 0, 2),)))
    one, two = TapeCache("here", known), TapeCache("here", known)
    other = threading.Thread(target=two.put, args=(1, 2, said[2:]))
    one.put(1, 2, Slow(said[2:], other))
    other.join()
    assert [message.text for message in tape.items or ()] == ["0", "1", "2", "3"]


def test_what_one_thread_saves_and_another_loads_is_put_once() -> None:
    """A save that moves its messages onto a tape shares it with a load that has read them by then."""
    ref = LogRef("here", 1)
    said = [Message.user(f"{number}") for number in range(4)]
    tape = Tape(said[:2], ref)
    known = show(new_session(), Transcript((Span(tape, 0, 2),)))
    loading = threading.Thread(target=TapeCache("here", known).put, args=(1, 2, said[2:]))

    class Saved(Span):
        def messages(self) -> list[Message]:
            return Slow(super().messages(), loading)

    saved = show(new_session(), Transcript((Span(tape, 0, 2), Saved(Tape(said[2:], ref, 2), 2, 4))))
    shown = consolidate(saved).state.messages
    loading.join()
    assert [message.text for message in tape.items or ()] == ["0", "1", "2", "3"]
    assert [message.text for message in shown] == ["0", "1", "2", "3"]
