"""Redaction of messages, and of everything that tells of them. It is the same in a store and in a record."""
