"""The imperative API: open a session, talk to it, fork it, compact it, close it."""
