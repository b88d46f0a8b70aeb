"""Makes a view shorter: chooses a cut, has a strategy make what is shown before it, and lays that over the view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

import msgspec

from perdure.aio import in_slices, raise_if_cancelled
from perdure.errors import CompactionFailed, ConfigurationError, DriverError, InvalidData
from perdure.loop.compaction.draft import (
    MARK,
    Draft,
    check_valid,
    is_summary,
    shortened,
    summary_message,
    view_of,
    with_results,
    without_files,
)
from perdure.loop.compaction.options import CompactionOptions, CompactStrategy, called
from perdure.loop.compaction.summary import NoteTaker
from perdure.loop.tokens import TokenEstimator
from perdure.model.ids import new_id, now
from perdure.model.loop_events import Compaction, CompactionBlock, CompactionPart
from perdure.model.message import Message
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage

SUMMARY_ON_RECORD = 200
"""The characters of a summary that its record quotes. The whole summary is a message in the log."""
QUOTED_REQUEST = 500


class Compacted(msgspec.Struct, frozen=True):
    """The result of a compaction: the block, what it shows, and what a model has used for it."""

    block: CompactionBlock
    shown: tuple[CompactionPart, ...]
    usage: Usage = Usage()


def overlaid(view: Transcript, made: Compacted | Compaction) -> Transcript:
    """Return a view with a compaction laid over it. Live and replayed, it is the same block."""
    block = made.block
    return view.cover(
        block.start,
        block.start + block.covered,
        view_of(made.shown, view),
        by=block.by,
        tokens_before=block.tokens_before,
        tokens_after=block.tokens_after,
        model=block.model,
        block_id=block.id,
        at=block.at,
    )


class Compactor:
    """A compactor with options. Without a summariser, a strategy that needs a model raises ConfigurationError."""

    def __init__(
        self,
        options: CompactionOptions,
        tokens: TokenEstimator | None = None,
        summariser: NoteTaker | None = None,
        *,
        model: str | None = None,
    ) -> None:
        self.options = options
        self.tokens = tokens or TokenEstimator()
        self._summariser = summariser
        self.model = model
        """The model whose count of tokens matters: the one that will be shown the view."""
        self.spent = Usage()
        """The usage of a model so far, whether or not the compaction succeeds."""

    async def compact(
        self, view: Transcript, *, open_calls: Collection[str] = (), step: int = 0, is_lenient: bool = False
    ) -> Compacted | None:
        """Return what to lay over a view; None if there is nothing to do.

        If it is lenient, the result may stay over the hard limit.
        """
        before = await self.tokens.count(view, self.model)
        threshold = self.options.token_threshold
        if threshold is not None and before < threshold:
            return None
        work = _Work(self, Draft(view, open_calls), step)
        await asyncio.sleep(0)  # listing a long view has taken ten milliseconds: other tasks run first
        has_model = self._summariser is not None and self._summariser.is_language_model
        strategy = self.options.strategy(has_model=has_model)
        try:
            await work.apply(strategy, work.draft.cut_for(self.options.keep_last))
            await work.keep_to_limit(is_lenient=is_lenient)
        except DriverError as error:
            raise CompactionFailed(str(error)) from error
        raise_if_cancelled()  # a driver may have taken the cancellation for its own
        return await work.result(before) if work.draft.is_changed else None

    def charge(self, usage: Usage) -> None:
        self.spent += usage

    async def possible_gain(self, view: Transcript) -> float:
        """Return the largest share of a view's tokens that a compaction could save."""
        limit = self.options.hard_limit_tokens
        older = view[: Draft(view).cut_for(self.options.keep_last)]
        total = await self.tokens.count(view, self.model)
        counted = [message async for some in in_slices(older) for message in some if not is_summary(message)]
        gain = await self.tokens.count(counted, self.model)
        if limit is not None:
            gain = max(gain, total - limit)
        return gain / total if total else 0.0

    async def count(self, draft: Draft) -> int:
        return await self.tokens.count(draft.messages(), self.model)

    @property
    def summariser(self) -> NoteTaker:
        if self._summariser is None:
            raise ConfigurationError(
                "The strategy 'llm' needs a model: pass CompactTranscript(loops=LoopFactory(…)), give a "
                "compress_callback that writes the summary, or use 'truncate' or 'observation_mask'."
            )
        return self._summariser


