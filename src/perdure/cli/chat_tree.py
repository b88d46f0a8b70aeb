"""A session's runs as a tree: what followed what, which branches ran side by side, at what cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from perdure.cli.terminal import line, status_style
from perdure.model.record import LoopRecord, SessionRecord
from perdure.sessions.face import Sessions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text
    from rich.tree import Tree

_ASKED = 46


async def whole_record(sessions: Sessions, session_id: str, *, limit: int | None = None) -> SessionRecord:
    """A session's record, its last runs with all that was said and done in them."""
    record = await sessions.record(session_id, limit=limit)
    loops = [await sessions.loop(session_id, loop.loop_id) for loop in record.loops]
    # A run read alone knows its own story; who follows whom, and what was selected, the record of all knows.
    links = [
        replace(loop, children_loop_ids=known.children_loop_ids, parallel_group=known.parallel_group)
        for loop, known in zip(loops, record.loops, strict=True)
    ]
    return replace(record, loops=tuple(links))


def run_tree(title: str, record: SessionRecord) -> RenderableType:
    """The tree of one session's runs, the first at its root."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text.assemble((line(title), "bold"), (f"  {line(record.session_id)}", "dim")))
    for loop in record.root_loops():
        _grow(tree, record, loop)
    return tree


def _grow(tree: Tree, record: SessionRecord, first: LoopRecord) -> None:
    """Runs that follow one another stand below one another; only where they part, the tree branches."""
    loop: LoopRecord | None = first
    while loop is not None:
        branch = tree.add(described_run(loop))
        for child in loop.child_loop_refs:
            branch.add(_child(child.child_session_id, child.tool_name))
        following = record.children_of(loop.loop_id)
        if len(following) > 1:
            for each in following:
                _grow(branch, record, each)
            return
        loop = following[0] if following else None


def _child(session_id: object, name: object) -> Text:
    from rich.text import Text

    return Text.assemble("sub-agent ", (line(name), "bold"), (f"  {line(session_id)}", "dim"))


def described_run(loop: LoopRecord) -> Text:
    """A run in one line: what was asked, what it made of it, what it used."""
    from rich.text import Text

    asked = next((message.text for message in loop.messages if message.role == "user"), "")
    tools = sum(len(turn.tool_executions) for turn in loop.turns)
    facts = [f"{len(loop.turns)} steps", f"{tools} tools", f"{loop.usage.total_tokens} tokens", f"${loop.usage.cost:.4f}"]
    if loop.started_at and loop.ended_at:
        facts.append(f"{(loop.ended_at - loop.started_at).total_seconds():.1f} s")
    group = loop.parallel_group
    chosen = "" if group is None else "selected branch" if group.is_selected else "branch"
    kind = "compaction" if loop.continuation_kind.kind == "compaction" else "run"
    return Text.assemble(
        (f"{line(asked, _ASKED) or chosen or kind}  ", "cyan"),
        (loop.status.value, status_style(loop.status.value)),
        (f"  {chosen}" if chosen and asked else "", "magenta"),
        (f"  {' · '.join(facts)}", "dim"),
    )
