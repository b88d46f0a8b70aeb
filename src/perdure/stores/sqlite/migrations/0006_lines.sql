-- A fork of a fork need not note again all that the one before it shows: it names it as its line.
ALTER TABLE session ADD COLUMN line INTEGER;
CREATE INDEX session_by_line ON session (line) WHERE line IS NOT NULL;
-- The version that came to show it; NULL if the first one does, which is what a line hands down.
ALTER TABLE ref ADD COLUMN since INTEGER;
