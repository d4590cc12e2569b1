-- Claims of keys by units, and the window in which they are held. The changes are functions of the schema.

-- name: claim
-- Claim sorted, different keys in the open transaction; return the places of those that were claimed before.
SELECT {schema}.claim(%(group_id)s, %(keys)b::bytea[])

-- name: claim_keep
-- Agree for how long the keys of a group are held; return what held before.
SELECT {schema}.claim_keep(%(group_id)s, %(seconds)s::float8)

-- name: claim_turn
-- Empty the older keys of a group if it is time; return the seconds to the next turn.
SELECT {schema}.claim_turn(%(group_id)s)

-- name: claim_windows
-- What an operator wants to see of claims. The number of keys is the server's estimate; the tables are not read.
SELECT w.group_id, w.seconds, w.turns, extract(epoch FROM clock_timestamp() - w.turned_at)::float8 AS turned_seconds_ago,
       coalesce(sum(t.n_live_tup), 0)::bigint AS keys, coalesce(sum(pg_total_relation_size(t.relid)), 0)::bigint AS bytes
FROM {schema}.claim_window w
LEFT JOIN pg_stat_all_tables t ON t.relid IN (to_regclass(w.younger), to_regclass(w.older))
WHERE (%(group_id)s::text IS NULL OR w.group_id = %(group_id)s)
GROUP BY w.group_id
ORDER BY w.group_id
