"""Pairs of verbs on the four stores: however two verbs meet, the promises of the design hold.

A case is one number. It chooses the pair and the store, the session's earlier life, whether the verbs come one after
the other or at once, in one process or in two, and where a fault strikes.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from tests.pairs.case import KINDS, PAIRS, ROUND, Case, broken_by

IN_TEST = {"memory": 40, "sqlite": 10, "file": 4, "postgres": 4}
"""The number of cases for each kind of store without PERDURE_TORTURE; with it, a round of all pairs on all."""


def _seeds() -> list[int]:
    if "PERDURE_PAIR_SEED" in os.environ:
        return [int(seed) for seed in os.environ["PERDURE_PAIR_SEED"].split(",")]
    if os.environ.get("PERDURE_TORTURE"):
        return [*range(ROUND)]
    chance = Random(11)
    pairs = chance.sample(range(len(PAIRS)), sum(IN_TEST.values()))
    kinds = [kind for kind, many in IN_TEST.items() for _ in range(many)]
    places = {kind: [place for place, each in enumerate(KINDS) if each == kind] for kind in IN_TEST}
    return [pair + len(PAIRS) * chance.choice(places[kind]) for pair, kind in zip(pairs, kinds, strict=True)]


@pytest.mark.parametrize("case", [Case(seed) for seed in _seeds()], ids=str)
async def test_the_promises_hold_where_two_verbs_meet(case: Case, tmp_path: Path) -> None:
    """No text is lost, nothing is done twice or undecided, and nothing is left behind."""
    broken, story = await broken_by(case, tmp_path)
    again = f"PERDURE_PAIR_SEED={case.seed} python -m pytest tests/pairs/test_pairs.py -n 0"
    assert not broken, "\n".join([again, *broken, "what was done:", *story])


def test_a_round_has_every_ordered_pair_on_every_store() -> None:
    """Torture leaves no pair out, and has as many cases as ROUND says."""
    met = {(case.first, case.second, case.kind) for case in map(Case, range(ROUND))}
    assert len(met) == len(PAIRS) * len(IN_TEST)
    assert len(PAIRS) == 34 * 34
    assert ROUND >= 10_000
