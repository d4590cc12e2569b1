-- Every statement of the library that is not DDL. A query starts with its name and its purpose.
-- All that lock several rows take them in the order of (topic, partition).
-- A partition has one row. Its generation is the last column of the key; who does not know it takes the newest, by a look
-- from behind, which does not pass the dead ones.

-- name: incarnation
-- Tell one incarnation of the server from the next, as an expression inside other statements. After a crash the ids of
-- transactions that left no trace in the log are given out again: what is known of an id holds within one incarnation.
-- An incarnation begins with the postmaster, and with each crash recovery under it: a backend that dies takes the others along,
-- but not the postmaster. Where the last recovery ended is null after an orderly start, and grows with each crash. Both are
-- numbers, so that no setting of a session, no role and no reset of statistics changes them.
((extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint::text
    || ' ' || coalesce(pg_last_wal_replay_lsn()::text, ''))

-- name: begin
-- Open a unit of work or a change of the ledger: who we are, and by what the server knows it. Where a role has array_nulls
-- off, a null in an array that psycopg sends would be the text NULL.
BEGIN ISOLATION LEVEL {isolation};
SET LOCAL application_name = {tag};
SELECT pg_current_xact_id()::text, pg_backend_pid(), {incarnation} FROM set_config('array_nulls', 'on', true)

-- name: join
-- Take a transaction that somebody else opened for a unit of work, and learn what BEGIN would have told. What it took
-- before is added to what the unit may take, because peers know only when the transaction began.
SELECT set_config('application_name', {tag} || CASE WHEN {owns_rows} THEN coalesce(nullif(
    least({may_take}::float8 + ceil(extract(epoch FROM clock_timestamp() - now())), 10000), 10000)::int::text,
    'inf') ELSE '-' END, true);
SELECT pg_current_xact_id()::text, pg_backend_pid(), {incarnation} FROM set_config('array_nulls', 'on', true)

-- name: begin_ledger
-- Open a short transaction that only touches the ledger; the server ends it where its process froze inside.
-- Its own bounds hold: a time-out of the role would end a wait for a lock before the one that is understood.
-- transaction_timeout came with Postgres 17. What may be lost, and what only locks rows to look at them, does not wait for
-- the disk.
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL application_name = {tag};
SET LOCAL lock_timeout = {lock_timeout};
SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = '10s';
SELECT CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', '0', true) END;
SELECT set_config('synchronous_commit', 'off', true) WHERE NOT {is_durable};
SELECT pg_backend_pid(), current_setting('transaction_read_only')::boolean, pg_is_in_recovery()
FROM set_config('array_nulls', 'on', true)

-- name: xact_status
-- What became of a transaction; null when the server no longer knows. One statement, so that the incarnation of the server and
-- the answer belong together whatever connection this is asked on.
SELECT CASE
    WHEN {incarnation} <> %(begun_in)s THEN 'restarted'
    WHEN EXISTS (SELECT FROM pg_prepared_xacts p
                 WHERE p.transaction::text = ((%(xid)s::text)::numeric %% 4294967296)::text) THEN 'prepared'
    ELSE pg_xact_status((%(xid)s::text)::xid8) END

-- name: answer
-- See that a server is behind a new connection, and how it isolates and commits what is executed without a BEGIN of ours.
SELECT current_setting('default_transaction_isolation') = 'read committed' AND current_setting('synchronous_commit') <> 'off'

-- name: current_xid
-- Learn the id of a transaction that is going to write.
SELECT pg_current_xact_id()::text

-- name: newest
-- Find the one row of the partition w, inside other statements: that of the newest generation.
SELECT * FROM {schema}.ledger l
WHERE l.group_id = %(group_id)s AND l.topic = w.topic AND l.partition = w.partition
ORDER BY l.generation DESC LIMIT 1

-- name: row
-- Name the columns of a row l of the ledger, inside other statements; Row has the same fields.
l.topic, l.partition, l.generation, l.next_offset, l.leader_epoch, l.cluster_id, l.topic_id,
l.owner_epoch, l.owner_token, l.owner_kind, l.owner_instance, l.owner_name, l.halted

-- name: existing
-- Which of these partitions have rows.
SELECT w.topic, w.partition
FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS w(topic, partition)
CROSS JOIN LATERAL ({newest}) AS l

-- name: topic_ids
-- Under which ids topics have rows. Two for one topic say that it was made again.
SELECT DISTINCT topic, topic_id FROM {schema}.ledger
WHERE group_id = %(group_id)s AND topic = ANY(%(topics)s::text[]) AND topic_id IS NOT NULL

-- name: has_rows
-- Whether the group was ever started; batch ids of a Spark query are no start of a consumer.
SELECT EXISTS (SELECT FROM {schema}.ledger WHERE group_id = %(group_id)s AND topic NOT LIKE 'query:%%')

-- name: is_read_only
-- Tell whether this server, or this role here, cannot write.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean

-- name: origin
-- Tell this ledger and this server from every other: see Origin.
SELECT v.ledger_id::text,
       (SELECT c.system_identifier FROM pg_control_system() c) || '.' || d.oid,
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
FROM {schema}.version v JOIN pg_database d ON d.datname = current_database()

-- name: ledger_id
-- Tell this ledger from others, by a role that may not ask more.
SELECT ledger_id::text, NULL, NULL FROM {schema}.version

-- name: offsets
-- A snapshot of offsets, to compare with what Kafka holds; and whether an operator moved one since it was last advanced.
SELECT topic, partition, next_offset, coalesce(moved_at > coalesce(advanced_at, '-infinity'), false) AS is_moved
FROM {schema}.ledger
WHERE group_id = %(group_id)s AND topic = ANY(%(topics)s::text[])

-- name: known
-- Which partitions have rows, and which had one that nobody forgot on purpose. Never used to learn an offset.
SELECT topic, partition, true AS has_row FROM {schema}.ledger
WHERE group_id = %(group_id)s AND topic = ANY(%(topics)s::text[])
UNION ALL
SELECT topic, partition, false
FROM (SELECT DISTINCT ON (topic, partition) topic, partition, action FROM {schema}.audit
      WHERE action IN ('register', 'forget') AND group_id = %(group_id)s AND topic = ANY(%(topics)s::text[])
      ORDER BY topic, partition, id DESC) AS latest
WHERE action = 'register'

-- name: register_lock
-- Let one process make rows of a group. A statement behind it sees all that were made before, and no rotation is missed.
SELECT pg_advisory_xact_lock(hashtext('exactly_once.register'), hashtext(%(group_id)s))

-- name: register
-- Give partitions their rows; those that exist, in whatever generation, stay as they are.
WITH made AS (
    INSERT INTO {schema}.ledger (group_id, topic, partition, next_offset, cluster_id, topic_id)
    SELECT %(group_id)s, e.topic, e.partition, e.next_offset, %(cluster_id)s, e.topic_id
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(next_offsets)s::bigint[], %(topic_ids)s::text[])
         AS e(topic, partition, next_offset, topic_id)
    WHERE NOT EXISTS (
        SELECT FROM {schema}.ledger l
        WHERE l.group_id = %(group_id)s AND l.topic = e.topic AND l.partition = e.partition)
    ORDER BY e.topic, e.partition
    ON CONFLICT DO NOTHING
    RETURNING group_id, topic, partition, next_offset, cluster_id, topic_id)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, new_offset, new_cluster_id, new_topic_id)
