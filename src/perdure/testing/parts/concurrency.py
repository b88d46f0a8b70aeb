"""Histories of several clients at once, which could have been done by one after the other."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

from perdure.testing.histories import History, broken, play, play_apart
from perdure.testing.outcomes import Outcome, note
from perdure.testing.scene import PATIENCE, Contract, in_directory

_TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
HISTORIES = 200 if _TORTURE else 3
# Fewer, since each starts several processes.
HISTORIES_APART = 40 if _TORTURE else 1
_CLIENTS, _OPERATIONS, _SESSIONS = 6, 30, 2
_KILLS = 2


class Concurrency(Contract):
    patience = 3600.0 if _TORTURE else PATIENCE

    @in_directory
    async def test_what_clients_do_at_once_could_be_done_one_by_one(self, where: Path) -> None:
        """Loads, saves, forks, claims, appends and erasures have an order that explains every answer."""
        wrong = list[str]()
        for number in range(HISTORIES):
            history = await self._history(where / str(number), f"{number}")
            wrong += [f"seed {number}, {text}" for text in broken(history)[:1]]
        self._note("histories of concurrent clients", HISTORIES, wrong)

    @in_directory
    async def test_what_processes_do_at_once_could_be_done_one_by_one(self, where: Path) -> None:
        """The same holds between processes. What a killed process had begun is done or not, but never half."""
        if not self.shared:
            return
        wrong = list[str]()
        for number in range(HISTORIES_APART):
            history = await play_apart(
                self,
                _made(where / str(number)),
                clients=4,
                operations=_OPERATIONS,
                sessions=_SESSIONS,
                seed=f"{number}",
                kills=_KILLS,
            )
            wrong += [f"seed {number}, {text}" for text in broken(history)[:1]]
        self._note("histories of concurrent processes, some killed", HISTORIES_APART, wrong)

    async def _history(self, where: Path, seed: str) -> History:
        async with AsyncExitStack() as opened:
            # Several handles where the store allows it: they share no cache, as processes do not.
            handles = range(3 if self.shared else 1)
            stores = [await opened.enter_async_context(self.open_store(_made(where))) for _ in handles]
            given = {"clients": _CLIENTS, "operations": _OPERATIONS, "sessions": _SESSIONS}
            return await play(stores, seed=seed, **given)

    def _note(self, attack: str, rounds: int, wrong: list[str]) -> None:
        store = type(self).__name__.removeprefix("Test").removesuffix("Histories")
        note(Outcome(attack=attack, store=store, rounds=rounds, failures=len(wrong)))
        assert not wrong, "\n".join(wrong)


def _made(where: Path) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    return where
