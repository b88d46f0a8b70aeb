-- Messages are found by their ids: by 64 bits of a hash, which those who search fill in. No save writes it. What was
-- indexed before has none, and is indexed once more when somebody asks for an id.
ALTER TABLE word ADD COLUMN named bigint;
CREATE INDEX word_by_name ON word (named);
