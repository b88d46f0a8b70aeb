"""Compacting a view: the result of each strategy and option, and that no message is ever lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import (
    CompactionFailed,
    CompactionOptions,
    ConfigurationError,
    ContextTooLong,
    DriverError,
    InvalidData,
    Message,
    ModelConfig,
    ToolCall,
    Transcript,
)
from perdure.loop.compaction.compactor import Compactor, overlaid
from perdure.loop.compaction.summary import INSTRUCTIONS, Summariser
from perdure.model.transcript import every_span
from perdure.testing import ScriptedDriver

LONG = "x" * 1000


def turn(number: int, *outputs: str) -> list[Message]:
    """Return a question; for each output a call and its result; and an answer."""
    ids = [f"c{number}-{place}" for place in range(len(outputs))]
    worked = [
        message
        for call_id, output in zip(ids, outputs, strict=True)
        for message in (
            Message.assistant(tool_calls=[ToolCall("look", {"n": number}, id=call_id)]),
            Message.tool(call_id, output, name="look"),
        )
    ]
    return [Message.user(f"question {number}"), *worked, Message.assistant(f"answer {number}")]


def conversation(turns: int, *outputs: str) -> Transcript:
    return Transcript.of(message for number in range(turns) for message in turn(number, *outputs))


def compactor(script: Any = None, **options: Any) -> Compactor:
    summariser = None if script is None else Summariser(ScriptedDriver(script), ModelConfig("test:model"))
    return Compactor(CompactionOptions.of(options), summariser=summariser)


async def compacted(view: Transcript, script: Any = None, **options: Any) -> Transcript:
    made = await compactor(script, **options).compact(view)
    return view if made is None else overlaid(view, made)


def texts(view: Sequence[Message]) -> list[str]:
    return [message.text for message in view]


def check_pairs(messages: Sequence[Message]) -> None:
    """Check that every result follows its call, and every call has its result."""
    waiting: list[str] = []
    for message in messages:
        for result in message.tool_results:
            assert result.call_id in waiting, "a result without its call"
            waiting.remove(result.call_id)
        waiting += [call.id for call in message.tool_calls]
    assert not waiting, "a call without its result"


def json_of(view: Sequence[Message]) -> bytes:
    return msgspec.json.encode(list(view))


# Strategies


async def test_truncate_shows_the_last_messages_and_a_note():
    """A note covers the earlier messages, and says so."""
    view = await compacted(conversation(10), compact_strategy="truncate", keep_last=4)
    assert texts(view)[1:] == ["question 8", "answer 8", "question 9", "answer 9"]
    assert (len(view), view[0].role) == (5, "user")
    assert "no longer shown" in view[0].text


async def test_truncate_quotes_a_request_that_it_covers():
    """A run that only works with tools at the end still has its request."""
    view = Transcript.of([*turn(0, "a")[:-1], *turn(1, *["b"] * 9)[1:-1]])
    shown = await compacted(view, compact_strategy="truncate", keep_last=4)
    assert "question 0" in shown[0].text


async def test_llm_has_a_model_write_the_summary():
    """The summary of the covered messages is the model's, and the block says which model wrote it."""
    driver = ScriptedDriver(lambda request: "they asked a lot")
    maker = Compactor(CompactionOptions(keep_last=2), summariser=Summariser(driver, ModelConfig("test:model")))
    view = conversation(3, LONG * 9)
    made = await maker.compact(view)
    assert made is not None
    shown = overlaid(view, made)
    assert "they asked a lot" in shown[0].text
    (block,) = shown.blocks()
    assert (block.by, block.model, made.usage.total_tokens) == ("llm", "test:model", 15)
    assert (block.covered_count, made.block.covered) == (9, 9)
    assert block.at is not None
    assert block.tokens_before is not None
    assert block.tokens_after is not None
    assert block.tokens_before > 5_000 > block.tokens_after
    (request,) = driver.requests
    asked = request.messages[0].text
    assert request.system_prompt == INSTRUCTIONS
    assert "question 1" in asked
    assert "answer 2" not in asked
    assert len(asked) < 2_000 * 3, "tool outputs are shortened for the model that summarises"


async def test_observation_mask_hides_tool_output_only():
    """Older tool output is masked one by one; the rest of the view is unchanged, and not stored again."""
    view = conversation(4, LONG)
    shown = await compacted(view, compact_strategy="observation_mask", keep_last=4)
    assert len(shown) == len(view)
    assert [len(m.text) for m in shown if m.role == "tool"][:3] == [36, 36, 36]
    assert shown[-2].text == LONG
    known = {message.id for message in view}
    assert [m.role for m in shown if m.id not in known] == ["tool"] * 3
    again = await compacted(shown, compact_strategy="observation_mask", keep_last=4)
    assert again is shown


