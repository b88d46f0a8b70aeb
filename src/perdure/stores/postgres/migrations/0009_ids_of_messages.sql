-- Messages are found by their ids: by 64 bits of a hash, which those who search fill in. No save writes it.
ALTER TABLE word ADD COLUMN named bigint;
CREATE INDEX word_by_name ON word (named);
-- What is indexed has none yet, and is indexed once more by the next who searches.
INSERT INTO unindexed (log, start, stop)
    SELECT log, min(pos), max(pos) + 1 FROM word GROUP BY log, pos / 100 ORDER BY max(number);
