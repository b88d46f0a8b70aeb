"""A check of a directory of backups, without a restore: which backups are whole, and what is damaged."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from perdure.aio import aside
from perdure.archive.backups.backing_up import told_in_loop
from perdure.archive.backups.catalog import hashes_in
from perdure.archive.backups.deposit import Tell
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.packs import Packs, chunks_in
from perdure.archive.backups.target import Target
from perdure.archive.moving import Progress
from perdure.errors import BackupDamaged
from perdure.model.checks import expect_function


class VerifyReport(msgspec.Struct, frozen=True):
    """The result of a check of a directory of backups."""

    backups: tuple[Backup, ...] = ()
    """The backups that are whole, and can be restored."""
    damaged: tuple[tuple[str, str], ...] = ()
    """The ids of the other backups, each with what is wrong."""
    chunks: int = 0
    """The number of chunks that were read."""
    bytes: int = 0
    """Their size."""
    problems: tuple[BackupDamaged, ...] = ()
    """The damage that a backup may suffer from."""
    unneeded: tuple[BackupDamaged, ...] = ()
    """The damage in what no backup needs. A file that is named without a chunk can be deleted."""

    @property
    def is_sound(self) -> bool:
        """True if no backup suffers from damage."""
        return not self.problems and not self.damaged


async def verify_backups(target: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check every chunk and manifest in a directory of backups, and report which backups are whole. Change nothing.

    `target` is the directory. `progress` is called with the bytes done and the bytes of all.
    """
    if progress is not None:
        expect_function(progress, "$.progress")
    place = Target.at(target)
    return await aside(_verified, place, told_in_loop(progress))


def _verified(place: Target, tell: Tell) -> VerifyReport:
    with place.reading():
        sound, size, problems = _sound_chunks(place.packs, tell)
        whole: list[Backup] = []
        damaged: list[tuple[str, str]] = []
        lacking: set[bytes] | None = set()
        for each in place.looked_through():
            if isinstance(each, BackupDamaged):
                problems.append(each)
                damaged.append((Path(each.path).stem, each.reason))
                lacking = None
            elif missing := _missing_catalog(each, sound):
                damaged.append((each.id, _told(missing)))
                lacking = None
            elif missing := [key for key in hashes_in(place.packs, each.catalog) if key not in sound]:
                damaged.append((each.id, _told(missing)))
                lacking = None if lacking is None else lacking | {*missing}
            else:
                whole.append(each)
        unneeded = [each for each in problems if not _may_be_needed(each, lacking)]
        harmful = [each for each in problems if each not in unneeded]
        return VerifyReport(tuple(whole), tuple(damaged), len(sound), size, tuple(harmful), tuple(unneeded))


def _sound_chunks(packs: Packs, tell: Tell) -> tuple[set[bytes], int, list[BackupDamaged]]:
    """Read all chunks. Return the hashes of the sound ones, the bytes of all, and what is wrong with the others."""
    sound: set[bytes] = set()
    problems = [*packs.damaged]
    broken = {each.path for each in packs.damaged}
    size, total = 0, sum(path.stat().st_size for path in packs.paths())
    for path in packs.paths():
        if str(path) in broken:
            continue
        for key, at in chunks_in(path):
            try:
                packs.read_at(key, at)
                sound.add(key)
            except BackupDamaged as error:
                problems.append(error)
            size += at.size
        tell(size, max(total, size))
    return sound, size, problems


def _missing_catalog(backup: Backup, sound: Collection[bytes]) -> list[bytes]:
    return [key for each in backup.catalog if (key := bytes.fromhex(each)) not in sound]


def _told(missing: list[bytes]) -> str:
    others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
    return f"chunk {missing[0].hex()}{others} missing or damaged"


def _may_be_needed(damage: BackupDamaged, lacking: Collection[bytes] | None) -> bool:
    """Tell whether a backup may lack what is damaged. `lacking` is None if it is not known what backups lack."""
    if lacking is None:
        return True
    # A file with a damaged index may have any chunk. If no backup lacks one, none is needed from there.
    return bool(lacking) if damage.chunk is None else bytes.fromhex(damage.chunk) in lacking
