-- Lists by time of update, and lists without sub-agents. `spawned` is 1 for the session of a sub-agent: it is filled in
-- from the heads, before this script if there are many. `recent` is the minute of `updated`: what most saves leave as it
-- is, so that they stay cheap, as an index on `updated` would not let them.
ALTER TABLE session ADD COLUMN IF NOT EXISTS spawned smallint NOT NULL DEFAULT 0;
DROP INDEX session_by_created, session_by_status, session_by_agent, session_by_owner, session_by_owner_and_agent,
    session_by_parent;
ALTER TABLE session ADD COLUMN recent bigint NOT NULL GENERATED ALWAYS AS (floor(updated / 60)::bigint) STORED;
CREATE INDEX session_by_created ON session (created, sid) WHERE status <> 'deleted';
CREATE INDEX session_by_parent ON session (parent, status, created, sid) WHERE parent IS NOT NULL;
CREATE INDEX session_by_shelf ON session (status, spawned, created, sid);
CREATE INDEX session_by_shelf_recent ON session (status, spawned, recent);
CREATE INDEX session_by_agent_shelf ON session (agent, status, spawned, created, sid);
CREATE INDEX session_by_agent_shelf_recent ON session (agent, status, spawned, recent);
-- With those that have no owner, which a list can ask for.
CREATE INDEX session_by_owner_shelf ON session (owner, status, spawned, created, sid);
CREATE INDEX session_by_owner_shelf_recent ON session (owner, status, spawned, recent);
CREATE INDEX session_by_owner_agent_shelf
    ON session (owner, agent, status, spawned, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX session_by_owner_agent_shelf_recent
    ON session (owner, agent, status, spawned, recent) WHERE owner IS NOT NULL;

DROP INDEX tag_by_created, tag_by_agent, tag_by_owner, tag_by_owner_and_agent;
ALTER TABLE tag ADD COLUMN spawned smallint, ADD COLUMN recent bigint;
UPDATE tag SET spawned = session.spawned, recent = session.recent FROM session WHERE session.sid = tag.sid;
CREATE INDEX tag_by_shelf ON tag (tag, status, spawned, created, sid);
CREATE INDEX tag_by_shelf_recent ON tag (tag, status, spawned, recent);
CREATE INDEX tag_by_agent_shelf ON tag (agent, tag, status, spawned, created, sid);
CREATE INDEX tag_by_agent_shelf_recent ON tag (agent, tag, status, spawned, recent);
CREATE INDEX tag_by_owner_shelf ON tag (owner, tag, status, spawned, created, sid);
CREATE INDEX tag_by_owner_shelf_recent ON tag (owner, tag, status, spawned, recent);
CREATE INDEX tag_by_owner_agent_shelf
    ON tag (owner, agent, tag, status, spawned, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX tag_by_owner_agent_shelf_recent
    ON tag (owner, agent, tag, status, spawned, recent) WHERE owner IS NOT NULL;

CREATE OR REPLACE FUNCTION tag_new() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE tag SET owner = session.owner, agent = session.agent, status = session.status, spawned = session.spawned,
            created = session.created, recent = session.recent
        FROM session WHERE session.sid = NEW.sid AND tag.tag = NEW.tag AND tag.sid = NEW.sid;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION tag_follows() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE tag SET owner = NEW.owner, agent = NEW.agent, status = NEW.status, spawned = NEW.spawned,
            created = NEW.created, recent = NEW.recent
        WHERE sid = NEW.sid;
    RETURN NULL;
END $$;
DROP TRIGGER tag_follows ON session;
CREATE TRIGGER tag_follows AFTER UPDATE OF owner, agent, status, spawned, created, updated ON session FOR EACH ROW
    WHEN ((OLD.recent, OLD.owner, OLD.agent, OLD.status, OLD.spawned, OLD.created)
        IS DISTINCT FROM (NEW.recent, NEW.owner, NEW.agent, NEW.status, NEW.spawned, NEW.created))
    EXECUTE FUNCTION tag_follows();
