-- Spark's data source: rows on their way into a table, and the runs of queries that were seen.

-- Rows as a task has staged them, in Arrow's own format. Unlogged: after a crash of the server it is empty, the publication
-- finds that, and Spark brings the batch again.
CREATE UNLOGGED TABLE {schema}.spark_stage (
    attempt        uuid        NOT NULL,
    number         int         NOT NULL,
    group_id       text        NOT NULL,
    run_id         uuid        NOT NULL,
    batch_id       bigint      NOT NULL,
    chunk          bytea       NOT NULL,
    staged_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (attempt, number)
);
ALTER TABLE {schema}.spark_stage ALTER COLUMN chunk SET STORAGE EXTERNAL;
CREATE INDEX spark_stage_run ON {schema}.spark_stage (group_id, run_id);

-- One row per run of a query, made by its first task: a run that is known and does not own its query's row any more was fenced.
CREATE TABLE {schema}.spark_run (
    group_id       text        NOT NULL,
    run_id         uuid        NOT NULL,
    held           jsonb       NOT NULL,
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, run_id)
) WITH (fillfactor = 20);

COMMENT ON COLUMN {schema}.spark_run.held IS 'of each row of the ledger that it acquired: topic, partition, token, epoch, topic id, and how far it has written it';

UPDATE {schema}.version SET version = 5, migrated_at = clock_timestamp();
