"""Redaction: the content of messages is replaced for good, wherever a store has it.

A message stands in one row of a log, and every version and fork shows that row. What else may tell of it: summaries
that cover it, steps and events that tell of its tool calls, errors of its runs, the inbox, and a session's own notes.
A store opens its rows as a `Bench`; what is done there is the same for all.
"""

from perdure.stores.jobs.redaction.held import Log as Log
from perdure.stores.jobs.redaction.held import Places as Places
from perdure.stores.jobs.redaction.held import Row as Row
from perdure.stores.jobs.redaction.request import Request as Request
from perdure.stores.jobs.redaction.versions import Version as Version
from perdure.stores.jobs.redaction.versions import next_version as next_version
from perdure.stores.redaction.bench import Redone as Redone
from perdure.stores.redaction.redacting import redact as redact
