"""Backups of whole stores, made while the stores are in use. Each has one state, and only new data is written."""

from perdure.archive.backups.backing_up import BackupReport, backup, list_backups
from perdure.archive.backups.manifest import Backup
from perdure.archive.backups.restoring import RestoreReport, restore
from perdure.archive.backups.verifying import VerifyReport, verify_backups

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