SELECT 'register', 'the first time that this group met the partition', group_id, topic, partition, next_offset,
       cluster_id, topic_id
FROM made

-- name: acquire
-- Become the owner of rows that are locked. Locking them has waited for a transaction of the old owner that has advanced.
UPDATE {schema}.ledger l
SET owner_epoch = l.owner_epoch + 1, owner_token = %(token)s, owner_kind = %(owner_kind)s,
    owner_instance = %(owner_instance)s, owner_name = %(owner_name)s, acquired_at = clock_timestamp(),
    application = coalesce(%(application)s, l.application)
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[]) AS w(topic, partition, generation)
WHERE l.group_id = %(group_id)s AND l.topic = w.topic AND l.partition = w.partition AND l.generation = w.generation
RETURNING {row}, l.application

-- name: look
-- Read rows as the last transactions have left them. It only raises a suspicion; offsets are learnt under lock.
SELECT {row}
FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS w(topic, partition)
CROSS JOIN LATERAL ({newest}) AS l

-- name: read_locked
-- Lock rows and read them, as they are after every transaction that still may change them.
SELECT {row}, l.application,
       extract(epoch FROM clock_timestamp() - l.acquired_at)::float8 AS acquired_seconds_ago,
       extract(epoch FROM clock_timestamp() - l.advanced_at)::float8 AS advanced_seconds_ago