class _Work:
    """One compaction under way."""

    def __init__(self, compactor: Compactor, draft: Draft, step: int) -> None:
        self.draft = draft
        self._compactor = compactor
        self._options = compactor.options
        self._step = step
        self._done_by: list[str] = []
        self._model: str | None = None

    async def apply(self, strategy: CompactStrategy, cut: int) -> None:
        by_name: dict[CompactStrategy, Callable[[int], Awaitable[None]]] = {
            "llm": self._summarise,
            "truncate": self._truncate,
            "observation_mask": self._mask,
            "custom": self._customise,
        }
        was = self.draft.items()
        await by_name[strategy](cut)
        await asyncio.sleep(0)  # changing a long view takes as long as listing it
        if self.draft.items() != was and strategy not in self._done_by:
            self._done_by.append(strategy)

    async def keep_to_limit(self, *, is_lenient: bool) -> None:
        """Apply the options for a view that is over the hard limit, and count again."""
        limit = self._options.hard_limit_tokens
        if limit is None or await self._compactor.count(self.draft) <= limit:
            return
        strategy = self._options.strategy_over_limit
        await self.apply(strategy, await self._cut_within(limit))
        if strategy == "truncate" and await self._compactor.count(self.draft) > limit:
            await self._shorten_results(await self._chars_within(limit))
            self._done_by += [] if "truncate" in self._done_by else ["truncate"]
        left = await self._compactor.count(self.draft)
        if left > limit and not is_lenient:
            raise InvalidData(
                "$.hard_limit_tokens",
                f"after {' and '.join(self._done_by) or strategy} the view is still about {left} tokens, over the "
                f"{limit} allowed; nothing was changed. Allow more, keep fewer messages, or trim the transcript",
            )

    async def _cut_within(self, limit: int) -> int:
        """Return a cut that keeps as many of the last messages as fit into the limit, beside a summary."""
        counts = await self._compactor.tokens.count_each(self.draft.messages(), self._compactor.model)
        notes = await _notes_in(self.draft.messages())
        # Room for the notes, and for a note that quotes a request. Of a small limit, the note takes a quarter at most.
        beside = self._compactor.tokens.messages(notes, self._compactor.model) + min(limit // 4, QUOTED_REQUEST)
        room, kept = limit - beside, 0
        most = len(counts) - self.draft.cut_at(self._options.keep_last)
        while kept < most and room >= counts[-1 - kept]:
            room -= counts[-1 - kept]
            kept += 1
        return self.draft.cut_after(len(counts) - kept)

    async def _chars_within(self, limit: int) -> int:
        """Return how many characters of each tool result fit if everything else stays."""
        results = [
            message async for some in in_slices(self.draft.messages()) for message in some if message.tool_results
        ]
        counts = await self._compactor.tokens.count(results, self._compactor.model)
        # 40 tokens a result for the line that says how much is left out, and only two characters for each token.
        room = limit - (await self._compactor.count(self.draft) - counts) - 40 * len(results)
        return max(0, 2 * room // max(1, len(results)))

    async def result(self, tokens_before: int) -> Compacted:
        covered, shown = self.draft.overlay()
        summary = next((part.message.text for part in shown if part.message is not None), "")
        block = CompactionBlock(
            id=new_id(),
            by="+".join(self._done_by),
            at=now(),
            covered=covered,
            summary=shortened(summary, SUMMARY_ON_RECORD),
            tokens_before=tokens_before,
            tokens_after=await self._compactor.count(self.draft),
            model=self._model,
        )
        return Compacted(block, tuple(shown), self._compactor.spent)

    async def _summarise(self, cut: int) -> None:
        older = self.draft.messages()[:cut]
        if _is_settled(older):
            return
        if self._options.compress_callback is not None:
            text = await called("compress_callback", str, self._options.compress_callback, older)
        else:
            summariser = self._compactor.summariser
            chars = self._options.tool_output_max_chars
            text = await summariser.summarise(older, self._compactor.charge, output_chars=chars, step=self._step)
            self._model = summariser.model.name
        intro = "[Notes on the conversation so far; the messages they stand for are no longer shown.]"
        self.draft.replace_before(cut, [summary_message(f"{intro}\n{text}", "llm")])

    async def _truncate(self, cut: int) -> None:
        messages = self.draft.messages()
        older = messages[:cut]
        if not _is_settled(older):
            if self._options.compress_callback is not None:
                text = await called("compress_callback", str, self._options.compress_callback, older)
            else:
                text = _note(older, messages[cut:])
            notes = await _notes_in(older)
            self.draft.replace_before(cut, [*notes, summary_message(text, "truncate")])
        if self._options.tool_output_max_chars is not None:
            await self._shorten_results(self._options.tool_output_max_chars)

    async def _shorten_results(self, chars: int) -> None:
        async for place, message in _numbered(self.draft.messages()):
            longest = max((len(result.text) for result in message.tool_results), default=0)
            if longest > chars:
                self._put_if_shorter(place, message, with_results(message, chars=chars, strategy="truncate"))

    async def _mask(self, cut: int) -> None:
        allowed = self._options.tool_output_max_chars
        async for place, given in _numbered(self.draft.messages()[:cut]):
            message = without_files(given)
            if message is not given:
                self.draft.put(place, message)
            longest = max((len(result.text) for result in message.tool_results), default=-1)
            if longest <= (-1 if allowed is None else allowed) or given.metadata.get(MARK) == "observation_mask":
                continue
            if self._options.mask_callback is not None:
                said = await called("mask_callback", str, self._options.mask_callback, message)
                self.draft.put(place, with_results(message, said, strategy="observation_mask"))
            else:
                text = None if allowed else _mask_text(message)
                masked = with_results(message, text, chars=allowed or 0, strategy="observation_mask")
                self._put_if_shorter(place, message, masked)

    def _put_if_shorter(self, place: int, message: Message, shorter: Message) -> None:
        if len(shorter.text) < len(message.text):
            self.draft.put(place, shorter)

    async def _customise(self, cut: int) -> None:
        older = self.draft.messages()[:cut]
        function = self._options.custom_compactor
        if not older or function is None:
            return
        answer: Sequence[Any] = await called("custom_compactor", list, function, older)
        # By identity: only messages that the callback has made are marked as made by a compaction.
        known = {id(message) for message in older}
        given = [Message.of(each) for each in answer]
        made = [each if id(each) in known else each.with_metadata(**{MARK: "custom"}) for each in given]
        check_valid(older, made)
        self.draft.replace_before(cut, made)


async def _numbered(messages: Sequence[Message]) -> AsyncIterator[tuple[int, Message]]:
    """Yield messages with their places. Other tasks can run in between."""
    place = 0
    async for some in in_slices(messages):
        for message in some:
            yield place, message
            place += 1


async def _notes_in(messages: Sequence[Message]) -> list[Message]:
    """Return the notes that a model has written for earlier compactions."""
    return [message async for some in in_slices(messages) for message in some if is_summary(message, "llm")]


def _is_settled(older: list[Message]) -> bool:
    """Tell whether there is nothing to summarise: no message, or only what earlier compactions have left."""
    return all(map(is_summary, older))


def _note(older: list[Message], kept: list[Message]) -> str:
    """Return a note that messages are missing. It quotes the user's last request if that is among them."""
    note = "[Earlier messages are no longer shown.]"
    if any(message.role == "user" and not is_summary(message) for message in kept):
        return note
    for message in reversed(older):
        if is_summary(message, "truncate"):
            return message.text  # it may hold the request, from one compaction to the next
        if message.role == "user" and message.text and not is_summary(message):
            return f"{note}\n[The user asked last: {shortened(message.text, QUOTED_REQUEST)}]"
    return note


def _mask_text(message: Message) -> str:
    chars = sum(len(result.text) for result in message.tool_results)
    return f"[Output of {chars} characters left out]"