async def test_custom_shows_what_a_function_makes_of_the_older_messages():
    """It gets the messages before the last ones; it may return messages, dicts and texts."""
    view = conversation(4)
    seen: list[Message] = []

    async def shorter(messages: Sequence[Message]) -> list[Any]:
        seen.extend(messages)
        return [messages[0], {"role": "assistant", "content": "and so on"}, "go on"]

    shown = await compacted(view, custom_compactor=shorter, keep_last=2)
    assert texts(shown) == ["question 0", "and so on", "go on", "question 3", "answer 3"]
    assert seen == list(view[:6])
    assert shown[0] is view[0]


async def test_custom_may_change_a_message_under_its_id():
    """The copy gets an id of its own: a log has one message of an id."""

    def change(messages: Sequence[Message]) -> list[Any]:
        return [msgspec.structs.replace(messages[0], parts=Message.user("less").parts)]

    shown = await compacted(conversation(3), custom_compactor=change, keep_last=2)
    assert shown[0].text == "less"
    assert len({message.id for message in (*shown, *shown.uncover())}) == 7


@pytest.mark.parametrize(
    "made",
    [[Message.tool("c0-0", "alone")], [Message.assistant(tool_calls=[ToolCall("look", id="c0-0")])], "text", [1j]],
)
async def test_custom_must_leave_a_valid_view(made):
    """Orphans and other values are refused, and named."""
    with pytest.raises(InvalidData):
        await compacted(conversation(2, "out"), custom_compactor=lambda _: made, keep_last=2)


async def test_without_a_strategy_the_callback_or_the_model_decides():
    """It is custom with its function, a mask with its own, a summary if a model is given, and truncation otherwise."""
    view = conversation(9, LONG)
    assert (await compactor().compact(view)).block.by == "truncate"
    assert (await compactor(lambda _: "sum").compact(view)).block.by == "llm"
    assert (await compactor(compress_callback=lambda _: "sum").compact(view)).block.by == "llm"
    assert (await compactor(mask_callback=lambda _: "m").compact(view)).block.by == "observation_mask"
    assert (await compactor(custom_compactor=lambda _: ["m"]).compact(view)).block.by == "custom"


# Options


async def test_keep_last_is_twelve_by_default():
    """Twelve messages stay as they are."""
    view = conversation(20)
    assert (await compacted(view))[1:] == view[-12:]


async def test_the_cut_moves_earlier_rather_than_part_a_call_from_its_result():
    """More than keep_last stays if a result would lose its call."""
    shown = await compacted(conversation(3, LONG), compact_strategy="truncate", keep_last=2)
    assert [m.role for m in shown] == ["user", "assistant", "tool", "assistant"]


async def test_a_view_that_is_short_enough_is_left_alone():
    """If there is nothing to cover, or less than token_threshold, nothing happens and no callback is called."""
    assert await compactor().compact(conversation(6)) is None
    assert await compactor().compact(Transcript()) is None
    view = conversation(20, LONG)
    tokens = compactor().tokens.messages(view)
    assert await compactor(token_threshold=tokens + 1).compact(view) is None
    assert await compactor(token_threshold=tokens).compact(view) is not None


async def test_tool_output_max_chars_keeps_the_beginning():
    """Masked output keeps that number of characters, shorter output is unchanged; truncation shortens its rest."""
    view = Transcript.of([*turn(0, "abc" * 100, "short"), *turn(1, LONG)])
    masked = await compacted(view, compact_strategy="observation_mask", keep_last=0, tool_output_max_chars=9)
    outputs = [m.text for m in masked if m.role == "tool"]
    assert outputs[0].startswith("abcabcabc[… 291 characters")
    assert outputs[1] == "short"
    cut = await compacted(view, compact_strategy="truncate", keep_last=4, tool_output_max_chars=9)
    assert [m.text for m in cut if m.role == "tool"] == ["xxxxxxxxx[… 991 characters left out]"]
    driver = ScriptedDriver(lambda _: "sum")
    options = CompactionOptions(keep_last=0, tool_output_max_chars=3)
    await Compactor(options, summariser=Summariser(driver, ModelConfig("test:model"))).compact(view)
    assert "xxx[… 997 characters left out]" in driver.requests[0].messages[0].text


