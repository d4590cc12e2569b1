-- Statements of the Spark data source: its runs, and the rows that its tasks stage.

-- name: spark_register
-- Make a run known; touches and returns nothing where it is. Waits for another task of the run that is just doing it.
INSERT INTO {schema}.spark_run (group_id, run_id, held) VALUES (%(group_id)s, %(run_id)s, '[]')
ON CONFLICT DO NOTHING
RETURNING run_id

-- name: spark_forget
-- Of all runs of a group remember the last thousand; what earlier ones have staged nobody will publish.
WITH staged AS (
    DELETE FROM {schema}.spark_stage WHERE group_id = %(group_id)s AND run_id <> %(run_id)s)
DELETE FROM {schema}.spark_run r
USING (SELECT run_id FROM {schema}.spark_run WHERE group_id = %(group_id)s ORDER BY registered_at DESC OFFSET 1000) AS old
WHERE r.group_id = %(group_id)s AND r.run_id = old.run_id

-- name: spark_held
-- Read what a run has acquired, and how far it has written that.
SELECT held FROM {schema}.spark_run WHERE group_id = %(group_id)s AND run_id = %(run_id)s

-- name: spark_ended_before
-- Read how far the query's run before this one has written, where this batch is the next one behind that.
SELECT e.row ->> 0, (e.row ->> 1)::int, (e.row ->> 5)::bigint
FROM {schema}.spark_query q
JOIN {schema}.spark_run r ON r.group_id = q.group_id AND r.run_id::text = q.run_id
CROSS JOIN jsonb_array_elements(r.held) AS e(row)
WHERE q.group_id = %(group_id)s AND q.query_id = %(query_id)s AND q.batch_id = %(batch_id)s - 1
  AND e.row ->> 5 IS NOT NULL

-- name: spark_hold
-- Write that down, in the transaction that makes it so.
UPDATE {schema}.spark_run SET held = %(held)s WHERE group_id = %(group_id)s AND run_id = %(run_id)s

-- name: spark_put
-- Stage some rows of one attempt.
INSERT INTO {schema}.spark_stage (attempt, number, group_id, run_id, batch_id, chunk)
VALUES (%(attempt)s, %(number)s, %(group_id)s, %(run_id)s, %(batch_id)s, %(chunk)s)

-- name: spark_get
-- Read them again.
SELECT chunk FROM {schema}.spark_stage WHERE attempt = %(attempt)s AND number = %(number)s

-- name: spark_unstage
-- Delete what a run has staged for this batch and those before it, whether it was published or its attempt had lost.
DELETE FROM {schema}.spark_stage
WHERE group_id = %(group_id)s AND run_id = %(run_id)s AND batch_id <= %(batch_id)s

-- name: spark_reap
-- Delete what nobody came back for. An attempt that still stages is younger than its oldest rows.
DELETE FROM {schema}.spark_stage s
WHERE NOT EXISTS (
    SELECT FROM {schema}.spark_stage young
    WHERE young.attempt = s.attempt AND young.staged_at > clock_timestamp() - %(seconds)s * interval '1 second')
