-- The text of an answer that is being written, piece by piece. It goes when the answer is whole.
CREATE TABLE sketch (
    sid   bigint NOT NULL,
    start bigint NOT NULL,
    crc   bigint NOT NULL,
    body  bytea NOT NULL,
    PRIMARY KEY (sid, start)
);
