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

INSERT INTO batch (sid, last, count, run, crc, body)
    SELECT event.sid, event.seq, 1, event.run,
        batch_crc(event.sid, event.seq, run.loop, event.kind, event.crc, event.body),
        batch_body(event.kind, event.body)
    FROM event LEFT JOIN run ON run.run = event.run ORDER BY event.rowid;

DROP TABLE event;
