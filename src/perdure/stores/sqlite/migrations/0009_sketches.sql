-- The text of an answer that is being written, piece by piece. It goes when the answer is whole.
CREATE TABLE sketch (
    sid   INTEGER NOT NULL,
    start INTEGER NOT NULL,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    PRIMARY KEY (sid, start)
) STRICT, WITHOUT ROWID;
