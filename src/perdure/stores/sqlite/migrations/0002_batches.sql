-- What one append puts on record is one row, packed. `run` is the run of all its entries that do not name another.
CREATE TABLE batch (
    sid   INTEGER NOT NULL,
    last  INTEGER NOT NULL,
    count INTEGER NOT NULL,
    run   INTEGER,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    UNIQUE (sid, last)
) STRICT;

-- A flipped bit can make anything of a column: such a row comes over with a wrong checksum, or is found missing, and
-- the rest of the file is read as before.
INSERT OR IGNORE INTO batch (sid, last, count, run, crc, body)
    SELECT sid, seq, 1, run, batch_crc(sid, seq, loop, kind, crc, body), batch_body(kind, body)
    FROM (
        SELECT event.sid, event.seq, event.crc, CAST(run.loop AS BLOB) AS loop,
            iif(typeof(event.run) = 'integer', event.run, NULL) AS run,
            coalesce(CAST(event.kind AS BLOB), x'') AS kind, coalesce(CAST(event.body AS BLOB), x'') AS body
        FROM event LEFT JOIN run ON run.run = event.run
        WHERE typeof(event.sid) = 'integer' AND typeof(event.seq) = 'integer'
        ORDER BY event.rowid
    );

DROP TABLE event;
