-- Spark: the queries that write through the sink, and the batch ids of those whose rows have no offsets.

-- One row per group that counts batches instead of offsets. The query id is the checkpoint's: under another
-- one the same batch id means other rows.
CREATE TABLE {schema}.spark_batch (
    group_id       text        PRIMARY KEY,
    query_id       text        NOT NULL,
    batch_id       bigint      NOT NULL DEFAULT -1,
    fingerprint    text,
    owner_token    uuid,
    owner_epoch    bigint      NOT NULL DEFAULT 1,
    owner_instance uuid,
    owner_name     text,
    halted         text,
    acquired_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    advanced_at    timestamptz
) WITH (fillfactor = 20);

COMMENT ON COLUMN {schema}.spark_batch.batch_id IS 'the last batch that was written; -1 before the first';
COMMENT ON COLUMN {schema}.spark_batch.fingerprint IS 'digest of its source offsets, where the checkpoint could be read';

-- One row per query: what it did last. For looking only, no decision rests on it.
CREATE TABLE {schema}.spark_query (
    group_id       text        NOT NULL,
    query_id       text        NOT NULL,
    run_id         text        NOT NULL,
    batch_id       bigint      NOT NULL,
    name           text,
    row_count      bigint      NOT NULL,
    dropped        bigint      NOT NULL,
    written_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, query_id)
) WITH (fillfactor = 20);

-- One row per group: the table that its offsets or batches are about.
CREATE TABLE {schema}.spark_target (
    group_id       text        PRIMARY KEY,
    table_name     text        NOT NULL
);

-- Counts one batch, inside the transaction of its rows; raises EO001 like the advance of offsets.
CREATE FUNCTION {schema}.spark_advance(
    unit_xid xid8, unit_group text, unit_token uuid, unit_epoch bigint, previous bigint, new_batch bigint, new_fingerprint text
) RETURNS void LANGUAGE plpgsql AS $advance$
BEGIN
    IF pg_current_xact_id() <> unit_xid THEN
        RAISE EXCEPTION 'the transaction of this unit of work has ended' USING ERRCODE = 'EO002';
    END IF;
    UPDATE {schema}.spark_batch b
    SET batch_id = new_batch, fingerprint = new_fingerprint, advanced_at = clock_timestamp()
    WHERE b.group_id = unit_group AND b.owner_token = unit_token AND b.owner_epoch = unit_epoch
      AND b.batch_id = previous;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % was not counted', new_batch USING ERRCODE = 'EO001';
    END IF;
END
$advance$;

UPDATE {schema}.version SET version = 4, migrated_at = clock_timestamp();
