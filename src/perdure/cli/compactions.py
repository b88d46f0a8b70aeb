"""What a compaction has come to, in words: how many messages are shown, of how many, and what became of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.model.transcript import Block

if TYPE_CHECKING:
    from perdure.model.session import AgentSession
    from perdure.sessions.sessions import Sessions

NOTHING_TO_DO = "There is nothing to compact."
_DONE = {
    "llm": "what is older is summed up",
    "truncate": "what is older is cut off, not summed up",
    "observation_mask": "older tool results are hidden",
}


class Compacted(NamedTuple):
    shown: int
    before: int
    by: str | None
    """The strategies that were used, joined by +; None if nothing was compacted."""

    @property
    def how(self) -> str:
        """What became of the rest, behind a semicolon; nothing if nothing did."""
        done = ", ".join(_DONE.get(each, f"by {each}") for each in (self.by or "").split("+") if each)
        return done and f"; {done}"


async def compacted(sessions: Sessions, session_id: str, **options: Any) -> Compacted:
    """Compact what a session shows, and tell how."""
    before = await sessions.session(session_id)
    shown = await sessions.compact(session_id, **options)
    made = _blocks(await sessions.session(session_id))
    new = [by for block_id, by in made.items() if block_id not in _blocks(before)]
    return Compacted(shown, len(before.state.messages), new[-1] if new else None)


def _blocks(session: AgentSession) -> dict[str, str]:
    return {piece.id: piece.by for piece in session.state.transcript.pieces if isinstance(piece, Block)}
