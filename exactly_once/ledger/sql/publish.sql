-- Every statement of the publish side. The changes of keys are functions of the schema, one call per batch.

-- name: publish_durably
-- Wait for the disk of this server at the COMMIT, whatever the role says; standbys are its own matter.
SELECT set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') = 'off'

-- name: publish_scope
-- Make a scope, if it is not there.
SELECT {schema}.publish_scope_number(%(name)s)

-- name: publish_window
-- Agree on the length of the window: the first to come decides, or who is to change it. Return what was decided. A
-- shorter one is due for one turn at once, and for no second one: what was confirmed a moment ago stays for a window.
UPDATE {schema}.publish_window
SET seconds = CASE WHEN %(changes)s THEN %(seconds)s::float8 ELSE coalesce(seconds, %(seconds)s::float8) END,
    turned_at = CASE WHEN %(changes)s AND %(seconds)s::float8 < seconds
                     THEN greatest(turned_at, clock_timestamp() - %(seconds)s::float8 * interval '1 second')
                     ELSE turned_at END
RETURNING seconds

-- name: publish_rotate
-- Drop the older generation of keys if it is time.
SELECT {schema}.publish_rotate()

-- name: publish_reserve
-- Reserve sorted, different keys; return only those that are not new.
SELECT place, found_state::text, holder
FROM {schema}.publish_reserve(
    {schema}.publish_scope_number(%(scope)s), %(keys)s::bytea[], %(owner)s, %(map_version)s)

-- name: publish_confirm
-- Confirm keys.
SELECT {schema}.publish_confirm({schema}.publish_scope_number(%(scope)s), %(keys)s::bytea[], %(owner)s)

-- name: publish_release
-- Make keys absent that surely are not in the log.
SELECT {schema}.publish_release(
    {schema}.publish_scope_number(%(scope)s), %(keys)s::bytea[], %(owner)s, %(is_held)s)

-- name: publish_mark_unknown
-- Make keys unknown.
SELECT {schema}.publish_mark_unknown({schema}.publish_scope_number(%(scope)s), %(keys)s::bytea[], %(owner)s)

-- name: publish_take_over
-- Settle what a fenced owner has left.
SELECT confirmed, released, unknown
FROM {schema}.publish_take_over({schema}.publish_scope_number(%(scope)s), %(dead)s, %(keys)s::bytea[], %(is_sure)s)

-- name: publish_count
-- Count the keys of a scope by state. A scan: for looking, not for every message.
SELECT state::text, count(*) FROM {schema}.publish_key
WHERE slot IN (0, 1) AND scope = (SELECT id FROM {schema}.publish_scope WHERE name = %(scope)s) GROUP BY 1

-- name: publish_peek
-- Look which keys are there and what they are, without reserving any.
SELECT key, state::text FROM {schema}.publish_key
WHERE slot IN (0, 1) AND scope = (SELECT id FROM {schema}.publish_scope WHERE name = %(scope)s)
  AND key = ANY(%(keys)s::bytea[])

-- name: publish_unknown
-- Find the keys of a scope whose messages may be in the log.
SELECT key FROM {schema}.publish_key
WHERE slot IN (0, 1) AND scope = (SELECT id FROM {schema}.publish_scope WHERE name = %(scope)s) AND state = 'u'

-- name: publish_start_owner
-- Begin the life of a sending process.
INSERT INTO {schema}.publish_owner (id, name, transactional_id, positions, lease_until)
VALUES (%(owner)s, %(name)s, %(transactional_id)s, %(positions)s::jsonb,
        clock_timestamp() + %(seconds)s * interval '1 second')

-- name: publish_find_owner
-- Find the own life, if it was begun by an attempt whose answer was lost.
SELECT id FROM {schema}.publish_owner WHERE id = %(owner)s

-- name: publish_lock_name
-- Let one process at a time decide about a name; the lock ends with its transaction.
SELECT pg_advisory_xact_lock(hashtext('exactly_once.publish_owner'), hashtext(%(name)s))

-- name: publish_living
-- Find owners of a name that have not ended, and how long their lease still runs.
SELECT id, extract(epoch FROM lease_until - clock_timestamp())::float8 FROM {schema}.publish_owner
WHERE name = %(name)s AND ended_at IS NULL

-- name: publish_renew
-- Extend the lease of an owner that was not fenced; return nothing if it was.
UPDATE {schema}.publish_owner SET lease_until = clock_timestamp() + %(seconds)s * interval '1 second'
WHERE id = %(owner)s AND ended_at IS NULL
RETURNING id

