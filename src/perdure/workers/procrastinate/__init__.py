"""The dispatcher on PostgreSQL. procrastinate hands out jobs, which come and go with the messages of sessions."""

from importlib.metadata import PackageNotFoundError, version

from perdure.errors import ConfigurationError

_LEAST = (3, 8)

try:
    _found = version("procrastinate")
except PackageNotFoundError:
    raise ConfigurationError(
        "ProcrastinateDispatcher needs procrastinate. Install it: pip install 'perdure[workers]'."
    ) from None
if tuple(int(part) for part in _found.split(".")[:2]) < _LEAST:
    raise ConfigurationError(
        f"ProcrastinateDispatcher needs procrastinate 3.8 or newer, and {_found} is installed. "
        "Upgrade it: pip install --upgrade 'perdure[workers]'."
    )

# After the check, since an older release lacks names that are imported there.
from perdure.workers.procrastinate.dispatcher import ProcrastinateDispatcher as ProcrastinateDispatcher  # noqa: E402

__all__ = ["ProcrastinateDispatcher"]
