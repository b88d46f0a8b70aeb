"""Repair of what can be repaired without guessing. A report says what was done, what is left, and what helps there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from perdure.archive.checking import fsck
from perdure.archive.moving import Progress
from perdure.errors import ConfigurationError
from perdure.model.checks import expect, expect_function
from perdure.protocols import Problem, SessionStore
from perdure.stores.redacting import without_redactors
from perdure.stores.store import Store


class RepairReport(msgspec.Struct, frozen=True):
    """The problems of a store, and what was done about them."""

    found: tuple[Problem, ...] = ()
    """The problems that the check found before."""
    repaired: tuple[Problem, ...] = ()
    """The problems that were repaired; in a dry run, those that would be."""
    left: tuple[Problem, ...] = ()
    """The problems that a check finds afterwards; in a dry run, those that cannot be repaired."""
    is_dry_run: bool = False
    """True if nothing was repaired."""

    @property
    def is_sound(self) -> bool:
        """True if no problem is left."""
        return not self.left


async def repair(store: SessionStore, *, dry_run: bool = False, progress: Progress | None = None) -> RepairReport:
    """Repair a `store`: indexes, columns and notes that follow from versions and messages.

    Others may use the store meanwhile. No version, message or earlier entry of a record is changed. What was repaired
    in a session is added to its record, as an entry of the kind "repaired". It may be killed at any instant and
    repeated. Raise ConfigurationError if the store cannot be repaired.

    A `dry_run` changes nothing, and reports what would be repaired. `progress` is called with the steps that are done
    and the steps in all.
    """
    expect(dry_run, bool, "$.dry_run")
    if progress is not None:
        expect_function(progress, "$.progress")
    store = without_redactors(store)
    if not isinstance(store, Store):
        raise ConfigurationError(f"A {type(store).__name__} cannot be repaired. Copy its sessions into another store.")
    before = await fsck(store)
    repaired = tuple(await store.repair(dry_run=dry_run, progress=progress))
    if dry_run:
        return RepairReport(before.problems, repaired, tuple(_beside(before.problems, repaired)), is_dry_run=True)
    return RepairReport(before.problems, repaired, (await fsck(store)).problems)


def _beside(found: Iterable[Problem], repaired: Iterable[Problem]) -> Iterable[Problem]:
    """Return the problems that would not be repaired, as far as their places tell."""
    places = Counter((each.session_id, each.where) for each in repaired)
    return (each for each in found if not places[each.session_id, each.where])
