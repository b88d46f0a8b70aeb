"""Redaction: the content of messages is replaced for good, wherever a store has it.

A message stands in one row of a log, and every version and fork shows that row. What else may tell of it: summaries
that cover it, steps and events that tell of its tool calls, errors of its runs, the inbox, and a session's own notes.
"""

from perdure.stores.jobs.redaction.redacting import redact as redact
from perdure.stores.jobs.redaction.request import Request as Request
