"""Histories of several clients at once, which could have been done by one after the other."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from perdure.testing.histories import LosesUpdates, broken, play, play_apart
from perdure.testing.outcomes import Outcome, note
from perdure.testing.scene import PATIENCE, Contract, in_directory

_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
HISTORIES = 200 if _TORTURE else 3
# Fewer, since each starts several processes.
HISTORIES_APART = 40 if _TORTURE else 1
CONTROLS, CONTROLS_APART = 20, 10
"""The number of rounds of a control. Outside of torture, one round that fails is enough, and none is played apart."""
_CLIENTS, _OPERATIONS, _SESSIONS = 6, 30, 2
_KILLS = 2


class Concurrency(Contract):
    patience = 3600.0 if _TORTURE else PATIENCE
    name: ClassVar[str] = ""
    """The name of the store in the table of outcomes. Leave it empty to write no outcome."""

    @in_directory
    async def test_what_clients_do_at_once_could_be_done_one_by_one(self, where: Path) -> None:
        """Loads, saves, forks, claims, appends and erasures have an order that explains every answer.

        If saves do not compare versions, they have none.
        """
        wrong = [text for number in range(HISTORIES) for text in await self._broken(where, number)]
        lost = list[list[str]]()
        while len(lost) < CONTROLS and (_TORTURE or not any(lost)):
            lost.append(await self._broken(where, HISTORIES + len(lost), is_control=True))
        self._note("histories of concurrent clients", HISTORIES, wrong, lost)

    @in_directory
    async def test_what_processes_do_at_once_could_be_done_one_by_one(self, where: Path) -> None:
        """The same holds between processes. What a killed process had begun is done or not, but never half."""
        if not self.shared:
            return
        wrong = [text for number in range(HISTORIES_APART) for text in await self._broken_apart(where, number)]
        controls = range(HISTORIES_APART, HISTORIES_APART + CONTROLS_APART) if _TORTURE else ()
        lost = [await self._broken_apart(where, number, is_control=True) for number in controls]
        self._note("histories of concurrent processes, some killed", HISTORIES_APART, wrong, lost)

    async def _broken(self, where: Path, number: int, *, is_control: bool = False) -> list[str]:
        """Return what is wrong with the history that a number stands for, if anything is."""
        async with AsyncExitStack() as opened:
            # Several handles where the store allows it: they share no cache, as processes do not.
            handles, place = range(3 if self.shared else 1), _made(where / str(number))
            stores: list[Any] = [await opened.enter_async_context(self.open_store(place)) for _ in handles]
            given = {"clients": _CLIENTS, "operations": _OPERATIONS, "sessions": _SESSIONS}
            history = await play([*map(LosesUpdates, stores)] if is_control else stores, seed=f"{number}", **given)
        return [f"seed {number}, {text}" for text in broken(history)[:1]]

    async def _broken_apart(self, where: Path, number: int, *, is_control: bool = False) -> list[str]:
        history = await play_apart(
            self,
            _made(where / str(number)),
            clients=4,
            operations=2 * _OPERATIONS,
            sessions=_SESSIONS,
            seed=f"{number}",
            kills=_KILLS,
            is_control=is_control,
        )
        return [f"seed {number}, {text}" for text in broken(history)[:1]]

    def _note(self, attack: str, rounds: int, wrong: list[str], lost: list[list[str]]) -> None:
        if self.name:
            note(
                Outcome(
                    attack=attack,
                    store=self.name,
                    rounds=rounds,
                    failures=len(wrong),
                    control="saves do not compare versions",
                    control_rounds=len(lost),
                    control_failures=sum(map(bool, lost)),
                )
            )
        assert not wrong, "\n".join(wrong)
        assert any(lost) or not lost, "saves did not compare versions, and every answer is explained: nothing is proved"


def _made(where: Path) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    return where
