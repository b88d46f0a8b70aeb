"""The actions on a session. Each file holds one verb, or one family of verbs."""
