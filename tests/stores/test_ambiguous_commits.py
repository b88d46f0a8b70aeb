"""PostgreSQL over a line that is cut after a commit was sent: the request is carried out once, or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from tests import postgres_server

from perdure import PostgresStore
from perdure.errors import PerdureError, SessionConflict, StoreError
from perdure.stores.postgres import writer
from perdure.testing.deeds import deeds_for, prepared, reduced
from perdure.testing.outcomes import Outcome, note
from perdure.testing.proxy import CuttingProxy, When

ROUNDS = 200 if os.environ.get("PERDURE_TORTURE") else 5
TIMES: tuple[When, ...] = ("before", "after", "after", "during")


def server() -> Path | tuple[str, int]:
    """Return the address on which the tests' server listens."""
    found = conninfo_to_dict(postgres_server.dsn())
    host, port = str(found.get("host", "localhost")), int(found.get("port") or 5432)
    return Path(host) / f".s.PGSQL.{port}" if host.startswith("/") else (host, port)


def through(proxy: CuttingProxy) -> str:
    """Return the address of the same database through a proxy."""
    found = conninfo_to_dict(postgres_server.dsn())
    user, name = found.get("user", "postgres"), found.get("dbname", "postgres")
    secret = f":{found['password']}" if found.get("password") else ""
    return f"postgresql://{user}{secret}@127.0.0.1:{proxy.port}/{name}?sslmode=disable"


async def attacked(where: Path, rounds: int, *, seed: int) -> tuple[Sequence[str], int]:
    """Do one thing in each round while a line is cut. Return what went wrong, and how many lines were cut."""
    chance, wrong = random.Random(seed), list[str]()
    async with CuttingProxy(server()) as proxy:
        for number in range(rounds):
            schema = postgres_server.lent_schema(where / str(number))
            async with PostgresStore(postgres_server.dsn(), schema=schema) as direct:
                before = await prepared(direct)
                async with PostgresStore(through(proxy), schema=schema) as store:
                    known = {name: await store.load(name) for name in ("a", "b")}
                    deed = chance.choice(deeds_for(store, known, before))
                    when, rounds_on = chance.choice(TIMES), chance.choice((1, 1, 1, 2, 3))
                    proxy.cut(when, in_rounds=rounds_on)
                    error = await _error_of(deed.work())
                    proxy.mend()
                    told = f"round {number}: {deed.name}, cut {when} question {rounds_on}, {error or 'acknowledged'}"
                    found = await reduced(direct)
                    wanted = [deed.after] if error is None else [before, deed.after]
                    if found not in wanted:
                        wrong.append(f"{told}: the store shows {found}, not one of {wanted}")
                    elif isinstance(error, SessionConflict) or not isinstance(error, StoreError | None):
                        wrong.append(f"{told}: nobody else has written")
            postgres_server.give_back(where / str(number))
        return wrong, proxy.cuts


async def _error_of(work: Any) -> PerdureError | None:
    try:
        await work
    except PerdureError as error:
        return error
    return None


async def test_what_was_sent_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store recognises its own write by the operation's id. Without the id it takes the write for somebody else's."""
    wrong, cuts = await attacked(tmp_path / "rounds", ROUNDS, seed=1)
    monkeypatch.setattr(writer, "_was_made", _never)
    lost, _ = await attacked(tmp_path / "control", ROUNDS, seed=1)
    note(
        Outcome(
            attack="line cut at a commit",
            store="PostgreSQL",
            rounds=ROUNDS,
            failures=len(wrong),
            control="the operation's id is not looked up",
            control_rounds=ROUNDS,
            control_failures=len(lost),
        )
    )
    assert wrong == []
    assert cuts >= ROUNDS // 2
    assert lost


async def _never(*_: object) -> bool:
    return False
