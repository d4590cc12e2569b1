-- Statements of the Spark sink's driver.

-- name: spark_report
-- Write down what a query did last.
INSERT INTO {schema}.spark_query AS q (group_id, query_id, run_id, batch_id, name, row_count, dropped, fingerprint)
VALUES (%(group_id)s, %(query_id)s, %(run_id)s, %(batch_id)s, %(name)s, %(row_count)s, %(dropped)s, %(fingerprint)s)
ON CONFLICT (group_id, query_id) DO UPDATE
SET run_id = excluded.run_id, batch_id = excluded.batch_id, name = excluded.name, row_count = excluded.row_count,
    dropped = excluded.dropped, fingerprint = excluded.fingerprint, written_at = excluded.written_at

-- name: spark_claim
-- Write down which table a group writes, and return which it is: another one only where the caller names the one before,
-- or while nothing was written. Return as well whether this query, and whether another one, has written for the group,
-- and what the group counts, where its rows tell: the data source counts batches also with offsets, and only where
-- nothing else is counted there are digests. Of batch jobs, which stand beside streams, they have the word itself instead.
INSERT INTO {schema}.spark_target AS t (group_id, table_name) VALUES (%(group_id)s, %(table)s)
ON CONFLICT (group_id) DO UPDATE
SET table_name = CASE
    WHEN t.table_name = %(previous)s
      OR NOT EXISTS (SELECT FROM {schema}.ledger l WHERE l.group_id = t.group_id AND l.advanced_at IS NOT NULL)
     AND NOT EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id)
    THEN excluded.table_name ELSE t.table_name END
RETURNING table_name,
    EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id AND q.query_id = %(query_id)s),
    EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id AND q.query_id <> %(query_id)s),
    CASE
        WHEN %(is_job)s THEN (
            SELECT min(q.fingerprint) FROM {schema}.spark_query q
            WHERE q.group_id = t.group_id AND q.fingerprint IN ('offsets', 'batch-id'))
        WHEN EXISTS (
            SELECT FROM {schema}.ledger l
            WHERE l.group_id = t.group_id AND l.topic NOT LIKE 'query:%%'
              AND l.owner_kind = 'spark' AND l.advanced_at IS NOT NULL)
         AND NOT EXISTS (
            SELECT FROM {schema}.ledger l
            WHERE l.group_id = t.group_id AND l.topic = 'query:' || %(query_id)s::text AND l.next_offset > 0) THEN 'offsets'
        WHEN EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id
                       AND q.fingerprint NOT IN ('offsets', 'batch-id'))
         AND NOT EXISTS (SELECT FROM {schema}.ledger l WHERE l.group_id = t.group_id AND l.topic NOT LIKE 'query:%%')
        THEN 'batch-id' END

-- name: spark_others
-- Find the other queries of a group whose batch ids are owned, or have been counted.
SELECT topic FROM {schema}.ledger
WHERE group_id = %(group_id)s AND topic LIKE 'query:%%' AND topic <> %(topic)s
  AND (owner_token IS NOT NULL OR next_offset > 0)
ORDER BY topic

-- name: spark_fingerprint
-- Read the digest of the batch that a query has counted last, unless an operator has moved it since.
SELECT fingerprint FROM {schema}.spark_query
WHERE group_id = %(group_id)s AND query_id = %(query_id)s AND batch_id = %(batch_id)s

-- name: spark_empty
-- Empty a table that is replaced as a whole by each batch; readers see the old rows until COMMIT. To a rule or a trigger
-- that keeps rows DELETE is no error, so tell whether any are left.
DELETE FROM {table};
SELECT EXISTS (SELECT FROM {table})