async def test_callbacks_may_be_async():
    """An async mask_callback or compress_callback is awaited."""

    async def mask(message: Message) -> str:
        return f"masked {message.tool_results[0].call_id}"

    async def compress(messages: Sequence[Message]) -> str:
        return f"{len(messages)} messages"

    shown = await compacted(conversation(2, LONG), mask_callback=mask, keep_last=0)
    assert [m.text for m in shown if m.role == "tool"] == ["masked c0-0", "masked c1-0"]
    assert "4 messages" in (await compacted(conversation(3), compress_callback=compress, keep_last=2))[0].text
    shown = await compacted(conversation(3), compact_strategy="truncate", compress_callback=compress, keep_last=2)
    assert shown[0].text == "4 messages"


@pytest.mark.parametrize("name", ["mask_callback", "compress_callback", "custom_compactor"])
async def test_a_callback_that_returns_something_else_is_named(name):
    """The error names the callback, and the view is unchanged."""
    with pytest.raises(InvalidData, match=name):
        await compacted(conversation(2, LONG), keep_last=0, **{name: lambda _: 7})


async def test_the_hard_limit_is_kept_with_its_own_strategy():
    """A view that is still too long is compacted again, in the same block, until it fits."""
    view = conversation(10, LONG)
    for strategy in ("truncate", "observation_mask"):
        shown = await compacted(
            view, lambda _: "sum", keep_last=20, hard_limit_tokens=700, hard_limit_strategy=strategy
        )
        assert compactor().tokens.messages(shown) <= 700
        assert "sum" in shown[0].text
        assert shown[-1] == view[-1]
        check_pairs(shown)
        (block,) = shown.blocks()
        assert block.by == f"llm+{strategy}"
        assert json_of(shown.uncover()) == json_of(view)


async def test_output_that_alone_is_over_the_hard_limit_is_shortened():
    """Truncation shortens tool output if leaving out messages is not enough."""
    view = Transcript.of(turn(0, "y" * 40_000))
    shown = await compacted(view, compact_strategy="truncate", hard_limit_tokens=500)
    assert compactor().tokens.messages(shown) <= 500
    check_pairs(shown)


async def test_a_hard_limit_that_cannot_be_kept_is_an_error():
    """The error says how many tokens are left, and what to do."""
    view = Transcript.of([Message.user("z" * 9_000)])
    with pytest.raises(InvalidData, match=r"still about 2254 tokens, over the 100 allowed.*Allow more"):
        await compacted(view, hard_limit_tokens=100)


async def test_calls_that_wait_for_a_person_stay():
    """The result is still to come, and must find its call in the view."""
    view = conversation(5).append(Message.assistant(tool_calls=[ToolCall("pay", id="p")]), Message.user("hm"))
    made = await compactor(keep_last=0, compact_strategy="truncate").compact(view, open_calls={"p"})
    assert [call.id for m in overlaid(view, made) for call in m.tool_calls] == ["p"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"keep": 3}, ["keep", "keep_last", "mask_callback"]),
        ({"keep_last": -1}, ["keep_last", "at least 0", "-1"]),
        ({"keep_last": True}, ["keep_last"]),
        ({"keep_last": "3"}, ["keep_last", "'3'"]),
        ({"keep_last": None}, ["keep_last"]),
        ({"token_threshold": 1.5}, ["token_threshold"]),
        ({"tool_output_max_chars": -3}, ["tool_output_max_chars"]),
        ({"hard_limit_tokens": "many"}, ["hard_limit_tokens"]),
        ({"compact_strategy": "magic"}, ["compact_strategy", "magic", "observation_mask"]),
        ({"hard_limit_strategy": ["llm"]}, ["hard_limit_strategy", "truncate"]),
        ({"compact_strategy": "custom"}, ["custom_compactor"]),
        ({"mask_callback": "text"}, ["mask_callback", "function"]),
    ],
)
def test_a_wrong_option_is_named(options, names):
    """The error names the option and says what is allowed."""
    with pytest.raises(InvalidData) as raised:
        CompactionOptions.of(options)
    for name in names:
        assert name in str(raised.value)


# The model that summarises


async def test_llm_without_a_model_says_what_to_pass():
    """A strategy that needs a model raises without one."""
    with pytest.raises(ConfigurationError, match="loops"):
        await compacted(conversation(9), compact_strategy="llm")


