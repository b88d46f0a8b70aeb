"""The stores that keep sessions: memory, a directory of files, SQLite, PostgreSQL."""