-- name: publish_advance
-- Move the offsets from which a take-over of an owner's keys reads: everything in flight stands behind them.
UPDATE {schema}.publish_owner SET positions = %(positions)s::jsonb WHERE id = %(owner)s AND ended_at IS NULL

-- name: publish_end_owner
-- End the own life in good order.
UPDATE {schema}.publish_owner SET ended_at = clock_timestamp() WHERE id = %(owner)s AND ended_at IS NULL

-- name: publish_fence
-- End the lives of owners whose lease is over; return those that are ended now, with what is needed to take over.
WITH fenced AS (
    UPDATE {schema}.publish_owner SET ended_at = clock_timestamp()
    WHERE id = ANY(%(owners)s) AND ended_at IS NULL AND lease_until < clock_timestamp()
    RETURNING id, name, transactional_id, positions)
SELECT id, name, transactional_id, positions FROM fenced
UNION ALL
SELECT id, name, transactional_id, positions FROM {schema}.publish_owner
WHERE id = ANY(%(owners)s) AND ended_at IS NOT NULL

-- name: publish_map
-- Agree on the version of a map of shards; return the version and digest that hold now.
SELECT map_version, map_digest FROM {schema}.publish_map(%(number)s, %(digest)s::bytea)

-- name: publish_map_now
-- Return version and digest of the map of shards that holds now.
SELECT map_version, map_digest FROM {schema}.publish_window

-- name: publish_seen
-- Of the numbers of a batch return those that their chains have seen: one intersection for each chain.
SELECT given.chain, number
FROM (SELECT chain, range_agg(int8range(number, number, '[]')) AS numbers
      FROM unnest(%(chains)s::text[], %(numbers)s::int8[]) AS pairs(chain, number) GROUP BY chain) AS given
JOIN {schema}.publish_chain AS c USING (chain),
     unnest(given.numbers * c.seen) AS r, generate_series(lower(r), upper(r) - 1) AS number

-- name: publish_see
-- Add the numbers of a batch to what their chains have seen; sorted, because two processes would wait for each other.
INSERT INTO {schema}.publish_chain AS c (chain, seen)
SELECT chain, range_agg(int8range(number, number, '[]'))
FROM unnest(%(chains)s::text[], %(numbers)s::int8[]) AS pairs(chain, number) GROUP BY chain ORDER BY chain
ON CONFLICT (chain) DO UPDATE SET seen = c.seen + excluded.seen

-- name: publish_show_window
-- Show the window that all filters of the schema share.
SELECT seconds, extract(epoch FROM clock_timestamp() - turned_at)::float8 AS generation_seconds, map_version
FROM {schema}.publish_window

-- name: publish_show_owners
-- Show owners that live, and those that have ended with keys in flight.
SELECT o.id, o.name, o.transactional_id, o.started_at, o.ended_at IS NOT NULL AS ended,
       extract(epoch FROM clock_timestamp() - o.started_at)::float8 AS started_seconds_ago,
       round(extract(epoch FROM o.lease_until - clock_timestamp()))::bigint AS lease_seconds,
       count(k.key) FILTER (WHERE k.state IN ('f', 't'))::int AS in_flight
FROM {schema}.publish_owner o
LEFT JOIN {schema}.publish_key k ON k.slot IN (0, 1) AND k.owner = o.id AND k.state <> 'c'
GROUP BY o.id
HAVING o.ended_at IS NULL OR count(k.key) FILTER (WHERE k.state IN ('f', 't')) > 0
ORDER BY o.started_at

-- name: publish_show_scopes
-- Show how many keys of each scope are in which state: a scan.
SELECT s.name AS scope,
       count(*) FILTER (WHERE k.state = 'c')::int AS confirmed,
       count(*) FILTER (WHERE k.state IN ('f', 't'))::int AS in_flight,
       count(*) FILTER (WHERE k.state = 'u')::int AS unknown
FROM {schema}.publish_scope s LEFT JOIN {schema}.publish_key k ON k.slot IN (0, 1) AND k.scope = s.id
GROUP BY s.name
ORDER BY s.name

-- name: publish_show_chains
-- Show up to where each chain was seen, and how many gaps it has.
SELECT chain, upper(seen) - 1 AS last_seen,
       greatest((SELECT count(*) FROM unnest(seen)) - 1, 0)::int AS gaps
FROM {schema}.publish_chain
ORDER BY chain
