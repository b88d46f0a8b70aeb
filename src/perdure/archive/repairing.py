"""Repair what can be repaired without guessing, and say what was done, what is left, and what helps there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from perdure.archive.checking import fsck
from perdure.archive.moving import Progress
from perdure.errors import ConfigurationError
from perdure.model.checks import expect, expect_function
from perdure.protocols import Problem, SessionStore
from perdure.stores.store import Store


class RepairReport(msgspec.Struct, frozen=True):
    """What was wrong in a store, and what has become of it."""

    found: tuple[Problem, ...] = ()
    """What the check has found before."""
    repaired: tuple[Problem, ...] = ()
    """What was written again; in a dry run, what would be."""
    left: tuple[Problem, ...] = ()
    """What a check finds afterwards, each with what helps; in a dry run, what nothing is known to mend."""
    is_dry_run: bool = False

    @property
    def is_sound(self) -> bool:
        return not self.left


async def repair(store: SessionStore, *, dry_run: bool = False, progress: Progress | None = None) -> RepairReport:
    """Repair a store: indexes, columns and notes that follow from versions and messages. Others may use it meanwhile.

    No version, message or record is changed. What was repaired of a session is on its record, as an entry of the kind
    "repaired". It may be killed at any instant and repeated. ConfigurationError if the store cannot be repaired.
    """
    expect(dry_run, bool, "$.dry_run")
    if progress is not None:
        expect_function(progress, "$.progress")
    if not isinstance(store, Store):
        raise ConfigurationError(f"A {type(store).__name__} cannot be repaired. Copy its sessions into another store.")
    before = await fsck(store)
    repaired = tuple(await store.repair(dry_run=dry_run, progress=progress))
    if dry_run:
        return RepairReport(before.problems, repaired, tuple(_beside(before.problems, repaired)), is_dry_run=True)
    return RepairReport(before.problems, repaired, (await fsck(store)).problems)


def _beside(found: Iterable[Problem], repaired: Iterable[Problem]) -> Iterable[Problem]:
    """Return what was found and is not among what would be repaired, as far as the places tell."""
    places = Counter((each.session_id, each.where) for each in repaired)
    return (each for each in found if not places[each.session_id, each.where])
