"""Where sessions are kept: memory, a directory of files, SQLite, PostgreSQL."""
