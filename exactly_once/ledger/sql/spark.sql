-- Statements of the Spark sink's driver.

-- name: spark_report
-- Tell lookers what a query did last.
INSERT INTO {schema}.spark_query AS q (group_id, query_id, run_id, batch_id, name, row_count, dropped)
VALUES (%(group_id)s, %(query_id)s, %(run_id)s, %(batch_id)s, %(name)s, %(row_count)s, %(dropped)s)
ON CONFLICT (group_id, query_id) DO UPDATE
SET run_id = excluded.run_id, batch_id = excluded.batch_id, name = excluded.name, row_count = excluded.row_count,
    dropped = excluded.dropped, written_at = excluded.written_at

-- name: spark_claim
-- Write down which table a group writes, and return which it is: another one only where the caller names the one before,
-- or while nothing was written. Return as well whether this query, and whether another one, has written for the group.
INSERT INTO {schema}.spark_target AS t (group_id, table_name) VALUES (%(group_id)s, %(table)s)
ON CONFLICT (group_id) DO UPDATE
SET table_name = CASE
    WHEN t.table_name = %(previous)s
      OR NOT EXISTS (SELECT FROM {schema}.ledger l WHERE l.group_id = t.group_id AND l.advanced_at IS NOT NULL)
     AND NOT EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id)
    THEN excluded.table_name ELSE t.table_name END
RETURNING table_name,
    EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id AND q.query_id = %(query_id)s),
    EXISTS (SELECT FROM {schema}.spark_query q WHERE q.group_id = t.group_id AND q.query_id <> %(query_id)s)

-- name: spark_acquire
-- Become the owner of a group's batch ids; another query id is refused by returning nothing,
-- once there is a batch.
INSERT INTO {schema}.spark_batch AS b (group_id, query_id, owner_token, owner_instance, owner_name)
VALUES (%(group_id)s, %(query_id)s, %(token)s, %(owner_instance)s, %(owner_name)s)
ON CONFLICT (group_id) DO UPDATE
SET query_id = excluded.query_id, owner_token = excluded.owner_token, owner_epoch = b.owner_epoch + 1, owner_instance = excluded.owner_instance,
    owner_name = excluded.owner_name, acquired_at = clock_timestamp()
WHERE b.query_id = excluded.query_id OR b.batch_id = -1
RETURNING b.query_id, b.batch_id, b.fingerprint, b.owner_token::text, b.owner_epoch

-- name: spark_counted
-- Read a group's batch ids as they are after every transaction that still may change them.
SELECT b.query_id, b.batch_id, b.fingerprint, b.owner_token::text, b.owner_epoch, b.halted, b.owner_name
FROM {schema}.spark_batch b WHERE b.group_id = %(group_id)s
FOR NO KEY UPDATE

-- name: spark_advance
-- The last statement of a transaction that writes a batch without offsets.
SELECT {schema}.spark_advance(
    %(xid)s::xid8, %(group_id)s, %(token)s::uuid, %(epoch)s::bigint, %(previous)s::bigint, %(batch_id)s::bigint,
    %(fingerprint)s)

-- name: spark_halt
-- Nobody may go on with these batch ids until an operator has decided.
UPDATE {schema}.spark_batch SET halted = %(reason)s WHERE group_id = %(group_id)s AND owner_token = %(token)s

-- name: spark_release
-- Give a group's batch ids back.
UPDATE {schema}.spark_batch SET owner_token = NULL WHERE group_id = %(group_id)s AND owner_token = %(token)s

-- name: spark_reset
-- An operator says which batch was the last to be written. Raising the epoch and clearing the token fences a live
-- query. The audit table has the batches in place of offsets, the query in that of the topic, and no partition: -1.
WITH before AS (
    SELECT * FROM {schema}.spark_batch WHERE group_id = %(group_id)s FOR UPDATE),
after AS (
    UPDATE {schema}.spark_batch b
    SET batch_id = %(batch_id)s, fingerprint = CASE WHEN b.batch_id = %(batch_id)s THEN b.fingerprint END,
        halted = NULL, owner_epoch = b.owner_epoch + 1, owner_token = NULL
    FROM before
    WHERE b.group_id = before.group_id
    RETURNING b.group_id)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, new_offset)
SELECT 'reset batches', %(reason)s, group_id, before.query_id, -1, before.batch_id, %(batch_id)s
FROM before JOIN after USING (group_id)

-- name: spark_empty
-- Empty a table that is replaced as a whole by each batch; readers see the old rows until COMMIT.
DELETE FROM {table}
