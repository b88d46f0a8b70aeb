"""Transcripts in Markdown, as a renderer reads them: said text never becomes structure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from perdure import (
    AgentDefinition,
    AgentSession,
    AgentSessionInfo,
    AgentState,
    Envelope,
    Media,
    Message,
    Opaque,
    SessionId,
    ToolCall,
)
from perdure.model.message import Text, Thinking
from perdure.sessions.markdown import code, fenced, inline, quoted, transcript

AGENT = AgentDefinition("guide", system_prompt="Be brief.")
SESSION = AgentSession(AgentSessionInfo(SessionId("s"), "guide"), AGENT, AgentState.of(AGENT))
RENDERER = MarkdownIt("commonmark", {"html": True})


def tokens_of(markdown: str) -> list[Token]:
    tokens = RENDERER.parse(markdown)
    return [*tokens, *(inner for token in tokens for inner in token.children or ())]


def test_a_transcript_reads_well() -> None:
    """It has headings for speakers, quotes for what was said, and blocks of code for calls and results."""
    said = [
        Message.user("What is 2 + 3?", Media("image/png", data=b"abc", name="sum.png")),
        Message.assistant(Thinking("Add."), tool_calls=[ToolCall("add", {"a": 2, "b": 3}, "c1")]),
        Message.tool("c1", "5"),
        Message.assistant("It is **5**.\n\n```python\n2 + 3\n```\nSee `a < b`.", Opaque("acme", {})),
        Message.assistant("And", metadata={"incomplete": True}),
        Message.tool("c2", "broken", is_error=True),
    ]
    assert (
        transcript(SESSION, said)
        == """\
# s

Session `s`, agent `guide`.

## System prompt

> Be brief.

## User

> What is 2 + 3?

`[sum.png: image/png: 3 bytes]`

## Assistant

*Thought:*

> Add.

*Calls* `add` *as* `c1`:

```json
{
  "a": 2,
  "b": 3
}
```

## Tool

*Result of* `c1`:

```
5
```

## Assistant

> It is **5**.
>
> ```python
> 2 + 3
> ```
> See `a < b`.

*For* `acme` *only.*

## Assistant (incomplete)

> And

## Tool

*Error of* `c2`:

```
broken
```
"""
    )


SCRAPS = """
``` ```` ~~~ ~~~~ ` `` <script> </script> <!-- --> <b onclick=x> &lt; ![a](http://x) [a](javascript:x) [a]: http://x
<http://x> > - 1. # ## --- === | \\ \\` \\< \\] ] ( : a <?php <![CDATA[ html ```html ~~~a`b <div
"""
hostile = st.lists(
    st.sampled_from([*SCRAPS.split(), " ", "  ", "    ", "\n", "\n\n", "\t", "\r", "\u2028", "\x1b[31m"]), max_size=30
).map("".join)


@given(texts=st.lists(hostile, min_size=1, max_size=3), result=hostile, name=hostile.filter(str.strip))
def test_no_text_becomes_structure(texts: list[str], result: str, name: str) -> None:
    """The text makes no HTML, no link, no image, and no heading outside of a quote."""
    said = [Message.user(text) for text in texts]
    said += [
        Message.assistant(Text(name), tool_calls=[ToolCall(name, {name: result}, name)]),
        Message.tool(name, result),
    ]
    document = transcript(SESSION, said)
    tokens = tokens_of(document)
    assert {token.type for token in tokens}.isdisjoint({"html_block", "html_inline", "link_open", "image"})
    headings = [token for token in tokens if token.type == "heading_open" and token.level == 0]
    assert len(headings) == 2 + len(said)
    assert "\x1b" not in document


@given(text=hostile)
def test_a_block_of_code_ends_where_it_is_meant_to(text: str) -> None:
    """A result is one block of code, and nothing follows it."""
    tokens = RENDERER.parse("\n".join([*fenced(text), "", "behind"]))
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


@given(text=hostile)
def test_a_name_in_a_line_is_code(text: str) -> None:
    """This holds for any name of a tool."""
    [_, line, _] = RENDERER.parse(f"a {code(text)} b")
    assert [token.type for token in line.children or ()] == ["text", "code_inline", "text"]


def test_ordinary_text_stays_as_it_is() -> None:
    """Harmless text is not changed: lists, emphasis, code and tables stay what they were."""
    ordinary = "- a *b* `List<int>`\n1. c | d\n# e\n~~~text\n<b>\n~~~"
    expected = ["> - a *b* `List<int>`", "> 1. c | d", "> # e", "> ```text", "> <b>", "> ```"]
    assert list(quoted(ordinary)) == expected
    assert inline("a < b & c") == "a &lt; b &amp; c"


def test_an_envelope_is_not_shown() -> None:
    """A transcript for people has nothing of a foreign item's rest."""
    envelope = Envelope("acme", {"type": "message"})
    shown = transcript(SESSION, [Message.user("Hi", envelope, id="m")])
    assert shown == transcript(SESSION, [Message.user("Hi", id="m")])
