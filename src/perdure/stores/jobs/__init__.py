"""What a session means in rows: generators of row statements, which know no engine and do no I/O."""
