-- Dead letters: stored by a worker, replayed or dropped by an operator.

-- name: dead_letter
-- Store a message in the transaction that skips it.
INSERT INTO {schema}.dead_letter (group_id, topic, partition, message_offset, cluster_id, topic_id, leader_epoch,
    timestamp_type, timestamp_ms, key, value, header_names, header_values, error_class, error, sqlstate, attempts)
VALUES (%(group_id)s, %(topic)s, %(partition)s, %(offset)s, %(cluster_id)s, %(topic_id)s, %(leader_epoch)s,
    %(timestamp_type)s, %(timestamp_ms)s, %(key)s::bytea, %(value)s::bytea, %(header_names)s::text[],
    %(header_values)s::bytea[], %(error_class)s, %(error)s, %(sqlstate)s, %(attempts)s)

-- name: count_dead_letters
-- How many of the offsets right before this one are dead, and how many messages of the group died lately.
SELECT (SELECT count(DISTINCT message_offset) FROM {schema}.dead_letter
        WHERE group_id = %(group_id)s AND topic = %(topic)s AND partition = %(partition)s AND status = 'dead'
          AND message_offset > %(offset)s - %(in_a_row)s AND message_offset <= %(offset)s),
       (SELECT count(*) FROM {schema}.dead_letter
        WHERE group_id = %(group_id)s AND dead_at > clock_timestamp() - make_interval(secs => %(window_seconds)s))

-- name: list_dead_letters
-- Dead letters in the order of the log; of one group, topic, status or some ids, if asked.
SELECT {columns} FROM {schema}.dead_letter
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
RETURNING {columns}
