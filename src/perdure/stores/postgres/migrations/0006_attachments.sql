-- Images and files, each once under the SHA-256 of its bytes. Most are compressed already.
CREATE TABLE blob (
    hash text COLLATE "C" PRIMARY KEY,
    size bigint NOT NULL,
    body bytea NOT NULL
);
ALTER TABLE blob ALTER COLUMN body SET STORAGE EXTERNAL;

-- The messages that show them. A position below 0 is that of an item in the inbox of the log's session.
CREATE TABLE attached (
    hash text COLLATE "C" NOT NULL,
    log  bigint NOT NULL,
    pos  bigint NOT NULL,
    PRIMARY KEY (log, pos, hash)
);

CREATE INDEX attached_by_hash ON attached (hash, log);