FROM (SELECT * FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS w(topic, partition)
      ORDER BY w.topic, w.partition) AS w
CROSS JOIN LATERAL {schema}.lock_row(%(group_id)s, w.topic, w.partition) AS l

-- name: start
-- Commit the chosen starting offsets, with the ids that they belong to, before anything is fetched.
WITH held AS (
    SELECT l.topic, l.partition, l.generation, s.next_offset, s.leader_epoch, s.topic_id
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[], %(tokens)s::uuid[],
                %(next_offsets)s::bigint[], %(leader_epochs)s::int[], %(topic_ids)s::text[])
         AS s(topic, partition, generation, token, next_offset, leader_epoch, topic_id)
    JOIN {schema}.ledger l ON l.group_id = %(group_id)s AND l.topic = s.topic AND l.partition = s.partition
                          AND l.generation = s.generation
    WHERE l.owner_token = s.token AND l.next_offset IS NULL
    ORDER BY l.topic, l.partition
    FOR UPDATE OF l)
UPDATE {schema}.ledger l
SET next_offset = held.next_offset, leader_epoch = held.leader_epoch,
    cluster_id = %(cluster_id)s, topic_id = held.topic_id
FROM held
WHERE l.group_id = %(group_id)s AND l.topic = held.topic AND l.partition = held.partition
  AND l.generation = held.generation
RETURNING l.topic, l.partition

-- name: correct
-- Apply on_out_of_range to one partition that we own, and write it down.
WITH after AS (
    UPDATE {schema}.ledger l SET next_offset = %(new_offset)s, leader_epoch = NULL, moved_at = clock_timestamp()
    WHERE l.group_id = %(group_id)s AND l.topic = %(topic)s AND l.partition = %(partition)s
      AND l.generation = %(generation)s AND l.owner_token = %(token)s AND l.next_offset = %(old_offset)s
    RETURNING l.group_id, l.topic, l.partition)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, new_offset)
SELECT 'out of range', %(reason)s, group_id, topic, partition, %(old_offset)s, %(new_offset)s FROM after

-- name: identify
-- Fill in ids that were unknown when the rows were made, which are locked, and write it down.
WITH after AS (
    UPDATE {schema}.ledger l
    SET topic_id = i.new_topic_id, cluster_id = coalesce(l.cluster_id, %(cluster_id)s)
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[], %(tokens)s::uuid[],
                %(topic_ids)s::text[]) AS i(topic, partition, generation, token, new_topic_id)
    WHERE l.group_id = %(group_id)s AND l.topic = i.topic AND l.partition = i.partition
      AND l.generation = i.generation AND l.owner_token = i.token AND l.topic_id IS NULL
    RETURNING l.group_id, l.topic, l.partition, l.topic_id)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, new_topic_id, new_cluster_id)
SELECT 'identify', 'the ids had been unknown', group_id, topic, partition, topic_id, %(cluster_id)s FROM after

-- name: advance
-- The last statement of a unit of work. Raises EO001 on a short count, EO002 in a foreign transaction.
SELECT {schema}.advance(
    %(xid)s::xid8, %(group_id)s::text, %(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[],
    %(tokens)s::uuid[], %(epochs)s::bigint[], %(topic_ids)s::text[], %(expected)s::bigint[],
    %(next_offsets)s::bigint[], %(leader_epochs)s::int[], %(rotates)s::boolean)

-- name: resolve
-- Acquire our own rows again, which are locked: whatever attempt was still on its way either committed before that, or never
-- will.
UPDATE {schema}.ledger l SET owner_token = %(token)s
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[]) AS w(topic, partition, generation)
WHERE l.group_id = %(group_id)s AND l.topic = w.topic AND l.partition = w.partition AND l.generation = w.generation
  AND l.owner_token = ANY(%(tokens)s::uuid[])
RETURNING {row}

-- name: release
-- Give rows back. A row that somebody has locked is being decided about elsewhere: leave it.
WITH held AS (
    SELECT l.topic, l.partition, l.generation
    FROM (SELECT * FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(tokens)s::uuid[]) AS w(topic, partition, token)
          ORDER BY w.topic, w.partition) AS w
    CROSS JOIN LATERAL ({newest} FOR UPDATE SKIP LOCKED) AS l
    WHERE l.owner_token = w.token)
