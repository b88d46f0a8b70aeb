"""The HTTP API under /api: sessions, what is said in them, what ran, and what waits."""
