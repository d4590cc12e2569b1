-- Statements of the sink command.

-- name: find_rest_column
-- Find the column that an earlier run made for fields without a column of their own.
SELECT a.attname::text
FROM pg_attribute a
WHERE a.attrelid = to_regclass(%(name)s) AND a.attnum > 0 AND NOT a.attisdropped
  AND col_description(a.attrelid, a.attnum) = %(comment)s

-- name: comment_on_rest_column
-- Mark that column, so that later runs fill it, too.
COMMENT ON COLUMN {column} IS {comment}

-- name: name_types
-- Have the server say what two names of types are, such as int4 and integer.
SELECT NULL::{one}, NULL::{other}

-- name: is_unwritten
-- Tell whether nothing was ever stored in a table, which needs no right to read it; of a foreign one nobody knows.
-- Rows may be in its partitions, or in tables that inherit from it.
WITH RECURSIVE parts(part) AS (
  SELECT c.oid FROM pg_class c WHERE c.oid = to_regclass(%(name)s)
  UNION
  SELECT i.inhrelid FROM pg_inherits i JOIN parts ON i.inhparent = parts.part
)
SELECT bool_and(c.relkind <> 'f' AND coalesce(pg_relation_size(c.oid), 0) = 0)
FROM parts JOIN pg_class c ON c.oid = parts.part
HAVING count(*) > 0
