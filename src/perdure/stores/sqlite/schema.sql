-- What all migrations make of an empty file, in a third of their time. A test holds it against them: after a new
-- migration it fails, and prints what belongs here.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;
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
, line INTEGER, spawned INTEGER NOT NULL DEFAULT 0, recent INTEGER, priority INTEGER NOT NULL DEFAULT 0, since REAL) STRICT;
CREATE INDEX session_again ON session (substr(id, -4));
CREATE INDEX session_claimed ON session (sid) WHERE claim IS NOT NULL;
CREATE TABLE tag (
    tag TEXT NOT NULL,
    sid INTEGER NOT NULL, owner TEXT, agent TEXT, status TEXT, created REAL, spawned INTEGER, recent INTEGER,
    PRIMARY KEY (tag, sid)
) STRICT, WITHOUT ROWID;
CREATE INDEX tag_by_session ON tag (sid);
CREATE TABLE log (
    log     INTEGER PRIMARY KEY AUTOINCREMENT,
    sid     INTEGER NOT NULL,
    name    TEXT NOT NULL DEFAULT '', crc INTEGER NOT NULL DEFAULT -1,
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
CREATE TABLE inbox (
    sid  INTEGER NOT NULL,
    seq  INTEGER NOT NULL,
    run  TEXT,
    kind TEXT NOT NULL,
    crc  INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (sid, seq)
) STRICT;
CREATE TABLE key (
    sid     INTEGER NOT NULL,
    name    TEXT NOT NULL,
    digest  TEXT NOT NULL,
    version INTEGER NOT NULL, crc INTEGER NOT NULL DEFAULT -1,
    PRIMARY KEY (sid, name)
) STRICT, WITHOUT ROWID;
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
CREATE TABLE ref (
    log   INTEGER NOT NULL,
    child INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop  INTEGER NOT NULL
, since INTEGER) STRICT;
CREATE INDEX ref_by_log ON ref (log);
CREATE INDEX ref_by_child ON ref (child);
CREATE TABLE batch (
    sid   INTEGER NOT NULL,
    last  INTEGER NOT NULL,
    count INTEGER NOT NULL,
    run   INTEGER,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    UNIQUE (sid, last)
) STRICT;
CREATE INDEX key_again ON key (sid, substr(name, -4));
CREATE INDEX session_by_created ON session (created) WHERE status <> 'deleted';
CREATE INDEX session_by_parent ON session (parent, status, created) WHERE parent IS NOT NULL;
CREATE INDEX session_backdated ON session (created) WHERE updated < created;
CREATE INDEX session_by_line ON session (line) WHERE line IS NOT NULL;
CREATE INDEX session_by_shelf ON session (status, spawned, created);
CREATE INDEX session_by_shelf_recent ON session (status, spawned, recent);
CREATE INDEX session_by_agent_shelf ON session (agent, status, spawned, created);
CREATE INDEX session_by_agent_shelf_recent ON session (agent, status, spawned, recent);
CREATE INDEX session_by_owner_shelf ON session (owner, status, spawned, created);
CREATE INDEX session_by_owner_shelf_recent ON session (owner, status, spawned, recent);
CREATE INDEX session_by_owner_agent_shelf
    ON session (owner, agent, status, spawned, created) WHERE owner IS NOT NULL;
CREATE INDEX session_by_owner_agent_shelf_recent
    ON session (owner, agent, status, spawned, recent) WHERE owner IS NOT NULL;
CREATE INDEX tag_by_shelf ON tag (tag, status, spawned, created) WHERE created IS NOT NULL;
CREATE INDEX tag_by_shelf_recent ON tag (tag, status, spawned, recent) WHERE created IS NOT NULL;
CREATE INDEX tag_by_agent_shelf ON tag (agent, tag, status, spawned, created) WHERE agent IS NOT NULL;
CREATE INDEX tag_by_agent_shelf_recent ON tag (agent, tag, status, spawned, recent) WHERE agent IS NOT NULL;
CREATE INDEX tag_by_owner_shelf ON tag (owner, tag, status, spawned, created) WHERE created IS NOT NULL;
CREATE INDEX tag_by_owner_shelf_recent ON tag (owner, tag, status, spawned, recent) WHERE created IS NOT NULL;
CREATE INDEX tag_by_owner_agent_shelf
    ON tag (owner, agent, tag, status, spawned, created) WHERE owner IS NOT NULL;
CREATE INDEX tag_by_owner_agent_shelf_recent
    ON tag (owner, agent, tag, status, spawned, recent) WHERE owner IS NOT NULL;
CREATE TRIGGER tag_new AFTER INSERT ON tag BEGIN
    UPDATE tag
        SET (owner, agent, status, spawned, created, recent)
            = (SELECT owner, agent, status, spawned, created, recent FROM session WHERE sid = new.sid)
        WHERE tag = new.tag AND sid = new.sid;
END;
CREATE TRIGGER tag_follows AFTER UPDATE OF owner, agent, status, spawned, created, recent ON session
    WHEN (old.owner, old.agent, old.status, old.spawned, old.created, old.recent)
        IS NOT (new.owner, new.agent, new.status, new.spawned, new.created, new.recent)
BEGIN
    UPDATE tag
        SET owner = new.owner, agent = new.agent, status = new.status, spawned = new.spawned, created = new.created,
            recent = new.recent
        WHERE sid = new.sid;
END;
CREATE TABLE blob (
    hash TEXT NOT NULL PRIMARY KEY,
    size INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE TABLE attached (
    hash TEXT NOT NULL,
    log  INTEGER NOT NULL,
    pos  INTEGER NOT NULL,
    PRIMARY KEY (log, pos, hash)
) STRICT, WITHOUT ROWID;
CREATE INDEX attached_by_hash ON attached (hash, log);
CREATE TABLE sketch (
    sid   INTEGER NOT NULL,
    start INTEGER NOT NULL,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    PRIMARY KEY (sid, start)
) STRICT, WITHOUT ROWID;
CREATE INDEX session_waiting ON session (status, priority DESC, since) WHERE inbox_end > taken;
CREATE INDEX session_waiting_by_owner ON session (owner) WHERE inbox_end > taken;
CREATE INDEX session_in_turn ON session (status, priority, owner, since) WHERE inbox_end > taken;
CREATE TABLE timer (
    timer INTEGER PRIMARY KEY AUTOINCREMENT,
    sid   INTEGER NOT NULL,
    name  TEXT NOT NULL,
    due   REAL NOT NULL,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    UNIQUE (sid, name)
) STRICT;
CREATE INDEX timer_by_due ON timer (due);
CREATE TABLE rate (
    name  TEXT PRIMARY KEY,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE token (
    digest TEXT PRIMARY KEY,
    id     TEXT NOT NULL UNIQUE,
    owner  TEXT,
    crc    INTEGER NOT NULL,
    body   BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX token_by_owner ON token (owner) WHERE owner IS NOT NULL;
INSERT INTO meta VALUES ('uid', lower(hex(randomblob(16)))), ('erasures', 0);
