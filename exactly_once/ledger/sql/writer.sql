-- Every statement of the table writer: what it asks the catalogue, and the templates of what it writes with.

-- name: find_table
-- Find a table by its name as SQL would, and what COPY and INSERT need to know of it. ON CONFLICT minds rules for INSERT
-- (3) that fire, and those for UPDATE (2) though they be disabled. A delete takes rows of inheriting tables, too. Of triggers
-- (1 for each row, 4 at INSERT, 8 at DELETE, 16 at UPDATE) those of foreign keys are internal, and one for each statement
-- sees rows in transition tables only. Rows follow one of the table, as those do that are deleted with it, through any number of
-- foreign keys; these may be its own, or those of a table whose triggers write to it. The row is there without a table, too, with
-- the part of its name that Postgres would cut, as it does without a word.
WITH RECURSIVE fires AS (
    SELECT ev_type FROM pg_rewrite
    WHERE ev_class = to_regclass(%(name)s) AND (ev_type = '2' OR ev_enabled IN (
        'A', CASE current_setting('session_replication_role') WHEN 'replica' THEN 'R' ELSE 'O' END))),
tree (oid) AS (
    SELECT to_regclass(%(name)s)::oid UNION SELECT relid FROM pg_partition_tree(to_regclass(%(name)s))),
follows (oid) AS (
    SELECT conrelid FROM pg_constraint
    WHERE contype = 'f' AND confrelid IN (SELECT oid FROM tree) AND concat(confupdtype, confdeltype) ~ '[cnd]'
    UNION SELECT f.conrelid FROM follows JOIN pg_constraint f ON f.contype = 'f' AND f.confrelid = follows.oid
    WHERE concat(f.confupdtype, f.confdeltype) ~ '[cnd]'),
sees (oid) AS (
    SELECT tgrelid FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 28 <> 0
      AND (tgtype & 1 <> 0 OR tgoldtable IS NOT NULL OR tgnewtable IS NOT NULL))
SELECT (SELECT part FROM unnest(parse_ident(%(name)s)) AS part WHERE part <> part::name::text LIMIT 1) AS cut,
       c.oid, c.relkind IN ('r', 'p', 'f') AS is_writable, n.nspname AS schema, c.relname AS name,
       c.relkind <> 'f' AS can_be_locked,
       EXISTS (SELECT FROM pg_class p WHERE p.relkind = 'f' AND p.oid IN (SELECT oid FROM tree)) AS is_foreign,
       EXISTS (SELECT FROM pg_class p WHERE p.relpersistence = 'u' AND p.oid IN (SELECT oid FROM tree)) AS is_unlogged,
       row_security_active(c.oid) AS has_row_security, current_setting('array_nulls')::bool AS reads_nulls,
       EXISTS (SELECT FROM fires WHERE ev_type IN ('2', '3')) AS has_rules,
       EXISTS (SELECT FROM fires WHERE ev_type = '4') AS has_delete_rules,
       EXISTS (SELECT FROM pg_trigger t WHERE t.tgtype & 8 <> 0 AND t.tgrelid IN (SELECT oid FROM tree))
         OR EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid AND c.relkind <> 'p') AS notices_deletes,
       row_security_active(c.oid) OR EXISTS (SELECT FROM follows WHERE oid IN (SELECT oid FROM tree))
         OR EXISTS (SELECT FROM fires WHERE ev_type = '4')
         OR EXISTS (SELECT FROM sees WHERE oid IN (SELECT oid FROM tree UNION SELECT oid FROM follows)) AS keeps_order
FROM (SELECT to_regclass(%(name)s)) AS named (oid)
     LEFT JOIN pg_class c USING (oid) LEFT JOIN pg_namespace n ON n.oid = c.relnamespace

