-- Every filter of a list has an index that gives the order too, whatever else is asked for. A list that names no
-- status asks for one after the other, but for the hidden one, so that hidden sessions cost nothing.
DROP INDEX session_by_created;
DROP INDEX session_by_agent;
DROP INDEX session_by_owner;
DROP INDEX session_by_parent;
DROP INDEX session_by_status;
CREATE INDEX session_by_created ON session (created) WHERE status <> 'deleted';
CREATE INDEX session_by_status ON session (status, created);
CREATE INDEX session_by_agent ON session (agent, status, created);
CREATE INDEX session_by_owner ON session (owner, status, created) WHERE owner IS NOT NULL;
CREATE INDEX session_by_owner_and_agent ON session (owner, agent, status, created) WHERE owner IS NOT NULL;
CREATE INDEX session_by_parent ON session (parent, status, created) WHERE parent IS NOT NULL;
-- Empty, unless clocks disagree: all other sessions were created before they were updated.
CREATE INDEX session_backdated ON session (created) WHERE updated < created;

-- A tag says again what lists ask of its session, for indexes of its own. Triggers fill it in.
ALTER TABLE tag ADD COLUMN owner TEXT;
ALTER TABLE tag ADD COLUMN agent TEXT;
ALTER TABLE tag ADD COLUMN status TEXT;
ALTER TABLE tag ADD COLUMN created REAL;

-- What a flipped bit has made another type of stays out: a check finds it missing.
UPDATE tag SET (owner, agent, status, created) = (SELECT owner, agent, status, created FROM session WHERE sid = tag.sid)
    WHERE EXISTS (
        SELECT 1 FROM session WHERE sid = tag.sid AND typeof(owner) IN ('text', 'null') AND typeof(agent) = 'text'
            AND typeof(status) = 'text' AND typeof(created) = 'real'
    );

CREATE INDEX tag_by_created ON tag (tag, status, created) WHERE created IS NOT NULL;
CREATE INDEX tag_by_agent ON tag (agent, tag, status, created) WHERE agent IS NOT NULL;
CREATE INDEX tag_by_owner ON tag (owner, tag, status, created) WHERE owner IS NOT NULL;
CREATE INDEX tag_by_owner_and_agent ON tag (owner, agent, tag, status, created) WHERE owner IS NOT NULL;

CREATE TRIGGER tag_new AFTER INSERT ON tag BEGIN
    UPDATE tag
        SET (owner, agent, status, created) = (SELECT owner, agent, status, created FROM session WHERE sid = new.sid)
        WHERE tag = new.tag AND sid = new.sid;
END;

CREATE TRIGGER tag_follows AFTER UPDATE OF owner, agent, status, created ON session
    WHEN (old.owner, old.agent, old.status, old.created) IS NOT (new.owner, new.agent, new.status, new.created)
BEGIN
    UPDATE tag SET owner = new.owner, agent = new.agent, status = new.status, created = new.created
        WHERE sid = new.sid;
END;