@pytest.mark.parametrize("failure", [DriverError("no luck"), "   "])
async def test_a_model_that_fails_is_a_compaction_that_failed(failure):
    """The error says that nothing has changed."""
    with pytest.raises(CompactionFailed, match="session is as it was"):
        await compacted(conversation(9), lambda _: failure)


async def test_more_than_the_model_can_read_is_summarised_piece_by_piece():
    """A refusal as too long halves the piece of one call; every call but the first gets the notes so far."""
    asked: list[str] = []

    def answer(request: Any) -> Any:
        text = request.messages[0].text
        if len(text) > 3_000:
            return ContextTooLong("test:model", "too long")
        asked.append(text)
        return f"notes {len(asked)}"

    view = Transcript.of(Message.user(f"fact {n} " + "w" * 200) for n in range(40))
    shown = await compacted(view, answer, keep_last=0)
    assert len(asked) > 2
    assert "<notes>\nnotes 1\n</notes>" in asked[1]
    assert shown[0].text.endswith(f"notes {len(asked)}")
    told = "".join(asked)
    assert all(f"fact {n} " in told for n in range(1, 40, 5))


async def test_a_known_window_is_not_overrun():
    """With a context_window the pieces are cut to fit from the start."""
    driver = ScriptedDriver(lambda _: "notes")
    model = ModelConfig("test:model", context_window=1_000)
    view = Transcript.of(Message.user("w" * 500) for _ in range(20))
    await Compactor(CompactionOptions(keep_last=0), summariser=Summariser(driver, model)).compact(view)
    assert len(driver.requests) == 6


# Overlays


async def test_compactions_nest_and_come_off_one_by_one():
    """Each uncover restores, byte by byte, the view before that compaction."""
    views = [conversation(8, LONG)]
    for options in (
        {"compact_strategy": "observation_mask", "keep_last": 8},
        {"compact_strategy": "truncate", "keep_last": 20},
        {"compact_strategy": "llm", "keep_last": 5},
        {"custom_compactor": lambda _: ["all of it"], "keep_last": 0},
    ):
        views.append(await compacted(views[-1], lambda _: "sum", **options))
        check_pairs(views[-1])
    view = views.pop()
    assert len(list(view.blocks())) == 4
    while views:
        view = view.uncover()
        assert view == views[-1]
        assert json_of(view) == json_of(views.pop())


async def test_a_cut_through_a_block_covers_the_block_and_shows_its_rest():
    """A mask shows many messages; a later cut among them loses none of its covered messages."""
    masked = await compacted(conversation(8, LONG), compact_strategy="observation_mask", keep_last=0)
    shown = await compacted(masked, compact_strategy="truncate", keep_last=8)
    assert len(shown) == 9
    assert shown[1:] == masked[-8:]
    assert shown.uncover() == masked


outputs = st.lists(st.sampled_from(["", "ok", "y" * 60, LONG]), max_size=3)
histories = st.lists(outputs, max_size=8)
strategies = st.fixed_dictionaries(
    {"keep_last": st.integers(0, 40)},
    optional={
        "compact_strategy": st.sampled_from(["llm", "truncate", "observation_mask", "custom"]),
        "tool_output_max_chars": st.integers(0, 80),
        "token_threshold": st.integers(0, 500),
        "hard_limit_tokens": st.integers(300, 3_000),
        "hard_limit_strategy": st.sampled_from(["llm", "truncate", "observation_mask", "custom"]),
    },
)


@given(histories, st.lists(strategies, min_size=1, max_size=4))
async def test_any_compaction_leaves_a_valid_view_and_can_be_undone(history, rounds):
    """Random histories, every strategy, any options, one after another: pairs hold, and each can be undone."""
    said = [message for number, given in enumerate(history) for message in turn(number, *given)]
    views = [Transcript.of(said)]
    for options in rounds:
        maker = compactor(lambda _: "sum", custom_compactor=lambda older: older[:1], **options)
        made = None
        with suppress(InvalidData):  # a limit that cannot be kept, or a custom view that is not valid
            made = await maker.compact(views[-1])
        if made is not None:
            views.append(overlaid(views[-1], made))
            check_pairs(views[-1])
            kept = min(options["keep_last"], len(views[-2]))
            if not options.keys() & {"hard_limit_tokens", "tool_output_max_chars"} and kept:
                assert views[-1][-kept:] == views[-2][-kept:]
    view = views.pop()
    in_logs = {message.id for span in every_span(view.pieces) for message in span.messages()}
    assert {message.id for message in said} <= in_logs
    while views:
        view = view.uncover()
        assert json_of(view) == json_of(views[-1])
        assert view == views.pop()
