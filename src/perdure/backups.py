"""The public names of backups."""

from perdure.archive.backups import (
    Backup,
    BackupReport,
    RestoreReport,
    VerifyReport,
    backup,
    list_backups,
    restore,
    verify_backups,
)

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
