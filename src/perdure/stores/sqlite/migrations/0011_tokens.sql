-- Access tokens of a service: never a secret, only its digest. What one may do is in its body.
CREATE TABLE token (
    digest TEXT PRIMARY KEY,
    id     TEXT NOT NULL UNIQUE,
    owner  TEXT,
    crc    INTEGER NOT NULL,
    body   BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX token_by_owner ON token (owner) WHERE owner IS NOT NULL;