-- name: find_alike
-- Find tables whose name differs in upper and lower case only, for the complaint.
SELECT format('%%I.%%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE lower(c.relname) = lower(%(name)s) AND c.relkind IN ('r', 'p', 'f')
ORDER BY 1 LIMIT 3

-- name: columns_of_table
-- Read the columns of a table, or the attributes of a composite type, in order, each with the type below its domains; or the one
-- part of a type, as if it were a column. Postgres 13 has no multiranges, and no column that tells of them.
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type_name, format_type(base.oid, -1) AS base_name,
       base.oid AS type_oid, base.typmod,
       t.typtype::text AS kind, a.attnotnull AS is_not_null,
       a.atthasdef OR a.attidentity = 'd' OR own.typdefault IS NOT NULL AS has_default,
       a.attgenerated <> '' AS is_generated, a.attidentity = 'a' AS is_identity,
       a.attidentity <> '' OR coalesce(pg_get_expr(v.adbin, v.adrelid) LIKE 'nextval(%%', false) AS is_numbered,
       own.typtype = 'd' AS is_domain,
       coalesce(l.collisdeterministic, true) AS is_deterministic,
       CASE WHEN l.collname <> 'default' THEN concat(l.collnamespace::regnamespace, '.', quote_ident(l.collname)) END AS collation,
       (SELECT s.nspname
        FROM pg_opclass c JOIN pg_am m ON m.oid = c.opcmethod JOIN pg_amop w ON w.amopfamily = c.opcfamily
        JOIN pg_operator r ON r.oid = w.amopopr JOIN pg_namespace s ON s.oid = r.oprnamespace
        WHERE c.opcintype = base.oid AND c.opcdefault AND m.amname = 'btree' AND w.amoplefttype = base.oid
          AND w.amoprighttype = base.oid AND w.amopstrategy = 3) AS operator_schema,
       nullif(t.typrelid, 0) AS composite_oid,
       CASE WHEN t.typcategory = 'A' THEN t.typelem
            WHEN t.typtype = 'r' THEN (SELECT r.rngsubtype FROM pg_range r WHERE r.rngtypid = t.oid)
            WHEN t.typtype = 'm' THEN (SELECT r.rngtypid FROM pg_range r
                                       WHERE (to_jsonb(r) ->> 'rngmultitypid')::oid = t.oid) END AS part_oid
FROM (
    SELECT attname, atttypid, atttypmod, attnotnull, atthasdef, attidentity, attgenerated, attcollation, attrelid, attnum
    FROM pg_attribute WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT '', %(part)s::oid, %(typmod)s::int, false, false, '', '', 0, 0, 0 WHERE %(part)s::oid IS NOT NULL) a
CROSS JOIN LATERAL (
    WITH RECURSIVE chain(oid, typmod, depth) AS (
        SELECT a.atttypid, a.atttypmod, 0
        UNION ALL
        SELECT d.typbasetype, d.typtypmod, depth + 1
        FROM chain JOIN pg_type d ON d.oid = chain.oid WHERE d.typtype = 'd')
    SELECT oid, typmod FROM chain ORDER BY depth DESC LIMIT 1) AS base
JOIN pg_type t ON t.oid = base.oid
JOIN pg_type own ON own.oid = a.atttypid
LEFT JOIN pg_attrdef v ON v.adrelid = a.attrelid AND v.adnum = a.attnum
LEFT JOIN pg_collation l ON l.oid = a.attcollation
ORDER BY a.attnum

-- name: keys_of_table
-- Read the sets of columns that ON CONFLICT can name, the primary key first and marked; not those that an index finds
-- equal in other cases than the columns' own collation. One WITHOUT OVERLAPS, from Postgres 18 on, is an exclusion constraint.
SELECT ARRAY(SELECT a.attname::text
             FROM unnest(i.indkey[0:i.indnkeyatts - 1]::int2[]) WITH ORDINALITY AS k(attnum, n)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             ORDER BY k.n) AS key, i.indisprimary AS is_primary
FROM pg_index i
WHERE i.indrelid = %(oid)s AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND NOT i.indisexclusion
  AND i.indpred IS NULL AND i.indexprs IS NULL
  AND NOT EXISTS (SELECT FROM unnest(i.indkey[0:i.indnkeyatts - 1]::int2[], i.indcollation::oid[]) AS k(attnum, collation_oid)
                  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                  WHERE a.attcollation <> k.collation_oid)
ORDER BY i.indisprimary DESC, i.indexrelid

-- name: lock_table
-- See to it that from here on nobody can alter a table before our transaction ends; partitions need no lock.
LOCK TABLE ONLY {table} IN ROW EXCLUSIVE MODE

-- name: shape_of_table
-- Tell all that is read of a table as it is now, to be compared with what was read before. A foreign key that points here
-- has triggers for deletes, too; one of a partition fires for its rows.
SELECT concat_ws(', ', (
    SELECT string_agg(concat_ws(' ', a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attcollation, a.attnotnull,
                                a.attidentity, a.attgenerated,
                                CASE WHEN a.atthasdef THEN (SELECT d.oid FROM pg_attrdef d
                                                            WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum) END,
                                -- Of a domain, and of composite types at any depth, also in ranges; what comes with
                                -- Postgres has a lower number, and needs no look.
                                CASE WHEN a.atttypid >= 16384 THEN (
                                    WITH RECURSIVE within (oid) AS (
                                        SELECT a.atttypid
                                        UNION
                                        SELECT inner_oid FROM within JOIN pg_type t USING (oid) CROSS JOIN LATERAL (
                                            SELECT unnest(ARRAY[t.typelem, t.typbasetype])
                                            UNION ALL
                                            SELECT CASE rngtypid WHEN t.oid THEN rngsubtype ELSE rngtypid END
                                            FROM pg_range r
                                            WHERE t.oid IN (rngtypid, (to_jsonb(r) ->> 'rngmultitypid')::oid)
                                            UNION ALL
                                            SELECT atttypid FROM pg_attribute
                                            WHERE attrelid = nullif(t.typrelid, 0) AND attnum > 0) AS i (inner_oid)
                                        WHERE inner_oid >= 16384)
                                    SELECT string_agg(concat_ws(' ', oid, t.typdefault, (
                                        SELECT string_agg(concat_ws(' ', attname, atttypid, atttypmod), ' '
                                                          ORDER BY attnum) FROM pg_attribute
                                        WHERE attrelid = nullif(t.typrelid, 0) AND attnum > 0)), ' ' ORDER BY oid)
                                    FROM within JOIN pg_type t USING (oid)) END),
                      ', ' ORDER BY a.attnum)
    FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
    c.relpersistence, c.relhassubclass,
    CASE c.relkind WHEN 'p' THEN (SELECT concat_ws(' ', count(*) FILTER (WHERE p.relpersistence = 'u'),
                                                   count(*) FILTER (WHERE p.relkind = 'f'))
                                  FROM pg_partition_tree(c.oid) JOIN pg_class p ON p.oid = relid) END,
    row_security_active(c.oid),
    current_setting('array_nulls'),
    CASE WHEN c.relhasrules THEN ARRAY(SELECT concat(ev_type, ev_enabled) FROM pg_rewrite
                                       WHERE ev_class = c.oid ORDER BY oid) END,
    CASE WHEN c.relhasindex THEN ARRAY(SELECT concat(indexrelid, indisprimary, indisvalid) FROM pg_index
                                       WHERE indrelid = c.oid AND indisunique ORDER BY indexrelid) END,
    CASE WHEN c.relhastriggers OR c.relkind = 'p' THEN (
        SELECT concat_ws(' ', count(*), string_agg(DISTINCT concat_ws(',', tgtype, tgenabled, tgisinternal, tgfoid,
                                                                      tgoldtable, tgnewtable), ' ')) FROM pg_trigger
        WHERE tgrelid IN (SELECT c.oid UNION ALL
                          SELECT relid FROM pg_partition_tree(CASE c.relkind WHEN 'p' THEN c.oid END))) END)
FROM pg_class c WHERE c.oid = to_regclass({qualified})

-- name: create_table
-- Make a table for what is to be written, unless there is one.
CREATE TABLE IF NOT EXISTS {table} ({columns})

-- name: copy_rows
-- Append rows that were encoded before.
COPY {target} ({columns}) FROM STDIN (FORMAT {format})

-- name: create_stage
-- Make a table that lives no longer than the transaction, so that any pooler may stand in between.
CREATE TEMP TABLE exactly_once_stage ({columns}) ON COMMIT DROP

-- name: drop_stage
-- Free the name and the space at once: the transaction may go on.
DROP TABLE pg_temp.exactly_once_stage

-- name: insert_rows
-- Store rows from the stage or from arrays.
INSERT INTO {table} AS t ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM {source} AS s {order} {conflict}

-- name: rank_rows
-- Number keys, and what says which row is newer, by the order and the collation of the table's columns. A composite value
-- of which a part is null is not null, but neither is it IS NOT NULL.
SELECT dense_rank() OVER (ORDER BY {keys}), CASE WHEN {age} IS DISTINCT FROM NULL THEN dense_rank() OVER (ORDER BY {age}) END
FROM (
    SELECT {names}, 0::bigint AS ordinal FROM {table} AS t WHERE false
    UNION ALL
    SELECT {values}, s.ordinal FROM {source} AS s) AS k
ORDER BY ordinal

-- name: delete_rows
-- Delete rows by key; the clause that locks orders them by the key, so that two workers never lock crosswise. The rows that it
-- locks are found again by the key, too: where it has waited for an UPDATE their ctid is one that this snapshot does not have.
WITH doomed AS (
    SELECT s.*
    FROM {table} t JOIN {source} AS s ON {same}
    {lock})
DELETE FROM {table} t USING doomed AS s WHERE {same} RETURNING s.ordinal

-- name: delete_found
-- Delete rows that are found and locked; rules for DELETE rewrite no WITH and no RETURNING.
DELETE FROM {table} t USING {source} AS s WHERE {same}

-- name: find_rows
-- Tell which keys have a row; the lock keeps it until the transaction ends.
SELECT s.ordinal FROM {table} t JOIN {source} AS s ON {same} {lock}
