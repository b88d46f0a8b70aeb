"""A response told as a stream of events, from the record of its run and the pieces of an answer under way.

Every event has a `sequence_number`, which says what has been told so far, by any process. It has the place of the entry
on the record that the event comes from, counted from the response's first. Within an answer that is being written, it
also has the number of characters told. So any process can tell the rest to a client that has seen a number, from the
record alone. No event has to be kept for it. Numbers grow, with gaps.

    number = place * UNIT + n                              the n-th event of an entry on the record
    number = place * UNIT + TEXT + attempt * ATTEMPT + 2 + characters    a piece of the answer after that entry
    number = place * UNIT + LAST + n                       what a run that pauses after that entry waits for
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perdure.model.loop_events import AgentStart, AnyLoopEvent, MessageEnd, ToolExecutionEnd, ToolExecutionStart
from perdure.model.message import Message, Text, ToolCall
from perdure.server.feeds import Piece
from perdure.server.openai.finding import Found, Outcome
from perdure.server.openai.items import Item, call_item, done_item, pending_items, text_item, text_part, thought_items
from perdure.server.openai.objects import ENDS, ended, opened, refused
from perdure.sessions.following import is_answer

UNIT = 1 << 26
TEXT = 1 << 16
ATTEMPT = 1 << 21
LAST = UNIT - TEXT
# The last one, counted from 0, that has its numbers between TEXT and LAST.
_MOST_ATTEMPTS = 30
_CREATED, _QUEUED, _RUNNING = 0, 1, 2
"""The numbers of the first events, which come from no entry of the record."""
Told = dict[str, Any]


class _Answer:
    """An answer that is being told."""

    def __init__(self, message_id: str, attempt: int, index: int) -> None:
        self.message_id = message_id
        self.attempt = attempt
        self.index = index
        self.text = ""

    @property
    def item_id(self) -> str:
        return f"msg_{self.message_id}"

    @property
    def at(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": self.index, "content_index": 0}


class Telling:
    """The telling of one response, after a number that the client has seen, or from the first event on."""

    def __init__(self, found: Found, after: int = -1) -> None:
        self.response = opened(found)
        self.run = found.run
        self._after = after
        self._begin = found.begin
        self._place = 0
        self._next = 0
        self._items: list[Item | None] = []
        self._answer: _Answer | None = None
        self._calls: dict[str, int] = {}
        self._approved: dict[str, str] = {}
        self._settled: set[str] = set()
        """Calls that were not made here: the client has made them, or they were denied."""
        self.heard = 0
        """The last place on the record that was told of."""

    @property
    def output(self) -> list[Item]:
        return [item for item in self._items if item is not None]

    def opening(self) -> Iterator[Told]:
        """Yield the first events: the response exists, and waits or runs."""
        yield from self._at(_CREATED, "response.created", response=self.response)
        if self.response["status"] == "queued":
            yield from self._at(_QUEUED, "response.queued", response=self.response)
        else:
            yield from self._running()

    def _running(self) -> Iterator[Told]:
        self.response = {**self.response, "status": "in_progress"}
        yield from self._at(_RUNNING, "response.in_progress", response=self.response)

    def begun(self, found: Found) -> Iterator[Told]:
        """Yield the events for the beginning of a run that the response has waited for."""
        if not self._begin and found.begin and found.refusal is None:
            self._begin, self.run = found.begin, found.run
            self.response = opened(found)
            yield from self._running()

    def take(self, event: AnyLoopEvent) -> Iterator[Told]:
        """Yield the events that an event of the run adds."""
        cursor = event.cursor or 0
        if event.loop_id != self.run or cursor <= self.heard:
            return
        self.heard = cursor
        match event:
            case AgentStart():
                self._approved |= event.approved
                self._settled |= {*event.answered, *event.denied}
                if not self._place:  # a run that is continued after a crash comes back to the answer under way
                    self._move(cursor)
            case MessageEnd() if is_answer(event.message, event.loop_id):
                yield from self._said(event.message, cursor)
            case ToolExecutionStart():
                self._move(cursor)
                yield from self._calling(event.call)
            case ToolExecutionEnd() if event.execution.call.id not in self._settled:
                self._move(cursor)
                yield from self._called(event)

    def hear(self, piece: Piece) -> Iterator[Told]:
        """Yield the events that a piece of an answer adds. If an answer begins again, what was told of it is void."""
        if piece.run != self.run:
            return
        yield from self._open(piece.message, min(piece.attempt, _MOST_ATTEMPTS))
        answer = self._answer
        assert answer is not None
        known = len(answer.text)
        if piece.start <= known:
            yield from self._say(answer, answer.text + piece.text[known - piece.start :])

    def end(self, found: Found, outcome: Outcome | None) -> Iterator[Told]:
        """Yield the last events: what the run waits for, and its outcome."""
        self._next = LAST
        yield from self._drop_answer()
        execution = outcome.session.state.execution if outcome is not None else None
        for item in pending_items(execution.pending_calls if execution is not None else ()):
            yield from self._item(item)
        self._close_calls()
        if outcome is None:
            self.response = refused(self.response, found)
        else:
            self.response = ended(self.response, outcome, self.output)
        yield from self._now(ENDS[self.response["status"]], response=self.response)

    def _move(self, cursor: int) -> None:
        self._place, self._next = cursor - self._begin + 1, 0

    def _at(self, number: int, kind: str, **facts: Any) -> Iterator[Told]:
        if number > self._after:
            yield {"type": kind, "sequence_number": number, **facts}

    def _now(self, kind: str, **facts: Any) -> Iterator[Told]:
        """Yield the next event of the place on record."""
        number = self._place * UNIT + self._next
        self._next += 1
        yield from self._at(number, kind, **facts)

    def _said(self, message: Message, cursor: int) -> Iterator[Told]:
        """Yield the events for what is new in a whole answer."""
        text = "".join(part.text for part in message.parts if isinstance(part, Text))
        if message.is_superseded:
            yield from self._drop_seen(message.id, _MOST_ATTEMPTS + 1)
            yield from self._drop_answer()
            self._move(cursor)
            return
        if text:
            answer = self._answer
            is_known = answer is not None and answer.message_id == message.id and text.startswith(answer.text)
            attempt = self._seen or 0 if answer is None else answer.attempt if is_known else answer.attempt + 1
            yield from self._open(message.id, attempt)
            assert self._answer is not None
            yield from self._say(self._answer, text)
        else:
            yield from self._drop_answer()
        self._move(cursor)
        if self._answer is not None:
            yield from self._close(self._answer, "incomplete" if message.is_incomplete else "completed")
        for item in thought_items(message):
            yield from self._item(item)

    def _open(self, message_id: str, attempt: int) -> Iterator[Told]:
        answer = self._answer
        if answer is not None and (answer.message_id, answer.attempt) == (message_id, attempt):
            return
        yield from self._drop_seen(message_id, attempt)
        yield from self._drop_answer()
        answer = self._answer = _Answer(message_id, attempt, len(self._items))
        self._items.append(None)
        added = text_item(message_id, "", "in_progress")
        number = self._number_in(answer)
        yield from self._at(number, "response.output_item.added", output_index=answer.index, item=added)
        yield from self._at(number + 1, "response.content_part.added", **answer.at, part=text_part(""))

    @property
    def _seen(self) -> int | None:
        """The attempt at the answer after this place that the client was told of, or None."""
        told = self._after - self._place * UNIT - TEXT
        return told // ATTEMPT if 0 <= told < LAST - TEXT else None

    def _drop_seen(self, message_id: str, attempt: int) -> Iterator[Told]:
        """Yield the end of an attempt that the client was told of by another stream, before a later one."""
        if self._answer is None and self._seen is not None and self._seen < attempt:
            self._answer = _Answer(message_id, self._seen, len(self._items))
            self._items.append(None)
            yield from self._drop_answer()

    def _number_in(self, answer: _Answer) -> int:
        return self._place * UNIT + TEXT + min(answer.attempt, _MOST_ATTEMPTS) * ATTEMPT

    def _say(self, answer: _Answer, text: str) -> Iterator[Told]:
        """Yield the text after what was told. If the client has a part of a piece, yield the rest."""
        begin = self._number_in(answer) + 2
        seen = max(len(answer.text), min(self._after - begin, len(text)))
        answer.text = text
        if text[seen:]:
            # A very long text must not use the numbers of the next attempt.
            number = begin + min(len(text), ATTEMPT - 3)
            yield from self._at(number, "response.output_text.delta", **answer.at, delta=text[seen:], logprobs=[])

    def _close(self, answer: _Answer, status: str) -> Iterator[Told]:
        item = text_item(answer.message_id, answer.text, status)
        self._items[answer.index] = item
        self._answer = None
        yield from self._now("response.output_text.done", **answer.at, text=answer.text, logprobs=[])
        yield from self._now("response.content_part.done", **answer.at, part=text_part(answer.text))
        yield from self._now("response.output_item.done", output_index=answer.index, item=item)

    def _drop_answer(self) -> Iterator[Told]:
        """Yield the end of an answer that is void: the model has begun again. The response does not have it."""
        answer = self._answer
        if answer is None:
            return
        number = self._number_in(answer) + ATTEMPT - 1
        item = text_item(answer.message_id, answer.text, "incomplete")
        self._answer = None
        yield from self._at(number, "response.output_item.done", output_index=answer.index, item=item)

    def _item(self, item: Item) -> Iterator[Told]:
        """Yield the events of an item that comes whole."""
        index = len(self._items)
        self._items.append(item)
        at = {"output_index": index, "item_id": item["id"]}
        yield from self._now("response.output_item.added", output_index=index, item=_begun(item))
        if item["type"] == "function_call":
            yield from self._arguments("function_call_arguments", at, item["arguments"])
        if item["type"] == "reasoning":
            text = item["content"][0]["text"]
            yield from self._now("response.reasoning_text.delta", **at, content_index=0, delta=text)
            yield from self._now("response.reasoning_text.done", **at, content_index=0, text=text)
        yield from self._now("response.output_item.done", output_index=index, item=item)

    def _arguments(self, of: str, at: Mapping[str, Any], arguments: str) -> Iterator[Told]:
        yield from self._now(f"response.{of}.delta", **at, delta=arguments)
        yield from self._now(f"response.{of}.done", **at, arguments=arguments)

    def _calling(self, call: ToolCall) -> Iterator[Told]:
        if call.id in self._calls:  # it is made again after a crash, since its outcome is unknown
            return
        index = self._calls[call.id] = len(self._items)
        item = call_item(call, approval=self._approved.get(call.id))
        self._items.append(item)
        at = {"output_index": index, "item_id": item["id"]}
        yield from self._now("response.output_item.added", output_index=index, item={**item, "arguments": ""})
        yield from self._now("response.mcp_call.in_progress", **at)
        yield from self._arguments("mcp_call_arguments", at, item["arguments"])

    def _called(self, event: ToolExecutionEnd) -> Iterator[Told]:
        call = event.execution.call
        yield from self._calling(call)
        index = self._calls[call.id]
        item = self._items[index] = done_item(event.execution, self._approved.get(call.id))
        how = "completed" if item["status"] == "completed" else "failed"
        yield from self._now(f"response.mcp_call.{how}", output_index=index, item_id=item["id"])
        yield from self._now("response.output_item.done", output_index=index, item=item)

    def _close_calls(self) -> None:
        """Mark calls that have no result."""
        for place, item in enumerate(self._items):
            if item is not None and item.get("status") == "in_progress":
                self._items[place] = {**item, "status": "incomplete"}


def _begun(item: Item) -> Item:
    """Return an item as it is shown first."""
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    return {**item, "content": []} if item["type"] == "reasoning" else item


def told_whole(found: Found, events: Iterable[AnyLoopEvent], outcome: Outcome | None) -> Mapping[str, Any]:
    """Return a response as its record tells it."""
    telling = Telling(found)
    for event in events:
        list(telling.take(event))
    if found.state != "over":
        return {**telling.response, "output": telling.output}
    list(telling.end(found, outcome))
    return telling.response
