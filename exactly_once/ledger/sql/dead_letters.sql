-- Dead letters: stored by a worker, replayed or dropped by an operator.

-- name: dead_letter
-- Store a message in the transaction that skips it, unless it is dead already; ``once`` is false for rows that were
-- made of messages, of which one may give several.
INSERT INTO {schema}.dead_letter (group_id, topic, partition, message_offset, cluster_id, topic_id, leader_epoch,
    timestamp_type, timestamp_ms, key, value, header_names, header_values, error_class, error, sqlstate, attempts,
    after_offset)
SELECT %(group_id)s, %(topic)s, %(partition)s::int, %(offset)s::bigint, %(cluster_id)s, %(topic_id)s,
    %(leader_epoch)s::int, %(timestamp_type)s::int, %(timestamp_ms)s::bigint, %(key)s::bytea, %(value)s::bytea,
    %(header_names)s::text[], %(header_values)s::bytea[], %(error_class)s, %(error)s, %(sqlstate)s, %(attempts)s::int,
    %(after_offset)s::bigint
WHERE NOT (%(once)s AND EXISTS (
    SELECT FROM {schema}.dead_letter d
    WHERE d.group_id = %(group_id)s AND d.topic = %(topic)s AND d.partition = %(partition)s
      AND d.message_offset = %(offset)s AND d.status = 'dead' AND d.topic_id IS NOT DISTINCT FROM %(topic_id)s
      -- A log that was cut has other messages at its old offsets.
      AND d.timestamp_ms = %(timestamp_ms)s AND d.key IS NOT DISTINCT FROM %(key)s::bytea
      AND d.value IS NOT DISTINCT FROM %(value)s::bytea))

-- name: count_dead_letters
-- How many messages up to this one are dead, none between them applied, and how many of the group died lately.
-- Counted from letter to letter, because the log has offsets without messages.
WITH RECURSIVE run AS (
    (SELECT 1 AS length, d.after_offset, d.topic_id FROM {schema}.dead_letter d
     WHERE d.group_id = %(group_id)s AND d.topic = %(topic)s AND d.partition = %(partition)s
       AND d.message_offset = %(offset)s AND d.status = 'dead'
     ORDER BY d.id DESC LIMIT 1)
    UNION ALL
    SELECT run.length + 1, before.after_offset, before.topic_id
    FROM run CROSS JOIN LATERAL (
        SELECT d.after_offset, d.topic_id, d.message_offset, d.moved_to FROM {schema}.dead_letter d
        WHERE d.group_id = %(group_id)s AND d.topic = %(topic)s AND d.partition = %(partition)s
          AND d.message_offset < run.after_offset AND d.status = 'dead'
          AND d.topic_id IS NOT DISTINCT FROM run.topic_id
        ORDER BY d.message_offset DESC, d.id DESC LIMIT 1) before
    WHERE run.length < %(in_a_row)s AND run.after_offset IN (before.message_offset + 1, before.moved_to))
SELECT (SELECT coalesce(max(length), 0) FROM run),
       (SELECT count(*) FROM {schema}.dead_letter
        WHERE group_id = %(group_id)s AND dead_at > clock_timestamp() - make_interval(secs => least(%(window_seconds)s, 1e9)))

-- name: move_dead_letters
-- Take note that the ledger goes from one offset to another behind the dead letter that is the last before it, over
-- markers only: who begins there knows nothing of the message before.
UPDATE {schema}.dead_letter d SET moved_to = moved.next_offset
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(expected)s::bigint[], %(next_offsets)s::bigint[])
     AS moved(topic, partition, expected, next_offset)
WHERE d.group_id = %(group_id)s AND d.topic = moved.topic AND d.partition = moved.partition AND d.status = 'dead'
  AND moved.expected IN (d.message_offset + 1, d.moved_to)
  AND d.message_offset = (
    SELECT max(other.message_offset) FROM {schema}.dead_letter other
    WHERE other.group_id = d.group_id AND other.topic = d.topic AND other.partition = d.partition
      AND other.message_offset < moved.expected AND other.status = 'dead')

-- name: list_dead_letters
-- Dead letters in the order of the log; of one group, topic, status or some ids, if asked.
SELECT {columns}, extract(epoch FROM clock_timestamp() - dead_at)::float8 AS dead_seconds_ago
FROM {schema}.dead_letter
WHERE (%(group_id)s::text IS NULL OR group_id = %(group_id)s)
  AND (%(topic)s::text IS NULL OR topic = %(topic)s)
  AND (%(partition)s::int IS NULL OR partition = %(partition)s)
  AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s))
  AND (%(status)s::text IS NULL OR status = %(status)s)
ORDER BY group_id, topic, partition, message_offset, id
LIMIT %(limit)s

-- name: settle_dead_letter
-- Take a dead letter off the list; another transaction that does the same waits here and finds nothing.
UPDATE {schema}.dead_letter SET status = %(status)s, settled_at = clock_timestamp(), settled_by = session_user
WHERE id = %(id)s AND status = 'dead'
RETURNING {columns}, extract(epoch FROM clock_timestamp() - dead_at)::float8 AS dead_seconds_ago

-- name: dead_letters_by_group
-- How many messages of each group wait for an operator; other groups have no row.
SELECT group_id, count(*)
FROM {schema}.dead_letter
WHERE status = 'dead' AND (%(group_id)s::text IS NULL OR group_id = %(group_id)s)
GROUP BY group_id
