-- Messages that a handler could not apply, whole, for an operator to replay or drop.
CREATE TABLE {schema}.dead_letter (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id       text        NOT NULL,
    topic          text        NOT NULL,
    partition      int         NOT NULL,
    message_offset bigint      NOT NULL,
    cluster_id     text,
    topic_id       text,
    leader_epoch   int,
    timestamp_type int         NOT NULL,
    timestamp_ms   bigint      NOT NULL,
    key            bytea,
    value          bytea,
    header_names   text[],
    header_values  bytea[],
    error_class    text        NOT NULL,
    error          text        NOT NULL,
    sqlstate       text,
    attempts       int         NOT NULL,
    after_offset   bigint,
    moved_to       bigint,
    owner_name     text,
    dead_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    status         text        NOT NULL DEFAULT 'dead' CHECK (status IN ('dead', 'replayed', 'dropped')),
    settled_at     timestamptz,
    settled_by     text
);

COMMENT ON COLUMN {schema}.dead_letter.after_offset IS 'the offset after the message before it in the log';
COMMENT ON COLUMN {schema}.dead_letter.moved_to IS 'where the ledger was moved to behind it: nothing is between but markers';

CREATE INDEX dead_letter_recent ON {schema}.dead_letter (group_id, dead_at);
CREATE INDEX dead_letter_dead ON {schema}.dead_letter (group_id, topic, partition, message_offset)
    WHERE status = 'dead';

UPDATE {schema}.version SET version = 2, migrated_at = clock_timestamp();
