-- A batch of changes, one for each session, in one statement. Each takes effect whole or not at all, independent of the
-- others. Rows come as JSON. The bytes that they name come in one piece, `blob`, and each has its place in it. The
-- parts between `-- if` and `-- end` are left out unless a change needs them: every table in the statement costs time.
WITH op AS MATERIALIZED (
    SELECT given.*, coalesce(given.at, extract(epoch FROM clock_timestamp())::double precision) AS time
    FROM jsonb_to_recordset(:ops::jsonb) AS given (
        n int, kind text, id text, op text, at double precision,
        sid bigint, version bigint, created double precision, msg_end bigint, evt_end bigint,
        epoch bigint, take_over boolean, gone bigint, erasures bigint,
        log bigint, status text, agent text, owner text, parent text, spawned smallint,
        updated double precision,
        messages bigint, entries bigint, taken bigint, holder text, lease double precision,
        said_in bigint, said_from bigint, said_sums bigint[], said_starts int[], said_sizes int[],
        head_crc bigint, head_from int, head_size int, hashes text[], wanted bigint[],
        batch_crc bigint, batch_from int, batch_size int, batch_run text,
        key_name text, key_digest text, tags text[], line bigint, drops boolean
    )
),
store AS MATERIALIZED (SELECT erasures, followed FROM meta),
-- Locked in the order of the batch, which is that of the sessions' numbers, so that no two batches wait for each other.
-- Rows are read as they are once they are locked. A session that another client has locked is passed over, since a
-- batch must not wait for one of its changes. That change is then sent alone, and waits.
found AS MATERIALIZED (
    SELECT op.*, now_sid, now_log, now_version, now_created, now_msg_end, now_evt_end, now_inbox_end, now_taken,
        now_epoch, now_claim, now_expires > op.time AS stands, now_op
    FROM op CROSS JOIN LATERAL (
        SELECT sid AS now_sid, log AS now_log, version AS now_version, created AS now_created, msg_end AS now_msg_end,
            evt_end AS now_evt_end, inbox_end AS now_inbox_end, taken AS now_taken, epoch AS now_epoch,
            claim AS now_claim, expires AS now_expires, op AS now_op
        FROM session WHERE session.id = op.id FOR UPDATE
-- if together
        SKIP LOCKED
-- end
    ) AS session
),
ready AS MATERIALIZED (
    SELECT found.* FROM found CROSS JOIN store
    WHERE kind <> 'create' AND now_op <> op AND now_sid = sid AND now_msg_end = msg_end AND now_evt_end = evt_end
        AND (version IS NULL OR now_version = version)
        AND (created IS NULL OR now_created = created)
        AND (found.erasures IS NULL OR store.erasures = found.erasures)
        AND CASE
            WHEN epoch IS NULL THEN now_claim IS NULL OR take_over AND (NOT stands OR now_epoch = gone)
            ELSE now_claim IS NOT NULL AND now_epoch = epoch
        END
),
-- if create
made AS (
    -- A session's number is never used twice, so that a claim on an erased session is not one on its successor.
    INSERT INTO session
        (sid, id, log, version, status, agent, owner, parent, spawned, created, updated, msg_end, epoch, op, line)
    SELECT sid, id, log, 1, status, agent, owner, parent, spawned, created, updated, messages, sid << 20, op, line
    FROM op WHERE kind = 'create'
    ON CONFLICT (id) DO NOTHING
    RETURNING sid
),
-- end
changed AS (
    UPDATE session SET
        version = session.version + CASE ready.kind WHEN 'save' THEN 1 ELSE 0 END,
        status = coalesce(ready.status, session.status),
        agent = coalesce(ready.agent, session.agent),
        updated = coalesce(ready.updated, session.updated),
        msg_end = session.msg_end + ready.messages,
        evt_end = session.evt_end + ready.entries,
        taken = greatest(session.taken, ready.taken),
        epoch = session.epoch + CASE ready.kind WHEN 'claim' THEN 1 ELSE 0 END,
        claim = CASE ready.kind WHEN 'save' THEN NULL WHEN 'claim' THEN ready.holder ELSE session.claim END,
        expires = CASE ready.kind WHEN 'save' THEN NULL ELSE ready.time + ready.lease END,
        op = ready.op
    FROM ready WHERE session.sid = ready.sid
),
done AS MATERIALIZED (
    SELECT * FROM ready
-- if create
    UNION ALL
    SELECT op.*, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM op
    WHERE op.kind = 'create' AND op.sid = ANY (ARRAY(SELECT sid FROM made))
-- end
)
-- if create
, logs AS (
    INSERT INTO log (log, sid) SELECT log, sid FROM done WHERE kind = 'create'
)
-- end
-- if claim
, claims AS (
    INSERT INTO claimed (sid) SELECT sid FROM done WHERE kind = 'claim' ON CONFLICT DO NOTHING
)
-- end
-- if give_back
, freed AS (
    DELETE FROM claimed USING done WHERE claimed.sid = done.sid AND done.kind = 'save' AND done.now_claim IS NOT NULL
)
-- end
-- if messages
, said AS (
    INSERT INTO msg (log, pos, crc, body)
    SELECT done.said_in, done.said_from + row.place - 1, row.crc, substring(:blob::bytea FROM row.start FOR row.size)
    FROM done CROSS JOIN LATERAL unnest(done.said_sums, done.said_starts, done.said_sizes)
        WITH ORDINALITY AS row (crc, start, size, place)
),
unsearched AS (
    INSERT INTO unindexed (log, start, stop)
    SELECT said_in, said_from, said_from + cardinality(said_sums) FROM done WHERE said_sums IS NOT NULL
)
-- end
-- if head
, heads AS (
    INSERT INTO head (sid, version, crc, op, hashes, wanted, body)
    SELECT sid, coalesce(version, 0) + 1, head_crc, op, hashes, wanted,
        substring(:blob::bytea FROM head_from FOR head_size)
    FROM done WHERE head_crc IS NOT NULL
)
-- end
-- if record
, runs AS (
    INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos)
    SELECT row.sid, row.loop, row.first_seq, row.last_seq, row.log, row.first_pos, row.end_pos
    FROM jsonb_to_recordset(:runs::jsonb)
        AS row (
            n int, sid bigint, loop text, first_seq bigint, last_seq bigint,
            log bigint, first_pos bigint, end_pos bigint
        )
    WHERE row.n = ANY (ARRAY(SELECT n FROM done))
    ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq, end_pos = excluded.end_pos
    RETURNING run, sid, loop
),
recorded AS (
    INSERT INTO batch (sid, last, count, run, crc, body)
    SELECT done.sid, done.evt_end + done.entries, done.entries, runs.run, done.batch_crc,
        substring(:blob::bytea FROM done.batch_from FOR done.batch_size)
    FROM done LEFT JOIN runs ON runs.sid = done.sid AND runs.loop = done.batch_run
    WHERE done.batch_crc IS NOT NULL
)
-- end
-- if sketches
, unsketched AS (DELETE FROM sketch USING done WHERE sketch.sid = done.sid AND done.drops)
-- end
-- if key
, keys AS (
    INSERT INTO key (sid, name, digest, version)
    SELECT sid, key_name, key_digest, coalesce(version, 0) + 1 FROM done WHERE key_name IS NOT NULL
    ON CONFLICT (sid, name) DO UPDATE SET digest = excluded.digest, version = excluded.version
)
-- end
-- if tags
, untagged AS (
    DELETE FROM tag USING done WHERE tag.sid = done.sid AND done.tags IS NOT NULL AND tag.tag <> ALL (done.tags)
),
tagged AS (
    INSERT INTO tag (tag, sid) SELECT each, sid FROM done CROSS JOIN unnest(done.tags) AS each ON CONFLICT DO NOTHING
)
-- end
-- if values
, given_values AS MATERIALIZED (
    SELECT row.* FROM jsonb_to_recordset(:values::jsonb) AS row (n int, sid bigint, hash text, start int, size int)
    WHERE row.n = ANY (ARRAY(SELECT n FROM done))
),
-- An erasure takes this lock alone. So no value that is about to be used is erased, or found and then gone.
gate AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(:gate::int, hashtext(current_schema()))
    WHERE EXISTS (SELECT 1 FROM given_values)
),
kept_values AS (
    INSERT INTO value (hash, body)
    SELECT DISTINCT ON (hash) hash, substring(:blob::bytea FROM start FOR size)
    FROM given_values CROSS JOIN gate ORDER BY hash
    ON CONFLICT DO NOTHING
),
kept_uses AS (
    INSERT INTO uses (hash, sid)
    SELECT hash, sid FROM given_values CROSS JOIN gate
    ON CONFLICT DO NOTHING
)
-- end
-- if files
, given_files AS MATERIALIZED (
    SELECT row.* FROM jsonb_to_recordset(:files::jsonb)
        AS row (n int, hash text, size int, start int, log bigint, pos bigint)
    WHERE row.n = ANY (ARRAY(SELECT n FROM done))
),
-- The same lock as for values, for the same reason.
file_gate AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared(:gate::int, hashtext(current_schema()))
    WHERE EXISTS (SELECT 1 FROM given_files)
),
kept_files AS (
    INSERT INTO blob (hash, size, body)
    SELECT DISTINCT ON (hash) hash, size, substring(:blob::bytea FROM start FOR size)
    FROM given_files CROSS JOIN file_gate WHERE start IS NOT NULL ORDER BY hash
    ON CONFLICT DO NOTHING
),
attached_files AS (
    INSERT INTO attached (hash, log, pos)
    SELECT DISTINCT hash, log, pos FROM given_files CROSS JOIN file_gate
    ON CONFLICT DO NOTHING
)
-- end
-- if refs
, kept_refs AS (
    INSERT INTO ref (log, child, start, stop, since)
    SELECT row.log, row.sid, row.start, row.stop, row.since
    FROM jsonb_to_recordset(:refs::jsonb)
        AS row (n int, sid bigint, log bigint, start bigint, stop bigint, since bigint)
    WHERE row.n = ANY (ARRAY(SELECT n FROM done))
)
-- end
SELECT answer.n, answer.n = ANY (ARRAY(SELECT n FROM done)) AS done, now_sid, now_log, now_version, now_created,
    now_msg_end, now_evt_end, now_inbox_end, now_taken, now_epoch, now_claim, stands, now_op, store.erasures,
    now_sid IS NULL AND EXISTS (SELECT 1 FROM session WHERE session.id = answer.id) AS passed_over
-- if record
    , CASE WHEN answer.entries > 0 AND answer.n = ANY (ARRAY(SELECT n FROM done)) AND store.followed > answer.time
        THEN pg_notify(:channel::text, answer.id) END AS told
-- end
FROM (
    SELECT * FROM found
    UNION ALL
    SELECT op.*, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM op
    WHERE op.n <> ALL (ARRAY(SELECT n FROM found))
) AS answer CROSS JOIN store