UPDATE {schema}.ledger l SET owner_token = NULL
FROM held
WHERE l.group_id = %(group_id)s AND l.topic = held.topic AND l.partition = held.partition
  AND l.generation = held.generation

-- name: halt
-- Nobody may acquire these partitions until an operator has decided, and whoever owns them by now is fenced. Rows are
-- locked. One that has moved beyond the unit, or belongs to another topic of the name, is left alone: another owner went on.
UPDATE {schema}.ledger l SET halted = %(reason)s, owner_epoch = l.owner_epoch + 1, owner_token = NULL
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(generations)s::bigint[], %(tokens)s::uuid[],
            %(topic_ids)s::text[], %(expected)s::bigint[])
     AS w(topic, partition, generation, token, topic_id, expected)
WHERE l.group_id = %(group_id)s AND l.topic = w.topic AND l.partition = w.partition AND l.generation = w.generation
  AND (l.owner_token = w.token
       OR coalesce(l.next_offset, 0) <= w.expected AND (l.topic_id = w.topic_id) IS NOT false)
RETURNING l.topic, l.partition

-- name: end_stale_blockers
-- End the backends of frozen owners that a transaction of ours waits for. Only backends that carry the
-- tag of our schema and run under our role, and of those:
-- our own lost ones; those of instances that own no row any more, which are fenced, as is each Spark run of a group of which we take a row;
-- of those that show no sign of life: the owners of the rows that we are acquiring, what an earlier owner of a row of
-- ours began before we took it from him, and whoever stands still beyond the time that his own unit may take (where all
-- wait for a frozen one, nobody polls, so Kafka cannot take its partitions away);
-- and alive or not, the owners of rows that we are acquiring, beyond that time: Kafka has given them up, too.
SELECT b.pid, b.application_name, pg_terminate_backend(b.pid)
FROM (SELECT a.*,
             substr(a.application_name, 14, 36) AS instance,
             substr(a.application_name, 60) AS may_take,
             CASE WHEN substr(a.application_name, 60) ~ '^[0-9]+$' THEN substr(a.application_name, 60)::int
                  WHEN a.application_name !~ ':.*:.*:' THEN 0 END AS bound,
             extract(epoch FROM clock_timestamp() - a.xact_start) AS age,
             EXISTS (
                 SELECT FROM pg_stat_activity s
                 WHERE s.application_name = 'exactly_once_alive:' || a.pid AND s.usename = session_user
                   AND s.state_change > clock_timestamp() - %(still)s * interval '1 second') AS lives
      FROM unnest(pg_blocking_pids(%(pid)s)) AS w(pid)
      JOIN pg_stat_activity a ON a.pid = w.pid
      WHERE a.application_name LIKE 'exactly\_once:%%'
        AND substr(a.application_name, 51, 8) = substr(%(tag)s, 51, 8)
        -- It has committed, and stands still for its synchronous standby: its end would show what no other server has.
        AND a.wait_event IS DISTINCT FROM 'SyncRep'
        AND a.usename = session_user) AS b
WHERE b.instance = %(instance)s
   OR b.may_take <> '-'
      AND NOT EXISTS (
          SELECT FROM {schema}.ledger l
          WHERE l.owner_token IS NOT NULL AND l.owner_instance::text = b.instance)
   OR 'query:' = ANY(SELECT left(w.topic, 6) FROM unnest(%(topics)s::text[]) AS w(topic)) AND EXISTS (
          SELECT FROM {schema}.ledger l
          WHERE l.group_id = %(group_id)s AND l.topic LIKE 'query:%%' AND l.owner_instance::text = b.instance)
   OR (NOT b.lives OR b.age > b.bound) AND b.age > %(young)s AND EXISTS (
          SELECT FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS w(topic, partition)
          CROSS JOIN LATERAL ({newest}) AS l
          WHERE l.owner_token IS NOT NULL AND l.owner_instance::text = b.instance)
   OR NOT b.lives AND b.age > %(young)s AND EXISTS (
          SELECT FROM unnest(%(taken_topics)s::text[], %(taken_partitions)s::int[], %(taken_from)s::text[])
               AS w(topic, partition, instance)
          CROSS JOIN LATERAL ({newest}) AS l
          WHERE w.instance = b.instance AND l.owner_instance::text = %(instance)s AND b.xact_start < l.acquired_at)
   OR NOT b.lives AND b.wait_event = 'ClientRead'
      AND b.state_change < clock_timestamp() - %(still)s * interval '1 second'
      AND b.age > coalesce(b.bound, %(unbounded)s)

