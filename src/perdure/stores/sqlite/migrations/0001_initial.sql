-- Dense append-only rowid tables: a batch of saves fills few pages, and the rowid is the order of commits.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta VALUES ('uid', lower(hex(randomblob(16)))), ('erasures', 0);

-- Columns other than version, claim and the ends are for filters; the truth of a header is its head.
CREATE TABLE session (
    sid       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT NOT NULL UNIQUE,
    log       INTEGER NOT NULL,
    version   INTEGER NOT NULL,
    status    TEXT NOT NULL,
    agent     TEXT NOT NULL,
    owner     TEXT,
    parent    TEXT,
    created   REAL NOT NULL,
    updated   REAL NOT NULL,
    msg_end   INTEGER NOT NULL DEFAULT 0,
    evt_end   INTEGER NOT NULL DEFAULT 0,
    inbox_end INTEGER NOT NULL DEFAULT 0,
    taken     INTEGER NOT NULL DEFAULT 0,
    epoch     INTEGER NOT NULL DEFAULT 0,
    claim     BLOB,
    expires   REAL
) STRICT;

-- A second way to a session by its id, asked when the first finds none: a damaged page is no unknown session.
CREATE INDEX session_again ON session (substr(id, -4));
CREATE INDEX session_by_agent ON session (agent, sid);
CREATE INDEX session_by_owner ON session (owner, sid) WHERE owner IS NOT NULL;
CREATE INDEX session_by_parent ON session (parent, sid) WHERE parent IS NOT NULL;
-- Most sessions are active, and the newest of those are found without an index.
CREATE INDEX session_by_status ON session (status, sid) WHERE status <> 'active';
CREATE INDEX session_claimed ON session (sid) WHERE claim IS NOT NULL;

CREATE TABLE tag (
    tag TEXT NOT NULL,
    sid INTEGER NOT NULL,
    PRIMARY KEY (tag, sid)
) STRICT, WITHOUT ROWID;

CREATE INDEX tag_by_session ON tag (sid);

-- A log's number is never used twice: a reused one would show a fork a stranger's text.
CREATE TABLE log (
    log     INTEGER PRIMARY KEY AUTOINCREMENT,
    sid     INTEGER NOT NULL,
    name    TEXT NOT NULL DEFAULT '',
    UNIQUE (sid, name)
) STRICT;

CREATE TABLE msg (
    log  INTEGER NOT NULL,
    pos  INTEGER NOT NULL,
    crc  INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (log, pos)
) STRICT;

CREATE TABLE head (
    sid     INTEGER NOT NULL,
    version INTEGER NOT NULL,
    crc     INTEGER NOT NULL,
    body    BLOB NOT NULL,
    UNIQUE (sid, version)
) STRICT;

-- The runs of a session, each with the first and the last of its events, and the stretch of log with its messages.
CREATE TABLE run (
    run       INTEGER PRIMARY KEY AUTOINCREMENT,
    sid       INTEGER NOT NULL,
    loop      TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq  INTEGER NOT NULL,
    log       INTEGER NOT NULL,
    first_pos INTEGER NOT NULL,
    end_pos   INTEGER NOT NULL,
    UNIQUE (sid, loop)
) STRICT;

CREATE INDEX run_by_session ON run (sid, first_seq);

CREATE TABLE event (
    sid  INTEGER NOT NULL,
    seq  INTEGER NOT NULL,
    run  INTEGER,
    kind TEXT NOT NULL,
    crc  INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (sid, seq)
) STRICT;

CREATE TABLE inbox (
    sid  INTEGER NOT NULL,
    seq  INTEGER NOT NULL,
    run  TEXT,
    kind TEXT NOT NULL,
    crc  INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (sid, seq)
) STRICT;

-- Idempotency keys, and the versions that their runs have saved.
CREATE TABLE key (
    sid     INTEGER NOT NULL,
    name    TEXT NOT NULL,
    digest  TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (sid, name)
) STRICT, WITHOUT ROWID;

-- What is large in a head, or the same in many, once, under the hash of its bytes.
CREATE TABLE value (
    hash TEXT NOT NULL UNIQUE,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE uses (
    hash TEXT NOT NULL,
    sid  INTEGER NOT NULL,
    PRIMARY KEY (hash, sid)
) STRICT, WITHOUT ROWID;

CREATE INDEX uses_by_session ON uses (sid);

-- All that one session can ever show of another's log.
CREATE TABLE ref (
    log   INTEGER NOT NULL,
    child INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop  INTEGER NOT NULL
) STRICT;

CREATE INDEX ref_by_log ON ref (log);
CREATE INDEX ref_by_child ON ref (child);
