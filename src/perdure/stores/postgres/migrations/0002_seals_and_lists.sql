-- Rows that had no checksum get one, which the database makes when it writes them: a stored one that no longer fits
-- the row is damage. Read them as `KEY_IS_SOUND` and `LOG_IS_SOUND` in postgres/rows.py do.
ALTER TABLE key ADD COLUMN seal bigint NOT NULL GENERATED ALWAYS AS (
    hashtextextended(name, hashtextextended(digest, hashint8extended(version, sid)))
) STORED;
-- A second way to a key: a damaged name must not let a request run again.
ALTER TABLE key ADD COLUMN name_hash bigint NOT NULL GENERATED ALWAYS AS (hashtextextended(name, sid)) STORED;
CREATE INDEX key_again ON key (name_hash);
ALTER TABLE log ADD COLUMN seal bigint NOT NULL GENERATED ALWAYS AS (
    hashtextextended(name, hashint8extended(sid, log))
) STORED;

-- Lists are in the order in which sessions were created, wherever that was: one that was brought in has a new number,
-- and its old time.
CREATE INDEX session_by_created ON session (created, sid);
DROP INDEX session_by_agent, session_by_owner, session_by_parent, session_by_status, session_by_owner_and_status;
CREATE INDEX session_by_agent ON session (agent, created, sid);
CREATE INDEX session_by_owner ON session (owner, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX session_by_parent ON session (parent, created, sid) WHERE parent IS NOT NULL;
CREATE INDEX session_by_status ON session (status, created, sid) WHERE status <> 'active';
CREATE INDEX session_by_owner_and_status ON session (owner, status, created, sid)
    WHERE owner IS NOT NULL AND status <> 'active';