-- name: blockers
-- Whom a transaction of ours waits for, and whether the ledger can be read: not where they have locked a table of the
-- library, as VACUUM FULL does, nor before it is made. Backend 0 is a transaction that somebody has prepared.
SELECT w.pid, a.usename::text, a.application_name,
       to_regclass(format('%%I.ledger', %(schema)s::text)) IS NOT NULL AND NOT EXISTS (
           SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
           WHERE coalesce(l.pid, 0) = w.pid AND l.granted AND l.mode = 'AccessExclusiveLock'
             AND c.relnamespace = to_regnamespace(quote_ident(%(schema)s)))
FROM (SELECT DISTINCT unnest(pg_blocking_pids(%(pid)s)) AS pid) AS w
LEFT JOIN pg_stat_activity a ON a.pid = w.pid
ORDER BY w.pid

-- name: look_anew
-- Forget what pg_stat_activity has shown in this transaction, which keeps its first sight of it to the end.
SELECT pg_stat_clear_snapshot()

-- name: show_sign
-- Open a transaction that says of a backend that the process behind it is alive. It holds no snapshot and no lock.
-- A transaction, so that it works behind a pooler.
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL application_name = {sign}

-- name: renew_sign
-- Say it again, which a stopped process cannot do. In the same transaction: between two of them a peer would miss it.
SET LOCAL application_name = {sign}

-- name: end_transaction
-- End the backend that still runs a transaction of ours on a connection that we have lost. Within one incarnation of the server
-- the lock on its id is held by that transaction alone, whatever its application_name and role are by now. One that has
-- committed, and waits for its standby, is waited for.
SELECT l.pid, pg_terminate_backend(l.pid)
FROM pg_locks l
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid = %(pid)s
  AND l.transactionid::text = ((%(xid)s::text)::numeric %% 4294967296)::text
  AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = l.pid AND a.wait_event = 'SyncRep')
  AND {incarnation} = %(begun_in)s

-- name: give_time
-- Let a backend that was told to end do so.
SELECT pg_sleep(0.02)

-- name: status
-- What an operator wants to see of a group. A snapshot: for looking, never for starting.
SELECT group_id, topic, partition, next_offset, leader_epoch, cluster_id, topic_id, owner_epoch, owner_kind,
       owner_name, owner_instance::text, owner_token IS NOT NULL AS owned, halted, acquired_at, advanced_at,
       extract(epoch FROM clock_timestamp() - advanced_at)::float8 AS advanced_seconds_ago
FROM {schema}.ledger
WHERE (%(group_id)s::text IS NULL OR group_id = %(group_id)s)
ORDER BY group_id, topic, partition

-- name: lost_rows
-- Which partitions of groups had a row that nobody forgot on purpose, and have none any more.
SELECT group_id, topic, partition
FROM (SELECT DISTINCT ON (group_id, topic, partition) group_id, topic, partition, action FROM {schema}.audit
      WHERE action IN ('register', 'forget') AND group_id = ANY(%(group_ids)s::text[])
      ORDER BY group_id, topic, partition, id DESC) AS latest
WHERE action = 'register' AND topic NOT LIKE 'query:%%' AND NOT EXISTS (
    SELECT FROM {schema}.ledger l
    WHERE l.group_id = latest.group_id AND l.topic = latest.topic AND l.partition = latest.partition)

-- name: ledger_health
-- What lets the table grow: dead versions of rows, which stay while a snapshot is held that could see them.
SELECT t.n_dead_tup AS dead_rows, pg_total_relation_size(t.relid) AS bytes, held.by AS snapshot_held_by,
       held.transactions AS snapshot_transactions, extract(epoch FROM held.since)::float8 AS snapshot_seconds
