-- Sessions with items in their inboxes that nobody has taken are found by themselves. A save changes none of these
-- columns, and touches no index that its row is not in. Since when older items wait is not known.
ALTER TABLE session ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE session ADD COLUMN since REAL;
UPDATE session SET since = updated WHERE inbox_end > taken AND typeof(updated) = 'real';
CREATE INDEX session_waiting ON session (status, priority DESC, since) WHERE inbox_end > taken;
CREATE INDEX session_waiting_by_owner ON session (owner) WHERE inbox_end > taken;
CREATE INDEX session_in_turn ON session (status, priority, owner, since) WHERE inbox_end > taken;

-- What is to go into a session's inbox at a time. A number is never used twice: whoever rings one compares it.
CREATE TABLE timer (
    timer INTEGER PRIMARY KEY AUTOINCREMENT,
    sid   INTEGER NOT NULL,
    name  TEXT NOT NULL,
    due   REAL NOT NULL,
    crc   INTEGER NOT NULL,
    body  BLOB NOT NULL,
    UNIQUE (sid, name)
) STRICT;

CREATE INDEX timer_by_due ON timer (due);

-- Rates that processes share: the time, in microseconds since 1970, up to which their places are taken.
CREATE TABLE rate (
    name  TEXT PRIMARY KEY,
    until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
