"""Bit rot as a test class, for a store that keeps its sessions in files. Apply it to yours in three lines:

    class TestRot(RotContract):
        def open_store(self, where):
            return MyStore(where / "sessions")

Every flip is one round. One place of one file is damaged, every read is tried, one session is saved, and all files are
put back. Set `flips` for more rounds. Define `damage` for a store that keeps its sessions elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from perdure.model.ids import use
from perdure.testing.clock import FrozenClock
from perdure.testing.rot.attack import Attack, Damage, RottenFiles, forget_claims
from perdure.testing.rot.furnishing import furnish
from perdure.testing.rot.questions import Kind, answers_of, questions_of
from perdure.testing.scene import Contract, in_directory

# Fewer than `furnish` makes by itself: every flip asks every question of every session again.
_CROWD = 8


class RotContract(Contract):
    """The contract that damage never leads to a wrong answer.

    Each answer is right, or is an error that names the damage, or names beside it what is missing.
    """

    flips: ClassVar[int] = 12
    seed: ClassVar[int] = 1
    left_to_check: ClassVar[Collection[Kind]] = ()
    """Kinds of questions in which only a check finds what is missing: see `perdure.testing.rot.questions`."""

    def damage(self, where: Path) -> Damage:
        """Return the parts of a closed store that can be damaged."""
        return RottenFiles(where)

    @in_directory
    async def test_damage_is_never_a_wrong_answer(self, where: Path) -> None:
        """No read gives a wrong answer, and neither does a save on top of what was read."""
        # The clock moves while sessions are made, so that lists have an order. Then it stands still: every answer has
        # to be the same each time it is asked for.
        clock = FrozenClock(tick=0.001)
        crowd = {f"crowd-{number:03d}{end}" for number in range(_CROWD) for end in ("", "-child")}
        with use(clock=clock):
            async with self.open_store(where) as store:
                await furnish(store, crowd=_CROWD)
                questions = await questions_of(store, crowd=crowd, orders=("created",))
                forget_claims(store)
        with use(clock=FrozenClock(clock())):
            damage = self.damage(where)
            async with self.open_store(where) as store:
                right: dict[str, Any] = await answers_of(store, questions)
                forget_claims(store)
            await damage.heal()
            attack = Attack(self.open_store, where, damage, questions, right, left_to_check=self.left_to_check)
            report = await attack.run(self.flips, self.seed)
        assert report.wrong == []
