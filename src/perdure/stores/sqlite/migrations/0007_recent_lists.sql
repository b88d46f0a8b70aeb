-- in steps
-- Lists by time of update, and lists without sub-agents. `spawned` is 1 for the session of a sub-agent. `recent` is the
-- minute of `updated`: a save sets it only when it changes, since an index on `updated` would cost every save its pages.
ALTER TABLE session ADD COLUMN spawned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE session ADD COLUMN recent INTEGER;
ALTER TABLE tag ADD COLUMN spawned INTEGER;
ALTER TABLE tag ADD COLUMN recent INTEGER;

UPDATE session
    SET recent = minute(updated),
        spawned = was_spawned((SELECT body FROM head WHERE head.sid = session.sid AND head.version = session.version))
    WHERE sid > :after AND sid <= :upto AND typeof(updated) = 'real' AND recent IS NOT minute(updated);

UPDATE tag
    SET (spawned, recent) = (SELECT spawned, recent FROM session WHERE session.sid = tag.sid)
    WHERE sid > :after AND sid <= :upto AND created IS NOT NULL
        AND recent IS NOT (SELECT recent FROM session WHERE session.sid = tag.sid);

CREATE INDEX IF NOT EXISTS session_by_shelf ON session (status, spawned, created);
CREATE INDEX IF NOT EXISTS session_by_shelf_recent ON session (status, spawned, recent);
CREATE INDEX IF NOT EXISTS session_by_agent_shelf ON session (agent, status, spawned, created);
CREATE INDEX IF NOT EXISTS session_by_agent_shelf_recent ON session (agent, status, spawned, recent);
-- With those that have no owner, which a list can ask for.
CREATE INDEX IF NOT EXISTS session_by_owner_shelf ON session (owner, status, spawned, created);
CREATE INDEX IF NOT EXISTS session_by_owner_shelf_recent ON session (owner, status, spawned, recent);
CREATE INDEX IF NOT EXISTS session_by_owner_agent_shelf
    ON session (owner, agent, status, spawned, created) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS session_by_owner_agent_shelf_recent
    ON session (owner, agent, status, spawned, recent) WHERE owner IS NOT NULL;

CREATE INDEX IF NOT EXISTS tag_by_shelf ON tag (tag, status, spawned, created) WHERE created IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_shelf_recent ON tag (tag, status, spawned, recent) WHERE created IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_agent_shelf ON tag (agent, tag, status, spawned, created) WHERE agent IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_agent_shelf_recent ON tag (agent, tag, status, spawned, recent) WHERE agent IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_owner_shelf ON tag (owner, tag, status, spawned, created) WHERE created IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_owner_shelf_recent ON tag (owner, tag, status, spawned, recent) WHERE created IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_owner_agent_shelf
    ON tag (owner, agent, tag, status, spawned, created) WHERE owner IS NOT NULL;
CREATE INDEX IF NOT EXISTS tag_by_owner_agent_shelf_recent
    ON tag (owner, agent, tag, status, spawned, recent) WHERE owner IS NOT NULL;

-- at once
DROP INDEX session_by_status;
DROP INDEX session_by_agent;
DROP INDEX session_by_owner;
DROP INDEX session_by_owner_and_agent;
DROP INDEX tag_by_created;
DROP INDEX tag_by_agent;
DROP INDEX tag_by_owner;
DROP INDEX tag_by_owner_and_agent;
DROP TRIGGER tag_new;
DROP TRIGGER tag_follows;

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
