-- Images and files, each once under the SHA-256 of its bytes. `size` stands before the bytes, so that it is read alone.
CREATE TABLE blob (
    hash TEXT NOT NULL PRIMARY KEY,
    size INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- The messages that show them. A position below 0 is that of an item in the inbox of the log's session.
CREATE TABLE attached (
    hash TEXT NOT NULL,
    log  INTEGER NOT NULL,
    pos  INTEGER NOT NULL,
    PRIMARY KEY (log, pos, hash)
) STRICT, WITHOUT ROWID;

CREATE INDEX attached_by_hash ON attached (hash, log);
