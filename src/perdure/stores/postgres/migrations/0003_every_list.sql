-- Every filter of a list has an index that gives the order too, whatever else is asked for. A list that names no
-- status asks for one after the other, but for the hidden one, so that hidden sessions cost nothing.
DROP INDEX session_by_created, session_by_agent, session_by_owner, session_by_parent, session_by_status,
    session_by_owner_and_status;
CREATE INDEX session_by_created ON session (created, sid) WHERE status <> 'deleted';
CREATE INDEX session_by_status ON session (status, created, sid);
CREATE INDEX session_by_agent ON session (agent, status, created, sid);
CREATE INDEX session_by_owner ON session (owner, status, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX session_by_owner_and_agent ON session (owner, agent, status, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX session_by_parent ON session (parent, status, created, sid) WHERE parent IS NOT NULL;

-- A tag says again what lists ask of its session, for indexes of its own. Triggers fill it in.
ALTER TABLE tag ADD COLUMN owner text COLLATE "C", ADD COLUMN agent text COLLATE "C",
    ADD COLUMN status text COLLATE "C", ADD COLUMN created double precision;
UPDATE tag SET owner = session.owner, agent = session.agent, status = session.status, created = session.created
    FROM session WHERE session.sid = tag.sid;
CREATE INDEX tag_by_created ON tag (tag, status, created, sid);
CREATE INDEX tag_by_agent ON tag (agent, tag, status, created, sid);
CREATE INDEX tag_by_owner ON tag (owner, tag, status, created, sid) WHERE owner IS NOT NULL;
CREATE INDEX tag_by_owner_and_agent ON tag (owner, agent, tag, status, created, sid) WHERE owner IS NOT NULL;

CREATE FUNCTION tag_new() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE tag SET owner = session.owner, agent = session.agent, status = session.status, created = session.created
        FROM session WHERE session.sid = NEW.sid AND tag.tag = NEW.tag AND tag.sid = NEW.sid;
    RETURN NULL;
END $$;
-- After the statement: a session and its tags are written by one.
CREATE TRIGGER tag_new AFTER INSERT ON tag FOR EACH ROW EXECUTE FUNCTION tag_new();

CREATE FUNCTION tag_follows() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE tag SET owner = NEW.owner, agent = NEW.agent, status = NEW.status, created = NEW.created
        WHERE sid = NEW.sid;
    RETURN NULL;
END $$;
CREATE TRIGGER tag_follows AFTER UPDATE OF owner, agent, status, created ON session FOR EACH ROW
    WHEN ((OLD.owner, OLD.agent, OLD.status, OLD.created)
        IS DISTINCT FROM (NEW.owner, NEW.agent, NEW.status, NEW.created))
    EXECUTE FUNCTION tag_follows();

-- Sessions that were updated before they were created, since clocks disagree; some of them no longer are. An index
-- instead would be on a column that each save changes, and make every save a dear one.
CREATE TABLE backdated (sid bigint PRIMARY KEY);
INSERT INTO backdated SELECT sid FROM session WHERE updated < created;
CREATE FUNCTION backdate() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO backdated VALUES (NEW.sid) ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER backdated AFTER INSERT OR UPDATE OF updated ON session FOR EACH ROW
    WHEN (NEW.updated < NEW.created) EXECUTE FUNCTION backdate();
