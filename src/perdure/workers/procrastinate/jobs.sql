-- What ties procrastinate's jobs to sessions: a job says that somebody should look at a session, and nothing else.
-- Applied as a whole, again whenever it has changed.

-- For each session at most one job waits, and one is done. The lock of a job keeps workers from fetching what they could
-- not run: a second job of a session, or one of an owner that has as many runs as it may. The claim on a session decides.
CREATE OR REPLACE FUNCTION perdure_lock(session_id text, owner text, per_owner integer) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN owner IS NULL OR per_owner IS NULL THEN session_id
        ELSE owner || '/' || abs(hashtext(session_id)::bigint) % per_owner END
$$;

-- procrastinate knows one order: by priority. So the turn of a session is part of it: of equal urgency, each owner has one
-- session in each turn. Priorities beyond 100 count as 100. The highest of all is that of runs that were killed.
CREATE OR REPLACE FUNCTION perdure_rank(priority bigint, turn bigint) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN priority >= 2147483647 THEN 2147483647
        ELSE (greatest(-100, least(100, priority)) * 10000000 - least(turn, 9999999))::integer END
$$;

-- A session's turn is the present one, or the next one of its owner. It begins at 0 again once nothing waits.
CREATE OR REPLACE FUNCTION perdure_take_turn() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    NEW.turn := greatest(0,
        (SELECT turn FROM waiting WHERE status = NEW.status AND priority = NEW.priority ORDER BY turn LIMIT 1),
        (SELECT turn + 1 FROM waiting WHERE coalesce(owner, '') = coalesce(NEW.owner, '') AND priority = NEW.priority
            ORDER BY turn DESC LIMIT 1));
    RETURN NEW;
END $$;

-- Without an urgency, as urgent as what waits there.
CREATE OR REPLACE FUNCTION perdure_wake(session_id text, urgency bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO procrastinate_jobs AS job (queue_name, task_name, priority, lock, queueing_lock, args)
        SELECT dispatcher.queue, 'perdure.advance',
            perdure_rank(coalesce(urgency, session.priority),
                coalesce((SELECT turn FROM waiting WHERE waiting.sid = session.sid), 0)),
            perdure_lock(session.id, session.owner, dispatcher.per_owner), session.id,
            jsonb_build_object('session_id', session.id)
        FROM session CROSS JOIN perdure_dispatcher AS dispatcher WHERE session.id = session_id
        ON CONFLICT (queueing_lock) WHERE status = 'todo'
            DO UPDATE SET priority = excluded.priority WHERE job.priority < excluded.priority;
END $$;

-- Put a job back, unless it is no longer this worker's. If another of its session waits already, that one is enough.
CREATE OR REPLACE FUNCTION perdure_give_back(job bigint, worker bigint, pause double precision, failures integer)
RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE procrastinate_jobs SET status = 'todo', worker_id = NULL, abort_requested = false,
            attempts = coalesce(failures, attempts), scheduled_at = now() + make_interval(secs => pause)
        WHERE id = job AND status = 'doing' AND worker_id IS NOT DISTINCT FROM worker;
    RETURN FOUND;
EXCEPTION WHEN unique_violation THEN
    DELETE FROM procrastinate_jobs WHERE id = job AND status = 'doing' AND worker_id IS NOT DISTINCT FROM worker;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION perdure_wake_waiting() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM perdure_wake(session.id, NEW.priority) FROM session WHERE session.sid = NEW.sid;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION perdure_forget_job() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    DELETE FROM procrastinate_jobs WHERE queueing_lock = OLD.id AND status = 'todo';
    RETURN NULL;
END $$;

CREATE INDEX IF NOT EXISTS perdure_jobs_by_lock ON procrastinate_jobs (lock, priority DESC, id)
    WHERE status IN ('todo', 'doing');

-- In the order in which a post locks them.
LOCK TABLE session, waiting IN SHARE ROW EXCLUSIVE MODE;
ALTER TABLE waiting ADD COLUMN IF NOT EXISTS turn bigint NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS perdure_turns ON waiting (status, priority, turn);
CREATE INDEX IF NOT EXISTS perdure_turns_of_owner ON waiting (coalesce(owner, ''), priority, turn);
DROP TRIGGER IF EXISTS perdure_takes_turn ON waiting;
DROP TRIGGER IF EXISTS perdure_wakes ON waiting;
DROP TRIGGER IF EXISTS perdure_wakes_again ON waiting;
DROP TRIGGER IF EXISTS perdure_forgets ON session;
CREATE TRIGGER perdure_takes_turn BEFORE INSERT ON waiting FOR EACH ROW EXECUTE FUNCTION perdure_take_turn();
CREATE TRIGGER perdure_wakes AFTER INSERT ON waiting FOR EACH ROW
    WHEN (NEW.status = 'active') EXECUTE FUNCTION perdure_wake_waiting();
CREATE TRIGGER perdure_wakes_again AFTER UPDATE OF status, priority ON waiting FOR EACH ROW
    WHEN (NEW.status = 'active' AND (OLD.status, OLD.priority) IS DISTINCT FROM (NEW.status, NEW.priority))
    EXECUTE FUNCTION perdure_wake_waiting();
CREATE TRIGGER perdure_forgets AFTER DELETE ON session FOR EACH ROW EXECUTE FUNCTION perdure_forget_job();

-- What waits since before there was a trigger.
UPDATE waiting SET turn = ranked.turn FROM (
    SELECT sid, row_number() OVER (PARTITION BY coalesce(owner, ''), priority ORDER BY since, sid) - 1 AS turn FROM waiting
) AS ranked WHERE waiting.sid = ranked.sid;
SELECT perdure_wake(session.id, waiting.priority) FROM waiting JOIN session ON session.sid = waiting.sid
    WHERE waiting.status = 'active' ORDER BY waiting.priority DESC, waiting.since, waiting.sid;
