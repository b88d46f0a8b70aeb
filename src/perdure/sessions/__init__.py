"""The imperative face: open a session, talk to it, fork it, compact it, close it."""
