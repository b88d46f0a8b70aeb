"""Backups of whole stores: made while others use them, each of one state, and only what is new is written."""

from perdure.archive.backups.backing_up import BackupReport, backup, list_backups
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.restoring import RestoreReport, VerifyReport, restore, verify_backups

__all__ = [
    "Backup",
    "BackupReport",
    "RestoreReport",
    "VerifyReport",
    "backup",
    "list_backups",
    "restore",
    "verify_backups",
]