FROM pg_stat_all_tables t
LEFT JOIN (
    SELECT concat_ws(' ', 'backend', pid, nullif(application_name, '')) AS by, age(backend_xmin) AS transactions,
           clock_timestamp() - xact_start AS since
    FROM pg_stat_activity
    WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND (datname = current_database() OR datname IS NULL)
    UNION ALL
    SELECT 'prepared transaction ' || gid, age(transaction), clock_timestamp() - prepared
    FROM pg_prepared_xacts WHERE database = current_database()
    UNION ALL
    SELECT 'replication slot ' || slot_name, age(xmin), NULL FROM pg_replication_slots WHERE xmin IS NOT NULL
    ORDER BY transactions DESC, since DESC NULLS LAST LIMIT 1) AS held ON true
WHERE t.schemaname = %(schema)s AND t.relname = 'ledger'

-- name: spark_queries
-- What an operator wants to see of Spark queries: what each wrote last, and which batch the ledger has counted last.
SELECT group_id, query_id, q.name, q.run_id, q.batch_id, q.row_count AS rows, q.dropped, q.written_at,
       extract(epoch FROM clock_timestamp() - q.written_at)::float8 AS written_seconds_ago,
       nullif(b.next_offset, 0) - 1 AS counted_batch_id, b.halted
FROM {schema}.spark_query q
FULL JOIN (SELECT group_id, substr(topic, 7) AS query_id, next_offset, halted
           FROM {schema}.ledger WHERE topic LIKE 'query:%%') AS b USING (group_id, query_id)
WHERE (%(group_id)s::text IS NULL OR group_id = %(group_id)s)
ORDER BY group_id, q.written_at, query_id

-- name: hand_over
-- An operator takes rows, which are locked, from an owner of the other kind, which has stopped or is fenced by this; offsets
-- stay.
WITH before AS (
    SELECT l.*
    FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS w(topic, partition)
    JOIN {schema}.ledger l ON l.group_id = %(group_id)s AND l.topic = w.topic AND l.partition = w.partition),
after AS (
    UPDATE {schema}.ledger l SET owner_epoch = l.owner_epoch + 1, owner_token = NULL
    FROM before
    WHERE l.group_id = before.group_id AND l.topic = before.topic AND l.partition = before.partition
      AND before.owner_token IS NOT NULL AND before.owner_kind IS DISTINCT FROM %(owner_kind)s
    RETURNING l.topic, l.partition),
written AS (
    INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, new_offset)
    SELECT 'hand-over', %(reason)s, before.group_id, topic, partition, before.next_offset, before.next_offset
    FROM before JOIN after USING (topic, partition)
    ORDER BY topic, partition)
SELECT topic, partition, next_offset FROM before ORDER BY topic, partition

-- name: reset
-- An operator moves offsets of rows that are locked; null leaves one as it is now. Raising the epoch and clearing the token fences
-- a live owner.
WITH before AS (
    SELECT l.*, r.new_offset
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(next_offsets)s::bigint[])
         AS r(topic, partition, new_offset)
    JOIN {schema}.ledger l ON l.group_id = %(group_id)s AND l.topic = r.topic AND l.partition = r.partition),
after AS (
    UPDATE {schema}.ledger l
    SET next_offset = coalesce(before.new_offset, before.next_offset), halted = NULL,
        leader_epoch = CASE WHEN before.new_offset IS NULL THEN l.leader_epoch END,
        owner_epoch = l.owner_epoch + 1, owner_token = NULL, moved_at = clock_timestamp()
    FROM before
    WHERE l.group_id = before.group_id AND l.topic = before.topic AND l.partition = before.partition
    RETURNING l.topic, l.partition)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, new_offset)
SELECT 'reset', %(reason)s, before.group_id, topic, partition, before.next_offset,
       coalesce(before.new_offset, before.next_offset)
FROM before JOIN after USING (topic, partition)
ORDER BY topic, partition
RETURNING topic, partition, old_offset, new_offset

-- name: adopt
-- An operator declares that rows, which are locked, belong to another topic id or cluster, at the offsets given; null
-- leaves an offset as it is.
WITH before AS (
    SELECT l.*, r.new_offset, r.new_topic_id
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(next_offsets)s::bigint[], %(topic_ids)s::text[])
         AS r(topic, partition, new_offset, new_topic_id)
    JOIN {schema}.ledger l ON l.group_id = %(group_id)s AND l.topic = r.topic AND l.partition = r.partition),
