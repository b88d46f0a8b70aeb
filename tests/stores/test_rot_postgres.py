"""Rows of PostgreSQL that rot: its pages are its own affair, and each row is compared with its checksum."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import postgres_server
from tests.store_breaks import without_checks, without_row_checksums
from tests.stores.files import TORTURE
from tests.stores.rotting import LEFT_TO_CHECK, THE_CROWD
from tests.stores.rotting_rows import RottenRows

from perdure.model.ids import use
from perdure.stores.postgres import PostgresStore
from perdure.testing.clock import FrozenClock
from perdure.testing.outcomes import Outcome, note
from perdure.testing.rot.attack import Attack, forget_claims
from perdure.testing.rot.furnishing import furnish
from perdure.testing.rot.questions import answers_of, questions_of

ROUNDS = 100 if TORTURE else 4
CONTROLS = {
    False: ("checksums of rows are ignored", without_row_checksums, 10),
    True: ("a check finds nothing", without_checks, 2),
}
"""The protection that is removed, its function, and the rounds in a shard: all shards together must find something."""
EVERY = ("plain", "list", "names", "queue", "heads", "lenient", "notes", "progress")


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard", range(50 if TORTURE else 1))
@pytest.mark.parametrize("naming", [False, True])
async def test_a_damaged_row_is_never_a_wrong_answer(
    tmp_path: Path, naming: bool, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any column of any table may be damaged. If it names the row, the row is missing, and a check says so."""
    dsn, schema = postgres_server.dsn(), postgres_server.schema_of(tmp_path)

    def open_store(_: Path) -> PostgresStore:
        return PostgresStore(dsn, schema=schema)

    clock = FrozenClock(tick=0.001)
    with use(clock=clock):
        async with open_store(tmp_path) as store:
            await furnish(store, crowd=12)
            questions = await questions_of(store, crowd=THE_CROWD, orders=("created",))
            forget_claims(store)
    with use(clock=FrozenClock(clock())):
        async with open_store(tmp_path) as store:
            right = await answers_of(store, questions)
            forget_claims(store)
        damage = RottenRows(dsn, schema, naming=naming)
        attack = Attack(
            open_store,
            tmp_path,
            damage,
            questions,
            right,
            left_to_check=EVERY if naming else LEFT_TO_CHECK,
            saves=False,
        )
        report = await attack.run(ROUNDS, shard)
        without, take_away, rounds = CONTROLS[naming]
        take_away(monkeypatch.setattr)
        control = await attack.run(rounds if TORTURE else 0, shard)
        damage.close()
    silent = {each.damage for each in control.wrong}
    note(
        Outcome(
            attack="bit flips",
            store=f"PostgreSQL, {'names of rows' if naming else 'rows'}",
            rounds=report.rounds,
            failures=len({each.damage for each in report.wrong}),
            control=without,
            control_rounds=control.rounds,
            control_failures=len(silent),
        )
    )
    assert report.wrong == []
