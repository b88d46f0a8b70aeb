"""What can be done to a session: one verb, or one family of verbs, a file."""
