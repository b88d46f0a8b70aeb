"""Automatic compaction, when a run's prompt comes near the model's window, or is refused as too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from perdure.errors import CompactionFailed, InvalidData
from perdure.loop.compaction.options import CompactionOptions
from perdure.loop.compaction.windows import window_of
from perdure.loop.tokens import TokenEstimator
from perdure.model.definition import ModelConfig
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.model.value import brief
from perdure.protocols import ModelRequest

if TYPE_CHECKING:
    from perdure.loop.compaction.compactor import Compacted, Compactor
    from perdure.loop.compaction.summary import Charge, NoteTaker

Trigger = Literal["window", "context_too_long"]

LEAST_GAIN = 0.1
"""The least share of the shown tokens that is worth a compaction. With less, the next step would compact again."""


class AutoCompaction:
    """The settings of automatic compaction: the `share` of the model's window at which it happens, and its `options`.

    The options are the fields of `CompactionOptions`. `model` names another model to write summaries. If a summary
    fails, the view is truncated and the run continues.
    """

    def __init__(self, share: float = 0.8, *, model: ModelConfig | str | None = None, **options: Any) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidData("$.share", f"share is a number over 0 and up to 1; got {brief(share)}")
        self.share = share
        self.model = None if model is None else ModelConfig.of(model)
        self.options = CompactionOptions.of(options)
        if self.options.keep_last < 1:
            raise InvalidData("$.keep_last", "a run keeps at least the last message: what it is to answer")


class AutoCompactor:
    """Automatic compaction for one model. `summariser` is called, and its code imported, only when it compacts."""

    def __init__(
        self, settings: AutoCompaction, model: ModelConfig, tokens: TokenEstimator, summariser: Callable[[], NoteTaker]
    ) -> None:
        self._settings = settings
        self._model = model
        self._tokens = tokens
        self._summariser = summariser

    def is_near_window(self, request: ModelRequest) -> bool:
        """Tell whether a request exceeds its share of the window. Without a known window, nothing is counted."""
        window = window_of(self._model)
        return window is not None and self._tokens.request(request) > window * self._settings.share

    def learn(self, request: ModelRequest, usage: Usage) -> None:
        """Learn from the provider's count, if the window is known. Otherwise counting would cost time for nothing."""
        if window_of(self._model) is not None:
            self._tokens.learn(request, usage.input_tokens)

    async def compact(
        self, view: Transcript, request: ModelRequest, trigger: Trigger, charge: Charge
    ) -> Compacted | None:
        """Return what to lay over a view to make its request fit; None if that gains too little.

        `charge` is given the usage, even if the compaction fails or is cancelled.
        """
        options = await self._options_for(view, request, trigger)
        compactor = self._compactor(options)
        if trigger == "window" and await compactor.possible_gain(view) < LEAST_GAIN:
            return None
        try:
            return await compactor.compact(view, step=request.step, is_lenient=True)
        except CompactionFailed:
            without_model = replace(options, compact_strategy="truncate", hard_limit_strategy="truncate")
            made = await self._compactor(without_model).compact(view, step=request.step, is_lenient=True)
            return None if made is None else replace(made, usage=compactor.spent)
        finally:
            charge(compactor.spent)

    def _compactor(self, options: CompactionOptions) -> Compactor:
        from perdure.loop.compaction.compactor import Compactor  # most runs never compact

        return Compactor(options, self._tokens, self._summariser(), model=self._model.name)

    async def _options_for(self, view: Transcript, request: ModelRequest, trigger: Trigger) -> CompactionOptions:
        """Return the settings with a hard limit: the messages' share of the window, or half of what was refused."""
        shown = await self._tokens.count(view, self._model.name)
        window = window_of(self._model)
        allowed = shown // 2
        if window is not None:
            beside = self._tokens.overhead(request.system_prompt, request.tools, self._model.name)
            allowed = max(0, int(window * self._settings.share) - beside)
        # The provider has refused it: our count or the window is wrong, so the view is at least halved.
        if trigger == "context_too_long":
            allowed = min(allowed, shown // 2)
        return replace(
            self._settings.options,
            token_threshold=self._settings.options.token_threshold if trigger == "window" else None,
            hard_limit_tokens=min(allowed, self._settings.options.hard_limit_tokens or allowed),
        )
