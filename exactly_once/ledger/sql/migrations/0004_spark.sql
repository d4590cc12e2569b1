-- Spark: the queries that write through the sink. Their batch ids are rows of the ledger, under the topic 'query:<id>'.

-- One row per query: what it did last. Where the ledger counts its batches, written in the transaction of the batch.
CREATE TABLE {schema}.spark_query (
    group_id       text        NOT NULL,
    query_id       text        NOT NULL,
    run_id         text        NOT NULL,
    batch_id       bigint      NOT NULL,
    name           text,
    row_count      bigint      NOT NULL,
    dropped        bigint      NOT NULL,
    fingerprint    text,
    written_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, query_id)
) WITH (fillfactor = 20);

-- One row per group: the table that its offsets or batches are about.
CREATE TABLE {schema}.spark_target (
    group_id       text        PRIMARY KEY,
    table_name     text        NOT NULL
);

COMMENT ON COLUMN {schema}.spark_query.fingerprint IS 'digest of the batch''s source offsets, where the checkpoint could be read';

UPDATE {schema}.version SET version = 4, migrated_at = clock_timestamp();
