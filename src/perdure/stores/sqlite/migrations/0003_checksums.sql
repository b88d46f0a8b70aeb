-- Idempotency keys and logs get checksums, as all other rows have. What a flipped bit has made another type of keeps a
-- checksum that does not match.
ALTER TABLE key ADD COLUMN crc INTEGER NOT NULL DEFAULT -1;
ALTER TABLE log ADD COLUMN crc INTEGER NOT NULL DEFAULT -1;

UPDATE key SET crc = key_crc(sid, CAST(name AS BLOB), CAST(digest AS BLOB), version)
    WHERE typeof(sid) = 'integer' AND typeof(name) = 'text' AND typeof(digest) = 'text' AND typeof(version) = 'integer';
UPDATE log SET crc = log_crc(log, sid, CAST(name AS BLOB))
    WHERE typeof(sid) = 'integer' AND typeof(name) = 'text';

-- A second way to a key, asked when the first finds none: a damaged name must not let a request run again.
CREATE INDEX key_again ON key (sid, substr(name, -4));
