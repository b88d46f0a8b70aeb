"""Adapters that keep other frameworks' sessions in perdure. Their items become messages, and come back unchanged."""
