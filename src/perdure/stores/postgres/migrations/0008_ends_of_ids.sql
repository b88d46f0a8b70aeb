-- Sessions are found by the end of their id: ids that perdure makes begin alike. No save changes an id.
CREATE INDEX session_by_end ON session (right(id, 4));