after AS (
    UPDATE {schema}.ledger l
    SET next_offset = coalesce(before.new_offset, before.next_offset), leader_epoch = NULL, halted = NULL,
        topic_id = before.new_topic_id, cluster_id = %(cluster_id)s,
        owner_epoch = l.owner_epoch + 1, owner_token = NULL, moved_at = clock_timestamp()
    FROM before
    WHERE l.group_id = before.group_id AND l.topic = before.topic AND l.partition = before.partition
    RETURNING l.topic, l.partition)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, new_offset,
                            old_topic_id, new_topic_id, old_cluster_id, new_cluster_id)
SELECT 'adopt', %(reason)s, before.group_id, topic, partition, before.next_offset,
       coalesce(before.new_offset, before.next_offset),
       before.topic_id, before.new_topic_id, before.cluster_id, %(cluster_id)s
FROM before JOIN after USING (topic, partition)
ORDER BY topic, partition
RETURNING topic, partition, old_offset, new_offset

-- name: forget
-- An operator deletes rows, which are locked, of partitions that Kafka does not have. One that was acquired since it was looked
-- at stays: its partition is there again.
WITH gone AS (
    DELETE FROM {schema}.ledger l
    USING unnest(%(topics)s::text[], %(partitions)s::int[], %(owner_epochs)s::bigint[])
          AS f(topic, partition, owner_epoch)
    WHERE l.group_id = %(group_id)s AND l.topic = f.topic AND l.partition = f.partition
      AND l.owner_epoch = f.owner_epoch
    RETURNING l.*)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, old_offset, old_topic_id, old_cluster_id)
SELECT 'forget', %(reason)s, group_id, topic, partition, next_offset, topic_id, cluster_id
FROM gone
ORDER BY topic, partition
RETURNING topic, partition, old_offset, new_offset

-- name: no_timeouts
-- Keep time-outs of the role away from a transaction that may have to wait for another one, whose changes it must see.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SELECT set_config('statement_timeout', '0', true),
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', '0', true) END

-- name: migration_lock
-- Let one process migrate at a time; the lock ends with its transaction.
SELECT pg_advisory_xact_lock(hashtext('exactly_once.migrate'), hashtext(%(schema)s))

-- name: create_schema
-- Make the schema itself, unless an administrator has done so.
CREATE SCHEMA IF NOT EXISTS {schema}

-- name: has_schema
-- Tell whether the schema was ever made, and under which name, which its functions have; quotes stay doubled in it.
SELECT to_regclass(format('%%I.version', %(schema)s::text)) IS NOT NULL,
       (SELECT substring(prosrc FROM ' "((?:[^"]|"")+)"[.]ledger ') FROM pg_proc
        WHERE proname = 'rotate' AND pronamespace = to_regnamespace(format('%%I', %(schema)s::text)))

-- name: version
-- Which schema is there, and the oldest release line that may still work with it.
SELECT version, oldest_reader FROM {schema}.version

-- name: register_for_operator
-- Give partitions the rows that they lack, before an operator's change gives them their offsets.
WITH made AS (
    INSERT INTO {schema}.ledger (group_id, topic, partition, cluster_id, topic_id)
    SELECT %(group_id)s, e.topic, e.partition, %(cluster_id)s, e.topic_id
    FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(topic_ids)s::text[]) AS e(topic, partition, topic_id)
    WHERE NOT EXISTS (
        SELECT FROM {schema}.ledger l
        WHERE l.group_id = %(group_id)s AND l.topic = e.topic AND l.partition = e.partition)
    ORDER BY e.topic, e.partition
    ON CONFLICT DO NOTHING
    RETURNING group_id, topic, partition, cluster_id, topic_id)
INSERT INTO {schema}.audit (action, reason, group_id, topic, partition, new_cluster_id, new_topic_id)
SELECT 'register', %(reason)s, group_id, topic, partition, cluster_id, topic_id FROM made

-- name: savepoint
-- Mark where a unit begins in the open transaction of somebody's test; an error where no transaction is open.
SAVEPOINT exactly_once

-- name: release_savepoint
-- Take the mark away and keep what was done since.
RELEASE SAVEPOINT exactly_once

-- name: to_savepoint
-- Undo that unit, and nothing before it.
ROLLBACK TO SAVEPOINT exactly_once;
RELEASE SAVEPOINT exactly_once

-- name: written
-- How many rows the open transaction has written.
SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_xact_all_tables

-- name: check_constraints
-- Have deferred constraints checked, as COMMIT would.
SET CONSTRAINTS ALL IMMEDIATE
