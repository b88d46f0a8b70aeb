-- Lists are in the order in which sessions were created, wherever that was: one that was brought in has a new number,
-- and its old time. An index ends with the number by itself.
CREATE INDEX session_by_created ON session (created);
DROP INDEX session_by_agent;
DROP INDEX session_by_owner;
DROP INDEX session_by_parent;
DROP INDEX session_by_status;
CREATE INDEX session_by_agent ON session (agent, created);
CREATE INDEX session_by_owner ON session (owner, created) WHERE owner IS NOT NULL;
CREATE INDEX session_by_parent ON session (parent, created) WHERE parent IS NOT NULL;
-- Most sessions are active, and the newest of those are found by when they were created.
CREATE INDEX session_by_status ON session (status, created) WHERE status <> 'active';
