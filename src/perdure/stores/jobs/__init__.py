"""Sessions in rows: the verbs as generators of row statements, which know no engine and do no I/O."""
